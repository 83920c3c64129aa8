"""Images, volumes and masks at another size, without keeping their aspect ratio.

Images are bilinear with antialiasing, as in FedBN's experiments (Li et al. 2021, arXiv:2102.07623, section 5.1),
volumes linear between voxels, and masks take the nearest pixel or voxel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1000
"""Number of images to resize at a time, because floats take four times the memory."""


def resize(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resize images ``[N, C, H, W]`` to ``size``."""
    if tuple(x.shape[2:]) == size:
        return x
    small = x.new_empty(*x.shape[:2], *size)
    for start in range(0, len(x), CHUNK):
        part = F.interpolate(
            x[start : start + CHUNK].float(), size=size, mode="bilinear", antialias=True, align_corners=False
        )
        small[start : start + CHUNK] = part.round_().clamp_(0, 255) if x.dtype == torch.uint8 else part
    return small


def resize_masks(y: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resize masks ``[N, H, W]`` to ``size``, using the nearest pixel."""
    if tuple(y.shape[1:]) == size:
        return y
    parts = (F.interpolate(part[:, None].float(), size=size, mode="nearest-exact") for part in torch.split(y, CHUNK))
    return torch.cat([part[:, 0].to(y.dtype) for part in parts])


def resize_volume(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return brightness ``x [C, ...]`` resized to ``size``, linear between voxels."""
    if tuple(x.shape[1:]) == size:
        return x
    kind = "trilinear" if len(size) == 3 else "bilinear"
    return F.interpolate(x[None], size=size, mode=kind, align_corners=False)[0]


def resize_mask(y: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return classes ``y [...]`` resized to ``size``, from the nearest voxel."""
    if tuple(y.shape) == size:
        return y
    return F.interpolate(y[None, None].float(), size=size, mode="nearest-exact")[0, 0].to(y.dtype)
