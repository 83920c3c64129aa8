"""The embedded digits: where each image comes from, the recipes, five different looks, the same bytes everywhere."""

import subprocess
import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.ft2font import FT2Font
from PIL import ImageFont
from sklearn.datasets import load_digits, load_sample_images

from fedshift.data.digits import CLIENTS, FONTS, digits, list_sources
from fedshift.utils.errors import UsageError

HANDWRITTEN = tuple(name for name in CLIENTS if name != "print")
SHIPPED = """DejaVuSans DejaVuSans-Bold DejaVuSans-BoldOblique DejaVuSans-Oblique DejaVuSansDisplay DejaVuSansMono
DejaVuSansMono-Bold DejaVuSansMono-BoldOblique DejaVuSansMono-Oblique DejaVuSerif DejaVuSerif-Bold
DejaVuSerif-BoldItalic DejaVuSerif-Italic DejaVuSerifDisplay STIXGeneral STIXGeneralBol STIXGeneralBolIta
STIXGeneralItalic cmb10 cmex10 cmmi10 cmr10 cmss10 cmsy10 cmtt10"""
"""Fonts with letters in the wheel of matplotlib 3.8.0, the lowest that is allowed; those of 3.9 to 3.11 have the same
bytes. Later ones have more."""


@cache
def inks() -> np.ndarray:
    """scikit-learn's handwritten digits as ink from 0 to 1, [1797, 28, 28]."""
    ink = torch.from_numpy(load_digits().images / 16)
    return F.interpolate(F.pad(ink, (1, 1, 1, 1))[:, None], size=28, mode="bicubic")[:, 0].clamp(0, 1).numpy()


def test_every_image_is_uint8_rgb_and_every_class_is_in_every_split() -> None:
    federation = digits()
    assert federation.check() is federation
    assert federation.names == CLIENTS
    assert federation.classes == 10
    for client in federation.clients:
        for split, (least, most), per_class in ((client.train, (300, 320), 29), (client.test, (140, 140), 14)):
            assert split.x.dtype == torch.uint8
            assert split.x.shape == (len(split), 3, 28, 28)
            assert split.y.dtype == torch.int64
            assert least <= len(split) <= most
            counts = split.y.bincount(minlength=10)
            assert counts.min() >= per_class
            assert counts.max() <= counts.min() + 3


def test_no_digit_stands_in_both_splits_and_no_handwritten_one_is_left_out() -> None:
    used = np.concatenate([part for name in HANDWRITTEN for part in list_sources()[name].values()])
    assert sorted(used) == list(range(1797))
    train, test = (set((list_sources()["print"][split] // 10).tolist()) for split in ("train", "test"))
    assert train == set(range(len(FONTS["train"])))
    assert test == {len(train) + number for number in range(len(FONTS["test"]))}


@pytest.mark.parametrize("name", CLIENTS)
def test_labels_are_those_of_the_sources(name: str) -> None:
    client = digits().client(name)
    for split in ("train", "test"):
        source = list_sources()[name][split]
        labels = source % 10 if name == "print" else load_digits().target[source]
        assert client.splits[split].y.tolist() == labels.tolist()


def test_pen_is_the_handwriting_upright_and_unmirrored() -> None:
    place, image = list_sources()["pen"]["train"][0], digits().client("pen").train.x[0].numpy()
    for channel in image:
        np.testing.assert_array_equal(channel, np.round(255 * inks()[place]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("split", ["train", "test"])
def test_photo_is_the_absolute_difference_of_one_patch_and_the_digit(split: str) -> None:
    image = digits().client("photo").splits[split].x[0].numpy().transpose(1, 2, 0).astype(float)
    ink = 255 * inks()[list_sources()["photo"][split][0]][..., None]
    bare = ink[0, :, 0] == 0  # here the top row shows the photograph itself
    assert bare.sum() >= 8
    found = []
    for photo in load_sample_images().images:
        rows = np.lib.stride_tricks.sliding_window_view(photo, 28, axis=1)[: 427 - 27]
        for top, left in np.argwhere((rows[..., bare] == image[0, bare].T).all((2, 3))):
            patch = photo[top : top + 28, left : left + 28].astype(float)
            if np.abs(np.abs(patch - ink) - image).max() <= 0.5:
                found.append(int(left))
    assert len(found) == 1
    assert found[0] + 28 <= 384 if split == "train" else found[0] >= 384


def test_fonts_hold_ten_distinct_digits_and_no_glyph_is_in_both_splits() -> None:
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    glyphs: dict[str, list[tuple[tuple[int, int], bytes]]] = {"train": [], "test": []}
    for split, fonts in FONTS.items():
        for font in fonts:
            assert font in SHIPPED.split()
            path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{font}.ttf")
            face = FT2Font(str(path))
            assert [face.get_glyph_name(face.get_char_index(ord(char))) for char in "0123456789"] == names
            masks = [ImageFont.truetype(path, 48).getmask(char) for char in "0123456789"]
            glyphs[split] += [(mask.size, bytes(mask)) for mask in masks]
    together = glyphs["train"] + glyphs["test"]
    assert len(set(together)) == len(together) == 10 * (len(FONTS["train"]) + len(FONTS["test"]))


def test_the_five_looks_differ() -> None:
    brightness, contrast, grain = {}, {}, {}
    for client in digits().clients:
        gray = client.train.x.float().mean(1)
        brightness[client.name] = float(gray.mean())
        contrast[client.name] = float(gray.std((1, 2)).mean())
        grain[client.name] = float((gray[..., 1:] - gray[..., :-1]).abs().mean())
    assert brightness["faded"] > 190 > 100 > brightness["pen"]
    assert contrast["faded"] < 0.5 * contrast["pen"]
    assert grain["worn"] > 1.5 * grain["pen"]
    for client in digits().clients:
        colored = bool((client.train.x.amax(1) != client.train.x.amin(1)).any())
        assert colored == (client.name in ("photo", "print"))


def test_sources_have_a_known_digest() -> None:
    # Pixels depend on the versions of FreeType and the JPEG decoder; which digit goes where does not.
    digest = blake2b(digest_size=8)
    for splits in list_sources().values():
        for part in splits.values():
            digest.update(part.astype("<i8").tobytes())
    assert digest.hexdigest() == "be4d30b22049947b"


@pytest.mark.slow
def test_the_same_bytes_in_every_process() -> None:
    script = "from fedshift.data.digits import digits; print(digits(size=8).fingerprint)"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == digits(size=8).fingerprint


@pytest.mark.parametrize("size", [7, 129])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"size={size} pixels.*8 to 128"):
        digits(size=size)
