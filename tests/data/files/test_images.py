"""Directories of images: which file lands where, and which arrangements are refused."""

from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.data.files.listing import holds_images
from tests.data.files.conftest import noise, refused, samples, write

# Which file lands where


def test_every_file_is_used_once_and_none_for_both_training_and_test(read, root, content):
    data = read()
    assert data.fit_images().check().sample_shape == (3, 4, 6)
    assert (data.name, data.classes, data.class_names, data.notices) == ("looks", 2, ("cat", "dog"), ())
    assert data.note == "22 images of 2 clients"
    assert data.names == ("color", "gray")
    for client in data.clients:
        train, test = samples(client.train), samples(client.test)
        assert not train & test
        assert train + test == content(client.name)
        assert client.test.y.bincount().tolist() == [1, 1]
        assert client.train.store.data_ptr() == client.test.store.data_ptr()
        assert client.validation is None


@pytest.mark.parametrize(("fraction", "drawn"), [(0.01, 1), (0.4, 2), (0.99, 4)])
def test_the_test_fraction_is_drawn_of_every_class_and_the_same_in_every_reading(read, fraction, drawn):
    gray = read(test_fraction=fraction).client("gray")
    assert gray.test.y.bincount().tolist() == [drawn, drawn]
    assert torch.equal(read(test_fraction=fraction, image_size=9).client("gray").test.rows, gray.test.rows)


def test_a_fraction_that_is_none_is_refused(read):
    assert refused(read, test_fraction=1.0) == "test_fraction=1: must lie between 0 and 1"


@pytest.mark.parametrize(("validation", "case"), [("val", str.lower), ("valid", str.upper), ("validation", str.title)])
def test_folders_of_parts_say_what_images_are_for(read, root, tmp_path, validation, case):
    parts = {"train": {"cat": 3, "dog": 2}, validation: {"dog": 1}, "test": {"cat": 1, "dog": 1}}
    key = count(1000)
    written = {}
    for part, categories in parts.items():
        for category, images in categories.items():
            for i in range(images):
                image = noise(4, 6, key=next(key))
                write(root / "parted" / case(part) / category / f"{i}.png", image)
                written.setdefault(part, Counter())[image.tobytes() + bytes([category == "dog"])] += 1
    data = read()
    assert data.names == ("color", "gray", "parted")  # of both forms
    assert data.notices == ()
    found = {part: samples(split) for part, split in data.client("parted").splits.items()}
    assert found == {"train": written["train"], "validation": written[validation], "test": written["test"]}


def test_without_a_test_folder_a_share_of_training_is_for_testing(read, root):
    for folder in ("cat", "dog"):
        (root / "gray" / "train").mkdir(exist_ok=True)
        (root / "gray" / folder).rename(root / "gray" / "train" / folder)
    write(root / "gray" / "val" / "dog" / "0.png", noise(4, 6, key=1000))
    data = read()
    gray = data.client("gray")
    assert [len(split) for split in gray.splits.values()] == [8, 1, 2]
    assert gray.test.y.tolist() == [0, 1]
    assert data.notices == ("client 'gray': no test folder, so 0.2 of its train folder is for testing",)


def test_proportions_that_resizing_changes_are_said_from_files_and_from_the_cache(read):
    told = [f"client {name!r}: images of 6 x 4 are resized to 9 x 9, which changes their proportions by 50%"
            for name in ("color", "gray")]  # fmt: skip
    for _ in range(2):
        assert [each for each in read(image_size=9).notices if "proportions" in each] == told
    assert not any("proportions" in notice for notice in read().notices)
    whole = read()
    assert "images of 6 x 4 are resized to 9 x 9" in whole.fit_images(9).notices[-1]
    assert whole.fit_images().notices == whole.notices


def test_classes_are_counted_over_all_clients_even_those_not_chosen(read, root):
    write(root / "color" / "ant" / "0.png", noise(4, 6, 3))
    write(root / "color" / "ant" / "1.png", noise(4, 6, 3))
    data = read(domains=("gray",))
    assert data.class_names == ("ant", "cat", "dog")
    assert data.client("gray").train.y.unique().tolist() == [1, 2]


def test_numbers_are_classes_in_their_own_order(read, root):
    for client in ("gray", "color"):
        (root / client / "cat").rename(root / client / "10")
        (root / client / "dog").rename(root / client / "9")
    assert read().class_names == ("9", "10")


def test_more_classes_may_be_said_but_not_fewer(read):
    assert read(classes=5).classes == 5
    assert "classes=1: " in (said := refused(read, classes=1))
    assert "has 2 class folders (cat, dog); ask for as many" in said


def test_what_systems_leave_behind_is_ignored(read, root):
    for place in (root, root / "gray", root / "gray" / "cat"):
        for name in (".DS_Store", "Thumbs.db", "._0.png", "desktop.ini"):
            (place / name).write_bytes(b"\0")
        write(place / "__MACOSX" / "0.png", noise(2, 2))
    data = read()
    assert (data.names, data.class_names, data.notices) == (("color", "gray"), ("cat", "dog"), ())
    assert data.note == "22 images of 2 clients"


def test_other_files_and_empty_classes_are_noticed(read, root):
    (root / "README.txt").write_text("looks")
    (root / "gray" / "labels.csv").write_text("a,b")
    (root / "gray" / "cat" / "x.webp").write_bytes(b"")
    (root / "gray" / "cat" / "y").write_bytes(b"")
    (root / "color" / "empty").mkdir()
    data = read()
    assert data.class_names == ("cat", "dog", "empty")
    assert data.notices == (
        f"client 'color': {root / 'color' / 'empty'} holds no image",
        "client 'gray': 1 files of other kinds left out (no suffix)",
    )
    assert data.faults == ("client 'gray': 1 image in a format that is not read, left out (.webp)",)
    assert data.select_clients(["color"]).faults == ()


def test_constant_images_and_clients_that_are_not_unpacked_are_said(read, root):
    write(root / "gray" / "cat" / "0.png", np.full((4, 6), 7, np.uint8))
    (root / "west.zip").write_bytes(b"")
    (root / "gray" / "cat" / "scan.nrrd").write_bytes(b"")
    assert read().faults == ("client 'gray': 1 image in a format that is not read, left out (.nrrd)",)
    notices = read().notices
    assert "client 'gray': 1 of 10 images are constant, all of their pixels have one value (gray/cat/0.png)" in notices
    assert f"{root} holds files that are not read: west.zip; unpack clients into folders" in notices


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_a_client_with_gray_of_8_bits_and_of_more_is_refused(read, root, dtype):
    write(root / "gray" / "cat" / "2.tif", noise(4, 6, key=9, top=2, dtype=dtype))
    if dtype == np.uint8:
        assert read().note == "22 images of 2 clients"
    else:
        assert "client 'gray' has images of different depth, " in refused(read)


# Arrangements that are refused


@pytest.fixture
def tree(tmp_path: Path, read):
    """What is said of a directory that holds these files."""

    def say(*files: str) -> str:
        for file in files:
            if file.endswith("/"):
                (tmp_path / "tree" / file).mkdir(parents=True)
            else:
                write(tmp_path / "tree" / file, noise(2, 2))
        return refused(read, tmp_path / "tree")

    return say


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["a/cat/0.png", "0.png"], "tree/0.png is an image outside of any client's folder: images belong in DIR/<cl"),
        (["a/0.png"], "tree/a/0.png is an image outside of any class folder"),
        (["a/cat/0.png", "a/1.png"], "tree/a/1.png is an image outside of any class folder"),
        (["a/train/0.png", "a/train/cat/0.png"], "tree/a/train/0.png is an image outside of any class folder"),
        (["a/cat/0.png", "a/cat/more/1.png"], "tree/a/cat/more is a folder inside of a class folder"),
        (["a/train/cat/0.png", "a/train/cat/more/1.png"], "tree/a/train/cat/more is a folder inside of a class folder"),
        (["a/train/cat/0.png", "a/dog/1.png"], "tree/a holds both train and dog, parts and classes"),
        (["a/test/cat/0.png", "a/val/cat/0.png"], "tree/a holds test, val but no train"),
        (["a/train/x/0.png", "a/val/x/0.png", "a/valid/x/0.png"], "holds train, val, valid, two of them for the same"),
        (["train/cat/0.png", "test/cat/1.png"], "tree holds test, train, but no folder of a client"),
        (
            ["a/cat/0.png", "b/"],
            "client 'b' has no file to read (.bmp, .gif, .jpeg, .jpg, .pbm, .pgm, .png, .ppm, .tif, .tiff) in",
        ),
        (["a/cat/0.png", "b/cat/"], "client 'b' has no file to read"),
        (
            ["a/cat/0.png", "a/dog/0.png"],
            "client 'a' has no sample for test among its 2: it has one sample of each class",
        ),
        (
            ["a/train/cat/", "a/test/cat/0.png"],
            "client 'a' has no sample for train among its 1: its parts must give it some",
        ),
    ],
)
def test_another_arrangement_is_refused_with_the_folder_and_the_way_out(tree, files, said):
    assert said in tree(*files)


@pytest.mark.parametrize(
    ("file", "holds"),
    [
        ("a/cat/0.png", True), ("a/train/cat/0.JPEG", True), ("a/0.png", True), ("a/b/c/d/0.png", True),
        ("0.png", False), ("a/cat/0.npz", False), (".a/cat/0.png", False), ("a/cat/.0.png", False),
    ],
)  # fmt: skip
def test_a_directory_that_holds_images_is_told_from_others(tmp_path, file, holds):
    write(tmp_path / "tree" / file, Image.new("L", (2, 2)), format="PNG")
    assert holds_images(tmp_path / "tree") is holds
    assert not holds_images(tmp_path / "nowhere")
