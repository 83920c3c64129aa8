"""HAM10000 from tiny files as published, and from the real compact ones where FEDSHIFT_DATA names their directory."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.data.datasets.dermoscopy import HAM10000, ham10000
from fedshift.utils.errors import UsageError

CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
SITES = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
COLUMNS = ["lesion_id", "image_id", "dx", "dx_type", "age", "sex", "localization", "dataset"]
DATA = Path(os.environ.get("FEDSHIFT_DATA", ""))


def rows() -> list[dict[str, str]]:
    """At every site five lesions of every class, each with two images."""
    table = []
    for site in SITES:
        for dx in CLASSES:
            for _ in range(5):
                lesion = f"HAM_{len(table) // 2:07d}"
                for _ in range(2):
                    image = f"ISIC_{24306 + len(table):07d}"
                    table.append(
                        dict(zip(COLUMNS, (lesion, image, dx, "histo", "80.0", "male", "scalp", site), strict=True))
                    )
    return table


@pytest.fixture
def published(tmp_path):
    """The metadata and two folders of images, whose red says the class and whose green and blue the lesion."""
    folder = tmp_path / "ham10000"
    for part in (1, 2):
        (folder / f"HAM10000_images_part_{part}").mkdir(parents=True)
    write_table(folder / "HAM10000_metadata", rows())
    for number, row in enumerate(rows()):
        lesion = number // 2
        color = (35 * CLASSES.index(row["dx"]), 20 * (lesion % 12), 20 * (lesion // 12))
        place = folder / f"HAM10000_images_part_{1 + number % 2}" / f"{row['image_id']}.jpg"
        Image.new("RGB", (16, 12), color).save(place, quality=95)
    return folder


def write_table(file, table, columns=COLUMNS, separator=","):
    with file.open("w", newline="") as target:
        writer = csv.DictWriter(target, columns, delimiter=separator, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(table)


def lesions(split) -> set[int]:
    """What the colors of the images say, after checking that they agree with the labels."""
    red, green, blue = split.x.float().mean((2, 3)).T
    assert torch.equal((red / 35).round().long(), split.y)
    return set(((green / 20).round() + 12 * (blue / 20).round()).int().tolist())


def test_a_fifth_of_the_lesions_of_every_class_and_site_is_for_testing(published):
    data = ham10000(published.parent, size=8).check()
    assert (data.name, data.names, data.class_names) == ("ham10000", ("ham10000",), CLASSES)
    client = data.clients[0]
    assert torch.bincount(client.train.y).tolist() == [4 * 4 * 2] * 7
    assert torch.bincount(client.test.y).tolist() == [4 * 1 * 2] * 7
    train, test = lesions(client.train), lesions(client.test)
    assert not train & test
    assert len(train | test) == 4 * 7 * 5


def test_sites_are_clients_with_the_same_split(published):
    whole = ham10000(published.parent, size=8).clients[0]
    data = ham10000(published.parent, by="site", size=8).check()
    assert data.names == SITES
    assert [(len(client.train), len(client.test)) for client in data.clients] == [(56, 14)] * 4
    assert set().union(*(lesions(client.test) for client in data.clients)) == lesions(whole.test)


def test_images_may_be_split_at_random_as_in_fedmmb(published):
    client = ham10000(published.parent, by_lesion=False, size=8).clients[0]
    assert (len(client.train), len(client.test)) == (224, 56)
    assert lesions(client.train) & lesions(client.test)


def test_the_table_may_have_a_suffix_and_no_sites(published):
    table = published / "HAM10000_metadata"
    table.unlink()
    write_table(published / "HAM10000_metadata.tab", rows(), COLUMNS[:-1], separator="\t")
    assert len(ham10000(published.parent, size=8).clients[0].train) == 224
    with pytest.raises(UsageError, match=r"by='site': HAM10000_metadata has no column 'dataset'"):
        ham10000(published.parent, by="site", size=8)


def test_images_that_are_not_there_are_named(published):
    (published / "HAM10000_images_part_2").rename(published.parent / "elsewhere")
    with pytest.raises(
        UsageError, match=r"140 of 280 images that .*HAM10000_metadata names are not below .*ISIC_0024307"
    ):
        ham10000(published.parent, size=8)


def test_an_unknown_class_in_the_table_is_refused(published):
    table = published / "HAM10000_metadata"
    table.write_text(table.read_text().replace(",nv,", ",nevus,", 1))
    with pytest.raises(UsageError, match=r"HAM10000_metadata cannot be read as a table of images"):
        ham10000(published.parent, size=8)


def test_other_choices_are_refused(published):
    with pytest.raises(UsageError, match=r"unknown value of by 'sites': did you mean 'site'"):
        ham10000(published.parent, by="sites")
    with pytest.raises(UsageError, match="test_fraction=0: must lie between 0 and 1"):
        ham10000(published.parent, test_fraction=0)


if HAM10000.present("ham10000", DATA):

    def test_the_real_images_are_those_of_the_paper():
        data = ham10000(DATA).check()
        client = data.clients[0]
        counts = torch.bincount(torch.cat([client.train.y, client.test.y])).tolist()
        assert dict(zip(CLASSES, counts, strict=True)) == {
            "nv": 6705, "mel": 1113, "bkl": 1099, "bcc": 514, "akiec": 327, "vasc": 142, "df": 115,
        }  # fmt: skip
        assert data.sample_shape == (3, 32, 32)
        assert abs(len(client.test) / 10015 - 0.2) < 0.005
        random = ham10000(DATA, by_lesion=False).clients[0]
        assert (len(random.train), len(random.test)) == (8012, 2003)  # FedMMB, section 4.3

    def test_no_real_lesion_is_on_both_sides_at_any_site():
        seen = {}
        for site in SITES:
            with np.load(DATA / "fed_isic2019_ham" / f"{site}.npz") as arrays:
                for part in ("train", "test"):
                    for image, lesion in zip(arrays[f"x_{part}"], arrays[f"lesion_{part}"], strict=True):
                        seen.setdefault(image.transpose(2, 0, 1).tobytes(), set()).add(int(lesion))
        data = ham10000(DATA, by="site")
        assert [len(client.train) + len(client.test) for client in data.clients] == [2259, 3363, 3954, 439]
        sides = [
            set().union(*(seen[image.numpy().tobytes()] for client in data.clients for image in client.splits[part].x))
            for part in ("train", "test")
        ]
        assert len(sides[0] | sides[1]) == 7470
        assert len(sides[0] & sides[1]) == 0
