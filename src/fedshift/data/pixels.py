"""Operations on the pixels of a batch of images ``[B, C, H, W]`` in [0, 1], with parameters per image.

Colors are as in torchvision's ``ColorJitter``. An image whose parameters change nothing is returned bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

GRAY = (0.2989, 0.587, 0.114)
"""Torchvision's weights for red, green and blue."""

Floats = NDArray[np.float64]


def broadcast_per_image(values_B: Floats, x: Tensor) -> Tensor:
    """Return one number per image, ``[B, 1, 1, 1]``, with the dtype and device of ``x``."""
    return torch.from_numpy(values_B).to(x)[:, None, None, None]


def choose_images(which_B: NDArray[np.bool_], chosen: Tensor, other: Tensor) -> Tensor:
    """Return the images of ``chosen`` where ``which_B`` is true, and of ``other`` elsewhere."""
    which = torch.from_numpy(which_B).to(other.device)
    return torch.where(which.reshape(-1, *[1] * (other.dim() - 1)), chosen, other)


def stack_matrices(*entries: Floats | float) -> Floats:
    """Return ``[B, 2, 3]`` from six entries, row by row, each ``[B]`` or one number for all."""
    return np.stack(np.broadcast_arrays(*entries), axis=-1).reshape(-1, 2, 3)


def warp(x: Tensor, into_B23: Floats, fill: str) -> Tensor:
    """Sample the output pixel at offset ``d`` from the center at offset ``into @ (d_x, d_y, 1)`` of the input.

    Offsets are in pixels. Floats are interpolated bilinearly; integers are taken from the nearest pixel.
    """
    whole = not x.is_floating_point()
    values = x.float() if whole else x
    into = torch.from_numpy(into_B23).to(values)
    height, width = x.shape[2:]
    half_x, half_y = (width - 1) / 2, (height - 1) / 2
    down, right = (torch.arange(side).to(values) - half for side, half in ((height, half_y), (width, half_x)))
    down, right = torch.meshgrid(down, right, indexing="ij")
    points_HW3 = torch.stack([right, down, torch.ones_like(right)], dim=-1)
    grid = torch.einsum("bij,hwj->bhwi", into, points_HW3) / values.new_tensor([max(half_x, 0.5), max(half_y, 0.5)])
    mode = "nearest" if whole else "bilinear"
    moved = F.grid_sample(values, grid, mode=mode, padding_mode=fill, align_corners=True)
    moved = moved.to(x.dtype) if whole else moved.clamp(0, 1)
    same = (into == torch.eye(2, 3).to(values)).all(dim=(1, 2))
    return torch.where(same[:, None, None, None], x, moved)


def blend(x: Tensor, about: Tensor, factor: Tensor) -> Tensor:
    """Return ``x`` with its distance from ``about`` multiplied by ``factor``."""
    return (factor * x + (1 - factor) * about).clamp(0, 1)


def convert_to_gray(x: Tensor) -> Tensor:
    """Return the brightness of color images, or the mean of other channels, ``[B, 1, H, W]``."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    return (x * x.new_tensor(GRAY)[:, None, None]).sum(dim=1, keepdim=True)


def rotate_hue(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate the hue by ``turn`` of the circle; keep value and saturation of the HSV color (Smith 1978)."""
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
