"""HAM10000 and Fed-ISIC2019 from tiny files as published, and from the real compact ones if FEDSHIFT_DATA has them."""

import csv
import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.data.checks.faults import judge_groups
from fedshift.data.datasets.dermoscopy import HAM10000, fed_isic2019, ham10000
from fedshift.utils.errors import UsageError

CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
SITES = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
CENTERS = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "msk", "vienna_dias")
DATA = Path(os.environ.get("FEDSHIFT_DATA", ""))


def write_table(file, table, columns=None, separator=","):
    with file.open("w", newline="") as target:
        writer = csv.DictWriter(target, columns or list(table[0]), delimiter=separator, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(table)


ROWS = [
    {"lesion_id": f"HAM_{number // 2:07d}", "image_id": f"ISIC_{24306 + number:07d}", "dx": dx, "dataset": site}
    for number, (site, dx, _, _) in enumerate(product(SITES, CLASSES, range(5), range(2)))
]
"""At every site five lesions of every class, each with two images."""


@pytest.fixture
def ham(tmp_path):
    """The metadata and two folders of images, whose red says the class and whose green and blue the lesion."""
    folder = tmp_path / "ham10000"
    for part in (1, 2):
        (folder / f"HAM10000_images_part_{part}").mkdir(parents=True)
    write_table(folder / "HAM10000_metadata", ROWS)
    for number, row in enumerate(ROWS):
        lesion = number // 2
        color = (35 * CLASSES.index(row["dx"]), 20 * (lesion % 12), 20 * (lesion // 12))
        place = folder / f"HAM10000_images_part_{1 + number % 2}" / f"{row['image_id']}.jpg"
        Image.new("RGB", (16, 12), color).save(place, quality=95)
    return folder


def lesions(split) -> set[int]:
    """What the colors of the images say, after checking that they agree with the labels."""
    red, green, blue = split.x.float().mean((2, 3)).T
    assert torch.equal((red / 35).round().long(), split.y)
    return set(((green / 20).round() + 12 * (blue / 20).round()).int().tolist())


def test_a_fifth_of_the_lesions_of_every_class_and_site_is_for_testing(ham):
    data = ham10000(ham.parent, size=8).check()
    assert (data.name, data.names, data.class_names) == ("ham10000", ("ham10000",), CLASSES)
    client = data.clients[0]
    assert torch.bincount(client.train.y).tolist() == [4 * 4 * 2] * 7
    assert torch.bincount(client.test.y).tolist() == [4 * 1 * 2] * 7
    train, test = lesions(client.train), lesions(client.test)
    assert not train & test
    assert len(train | test) == 4 * 7 * 5
    sites = ham10000(ham.parent, by="site", size=8).check()
    assert sites.names == SITES
    assert [(len(client.train), len(client.test)) for client in sites.clients] == [(56, 14)] * 4
    assert set().union(*(lesions(client.test) for client in sites.clients)) == test
    client = ham10000(ham.parent, by_lesion=False, size=8).clients[0]  # as in FedMMB
    assert (len(client.train), len(client.test)) == (224, 56)
    assert lesions(client.train) & lesions(client.test)


def test_the_table_may_have_a_suffix_and_no_sites(ham):
    (ham / "HAM10000_metadata").unlink()
    write_table(ham / "HAM10000_metadata.tab", ROWS, ["lesion_id", "image_id", "dx"], separator="\t")
    assert len(ham10000(ham.parent, size=8).clients[0].train) == 224
    with pytest.raises(UsageError, match=r"by='site': HAM10000_metadata has no column 'dataset'"):
        ham10000(ham.parent, by="site", size=8)


def test_missing_images_unknown_classes_and_other_choices_are_refused(ham):
    with pytest.raises(UsageError, match=r"unknown value of by 'sites': did you mean 'site'"):
        ham10000(ham.parent, by="sites")
    with pytest.raises(UsageError, match="test_fraction=0: must lie between 0 and 1"):
        ham10000(ham.parent, test_fraction=0)
    with pytest.raises(UsageError, match="size=0 pixels: must be at least 1"):
        ham10000(ham.parent, size=0)
    (ham / "HAM10000_images_part_2").rename(ham.parent / "elsewhere")
    said = r"140 of 280 images that .*HAM10000_metadata names are not below .*ISIC_0024307"
    with pytest.raises(UsageError, match=said):
        ham10000(ham.parent, size=8)
    table = ham / "HAM10000_metadata"
    table.write_text(table.read_text().replace(",nv,", ",nevus,", 1))
    with pytest.raises(UsageError, match=r"HAM10000_metadata cannot be read as a table of images"):
        ham10000(ham.parent, size=8)


def name(center: int, number: int) -> str:
    return f"ISIC_{100 * center + number:07d}" + ("_downsampled" if center == 4 else "")


@pytest.fixture
def isic(tmp_path):
    """Eight images at every center, one of each class; red says the class, green the center; 3 and 7 for testing."""
    images = tmp_path / "fed-isic2019" / "ISIC_2019_Training_Input_preprocessed"
    images.mkdir(parents=True)
    rows = []
    for number, center in product(range(8), range(6)):
        fold = "test" if number % 4 == 3 else "train"
        rows.append({"image": name(center, number), "target": number, "center": center, "fold": fold})
        image = Image.new("RGB", (20 + number, 16), (30 * number, 40 * center, 0))
        image.save(images / f"{name(center, number)}.jpg", quality=95)
    write_table(images.parent / "train_test_split", rows)
    return images.parent


def test_the_folds_of_flamby_are_the_split(isic):
    data = fed_isic2019(isic.parent, size=8).check()
    assert (data.name, data.names, data.classes) == ("fed-isic2019", CENTERS, 8)
    assert data.class_names == ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    for center, client in enumerate(data.clients):
        assert (client.train.y.tolist(), client.test.y.tolist()) == ([0, 1, 2, 4, 5, 6], [3, 7])
        red, green, _ = torch.cat([client.train.x, client.test.x]).float().mean((2, 3)).T
        assert (red / 30).round().tolist() == [0, 1, 2, 4, 5, 6, 3, 7]
        assert set((green / 40).round().tolist()) == {center}


def test_clean_leaves_lesions_of_any_test_set_out_of_training(isic):
    """Lesions of all images but the third: 0 is that of test image 3, at every center; 1 of center 1 that of 7 of 2."""
    with pytest.raises(
        UsageError, match=r"clean=True needs HAM10000_metadata and ISIC_2019_Training_Metadata.csv next"
    ):
        fed_isic2019(isic.parent, clean=True)
    tables = {"HAM10000_metadata": [], "ISIC_2019_Training_Metadata.csv": []}
    for center, number in product(range(6), range(8)):
        lesion = f"L{center}_{3 if number == 0 else number}"
        lesion = "L2_7" if (center, number) == (1, 1) else "" if number == 2 else lesion
        file, key = list(zip(tables, ("image_id", "image"), strict=True))[center in (0, 4)]
        tables[file].append({"lesion_id": lesion, key: name(center, number)})
    for file, rows in tables.items():
        write_table(isic / file, rows)
    data = fed_isic2019(isic.parent, clean=True, size=4)
    for center, client in enumerate(data.clients):
        assert client.train.y.tolist() == ([2, 4, 5, 6] if center == 1 else [1, 2, 4, 5, 6])
        assert client.test.y.tolist() == [3, 7]


@pytest.mark.parametrize(("was", "now"), [(",test", ",validation"), ("target", "y")])
def test_another_list_is_refused_by_name_and_images_as_published_are_told(isic, was, now):
    raw = isic / "ISIC_2019_Training_Input"
    (isic / "ISIC_2019_Training_Input_preprocessed").rename(raw)
    told = f"{raw} holds the images as published, without FLamby's color constancy"
    assert fed_isic2019(isic.parent, size=4).notices[-1] == told
    table = isic / "train_test_split"
    table.write_text(table.read_text().replace(was, now))
    with pytest.raises(UsageError, match="train_test_split cannot be read as FLamby's list"):
        fed_isic2019(isic.parent, size=4)


def test_compact_files_are_read_and_cleaned(tmp_path):
    random = np.random.default_rng(0)
    for place, site in enumerate(sorted(SITES, key=CENTERS.index)):
        np.savez(
            tmp_path / f"{site}.npz",
            x_train=random.integers(0, 255, (6, 5, 5, 3), np.uint8),
            y_train=np.arange(6, dtype=np.uint8),
            lesion_train=np.array([0, 1, 2, 3, 4, 30]) + 10 * place,
            x_test=random.integers(0, 255, (2, 5, 5, 3), np.uint8),
            y_test=np.array([1, 7], np.uint8),
            lesion_test=np.array([1, 9]) + 10 * place,
        )
    data = fed_isic2019(tmp_path).check()
    assert (data.sample_shape, data.names) == ((3, 5, 5), tuple(sorted(SITES, key=CENTERS.index)))
    with np.load(tmp_path / "rosendahl.npz") as arrays:
        assert np.array_equal(data.client("rosendahl").train.x.permute(0, 2, 3, 1), arrays["x_train"])
    clean = fed_isic2019(tmp_path, clean=True, size=3)
    assert [client.train.y.tolist() for client in clean.clients] == [[0, 2, 3, 4, 5]] * 4
    assert clean.sample_shape == (3, 3, 3)
    assert clean.clients[0].train.normalization.mean == (0.485, 0.456, 0.406)


if HAM10000.present("ham10000", DATA):

    @pytest.mark.slow
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

    @pytest.mark.slow
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

    @pytest.mark.slow
    def test_the_real_folds_have_the_sizes_of_flamby_and_share_the_lesions_that_are_known():
        data = fed_isic2019(DATA).check()
        assert [(client.name, len(client.train), len(client.test)) for client in data.clients] == [
            ("vidir_molemax", 3163, 791), ("vidir_modern", 2691, 672),
            ("rosendahl", 1807, 452), ("vienna_dias", 351, 88),
        ]  # fmt: skip
        clean = fed_isic2019(DATA, clean=True).check()
        tested, left = set(), []
        for client in data.clients:
            with np.load(DATA / "fed_isic2019_ham" / f"{client.name}.npz") as arrays:
                tested |= set(arrays["lesion_test"].tolist())
        for client in clean.clients:
            with np.load(DATA / "fed_isic2019_ham" / f"{client.name}.npz") as arrays:
                left.append(sum(lesion not in tested for lesion in arrays["lesion_train"].tolist()))
        assert [len(client.train) for client in clean.clients] == left == [3160, 2110, 1529, 285]
        (fault,) = judge_groups(data)  # 693 lesions are on both sides of one center, 4 of two
        assert fault.text.endswith(
            "1 of 791 of vidir_molemax, 437 of 569 of vidir_modern, 213 of 424 of rosendahl, 46 of 79 of vienna_dias."
        )
        assert not list(judge_groups(clean))
        both = (np.intersect1d(client.train.group, client.test.group) for client in data.clients)
        assert sum(map(len, both)) == 434 + 213 + 46
