"""Directories of images: which pixels come out of a file, which file lands where, and what is refused."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedshift.data.files.image_store as image_store
from fedshift.base.errors import UsageError
from fedshift.data.files.image_tree import holds_images
from fedshift.data.files.images import read_images
from fedshift.data.files.reading import Reading

SUFFIXES = ("png", "bmp", "tif", "TIFF", "PNG")


def noise(*shape: int, key: int = 0, top: int = 256, dtype=np.uint8) -> np.ndarray:
    return np.random.default_rng([key, *shape]).integers(0, top, shape).astype(dtype)


def write(path: Path, image: Image.Image | np.ndarray, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(path, **options)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two clients of two classes, 5 + 5 gray and 6 + 6 color images of 6 x 4 pixels, each with pixels of its own."""
    folder = tmp_path / "looks"
    for client, images, depth in (("gray", 5, ()), ("color", 6, (3,))):
        for place, category in enumerate(("cat", "dog")):
            for i in range(images):
                image = noise(4, 6, *depth, key=100 * place + i)
                write(folder / client / category / f"{i}.{SUFFIXES[i % 5]}", image)
    return folder


@pytest.fixture
def read(tmp_path: Path, root: Path):
    """Read the directory, with a cache of this test's own."""
    return lambda path=root, **choices: read_images(path, Reading(**({"cache": tmp_path / "cache"} | choices)))


@pytest.fixture
def one(tmp_path: Path, read):
    """The array [C, H, W] that comes out of a file, written by a function that is given the path."""
    numbers = count()

    def through(suffix: str, save, **choices) -> np.ndarray:
        folder = tmp_path / f"one-{next(numbers)}"
        for name in ("first", "second"):
            file = folder / "client" / "only" / f"{name}.{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            save(file)
        (client,) = read(folder, **choices).clients
        assert len(client.train) == len(client.test) == 1
        assert torch.equal(client.train.x, client.test.x)
        return client.train.x[0].numpy()

    return through


def samples(split) -> Counter[bytes]:
    return Counter(x.numpy().tobytes() + bytes([int(y)]) for x, y in zip(split.x, split.y, strict=True))


def refused(read, *arguments, **choices) -> str:
    with pytest.raises(UsageError) as error:
        read(*arguments, **choices)
    return str(error.value)


# Pixels of a file


@pytest.mark.parametrize("suffix", ["png", "tif", "tiff", "bmp", "PNG", "TIF"])
def test_gray_and_color_of_lossless_formats_are_read_exactly(one, suffix):
    gray, color = noise(5, 7), noise(5, 7, 3)
    np.testing.assert_array_equal(one(suffix, Image.fromarray(gray).save), gray[None])
    np.testing.assert_array_equal(one(suffix, Image.fromarray(color).save), color.transpose(2, 0, 1))


@pytest.mark.parametrize("suffix", ["jpg", "jpeg", "JPG"])
def test_jpeg_comes_close_to_what_was_written(one, suffix):
    image = Image.fromarray(noise(4, 5, 3)).resize((40, 32), Image.Resampling.BICUBIC)
    pixels = one(suffix, lambda file: image.save(file, quality=95))
    assert np.abs(pixels.transpose(1, 2, 0).astype(float) - np.array(image)).mean() < 5


def test_one_bit_becomes_black_and_white(one):
    bits = noise(5, 7, top=2).astype(bool)
    np.testing.assert_array_equal(one("png", Image.fromarray(bits).save), 255 * bits[None])


def paletted(index: np.ndarray, palette: np.ndarray) -> Image.Image:
    image = Image.frombytes("P", index.shape[::-1], index.tobytes())
    image.putpalette(palette.flatten().tolist())
    return image


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif"])
def test_a_palette_is_looked_up(one, suffix):
    index, palette = noise(5, 7, top=4), noise(4, 3)
    pixels = one(suffix, paletted(index, palette).save)
    np.testing.assert_array_equal(pixels, palette[index].transpose(2, 0, 1))


def test_ink_becomes_light(one):
    inks = noise(5, 7, 4)
    pixels = one("tif", Image.frombytes("CMYK", (7, 5), inks.tobytes()).save)
    light = (255.0 - inks[..., :3]) * (255.0 - inks[..., 3:]) / 255
    assert np.abs(pixels - light.transpose(2, 0, 1)).max() <= 1.5


def test_luma_and_chroma_become_color(one):
    gray = noise(5, 7)
    neutral = np.stack([gray, np.full_like(gray, 128), np.full_like(gray, 128)], axis=2)
    pixels = one("tif", Image.frombytes("YCbCr", (7, 5), neutral.tobytes()).save)
    np.testing.assert_array_equal(pixels, np.stack([gray] * 3))


def test_transparent_color_lies_over_white(one):
    rgba = noise(5, 7, 4)
    alpha = rgba[..., 3:] / 255
    white = rgba[..., :3] * alpha + 255 * (1 - alpha)
    assert np.abs(one("png", Image.fromarray(rgba).save) - white.transpose(2, 0, 1)).max() <= 1


def test_transparent_gray_lies_over_white_and_stays_gray(one):
    shade, alpha = noise(5, 7, 2).transpose(2, 0, 1)
    image = Image.frombytes("LA", (7, 5), np.stack([shade, alpha], axis=2).tobytes())
    white = shade * (alpha / 255) + 255 * (1 - alpha / 255)
    assert np.abs(one("png", image.save) - white[None]).max() <= 1


@pytest.mark.parametrize("transparent", [2, bytes([255, 255, 0, 255])])
def test_a_transparent_entry_of_a_palette_is_white(one, transparent):
    index, palette = noise(5, 7, top=4), noise(4, 3, top=200)
    pixels = one("png", lambda file: paletted(index, palette).save(file, transparency=transparent))
    palette[2] = 255
    np.testing.assert_array_equal(pixels, palette[index].transpose(2, 0, 1))


def test_a_transparent_shade_is_white(one):
    gray, color = noise(5, 7, top=3), noise(5, 7, 3, top=2)
    pixels = one("png", lambda file: Image.fromarray(gray).save(file, transparency=1))
    np.testing.assert_array_equal(pixels, np.where(gray == 1, 255, gray)[None])
    pixels = one("png", lambda file: Image.fromarray(color).save(file, transparency=(1, 0, 1)))
    clear = (color == [1, 0, 1]).all(2, keepdims=True)
    assert clear.any()
    np.testing.assert_array_equal(pixels, np.where(clear, 255, color).transpose(2, 0, 1))


TURNS = {
    1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud,
    5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1), 8: np.rot90,
}  # fmt: skip
"""What EXIF's orientations ask for."""


def orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("value", TURNS)
def test_images_are_turned_upright(one, suffix, value):
    color, deep = noise(5, 7, 3), noise(5, 7, top=65536, dtype=np.uint16)
    pixels = one(suffix, lambda file: Image.fromarray(color).save(file, exif=orientation(value)))
    np.testing.assert_array_equal(pixels, TURNS[value](color).transpose(2, 0, 1))
    pixels = one(suffix, lambda file: Image.fromarray(deep).save(file, exif=orientation(value)))
    np.testing.assert_allclose(pixels[0], TURNS[value](deep) / 65535 * 2 - 1, atol=1e-6)


def test_jpegs_are_turned_upright(one):
    light = np.zeros((16, 32, 3), np.uint8)
    light[:, 16:] = 255
    pixels = one("jpg", lambda file: Image.fromarray(light).save(file, exif=orientation(6)))
    assert pixels.shape == (3, 32, 16)
    assert pixels[:, :15].max() < 20
    assert pixels[:, 17:].min() > 235


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
    [(1, 8), (255, 8), (256, 10), (1023, 10), (1024, 12), (4095, 12), (4096, 14), (16384, 16), (65535, 16)],
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
        assert data.notices == (f"client 'scan': gray read as {bits} bits, 0..{2**bits - 1} scaled to [-1, 1]",)
        for part, image in images.items():
            x = data.clients[0].splits[part].x
            assert x.dtype == torch.float32
            expected = np.minimum(image / (2.0**bits - 1), 1) * 2 - 1
            np.testing.assert_allclose(x.numpy(), np.broadcast_to(expected, (2, 1, 4, 6)), atol=1e-6)


def test_a_larger_test_value_changes_nothing_in_training(read, tmp_path):
    for i in range(10):
        write(tmp_path / "deep" / "scan" / "only" / f"{i}.png", noise(4, 6, key=i, top=4096, dtype=np.uint16))
    before = read(tmp_path / "deep")
    held_out = before.clients[0].test.rows
    assert len(held_out) == 2
    for i in held_out:
        write(tmp_path / "deep" / "scan" / "only" / f"{i}.png", np.full((4, 6), 65535, np.uint16))
    after = read(tmp_path / "deep")
    assert torch.equal(before.clients[0].train.x, after.clients[0].train.x)
    assert (after.clients[0].test.x == 1).all()


@pytest.mark.parametrize("order", ["<", ">"])
def test_deep_gray_of_either_byte_order_and_of_32_bits_is_read(one, order):
    deep = noise(5, 7, top=65536, dtype=np.uint16)
    mode = "I;16" if order == "<" else "I;16B"
    swapped = Image.frombytes(mode, (7, 5), deep.astype(f"{order}u2").tobytes())
    for image in (swapped, Image.fromarray(deep.astype(np.int32))):
        np.testing.assert_allclose(one("tif", image.save)[0], deep / 65535 * 2 - 1, atol=1e-6)


def test_floats_from_0_to_1_are_read(one):
    real = np.random.default_rng(0).random((5, 7), dtype=np.float32)
    np.testing.assert_allclose(one("tif", Image.fromarray(real).save)[0], 2 * real - 1, atol=1e-6)


def test_deep_gray_is_resized_before_it_is_scaled(one):
    deep = noise(9, 15, top=65536, dtype=np.uint16)
    pixels = one("png", Image.fromarray(deep).save, image_size=4)
    small = Image.fromarray(deep.astype(np.float32)).resize((4, 4), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(pixels[0], np.array(small) / 65535 * 2 - 1, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.float32([[0, 1.5]]), "has values from 0 to 1.5, not in 0..1"),
        (np.float32([[0, np.nan]]), "has values from nan to nan, not in 0..1"),
        (np.int32([[-1, 5]]), "has values from -1 to 5, not in 0..65535"),
        (np.int32([[0, 65536]]), "has values from 0 to 65536, not in 0..65535"),
    ],
)
def test_deep_values_of_unknown_scale_are_refused(one, values, said):
    assert said in refused(one, "tif", Image.fromarray(values).save)


def test_gray_of_8_and_of_16_bits_is_not_mixed_in_a_client(read, root):
    deep = write(root / "gray" / "cat" / "0.png", noise(4, 6, dtype=np.uint16))
    assert refused(read) == (
        f"client 'gray' has images of different depth, {deep.with_name('1.bmp')} (byte) and {deep} (integer): "
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


def test_without_a_size_images_of_one_size_keep_it(read):
    assert {client.train.shape for client in read().clients} == {(1, 4, 6), (3, 4, 6)}


def test_sizes_that_differ_are_refused_by_name(read, root):
    small = write(root / "gray" / "cat" / "0.png", noise(3, 5))
    large = write(root / "color" / "dog" / "1.bmp", noise(8, 4, 3))
    said = refused(read)
    assert f"{small} has 5 x 3 pixels, {large} has 4 x 8 (widths 4 to 6, heights 3 to 8)" in said
    assert "--image-size 64" in said
    assert {client.train.shape[1:] for client in read(image_size=5).clients} == {(5, 5)}


def test_a_size_that_differs_from_that_of_a_cached_client_is_refused(read, root):
    read(domains=("gray",))
    for file in (root / "color").rglob("*.*"):
        write(file, noise(8, 8, 3))
    said = refused(read)
    assert f"{root / 'gray' / 'cat' / '0.png'} has 6 x 4 pixels, {root / 'color' / 'cat'}" in said


def test_gray_is_repeated_next_to_color_in_a_client(read, root):
    gray = noise(4, 6, key=77)
    write(root / "color" / "cat" / "0.png", gray)
    client = read().client("color")
    x = torch.cat([client.train.x, client.test.x]).numpy()
    assert x.shape == (12, 3, 4, 6)
    assert sum((image == gray).all() for image in x) == 1


def test_an_impossible_size_is_refused(read):
    assert refused(read, image_size=0) == "image_size=0 pixels: must be at least 1"


# Which file lands where


def content(root: Path, client: str) -> Counter[bytes]:
    """Every sample of a client as Pillow reads it, with its class, classes counted by name."""
    names = sorted({folder.name for folder in root.glob("*/*")})
    found: Counter[bytes] = Counter()
    for file in (root / client).rglob("*.*"):
        with Image.open(file) as image:
            pixels = np.array(image).reshape(4, 6, -1).transpose(2, 0, 1)
        found[pixels.tobytes() + bytes([names.index(file.parent.name)])] += 1
    return found


def test_every_file_is_used_once_and_none_for_both_training_and_test(read, root):
    data = read()
    assert data.fitted().check().sample_shape == (3, 4, 6)
    assert (data.name, data.classes, data.class_names, data.notices) == ("looks", 2, ("cat", "dog"), ())
    assert data.note == "22 images of 2 clients"
    assert data.names == ("color", "gray")
    for client in data.clients:
        train, test = samples(client.train), samples(client.test)
        assert not train & test
        assert train + test == content(root, client.name)
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


def test_domains_choose_and_order_clients(read, root):
    (root / "color" / "cat" / "0.png").write_text("not chosen, so not read")
    assert read(domains=("gray",)).names == ("gray",)
    (root / "color" / "cat" / "0.png").unlink()
    assert read(domains=("gray", "color")).names == ("gray", "color")
    assert "unknown domain 'grey': did you mean 'gray'?" in refused(read, domains=("grey",))


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
        "client 'gray': 2 files that are no images left out (.webp, no suffix)",
    )


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
        (["a/train/x/0.png", "a/val/x/0.png", "a/valid/x/0.png"], "holds train, val, valid, of which two are the same"),
        (["train/cat/0.png", "test/cat/1.png"], "tree holds test, train, but no folder of a client"),
        (["a/cat/0.png", "b/"], "client 'b' has no image (.bmp, .jpeg, .jpg, .png, .tif, .tiff) in"),
        (["a/cat/0.png", "b/cat/"], "client 'b' has no image"),
        ([".hidden/cat/0.png"], "tree holds no folder"),
        (["a/cat/0.png", "a/dog/0.png"], "client 'a' has no test image, and no two training images of one class"),
        (["a/train/cat/", "a/test/cat/0.png"], "client 'a' has no training image that can be read"),
    ],
)
def test_another_arrangement_is_refused_with_the_folder_and_the_way_out(tree, files, said):
    assert said in tree(*files)


def test_a_directory_that_is_none_is_refused(read, tmp_path):
    assert f"{tmp_path / 'nowhere'} is no directory" in refused(read, tmp_path / "nowhere")


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


# Files that cannot be read


def text(file: Path):
    file.write_text("not an image")


def nothing(file: Path):
    file.write_bytes(b"")


def cut_short(file: Path):
    write(file, noise(40, 60, 3))
    file.write_bytes(file.read_bytes()[:-2000])


def cut_header(file: Path):
    file.write_bytes(file.read_bytes()[:20])


def damaged(file: Path):
    pixels = bytearray(file.read_bytes())
    start = pixels.index(b"IDAT") + 4
    pixels[start : start + 8] = bytes(8)
    file.write_bytes(pixels)


def of_another_format(file: Path):
    Image.new("L", (6, 4)).save(file, format="GIF")


def dangling(file: Path):
    file.unlink()
    file.symlink_to(file.with_name("gone.png"))


def large(file: Path):
    Image.new("1", (10000, 9000)).save(file)  # 90 million pixels, more than Pillow's limit of 89


def bomb(file: Path):
    Image.new("1", (20000, 9000)).save(file)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (text, "is no image in format PNG, JPEG, TIFF, BMP"), (nothing, "is empty"), (cut_short, "truncated"),
        (cut_header, "Truncated File Read"), (damaged, "broken"), (of_another_format, "is no image in format"),
        (dangling, "No such file or directory"), (large, "could be decompression bomb"),
        (bomb, "could be decompression bomb"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused_by_name_or_left_out(read, root, spoil, why):
    bad = root / "color" / "cat" / "0.png"
    spoil(bad)
    for _ in range(2):  # decoded, and from the cache
        said = refused(read, image_size=4)
        assert said.startswith(f"1 of 22 files cannot be read: {bad}: ")
        assert why in said
        assert said.endswith("; mend or remove them, or leave them out (--broken skip)")
        data = read(image_size=4, broken="skip")
        assert data.note == "21 images of 2 clients"
        assert "client 'color': 1 of 12 files cannot be read, left out (color/cat/0.png: " in data.notices[0]
        assert why in data.notices[0]
        rows = torch.cat([data.client("color").train.rows, data.client("color").test.rows])
        assert sorted(rows.tolist()) == list(range(1, 12))
        assert data.client("color").test.y.tolist() == [0, 1]


def test_of_many_broken_files_five_are_named_and_all_are_counted(read, root):
    for file in (root / "gray" / "cat").iterdir():
        text(file)
    cut_short(root / "color" / "cat" / "0.png")
    cut_short(root / "color" / "cat" / "4.PNG")
    said = refused(read, image_size=4)
    assert said.startswith("7 of 22 files cannot be read: ")
    assert ", and 2 more; mend" in said
    assert said.count(str(root)) == 5


def test_a_client_of_broken_files_alone_is_refused(read, root):
    for file in (root / "gray").rglob("*.*"):
        text(file)
    for _ in range(2):  # decoded, and from the cache
        assert refused(read).startswith("10 of 22 files")
        assert "client 'gray' has no training image that can be read" in refused(read, broken="skip")
    assert read(domains=("color",)).note == "12 images of 1 clients"


def test_a_mended_file_is_read(read, root):
    bad = root / "gray" / "cat" / "0.png"
    good = bad.read_bytes()
    text(bad)
    refused(read)
    bad.write_bytes(good)
    client = read().client("gray")
    assert samples(client.train) + samples(client.test) == content(root, "gray")


# The cache


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Names of files in the order in which they are decoded."""
    names: list[str] = []
    decode = image_store.decode

    def counted(file, **form):
        names.append(file.name)
        return decode(file, **form)

    monkeypatch.setattr(image_store, "decode", counted)
    return names


def test_a_second_reading_opens_no_image(read, decoded, monkeypatch):
    first = read()
    assert len(decoded) == 22
    monkeypatch.setattr(Image, "open", None)
    second = read()
    assert len(decoded) == 22
    assert second.fingerprint == first.fingerprint
    assert (second.notices, second.note) == (first.notices, first.note)


def test_a_changed_a_new_and_a_removed_file_are_noticed(read, root, decoded):
    read()
    stamp = (root / "gray" / "cat" / "0.png").stat().st_mtime_ns
    os.utime(root / "gray" / "cat" / "0.png", ns=(stamp, stamp + 1))
    read()
    assert len(decoded) == 22 + 10  # the other client is not decoded again
    write(root / "gray" / "cat" / "new.png", noise(4, 6, key=99))
    assert read().note == "23 images of 2 clients"
    assert len(decoded) == 32 + 11
    (root / "gray" / "cat" / "new.png").unlink()
    read()
    assert len(decoded) == 32 + 11  # known from before


def test_another_size_is_decoded_again_and_another_choice_of_clients_is_not(read, decoded):
    read()
    read(domains=("gray",), classes=7, broken="skip")
    assert len(decoded) == 22
    read(image_size=5)
    assert len(decoded) == 44


def test_equal_stamps_in_another_directory_are_other_images(read, root, tmp_path):
    for name, shade in (("one", 10), ("two", 200)):
        for i in range(2):
            os.utime(write(tmp_path / name / "a" / "x" / f"{i}.bmp", np.full((4, 6), shade, np.uint8)), (0, 0))
    assert (read(tmp_path / "one").clients[0].train.x == 10).all()
    assert (read(tmp_path / "two").clients[0].train.x == 200).all()


def test_writing_to_the_array_does_not_reach_the_cache(read):
    before = read()
    fingerprint = before.fingerprint
    before.clients[0].train.store.zero_()
    assert read().fingerprint == fingerprint


def test_a_reading_that_was_stopped_leaves_nothing_behind(read, tmp_path, decoded):
    def stop(what, done, total):
        if what == "images of gray":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(progress=stop)
    entries = list((tmp_path / "cache" / "images").iterdir())
    assert [len(list(entry.iterdir())) for entry in entries] == [2]  # the client that was finished, whole
    read()
    assert len(decoded) == 22 + 10


@pytest.mark.parametrize("spoil", [
    lambda entry: (entry / "facts.json").unlink(),
    lambda entry: (entry / "facts.json").write_text("{"),
    lambda entry: (entry / "facts.json").write_text("[]"),
    lambda entry: (entry / "facts.json").write_text(json.dumps({"other": 1})),
    lambda entry: (entry / "pixels.npy").unlink(),
    lambda entry: (entry / "pixels.npy").write_bytes((entry / "pixels.npy").read_bytes()[:-1]),
])  # fmt: skip
def test_a_damaged_entry_is_made_again(read, tmp_path, decoded, spoil):
    fingerprint = read().fingerprint
    for entry in (tmp_path / "cache" / "images").iterdir():
        spoil(entry)
    assert read().fingerprint == fingerprint
    assert len(decoded) == 44
    assert read().fingerprint == fingerprint
    assert len(decoded) == 44


def test_threads_that_read_at_the_same_time_all_get_the_same(read):
    with ThreadPoolExecutor(4) as pool:
        readings = list(pool.map(lambda _: read(), range(4)))
    assert len({data.fingerprint for data in readings}) == 1
    assert all(data.notices == () for data in readings)


def test_two_processes_that_decode_at_the_same_time_get_the_same(read, root, tmp_path):
    cache = tmp_path / "shared"
    code = f"""
import pathlib, time
import fedshift.data.files.images as images
from fedshift.data.files.reading import Reading
def meet(*told):
    pathlib.Path({str(tmp_path)!r}, "child").touch()
    while not pathlib.Path({str(tmp_path)!r}, "parent").exists():
        time.sleep(0.01)
choices = Reading(cache=pathlib.Path({str(cache)!r}), progress=meet)
data = images.read_images(pathlib.Path({str(root)!r}), choices)
print(data.fingerprint, data.notices)
"""
    child = subprocess.Popen([sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, text=True)

    def meet(*told):  # neither has finished when the other begins
        (tmp_path / "parent").touch()
        while not (tmp_path / "child").exists():
            assert child.poll() is None
            time.sleep(0.01)

    data = read(cache=cache, progress=meet)
    assert child.communicate()[0] == f"{data.fingerprint} {data.notices}\n"
    assert data.notices == ()
    assert len(list((cache / "images").iterdir())) == 2


def test_an_entry_that_another_process_finished_first_is_used(read, tmp_path):
    fingerprint = read(cache=tmp_path / "other").fingerprint

    def publish(what, done, total):
        if what.startswith("images"):
            for entry in (tmp_path / "other" / "images").iterdir():
                target = tmp_path / "cache" / "images" / entry.name
                if not target.exists():
                    entry.rename(target)

    assert read(progress=publish).fingerprint == fingerprint
    names = [entry.name for entry in (tmp_path / "cache" / "images").iterdir()]
    assert len(names) == 2
    assert not any(name.endswith(".tmp") for name in names)


def test_without_a_cache_that_can_be_written_images_are_in_memory(read, tmp_path):
    (tmp_path / "occupied").write_text("a file where the cache would be")
    data = read(cache=tmp_path / "occupied")
    assert data.notices == (f"{tmp_path / 'occupied'} cannot be written (Not a directory): images are kept in memory",)
    assert data.fingerprint == read().fingerprint


def test_a_place_that_something_else_takes_is_left_alone(read, tmp_path):
    fingerprint = read(domains=("gray",)).fingerprint
    (entry,) = (tmp_path / "cache" / "images").iterdir()
    entry.rename(tmp_path / "elsewhere")
    entry.write_text("something else")
    data = read(domains=("gray",))
    assert data.fingerprint == fingerprint
    assert data.notices[-1].endswith(f"({entry} cannot be read): images are kept in memory")
    assert [file.read_text() for file in (tmp_path / "cache" / "images").iterdir()] == ["something else"]


def test_a_disk_that_is_full_is_survived(read, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    for i in range(4):
        write(tmp_path / "deep" / "scan" / "only" / f"{i}.png", noise(4, 6, key=i, top=4096, dtype=np.uint16))
    whole = read(tmp_path / "deep")
    monkeypatch.setattr(os, "fsync", full)
    data = read(tmp_path / "deep", cache=tmp_path / "full")
    assert "No space left on device" in data.notices[-1]
    assert data.fingerprint == whole.fingerprint
    assert list((tmp_path / "full" / "images").iterdir()) == []


def test_progress_is_told_of_every_client(read, root):
    heard = []
    read(progress=lambda *told: heard.append(told))
    assert heard == [
        ("headers of color", 12, 12), ("headers of gray", 10, 10), ("images of color", 12, 12),
        ("images of gray", 10, 10),
    ]  # fmt: skip
    heard.clear()
    for i in range(6, 26):
        write(root / "gray" / "cat" / f"{i}.png", noise(4, 6, key=i))
    read(progress=lambda *told: heard.append(told))
    assert heard == [(what, done, 30) for what in ("headers of gray", "images of gray") for done in (16, 30)]


def test_a_file_that_cannot_be_opened_now_is_no_broken_file_and_is_not_remembered_as_one(tmp_path, monkeypatch):
    for label in ("cat", "dog"):
        (tmp_path / "own" / "north" / label).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(noise(6, 6)).save(tmp_path / "own" / "north" / label / f"{number}.png")
    opened = Path.open

    def refused(file, *given, **named):
        if file.name == "2.png":
            raise PermissionError(13, "Permission denied")
        return opened(file, *given, **named)

    reading = Reading(cache=tmp_path / "cache", broken="skip")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refused)
        with pytest.raises(UsageError, match=r"2\.png cannot be read now: Permission denied"):
            read_images(tmp_path / "own", reading)
    assert sum(len(split) for split in read_images(tmp_path / "own", reading).clients[0].splits.values()) == 8
