"""Directories of images with masks: which mask belongs to which image, what its values mean, what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.data.assembly import read_folder
from fedshift.data.files.pairing import match_names
from fedshift.tasks import Segmentation
from fedshift.utils.errors import UsageError

HIGH, WIDE = 4, 6


def draw(client, part, stem, classes=3):
    """An image of noise in gray, and a mask of noise of ``classes`` classes."""
    rng = np.random.default_rng([*map(ord, f"{client}{part}{stem}")])
    return rng.integers(0, 256, (HIGH, WIDE), np.uint8), rng.integers(0, classes, (HIGH, WIDE), np.uint8)


def save(folder, stem, image, mask, suffix=".png"):
    for kind, picture in (("images", image), ("masks", mask)):
        if picture is not None:
            picture = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
            (folder / kind).mkdir(parents=True, exist_ok=True)
            picture.save(folder / kind / f"{stem}{suffix if kind == 'images' else '.png'}")


@pytest.fixture
def root(tmp_path):
    """Client a has parts and images in TIFF, client b has none."""
    for part, stems in {"train": "pqr", "test": "st"}.items():
        for stem in stems:
            save(tmp_path / "scans" / "a" / part, stem, *draw("a", part, stem), suffix=".tif")
    for stem in "uvwxy":
        save(tmp_path / "scans" / "b", stem, *draw("b", "", stem))
    return tmp_path / "scans"


@pytest.fixture
def read(root):
    return lambda path=root, **options: read_folder(path, **options)


def pairs(split):
    return {(x.numpy().tobytes(), y.numpy().tobytes()) for x, y in zip(split.x, split.y, strict=True)}


def drawn(client, part, stems, classes=3):
    return {tuple(each.tobytes() for each in draw(client, part, stem, classes)) for stem in stems}


def refused(read, **options):
    with pytest.raises(UsageError) as error:
        read(**options)
    return str(error.value)


def test_every_image_has_its_own_mask(read):
    for _ in range(2):  # the second time from the cache
        data = read().check()
        a, b = data.clients
        assert (data.task, data.classes, data.names) == (Segmentation(), 3, ("a", "b"))
        assert pairs(a.train) == drawn("a", "train", "pqr")
        assert pairs(a.test) == drawn("a", "test", "st")
        assert pairs(b.train) | pairs(b.test) == drawn("b", "", "uvwxy")
        assert (len(b.train), len(b.test)) == (4, 1)
        assert a.train.y.dtype == torch.uint8
        assert data.notices == ()


def test_masks_are_resized_to_the_nearest_pixel(read):
    large, data = read(image_size=12), read()
    assert large.client("a").train.y.shape == (3, 12, 12)
    assert torch.equal(large.client("a").train.y[:, 1::3, ::2], data.client("a").train.y)
    fitted = data.fit_images(12).client("a").train
    assert torch.equal(fitted.y, large.client("a").train.y)
    assert fitted.x.shape == (3, 1, 12, 12)


def save_two(folder, client, change, stems="pqr", suffix=".png"):
    """Write images with masks of 0 and 1, as pictures or arrays that ``change`` makes of them, and return the pairs."""
    for number, stem in enumerate(stems):
        image, mask = draw(client, "", stem, 2)
        save(folder / client, stem, image, change(mask, number), suffix=suffix)
    return drawn(client, "", stems, 2)


def paint(mask, colors):
    picture = Image.fromarray(mask, "P")
    picture.putpalette([value for color in colors for value in color])
    return picture


STORED = {
    "L": lambda mask, _: 255 * mask,
    "1": lambda mask, _: Image.fromarray(mask > 0),
    "P": lambda mask, _: paint(mask, [(200, 10, 10), (20, 220, 20)]),
    "RGB": lambda mask, _: np.repeat(255 * mask[..., None], 3, axis=2),
    "I;16": lambda mask, _: mask.astype(np.uint16),
}


@pytest.mark.parametrize("mode", STORED)
def test_two_values_are_two_classes_however_they_are_stored(read, tmp_path, mode):
    expected = save_two(tmp_path / "two", "c", STORED[mode])
    data = read(tmp_path / "two").check()
    (client,) = data.clients
    assert data.classes == 2
    assert pairs(client.train) | pairs(client.test) == expected


def test_255_is_ignored_where_there_are_other_classes(read, root):
    image, mask = draw("b", "", "u")
    mask[0] = 255
    save(root / "b", "u", image, mask)
    data = read().check()
    split = next(s for s in data.client("b").splits.values() if 255 in s.y)
    assert data.classes == 3
    assert split.targets().unique().tolist() == [-100, 0, 1, 2]


def test_empty_masks_are_noted(read, root):
    image, _ = draw("a", "train", "p")
    save(root / "a" / "train", "p", image, np.zeros((HIGH, WIDE), np.uint8), suffix=".tif")
    assert read().notices == ("client 'a': 1 of 5 masks are empty (a/train/masks/p.png)",)


def test_a_mask_of_another_size_is_refused(read, root):
    save(root / "b", "v", None, np.zeros((HIGH, WIDE + 1), np.uint8))
    assert refused(read) == (
        f"mask {root}/b/masks/v.png has 7 x 4 pixels, but its image {root}/b/images/v.png has 6 x 4: give both the "
        "same size"
    )


@pytest.mark.parametrize(("kind", "other"), [("images", "masks"), ("masks", "images")])
def test_an_image_and_a_mask_without_each_other_are_refused(read, root, kind, other):
    (root / "b" / kind / "w.png").unlink()
    assert refused(read) == (
        f"client 'b': 1 of 5 files in {other} have none of the same name in {kind}, the first is "
        f"{root}/b/{other}/w.png: rename or add it, or take the file away"
    )


@pytest.mark.parametrize("turned", [("images",), ("masks",), ("images", "masks"), ()])
@pytest.mark.parametrize("orientation", [3, 6])
def test_a_rotation_tag_of_images_or_masks_alone_is_said(read, tmp_path, turned, orientation):
    for stem in "pqrst":
        for kind in ("images", "masks"):
            tag = Image.Exif()
            tag[0x0112] = orientation if kind in turned else 1
            picture = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4) % (2 if kind == "masks" else 16))
            (tmp_path / "tags" / "c" / kind).mkdir(parents=True, exist_ok=True)
            picture.save(tmp_path / "tags" / "c" / kind / f"{stem}.png", exif=tag)
    data = read(tmp_path / "tags")
    said = "client 'c': 5 of 5 images have a rotation tag (EXIF) that their masks do not have, or the other way round ("
    assert sum(notice.startswith(said) for notice in data.notices) == (len(turned) == 1)
    train = data.clients[0].train
    upright = np.rot90(np.arange(16).reshape(4, 4), 2 if orientation == 3 else -1)
    for kind, values in (("images", train.x[0, 0]), ("masks", train.y[0])):
        stored = np.arange(16).reshape(4, 4)
        expected = upright if kind in turned else stored
        assert np.array_equal(values, expected % (2 if kind == "masks" else 16))


def test_values_that_are_no_class_are_refused(read, root):
    image, mask = draw("b", "", "w")
    mask[1, 1] = 7
    save(root / "b", "w", image, mask)
    assert read().classes == 8
    said = refused(read, classes=3)
    assert said.startswith(f"mask {root}/b/masks/w.png has the value 7, but classes=3 means 0..2 (and 255 for ignored")
    assert read(classes=9).classes == 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"c": lambda mask, _: 128 * mask}, "hold 0, 128 alone, the 128 first at client 'c': write 1, 2, ... for the"),
        (
            {"ones": lambda mask, _: mask, "gray": lambda mask, _: 128 * mask},
            "hold 0, 1, 128, the 128 first at client 'gray'",
        ),
        (
            {"c": lambda mask, number: (1, 255, 1)[number] * mask},
            "such as {}/c/masks/p.png, or 0 and 255, such as {}/c/masks/q.png",
        ),
        (
            {"ones": lambda mask, number: np.where(mask * (number == 0), 255, 1 - mask), "white": STORED["L"]},
            "masks of client 'white' hold 0 and 255, those of 'ones' 0, 1 and 255",
        ),
    ],
)
def test_values_that_may_mean_several_things_are_refused(read, tmp_path, changes, said):
    for client, change in changes.items():
        save_two(tmp_path / "two", client, lambda mask, number, change=change: change(mask, number).astype(np.uint8))
    folder = tmp_path / "two"
    assert said.format(folder, folder) in refused(lambda: read(folder))
    if len(changes) == 1 and "such as" in said:
        assert read(folder, classes=2).classes == 2


def test_smoothed_masks_do_not_become_255_classes(read, root):
    image, _ = draw("b", "", "w")
    levels = np.resize(np.linspace(0, 255, 36, dtype=np.uint8), (HIGH, WIDE))  # 24 pixels a mask
    save(root / "b", "w", image, levels)
    save(root / "b", "x", image, levels.T.reshape(HIGH, WIDE) | 1)
    save(root / "b", "v", image, np.full((HIGH, WIDE), 255, np.uint8))
    save(root / "b", "u", image, np.arange(229, 229 + HIGH * WIDE, dtype=np.uint8).reshape(HIGH, WIDE))
    assert "client 'b': masks hold 255 and " in refused(read)
    assert read(classes=255).classes == 255


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda file: file.write_bytes(b"none"), "is not an image in format PNG, JPEG, TIFF, BMP, GIF, PPM"),
        (lambda file: Image.new("RGB", (WIDE, HIGH), (1, 2, 3)).save(file), "is a mask in color"),
        (lambda file: Image.fromarray(np.full((HIGH, WIDE), 300, np.uint16)).save(file), "values from 300 to 300"),
        (lambda file: Image.new("L", (WIDE, HIGH)).save(file, "JPEG"), "is a mask in JPEG, which alters class numbers"),
    ],
)
def test_a_mask_that_cannot_be_read_is_refused_or_left_out_with_its_image(read, root, spoil, said):
    spoil(root / "b" / "masks" / "x.png")
    message = refused(read)
    assert message.startswith(f"1 of 20 files cannot be read: {root}/b/masks/x.png: ")
    assert said in message
    data = read(on_data_error="ignore")
    b = data.client("b")
    assert pairs(b.train) | pairs(b.test) == drawn("b", "", "uvwy")
    assert data.faults[0].startswith("client 'b': 1 of 10 files cannot be read, left out (b/masks/x.png: ")


def test_clients_may_write_the_foreground_as_1_or_255(read, tmp_path):
    expected = {
        client: save_two(tmp_path / "both", client, lambda mask, _, factor=factor: factor * mask)
        for client, factor in (("ones", 1), ("white", 255))
    }
    data = read(tmp_path / "both").check()
    assert data.classes == 2
    assert {client.name: pairs(client.train) | pairs(client.test) for client in data.clients} == expected
    assert data.notices == (
        "masks hold 0 and 255, which are read as the classes 0 and 1, at 'white'; elsewhere they hold 0 and 1",
    )


def save_gif(file, mask, colors):
    file.parent.mkdir(exist_ok=True)
    paint(mask, [(color,) * 3 for color in colors]).save(file.with_suffix(".gif"))


@pytest.mark.parametrize("colors", [(0, 255), (255, 0), (0, 1)])
def test_masks_in_gif_are_gray_however_their_palette_is_ordered(read, tmp_path, colors):
    for stem in "pqr":
        image, mask = draw("c", "", stem, 2)
        save(tmp_path / "gif" / "c", stem, image, None, suffix=".ppm")
        save_gif(tmp_path / "gif" / "c" / "masks" / stem, 1 - mask if colors[1] == 0 else mask, colors)
    (client,) = read(tmp_path / "gif").check().clients
    assert pairs(client.train) | pairs(client.test) == drawn("c", "", "pqr", 2)


def test_pixels_outside_of_the_field_of_view_are_ignored(read, root):
    for stem in "uvwxy":
        field = np.full((HIGH, WIDE), 255, np.uint8)
        field[:, 0] = 0
        save_gif(root / "b" / "fov" / stem, (field > 0).astype(np.uint8), (0, 255))
    data = read().check()
    for split in data.client("b").splits.values():
        assert (split.y[:, :, 0] == 255).all()
        assert (split.y[:, :, 1:] < 3).all()
    assert data.notices == ("pixels outside of the fields of view are ignored: 17% at 'b'",)
    (root / "b" / "fov" / "u.gif").write_bytes(b"none")
    assert "1 of 25 files cannot be read" in refused(read)
    kept = read(on_data_error="ignore").client("b")
    assert len(kept.train) + len(kept.test) == 4
    (root / "b" / "fov" / "u.gif").unlink()
    assert "1 of 5 files in images have none of the same name in fov" in refused(read)


def test_masks_of_two_annotators_are_refused_with_their_names(read, root):
    for annotator in ("1stHO", "2ndHO"):
        (root / "b" / "masks" / f"w_{annotator}.png").write_bytes((root / "b" / "masks" / "w.png").read_bytes())
    (root / "b" / "masks" / "w.png").unlink()
    (root / "b" / "images" / "w.png").rename(root / "b" / "images" / "w_1st.png")
    said = refused(read)
    assert "1 of 5 files in images have none of the same name in masks" in said
    assert "(closest: b/masks/w_1stHO.png" in said
    for mask in [*(root / "b" / "masks").iterdir()]:
        mask.unlink()
    for stem in ("u", "v", "w_1st", "x", "y"):
        for annotator in ("ah", "vk"):
            Image.new("L", (WIDE, HIGH)).save(root / "b" / "masks" / f"{stem}.{annotator}.png")
    assert "masks has 2 files for each image: keep one annotator's" in refused(read)


def test_a_folder_of_one_client_joins_others(read, root):
    data = read()
    for mask in (root / "b" / "masks").iterdir():
        Image.fromarray(np.asarray(Image.open(mask)) % 2).save(mask)
    joined = read(root / "b", schema=data.schema)
    assert (joined.names, joined.classes) == (("b",), 3)
    assert joined.clients[0].train.y.max() == 1


def test_other_folders_and_double_names_are_refused(read, root):
    image, mask = draw("b", "", "u")
    Image.fromarray(image).save(root / "b" / "images" / "u.tif")
    assert "b/images/u.png and" in refused(read)
    (root / "b" / "images" / "u.tif").unlink()
    (root / "b" / "extra").mkdir()
    Image.fromarray(mask).save(root / "b" / "extra" / "u.png")
    assert refused(read).startswith(f"{root}/b/extra/u.png is in none of the folders images, masks, fov:")


def test_a_class_called_masks_is_a_class(read, tmp_path):
    for name in ("bare", "masks"):
        for stem in "pqr":
            image, _ = draw("c", name, stem)
            (tmp_path / "faces" / "c" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(tmp_path / "faces" / "c" / name / f"{stem}.png")
    assert read(tmp_path / "faces").class_names == ("bare", "masks")


@pytest.mark.parametrize("name", "ym")
def test_arrays_of_masks_are_for_segmentation(tmp_path, name):
    x, masks = (np.stack(each) for each in zip(*(draw("d", "", stem) for stem in "pqrst"), strict=True))
    np.savez(
        tmp_path / "d.npz",
        **{"x_train": x[:3], f"{name}_train": masks[:3], "x_test": x[3:], f"{name}_test": masks[3:]},
    )
    data = read_folder(tmp_path).check()
    assert (data.task, data.classes) == (Segmentation(), 3)
    assert pairs(data.clients[0].train) == drawn("d", "", "pqr")


@pytest.mark.parametrize(
    ("ones", "others", "matched"),
    [
        ("21_training 22_training 30_training", "30_manual1 21_manual1 22_manual1", "21_manual1 22_manual1 30_manual1"),
        ("im0001 im0255", "im0255.ah im0001.ah", "im0001.ah im0255.ah"),
        ("Image_01L Image_11R", "Image_11R_1stHO Image_01L_1stHO", "Image_01L_1stHO Image_11R_1stHO"),
        ("scan1 scan2 scan10", "mask2 mask10 mask1", "mask1 mask2 mask10"),
        ("im11 im12", "im21 im22", None),  # numbers are not cut
        ("a1x a1y", "a2x a2y", None),
        ("a b", "a_1 b_1 b_2", None),  # a second annotator
        ("21_x 22_x", "21_m 22_m 23_m", "21_m 22_m"),
        ("a b", "a_1 c_1", None),
        ("one", "two", None),  # nothing shows that they belong together
    ],
)
def test_names_that_differ_in_the_same_way_are_paired(ones, others, matched):
    found = match_names(*([("", name) for name in side.split()] for side in (ones, others)))
    assert found == (matched and {("", a): ("", b) for a, b in zip(ones.split(), matched.split(), strict=True)})


def test_masks_of_other_names_are_paired_with_a_notice(read, root):
    expected = read().client("b")
    for mask in (root / "b" / "masks").iterdir():
        mask.rename(mask.with_stem(f"{mask.stem}_manual1"))
    data = read()
    for split, samples in data.client("b").splits.items():
        assert torch.equal(samples.y, expected.splits[split].y)
    assert [text for text in data.notices if "names differ" in text] == [
        "client 'b': 5 files are paired by the parts in which their names differ, as b/images/u.png with "
        "b/masks/u_manual1.png"
    ]
