"""Directories of images: which file lands where, with which pixels, and which arrangements are refused."""

from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

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


def test_classes_are_counted_over_all_clients_even_those_not_chosen_and_numbers_in_their_order(read, root):
    for number in range(2):
        write(root / "color" / "ant" / f"{number}.png", noise(4, 6, 3))
    data = read(domains=("gray",))
    assert data.class_names == ("ant", "cat", "dog")
    assert data.client("gray").train.y.unique().tolist() == [1, 2]
    for folder in root.glob("*/*"):
        folder.rename(folder.with_name({"ant": "7", "cat": "10", "dog": "9"}[folder.name]))
    assert read().class_names == ("7", "9", "10")


def test_choices_that_cannot_be_are_refused(read):
    assert read(classes=5).classes == 5
    assert "classes=1: " in (said := refused(read, classes=1))
    assert "has 2 class folders (cat, dog); ask for as many" in said
    assert refused(read, test_fraction=1.0) == "test_fraction=1: must lie between 0 and 1"
    assert refused(read, image_size=0) == "image_size=0 pixels: must be at least 1"


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
    write(root / "gray" / "dog" / "0.png", np.full((4, 6), 7, np.uint8))
    (root / "west.zip").write_bytes(b"")
    data = read()
    assert data.class_names == ("cat", "dog", "empty")
    assert data.notices == (
        f"{root} holds files that are not read: west.zip; unpack clients into folders",
        f"client 'color': {root / 'color' / 'empty'} holds no image",
        "client 'gray': 1 files of other kinds left out (no suffix)",
        "client 'gray': 1 of 10 images are constant, all of their pixels have one value (gray/dog/0.png)",
    )
    assert data.faults == ("client 'gray': 1 image in a format that is not read, left out (.webp)",)
    assert data.select_clients(["color"]).faults == ()


# Pixels of a file


def test_of_several_frames_the_first_is_read_and_the_others_are_counted(one, read, root):
    first, others = noise(4, 6), [Image.fromarray(noise(4, 6, key=i)) for i in (1, 2)]

    def save(file):
        Image.fromarray(first).save(file, save_all=True, append_images=others)

    np.testing.assert_array_equal(one("tif", save), first[None])
    np.testing.assert_array_equal(one("png", save), first[None])
    save(root / "gray" / "cat" / "2.tif")
    for _ in range(2):  # decoded, and from the cache
        assert read().notices == ("client 'gray': 1 files hold several frames, the first is read (gray/cat/2.tif: 3)",)


# Gray of more than 8 bits


@pytest.mark.parametrize(
    ("top", "bits"),
    [(1, 8), (255, 8), (256, 10), (4095, 12), (65535, 16)],
)
def test_deep_gray_is_scaled_by_the_bits_that_its_training_images_use(read, tmp_path, top, bits):
    folder = tmp_path / "deep" / "scan"
    images = {part: noise(4, 6, key=i, top=top, dtype=np.uint16) for i, part in enumerate(("train", "test"))}
    images["train"][1, 2] = top
    images["test"][0, 0] = 65535
    for part, image in images.items():
        write(folder / part / "only" / "a.png", image)
        write(folder / part / "only" / "b.tif", image)
    for _ in range(2):  # decoded, and from the cache
        data = read(tmp_path / "deep")
        said = f"gray of more than 8 bits read as {bits} bits, 0..{2**bits - 1} scaled to [-1, 1], at all clients"
        assert data.notices == (said,)
        for part, image in images.items():
            x = data.clients[0].splits[part].x
            assert x.dtype == torch.float32
            expected = np.minimum(image / (2.0**bits - 1), 1) * 2 - 1
            np.testing.assert_allclose(x.numpy(), np.broadcast_to(expected, (2, 1, 4, 6)), atol=1e-6)


def test_deep_gray_is_resized_before_it_is_scaled(one):
    deep = noise(9, 15, top=65536, dtype=np.uint16)
    pixels = one("png", Image.fromarray(deep).save, image_size=4)
    small = Image.fromarray(deep.astype(np.float32)).resize((4, 4), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(pixels[0], np.array(small) / 65535 * 2 - 1, atol=1e-6)


@pytest.mark.parametrize(("dtype", "kind"), [(np.uint16, "integer"), (np.float32, "real")])
def test_gray_of_8_and_of_more_bits_is_not_mixed_in_a_client(read, root, dtype, kind):
    deep = write(root / "gray" / "cat" / "2.tif", noise(4, 6, top=2, dtype=dtype))
    assert refused(read) == (
        f"client 'gray' has images of different depth, {deep.with_name('0.png')} (byte) and {deep} ({kind}): "
        "convert all of a client's images to one"
    )


# Sizes and channels


@pytest.mark.parametrize("channels", [(), (3,)])
def test_a_size_asked_for_is_bilinear_with_antialiasing(one, channels):
    image = noise(9, 15, *channels)
    pixels = one("png", Image.fromarray(image).save, image_size=4)
    whole = torch.from_numpy(image).reshape(1, 9, 15, -1).permute(0, 3, 1, 2).double()
    small = torch.nn.functional.interpolate(whole, size=(4, 4), mode="bilinear", antialias=True, align_corners=False)
    assert pixels.shape == small.shape[1:]
    assert np.abs(pixels - small[0].numpy()).max() <= 1  # Pillow rounds after each direction


def test_sizes_that_differ_are_refused_by_name(read, root):
    small = write(root / "gray" / "cat" / "0.png", noise(3, 5))
    large = write(root / "color" / "dog" / "1.bmp", noise(8, 4, 3))
    said = refused(read)
    assert f"{small} has 5 x 3 pixels, {large} has 4 x 8 (widths 4 to 6, heights 3 to 8)" in said
    assert "image_size=64" in said
    assert {client.train.shape[1:] for client in read(image_size=5).clients} == {(5, 5)}
    for file in (root / "color").rglob("*.*"):
        write(file, noise(8, 8, 3))
    read(domains=("color",))
    assert f"{small} has 5 x 3 pixels, {root / 'color' / 'cat'}" in refused(read)  # of which one is in the cache


def test_gray_is_repeated_next_to_color_in_a_client(read, root):
    gray = noise(4, 6, key=77)
    write(root / "color" / "cat" / "0.png", gray)
    client = read().client("color")
    x = torch.cat([client.train.x, client.test.x]).numpy()
    assert x.shape == (12, 3, 4, 6)
    assert sum((image == gray).all() for image in x) == 1


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
        (["a/b/c/d/0.png"], "tree/a/b/c is a folder inside of a class folder"),
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
