"""Embedded federation: the same ten digits in five styles, built from files that are included with dependencies.

The handwriting is scikit-learn's copy of the test set of UCI's optical recognition of handwritten digits (E. Alpaydin,
1998): 1,797 digits of 8 x 8 pixels by 13 people. The writers are not recorded, so each may occur in every client.
The digits are distributed to four clients; the fifth has printed digits:

* ``pen``: the handwriting unchanged, white on black.
* ``photo``: MNIST-M's recipe (Ganin et al. 2016, arXiv:1505.07818), ``|patch - digit|`` in each color, with patches of
  scikit-learn's two sample photographs; test patches come from another part of a photograph.
* ``print``: SynthDigits' recipe (Ganin and Lempitsky 2015, arXiv:1409.7495), fonts with random position, orientation,
  colors and blur; here with one digit per image and the fonts included in matplotlib.
* ``faded``: the handwriting inverted and with low contrast, gray ink on pale paper.
* ``worn``: the handwriting blurred and noisy, as if from a worn-out scanner.

No handwritten digit is in two clients, or in both train and test; the test fonts are from a different family than the
training fonts. Every draw comes from a keyed stream, so the data are the same in every process.

Licenses (no source file is copied into this package): the photographs are Creative Commons Attribution 2.0 (china.jpg
by danielbuechele; flower.jpg from vultilion's Flickr page), the fonts DejaVu, STIX and BaKoMa Computer Modern are free.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_digits, load_sample_image

from ..utils.errors import UsageError
from ..utils.random_streams import stream
from .federation import ClientData, Federation
from .samples import Samples

CLIENTS = ("pen", "photo", "print", "faded", "worn")
NOTE = (
    "No download: scikit-learn's 1,797 real handwritten digits in four styles (plain; against a photograph, as in "
    "MNIST-M; faded; worn), and digits rendered in matplotlib's fonts (as in SynthDigits). "
    "No handwritten digit is in two clients or in both train and test; training and test fonts differ."
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_TRAIN_PER_CLASS, _TEST_PER_CLASS = 31, 14  # printed digits; clients with handwriting have nearly the same numbers
_DEJAVU = tuple(
    f"DejaVu{family}{style}"
    for family, slant in (("Sans", "Oblique"), ("SansMono", "Oblique"), ("Serif", "Italic"))
    for style in ("", "-Bold", f"-{slant}", f"-Bold{slant}")
)
_STIX = ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta")
_COMPUTER_MODERN = ("cmb10", "cmr10", "cmss10", "cmtt10")
FONTS = {"train": _DEJAVU + _STIX, "test": _COMPUTER_MODERN}
"""Fonts of the printed digits, which every matplotlib from 3.8 on includes, with the same bytes."""


@cache
def digits(size: int = 28) -> Federation:
    """Return five clients with about 310 training and 140 test images each, uint8 ``[N, 3, size, size]``, ten classes.

    Raises :class:`UsageError` for a ``size`` (pixels) outside 8..128.
    """
    if not 8 <= size <= 128:
        raise UsageError(f"size={size} pixels: the embedded digits are made in sizes 8 to 128; ask for one of those")
    x_pen, y_pen = _load_handwriting(size)
    clients = []
    for name in CLIENTS:
        splits = {}
        for split, source in list_sources()[name].items():
            if name == "print":
                x, y = _print_digits(source, split, size), source % 10
            else:
                x, y = _apply_look(name, x_pen[source], split), y_pen[source]
            pixels = torch.from_numpy((255 * x.clip(0, 1)).round().astype(np.uint8))
            splits[split] = Samples(x=pixels, y=torch.from_numpy(y))
        clients.append(ClientData(name=name, train=splits["train"], test=splits["test"]))
    return Federation(name="digits", clients=tuple(clients), classes=10, note=NOTE).check()


@cache
def list_sources() -> dict[str, dict[str, Ints]]:
    """Return the source of each image, ``{client: {split: int64 [N]}}``, in the order of the images.

    A source is the digit's index in scikit-learn's data; for ``print``, it is ten times the font's index in
    ``FONTS["train"] + FONTS["test"]`` plus the digit.
    """
    fonts = {"train": np.arange(len(FONTS["train"])), "test": len(FONTS["train"]) + np.arange(len(FONTS["test"]))}
    per_class = {"train": _TRAIN_PER_CLASS, "test": _TEST_PER_CLASS}
    parts: dict[str, dict[str, list[Ints]]] = {name: {"train": [], "test": []} for name in CLIENTS}
    handwritten = load_digits().target
    for digit in range(10):
        shuffled = stream(0, "digits/share", digit).permutation(np.flatnonzero(handwritten == digit))
        shares = dict(zip((name for name in CLIENTS if name != "print"), np.array_split(shuffled, 4), strict=True))
        for name, share in shares.items():
            parts[name]["test"].append(share[:_TEST_PER_CLASS])
            parts[name]["train"].append(share[_TEST_PER_CLASS:])
        for split, count in per_class.items():
            parts["print"][split].append(10 * np.resize(fonts[split], count) + digit)
    return {
        name: {
            split: stream(0, "digits/order", name, split).permutation(np.concatenate(classes))
            for split, classes in splits.items()
        }
        for name, splits in parts.items()
    }


def _load_handwriting(size: int) -> tuple[Floats, Ints]:
    """Return all handwritten digits as ink in [0, 1], ``[1797, size, size]`` with MNIST's margin, and their labels."""
    data = load_digits()
    ink = torch.from_numpy(np.pad(data.images / 16, ((0, 0), (1, 1), (1, 1))))
    smooth = F.interpolate(ink[:, None], size=(size, size), mode="bicubic", align_corners=False)
    return smooth[:, 0].clamp(0, 1).numpy(), data.target


def _apply_look(name: str, ink_NHW: Floats, split: str) -> Floats:
    """Return the handwriting in the style of client ``name``, ``[N, 3, H, W]``, with values around 0 to 1."""
    rng = stream(0, "digits/look", name, split)
    size = ink_NHW.shape[-1]
    match name:
        case "photo":
            return np.abs(_draw_patches(len(ink_NHW), split, size, rng) - ink_NHW[:, None])
        case "faded":
            gray = 0.85 - 0.35 * ink_NHW
        case "worn":
            blurred = gaussian_filter(ink_NHW, size / 18, axes=(1, 2))
            gray = 0.1 + 0.7 * blurred + rng.normal(0, 0.12, ink_NHW.shape)
        case _:
            gray = ink_NHW
    return np.repeat(gray[:, None], 3, axis=1)


def _draw_patches(count: int, split: str, size: int, rng: np.random.Generator) -> Floats:
    """Draw photo patches ``[N, 3, size, size]``: from the left 60 % of a photo for training, else from the rest."""
    photos = np.stack([load_sample_image(name) for name in ("china.jpg", "flower.jpg")]).transpose(0, 3, 1, 2) / 255
    border = photos.shape[3] * 3 // 5
    photos = photos[..., :border] if split == "train" else photos[..., border:]
    windows = np.lib.stride_tricks.sliding_window_view(photos, (size, size), axis=(2, 3))
    which, top, left = (rng.integers(windows.shape[axis], size=count) for axis in (0, 2, 3))
    return windows[which, :, top, left]


def _print_digits(source: Ints, split: str, size: int) -> Floats:
    """Return printed digits ``[N, 3, size, size]``; in each color, ink and paper differ by 0.4 to 0.6 of the range."""
    rng = stream(0, "digits/look", "print", split)
    ink = np.stack([_render_glyph(*divmod(int(number), 10), size, rng) for number in source])[:, None]
    paper = rng.random((len(source), 3, 1, 1))
    color = (paper + rng.uniform(0.4, 0.6, paper.shape)) % 1
    return paper + (color - paper) * ink


def _render_glyph(font: int, digit: int, size: int, rng: np.random.Generator) -> Floats:
    """Return a printed digit as ink in [0, 1], ``[size, size]``: drawn at four times the size, rotated and blurred."""
    side = 4 * size
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{(FONTS['train'] + FONTS['test'])[font]}.ttf")
    face = ImageFont.truetype(path, round(side * rng.uniform(0.85, 1.1)), layout_engine=ImageFont.Layout.BASIC)
    left, top, right, bottom = face.getbbox(str(digit))
    x, y = side * (0.5 + rng.uniform(-0.08, 0.08, 2))
    canvas = Image.new("L", (side, side))
    ImageDraw.Draw(canvas).text((x - (left + right) / 2, y - (top + bottom) / 2), str(digit), fill=255, font=face)
    turned = canvas.rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC)
    blurred = turned.filter(ImageFilter.GaussianBlur(side / 28 * rng.uniform(0, 1)))
    return np.asarray(blurred.reduce(4), dtype=np.float64) / 255
