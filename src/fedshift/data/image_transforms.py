"""Pixel operations of augmentations: each draws parameters for every image and transforms the whole batch at once.

An operation takes a batch ``x`` ``[B, C, H, W]`` in [0, 1] and a NumPy generator, and returns a new batch of the same
shape and dtype. Parameters are drawn as doubles, a fixed number per image. An image whose parameters change nothing is
returned bit for bit. :mod:`fedshift.data.augmentation` documents the options and checks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

_PAD_MODES = {"zeros": "constant", "border": "replicate", "reflection": "reflect"}
_GRAY = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue

Floats = NDArray[np.float64]
Draws = np.random.Generator


class Augmentation(Protocol):
    """A function of a batch of images ``[B, C, H, W]`` in [0, 1] and a generator that returns a new batch."""

    def __call__(self, x: Tensor, rng: Draws, /) -> Tensor:
        """Return the new batch; ``x`` is not modified."""
        ...


class Transform(Augmentation):
    """An operation of this module with its options, equal to and written like any other of the same options."""

    def __init__(self, operation: Callable[..., Tensor], **options: Any) -> None:
        self.operation, self.options = operation, options

    @override
    def __call__(self, x: Tensor, rng: Draws, /) -> Tensor:
        return self.operation(x, rng, **self.options)

    @override
    def __repr__(self) -> str:
        name = self.operation.__name__.title().replace("_", "")
        return f"{name}({', '.join(f'{option}={value!r}' for option, value in self.options.items())})"

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transform) and repr(self) == repr(other)

    @override
    def __hash__(self) -> int:
        return hash(repr(self))


def sequence(x: Tensor, rng: Draws, *, parts: tuple[Augmentation, ...]) -> Tensor:
    """Apply ``parts`` in order."""
    for part in parts:
        x = part(x, rng)
    return x


def sometimes(x: Tensor, rng: Draws, *, augmentation: Augmentation, p: float) -> Tensor:
    """Augment each image with probability ``p``; parameters are drawn for every image."""
    return _choose_images(rng.random(len(x)) < p, augmentation(x, rng), x)


def flip(x: Tensor, rng: Draws, *, p: float, vertical: bool) -> Tensor:
    """Exchange left and right; with ``vertical`` that, upside down, or both, each with a third of ``p``."""
    u = rng.random(len(x))
    x = _choose_images(u < p * (2 / 3 if vertical else 1), x.flip(3), x)
    return _choose_images((u >= p / 3) & (u < p), x.flip(2), x) if vertical else x


def rotate(x: Tensor, rng: Draws, *, degrees: float, fill: str) -> Tensor:
    """Rotate about the center, counterclockwise where the angle is positive."""
    angle = np.deg2rad(rng.uniform(-degrees, degrees, len(x)))
    return _warp(x, _stack_matrices(np.cos(angle), -np.sin(angle), 0, np.sin(angle), np.cos(angle), 0), fill)


def scale(x: Tensor, rng: Draws, *, amount: float, fill: str) -> Tensor:
    """Zoom about the center."""
    step = 1 / rng.uniform(1 - amount, 1 + amount, len(x))
    return _warp(x, _stack_matrices(step, 0, 0, 0, step, 0), fill)


def shear(x: Tensor, rng: Draws, *, degrees: float, fill: str) -> Tensor:
    """Shift rows in proportion to their distance from the center."""
    lean = np.tan(np.deg2rad(rng.uniform(-degrees, degrees, len(x))))
    return _warp(x, _stack_matrices(np.ones_like(lean), lean, 0, 0, 1, 0), fill)


def crop(x: Tensor, rng: Draws, *, padding: float, fill: str) -> Tensor:
    """Cut a window of the image's size from the padded image; pixels are moved, never interpolated."""
    places = []
    pads = [min(_to_pixels(padding, side), side - 1) for side in x.shape[2:]]
    for pad, side in zip(pads, x.shape[2:], strict=True):
        start = torch.from_numpy((rng.random(len(x)) * (2 * pad + 1)).astype(np.int64)).to(x.device)
        places.append(start[:, None] + torch.arange(side, device=x.device))
    padded = F.pad(x, (pads[1], pads[1], pads[0], pads[0]), mode=_PAD_MODES[fill])
    image, channel = (torch.arange(count, device=x.device) for count in x.shape[:2])
    rows, columns = places
    return padded[image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None]]


def resized_crop(x: Tensor, rng: Draws, *, scale: tuple[float, float], ratio: tuple[float, float]) -> Tensor:
    """Resize a window of random area, shape and place to the image's size."""
    height, width = x.shape[2:]
    area = height * width * rng.uniform(*scale, len(x))
    shape = np.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1]), len(x)))
    across, down = np.minimum(np.sqrt(area * shape) / width, 1), np.minimum(np.sqrt(area / shape) / height, 1)
    right = (1 - across) * width * rng.uniform(-0.5, 0.5, len(x))
    below = (1 - down) * height * rng.uniform(-0.5, 0.5, len(x))
    return _warp(x, _stack_matrices(across, 0, right, 0, down, below), "border")


def color_jitter(x: Tensor, rng: Draws, *, brightness: float, contrast: float, saturation: float, hue: float) -> Tensor:
    """Change brightness, contrast, saturation and hue, in this order."""
    a, b, c = (
        _broadcast_per_image(rng.uniform(max(0, 1 - strength), 1 + strength, len(x)), x)
        for strength in (brightness, contrast, saturation)
    )
    turn = _broadcast_per_image(rng.uniform(-hue, hue, len(x)), x)
    x = (x * a).clamp(0, 1)
    x = _blend(x, _to_gray(x).mean(dim=(2, 3), keepdim=True), b)
    return _rotate_hue(_blend(x, _to_gray(x), c), turn) if x.shape[1] == 3 else x


def brightness_contrast(x: Tensor, rng: Draws, *, brightness: float, contrast: float) -> Tensor:
    """Return ``a x + b``, clamped to [0, 1]."""
    a, b = (
        _broadcast_per_image(rng.uniform(middle - strength, middle + strength, len(x)), x)
        for middle, strength in ((1, contrast), (0, brightness))
    )
    return (a * x + b).clamp(0, 1)


def erase(x: Tensor, rng: Draws, *, patches: int, size: float) -> Tensor:
    """Blacken one to ``patches`` squares, which may overlap."""
    used = np.floor(rng.random(len(x)) * patches)[:, None] >= np.arange(patches)
    covered = []
    for side in x.shape[2:]:
        length = min(max(_to_pixels(size, side), 1), side)
        start = np.floor(rng.random((len(x), patches)) * (side - length + 1))[:, :, None]
        covered.append(torch.from_numpy((np.arange(side) >= start) & (np.arange(side) < start + length)).to(x))
    rows_BPH, columns_BPW = covered
    rows_BPH = rows_BPH * torch.from_numpy(used).to(x)[:, :, None]
    return x.masked_fill(((rows_BPH.mT @ columns_BPW) > 0)[:, None], 0)


def _to_pixels(length: float, side: int) -> int:
    """Return ``length`` in pixels: itself if a whole number, otherwise that share of ``side``."""
    return length if isinstance(length, int) else round(length * side)


def _broadcast_per_image(values_B: Floats, x: Tensor) -> Tensor:
    """Return one number per image, ``[B, 1, 1, 1]``, with the dtype and device of ``x``."""
    return torch.from_numpy(values_B).to(x)[:, None, None, None]


def _choose_images(which_B: NDArray[np.bool_], chosen: Tensor, other: Tensor) -> Tensor:
    return torch.where(torch.from_numpy(which_B).to(other.device)[:, None, None, None], chosen, other)


def _stack_matrices(*entries: Floats | float) -> Floats:
    """Return ``[B, 2, 3]`` from the six entries by rows, each ``[B]`` or one number for all."""
    return np.stack(np.broadcast_arrays(*entries), axis=-1).reshape(-1, 2, 3)


def _warp(x: Tensor, into_B23: Floats, fill: str) -> Tensor:
    """Sample the pixel at ``d`` from the center at ``into @ (d_x, d_y, 1)`` of the input, bilinear (in pixels)."""
    into = torch.from_numpy(into_B23).to(x)
    height, width = x.shape[2:]
    half_x, half_y = (width - 1) / 2, (height - 1) / 2
    down, right = torch.meshgrid(torch.arange(height).to(x) - half_y, torch.arange(width).to(x) - half_x, indexing="ij")
    points_HW3 = torch.stack([right, down, torch.ones_like(right)], dim=-1)
    grid = torch.einsum("bij,hwj->bhwi", into, points_HW3) / x.new_tensor([max(half_x, 0.5), max(half_y, 0.5)])
    moved = F.grid_sample(x, grid, mode="bilinear", padding_mode=fill, align_corners=True).clamp(0, 1)
    same = (into == torch.eye(2, 3).to(x)).all(dim=(1, 2))
    return torch.where(same[:, None, None, None], x, moved)


def _blend(x: Tensor, about: Tensor, factor: Tensor) -> Tensor:
    return (factor * x + (1 - factor) * about).clamp(0, 1)


def _to_gray(x: Tensor) -> Tensor:
    """Return ``[B, 1, H, W]``."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    return (x * x.new_tensor(_GRAY)[:, None, None]).sum(dim=1, keepdim=True)


def _rotate_hue(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate the hue by ``turn`` of the circle; value and saturation of the HSV color stay (Smith 1978)."""
    red, green, blue = x.unbind(1)
    value = x.amax(dim=1)
    chroma = value - x.amin(dim=1)
    unit = torch.where(chroma > 0, chroma, 1)
    sixths = torch.where(
        value == red, (green - blue) / unit,
        torch.where(value == green, (blue - red) / unit + 2, (red - green) / unit + 4),
    )  # fmt: skip
    place = (sixths[:, None] + 6 * turn + x.new_tensor([5, 3, 1])[:, None, None]) % 6
    turned = value[:, None] - chroma[:, None] * torch.minimum(place, 4 - place).clamp(0, 1)
    return torch.where(turn == 0, x, turned.clamp(0, 1))
