"""Office-Home, VLCS and TerraIncognita from tiny files in the folders that publishers and DomainBed write."""

import pytest
import torch
from PIL import Image

from fedshift.data.datasets.image_domains import OFFICE_HOME, office_home, terra_incognita, vlcs
from fedshift.utils.errors import UsageError

OBJECTS = tuple(f"Object_{number:02d}" for number in range(65))
ANIMALS = ("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel")
THINGS = ("bird", "car", "chair", "dog", "person")
PLACES = tuple(f"location_{number}" for number in (38, 43, 46, 100))


def write(root, folders, classes, count=5):
    """``count`` images of every class in every folder, whose red is the class and whose blue is the folder."""
    for place, folder in enumerate(folders):
        for label, name in enumerate(classes):
            (root / folder / name).mkdir(parents=True)
            for number in range(count):
                color = (3 * label, 40 * number, 60 * place)
                Image.new("RGB", (4, 4), color).save(root / folder / name / f"{number:05d}.png")


def check(data, names, classes, count=5):
    assert (data.names, data.class_names) == (names, classes)
    for place, client in enumerate(data.check().clients):
        assert torch.bincount(client.train.y).tolist() == [count - 1] * len(classes)
        assert torch.bincount(client.test.y).tolist() == [1] * len(classes)
        for split in (client.train, client.test):
            red, _, blue = split.x.float().mean((2, 3)).T
            assert torch.equal((red / 3).long(), split.y)
            assert set(blue.tolist()) == {60 * place}


@pytest.mark.parametrize("real", ["Real World", "Real_World", "RealWorld"])
def test_office_home_is_read_as_its_publisher_and_as_others_spell_it(tmp_path, real):
    write(tmp_path / "office-home" / "OfficeHomeDataset_10072016", ("Art", "Clipart", "Product", real), OBJECTS, 2)
    data = office_home(tmp_path, size=2, test_fraction=0.5)
    check(data, ("art", "clipart", "product", "real_world"), OBJECTS, 2)


def test_vlcs_and_terra_incognita_are_read_as_domainbed_writes_them(tmp_path):
    write(tmp_path / "VLCS", ("Caltech101", "LabelMe", "SUN09", "VOC2007"), THINGS)
    write(tmp_path / "terra_incognita", PLACES, ANIMALS)
    check(vlcs(tmp_path, size=4), ("caltech", "labelme", "sun", "voc"), THINGS)
    check(terra_incognita(tmp_path, size=4), PLACES, ANIMALS)


def test_other_classes_are_refused_and_missing_files_explained(tmp_path):
    write(tmp_path / "VLCS", ("Caltech101", "LabelMe", "SUN09", "VOC2007"), (*THINGS, "cat"), 1)
    with pytest.raises(UsageError, match=r"class folders .bird, car, cat, .*; VLCS has bird, car, chair, dog"):
        vlcs(tmp_path)
    write(tmp_path / "office-home", ("art", "clipart", "product", "real world"), THINGS, 1)
    with pytest.raises(UsageError, match=r"has 5 class folders \(bird, car, chair, dog, person\); Office-Home has 65"):
        office_home(tmp_path)
    assert OFFICE_HOME.hub == "flwrlabs/office-home"
    with pytest.raises(UsageError, match=r"'terra-incognita' is not in .*: get it from https://lila.science"):
        terra_incognita(tmp_path)
