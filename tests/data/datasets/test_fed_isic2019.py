"""Fed-ISIC2019 from tiny files as FLamby leaves them, and from the real compact ones where FEDSHIFT_DATA has them."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedshift.data.checks.faults import judge_groups
from fedshift.data.datasets.dermoscopy import fed_isic2019
from fedshift.utils.errors import UsageError

CENTERS = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "msk", "vienna_dias")
CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
DATA = Path(os.environ.get("FEDSHIFT_DATA", ""))


def name(center: int, number: int) -> str:
    return f"ISIC_{100 * center + number:07d}" + ("_downsampled" if center == 4 else "")


def side(number: int) -> str:
    return "test" if number % 4 == 3 else "train"


@pytest.fixture
def published(tmp_path):
    """Eight images at every center, one of each class; red says the class, green the center; 3 and 7 for testing."""
    folder = tmp_path / "fed-isic2019"
    images = folder / "ISIC_2019_Training_Input_preprocessed"
    images.mkdir(parents=True)
    lines = ["image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK,target,center,fold,fold2"]
    for number in range(8):
        for center in range(6):
            one_hot = ",".join("1.0" if place == number else "0.0" for place in range(9))
            fold = side(number)
            lines.append(f"{name(center, number)},{one_hot},{number},{center},{fold},{fold}_{center}")
            image = Image.new("RGB", (20 + number, 16), (30 * number, 40 * center, 0))
            image.save(images / f"{name(center, number)}.jpg", quality=95)
    (folder / "train_test_split").write_text("\n".join(lines) + "\n")
    return folder


def kinds(split) -> list[tuple[int, int]]:
    """Class and center that the colors of the images show."""
    red, green, _ = split.x.float().mean((2, 3)).T
    return list(zip((red / 30).round().int().tolist(), (green / 40).round().int().tolist(), strict=True))


def test_the_folds_of_flamby_are_the_split(published):
    data = fed_isic2019(published.parent, size=8).check()
    assert (data.name, data.names, data.classes, data.class_names) == ("fed-isic2019", CENTERS, 8, CLASSES)
    for center, client in enumerate(data.clients):
        assert client.train.y.tolist() == [0, 1, 2, 4, 5, 6]
        assert client.test.y.tolist() == [3, 7]
        assert kinds(client.train) + kinds(client.test) == [(y, center) for y in (0, 1, 2, 4, 5, 6, 3, 7)]


def write_lesions(folder):
    """Lesions of all images but the third: 0 is that of test image 3, at every center; 1 of center 1 that of 7 of 2."""
    ham = ["lesion_id,image_id,dx,dx_type,age,sex,localization,dataset"]
    isic = ["image,age_approx,anatom_site_general,lesion_id,sex"]
    for center in range(6):
        for number in range(8):
            lesion = f"L{center}_{3 if number == 0 else number}"
            lesion = "L2_7" if (center, number) == (1, 1) else "" if number == 2 else lesion
            if center in (0, 4):
                isic.append(f"{name(center, number)},55.0,anterior torso,{lesion},female")
            else:
                ham.append(f"{lesion},{name(center, number)},nv,histo,80.0,male,scalp,vidir_modern")
    (folder / "HAM10000_metadata").write_text("\n".join(ham) + "\n")
    (folder / "ISIC_2019_Training_Metadata.csv").write_text("\n".join(isic) + "\n")


def test_clean_leaves_lesions_of_any_test_set_out_of_training(published):
    write_lesions(published)
    data = fed_isic2019(published.parent, clean=True, size=4)
    for center, client in enumerate(data.clients):
        assert client.train.y.tolist() == ([2, 4, 5, 6] if center == 1 else [1, 2, 4, 5, 6])
        assert client.test.y.tolist() == [3, 7]


def test_clean_needs_to_know_the_lesions(published):
    with pytest.raises(
        UsageError, match=r"clean=True needs HAM10000_metadata and ISIC_2019_Training_Metadata.csv next to "
    ):
        fed_isic2019(published.parent, clean=True)


def test_images_without_flamby_s_preprocessing_are_read_and_that_is_said(published):
    raw = published / "ISIC_2019_Training_Input"
    (published / "ISIC_2019_Training_Input_preprocessed").rename(raw)
    told = f"{raw} holds the images as published, without FLamby's color constancy"
    assert fed_isic2019(published.parent, size=4).notices[-1] == told


@pytest.mark.parametrize(("was", "now"), [("test,test_0", "validation,validation_0"), ("target", "y")])
def test_another_list_is_refused_by_name(published, was, now):
    table = published / "train_test_split"
    table.write_text(table.read_text().replace(was, now))
    with pytest.raises(UsageError, match="train_test_split cannot be read as FLamby's list"):
        fed_isic2019(published.parent, size=4)


def test_compact_files_are_read_and_cleaned(tmp_path):
    random = np.random.default_rng(0)
    for place, site in enumerate(("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")):
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
    assert data.sample_shape == (3, 5, 5)
    assert data.names == ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias")
    with np.load(tmp_path / "rosendahl.npz") as arrays:
        assert np.array_equal(data.client("rosendahl").train.x.permute(0, 2, 3, 1), arrays["x_train"])
    clean = fed_isic2019(tmp_path, clean=True)
    assert [client.train.y.tolist() for client in clean.clients] == [[0, 2, 3, 4, 5]] * 4
    assert fed_isic2019(tmp_path, size=3).sample_shape == (3, 3, 3)
    assert fed_isic2019(tmp_path, size=3).clients[0].train.normalization.mean == (0.485, 0.456, 0.406)


if (DATA / "fed_isic2019_ham").is_dir():

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
