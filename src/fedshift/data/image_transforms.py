"""What augmentations do to pixels: each draws one set of parameters an image, and transforms the whole batch at once.

Every class is called with a batch ``x`` ``[B, C, H, W]`` in [0, 1] and a NumPy generator; parameters are drawn as
doubles, a fixed number an image, and the result has the shape and dtype of ``x``, which is left alone. An image whose
parameters change nothing comes out bit for bit. :mod:`fedshift.data.augmentation` has the names and what they mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

_PAD_MODES = {"zeros": "constant", "border": "replicate", "reflection": "reflect"}
_GRAY = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue


class Augmentation(Protocol):
    """What makes a new batch of images ``[B, C, H, W]`` in [0, 1] from a batch and the generator of its key."""

    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        """The new batch; ``x`` is left as it is."""
        ...


def _broadcast_per_image(values_B: NDArray[np.float64], x: Tensor) -> Tensor:
    """One number an image, ``[B, 1, 1, 1]``, of the kind of ``x``."""
    return torch.from_numpy(values_B).to(x)[:, None, None, None]


def _choose_images(which_B: NDArray[np.bool_], chosen: Tensor, other: Tensor) -> Tensor:
    return torch.where(torch.from_numpy(which_B).to(other.device)[:, None, None, None], chosen, other)


def _stack_matrices(*entries: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """``[B, 2, 3]`` from the six entries by rows, each ``[B]`` or one number for all."""
    return np.stack(np.broadcast_arrays(*entries), axis=-1).reshape(-1, 2, 3)


def _warp(x: Tensor, into_B23: NDArray[np.float64], fill: str) -> Tensor:
    """Images whose pixel at ``d`` from the center is the input's at ``into @ (d_x, d_y, 1)``, bilinear (in pixels)."""
    into = torch.from_numpy(into_B23).to(x)
    height, width = x.shape[2:]
    half_x, half_y = (width - 1) / 2, (height - 1) / 2
    down, right = torch.meshgrid(torch.arange(height).to(x) - half_y, torch.arange(width).to(x) - half_x, indexing="ij")
    points_HW3 = torch.stack([right, down, torch.ones_like(right)], dim=-1)
    grid = torch.einsum("bij,hwj->bhwi", into, points_HW3) / x.new_tensor([max(half_x, 0.5), max(half_y, 0.5)])
    moved = F.grid_sample(x, grid, mode="bilinear", padding_mode=fill, align_corners=True).clamp(0, 1)
    same = (into == torch.eye(2, 3).to(x)).all(dim=(1, 2))
    return torch.where(same[:, None, None, None], x, moved)


def _to_pixels(length: float, side: int) -> int:
    """``length`` in pixels: itself if a whole number, else that share of ``side``."""
    return length if isinstance(length, int) else round(length * side)


@dataclass(frozen=True, kw_only=True)
class Sequence(Augmentation):
    """One after the other."""

    parts: tuple[Augmentation, ...]

    @override
    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        for part in self.parts:
            x = part(x, rng)
        return x


@dataclass(frozen=True, kw_only=True)
class Sometimes(Augmentation):
    """Each image augmented with probability ``p``; parameters are drawn for every image."""

    augmentation: Augmentation
    p: float

    @override
    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        chosen = rng.random(len(x)) < self.p
        return _choose_images(chosen, self.augmentation(x, rng), x)


@dataclass(frozen=True, kw_only=True)
class Flip(Augmentation):
    """Left and right exchanged; with ``vertical`` that, upside down, or both, each with a third of ``p``."""

    p: float
    vertical: bool

    @override
    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        u = rng.random(len(x))
        x = _choose_images(u < self.p * (2 / 3 if self.vertical else 1), x.flip(3), x)
        return _choose_images((u >= self.p / 3) & (u < self.p), x.flip(2), x) if self.vertical else x


@dataclass(frozen=True, kw_only=True)
class Rotate(Augmentation):
    """Rotation about the center, counterclockwise where the angle is positive."""

    degrees: float
    fill: str

    @override
    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        angle = np.deg2rad(rng.uniform(-self.degrees, self.degrees, len(x)))
        return _warp(x, _stack_matrices(np.cos(angle), -np.sin(angle), 0, np.sin(angle), np.cos(angle), 0), self.fill)


@dataclass(frozen=True, kw_only=True)
class Scale(Augmentation):
    """Zoom about the center."""

    amount: float
    fill: str

    @override
    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        step = 1 / rng.uniform(1 - self.amount, 1 + self.amount, len(x))
        return _warp(x, _stack_matrices(step, 0, 0, 0, step, 0), self.fill)


@dataclass(frozen=True, kw_only=True)
class Shear(Augmentation):
    """Rows shifted in proportion to their distance from the center."""

    degrees: float
    fill: str

    @override
    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        lean = np.tan(np.deg2rad(rng.uniform(-self.degrees, self.degrees, len(x))))
        return _warp(x, _stack_matrices(np.ones_like(lean), lean, 0, 0, 1, 0), self.fill)


@dataclass(frozen=True, kw_only=True)
class Crop(Augmentation):
    """A window of the image's size at a random place of the padded image; pixels are moved, never interpolated."""

    padding: float
    fill: str

    @override
    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        places = []
        pads = [min(_to_pixels(self.padding, side), side - 1) for side in x.shape[2:]]
        for pad, side in zip(pads, x.shape[2:], strict=True):
            start = torch.from_numpy((rng.random(len(x)) * (2 * pad + 1)).astype(np.int64)).to(x.device)
            places.append(start[:, None] + torch.arange(side, device=x.device))
        padded = F.pad(x, (pads[1], pads[1], pads[0], pads[0]), mode=_PAD_MODES[self.fill])
        image, channel = (torch.arange(count, device=x.device) for count in x.shape[:2])
        rows, columns = places
        return padded[
            image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None]
        ]


@dataclass(frozen=True, kw_only=True)
class ResizedCrop(Augmentation):
    """A window of random area, shape and place, brought to the image's size."""

    scale: tuple[float, float]
    ratio: tuple[float, float]

    @override
    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        height, width = x.shape[2:]
        area = height * width * rng.uniform(*self.scale, len(x))
        ratio = np.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1]), len(x)))
        across, down = np.minimum(np.sqrt(area * ratio) / width, 1), np.minimum(np.sqrt(area / ratio) / height, 1)
        right = (1 - across) * width * rng.uniform(-0.5, 0.5, len(x))
        below = (1 - down) * height * rng.uniform(-0.5, 0.5, len(x))
        return _warp(x, _stack_matrices(across, 0, right, 0, down, below), "border")


@dataclass(frozen=True, kw_only=True)
class ColorJitter(Augmentation):
    """Brightness, contrast, saturation and hue, in this order."""

    brightness: float
    contrast: float
    saturation: float
    hue: float

    @override
    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        brightness, contrast, saturation = (
            _broadcast_per_image(rng.uniform(max(0, 1 - strength), 1 + strength, len(x)), x)
            for strength in (self.brightness, self.contrast, self.saturation)
        )
        turn = _broadcast_per_image(rng.uniform(-self.hue, self.hue, len(x)), x)
        x = (x * brightness).clamp(0, 1)
        x = _blend(x, _to_gray(x).mean(dim=(2, 3), keepdim=True), contrast)
        return _rotate_hue(_blend(x, _to_gray(x), saturation), turn) if x.shape[1] == 3 else x


def _blend(x: Tensor, about: Tensor, factor: Tensor) -> Tensor:
    return (factor * x + (1 - factor) * about).clamp(0, 1)


def _to_gray(x: Tensor) -> Tensor:
    """``[B, 1, H, W]``."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    return (x * x.new_tensor(_GRAY)[:, None, None]).sum(dim=1, keepdim=True)


def _rotate_hue(x: Tensor, turn: Tensor) -> Tensor:
    """Hue turned by ``turn`` of the circle, with value and saturation of the HSV color kept (Smith 1978)."""
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


@dataclass(frozen=True, kw_only=True)
class BrightnessContrast(Augmentation):
    """``a x + b``, cut to [0, 1]."""

    brightness: float
    contrast: float

    @override
    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        a, b = (
            _broadcast_per_image(rng.uniform(middle - strength, middle + strength, len(x)), x)
            for middle, strength in ((1, self.contrast), (0, self.brightness))
        )
        return (a * x + b).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class Erase(Augmentation):
    """One to ``patches`` black squares; they may overlap."""

    patches: int
    size: float

    @override
    def __call__(self, x: Tensor, rng: np.random.Generator, /) -> Tensor:
        used = np.floor(rng.random(len(x)) * self.patches)[:, None] >= np.arange(self.patches)
        covered = []
        for side in x.shape[2:]:
            size = min(max(_to_pixels(self.size, side), 1), side)
            start = np.floor(rng.random((len(x), self.patches)) * (side - size + 1))[:, :, None]
            covered.append(torch.from_numpy((np.arange(side) >= start) & (np.arange(side) < start + size)).to(x))
        rows_BPH, columns_BPW = covered
        rows_BPH = rows_BPH * torch.from_numpy(used).to(x)[:, :, None]
        return x.masked_fill(((rows_BPH.mT @ columns_BPW) > 0)[:, None], 0)
