"""Images, volumes and masks at another size, without keeping their aspect ratio.

Images are bilinear with antialiasing, as in FedBN's experiments (Li et al. 2021, arXiv:2102.07623, section 5.1),
volumes linear between voxels, and masks take the nearest pixel or voxel.

Resampling to a spacing follows nnU-Net (Isensee et al. 2021, doi:10.1038/s41592-020-01008-z): cubic splines for images;
for masks, linear interpolation of each class, of which the highest wins; and the nearest voxel along an axis that is
over :data:`COARSE` times coarser than the finest. The grids before and after cover the same extent, from the outer side
of the first voxel to that of the last (``scipy.ndimage.zoom`` with ``grid_mode`` and ``mode="nearest"``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .ranges import choose_float

COARSE = 3.0
"""An axis whose voxels are more than this many times as long as the finest axis's is not interpolated."""
Order = Literal[0, 1, 3]
"""Degree of splines: the nearest voxel, linear, cubic."""
ROUNDED = 1e-5
"""Difference of two classes' shares of a voxel that is rounding."""
STRETCH = 0.05
"""Change of an image's proportions that a notice names."""
CHUNK = 1000
"""Number of images to resize at a time, because floats take four times the memory."""


def describe_stretch(sizes: Iterable[Sequence[int]], size: Sequence[int]) -> str:
    """Return a remark on images of ``sizes`` that are resized to ``size``, width last; empty: in proportion."""
    change, old = 0.0, size
    for one in sizes:
        factors = [new / side for new, side in zip(size, one, strict=True)]
        change, old = max((change, old), (max(factors) / min(factors) - 1, one))
    if change <= STRETCH:
        return ""
    before, after = (" x ".join(map(str, each[::-1])) for each in (old, size))
    return f"images of {before} are resized to {after}, which changes their proportions by {change:.0%}"


def resize(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resize images ``[N, C, H, W]`` to ``size``."""
    if tuple(x.shape[2:]) == size:
        return x
    small = []
    for part in torch.split(x, CHUNK):
        values = F.interpolate(part.float(), size=size, mode="bilinear", antialias=True, align_corners=False)
        small.append((values.round_().clamp_(0, 255) if x.dtype == torch.uint8 else values).to(x.dtype))
    return torch.cat(small)


def resize_masks(y: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return masks ``[N, ...]`` resized to ``size``, from the nearest pixel or voxel."""
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


def find_size(size: Sequence[int], before: Sequence[float], after: Sequence[float]) -> tuple[int, ...]:
    """Return the number of voxels along each axis when a spacing ``before`` becomes ``after``, at least one."""
    return tuple(max(1, round(n * old / new)) for n, old, new in zip(size, before, after, strict=True))


def resample_image(x: NDArray[Any], before: Sequence[float], after: Sequence[float]) -> NDArray[Any]:
    """Return values ``x [C, ...]`` with a spacing ``before`` on the grid of a spacing ``after``, by cubic splines."""
    size = find_size(x.shape[1:], before, after)
    return _interpolate(x.astype(choose_float(x.min(), x.max())), size, _choose_orders(3, before, after))


def resample_mask(y: NDArray[np.uint8], before: Sequence[float], after: Sequence[float]) -> NDArray[np.uint8]:
    """Return classes ``y [...]`` with a spacing ``before`` on the grid of a spacing ``after``; lower ones win ties."""
    size, orders = find_size(y.shape, before, after), _choose_orders(1, before, after)
    best, chosen = np.zeros(size, np.float32), np.zeros(size, np.uint8)
    for value in np.unique(y).tolist():
        share = _interpolate((y == value).astype(np.float32)[None], size, orders)[0]
        chosen[share > best + ROUNDED] = value
        np.maximum(best, share, out=best)
    return chosen


def _choose_orders(order: Order, before: Sequence[float], after: Sequence[float]) -> tuple[Order, ...]:
    """Return the degree of the splines along each axis: ``order``, or 0 along an axis that is coarse in a spacing."""
    coarse = [max(steps[axis] / min(steps) for steps in (before, after)) > COARSE for axis in range(len(before))]
    return tuple(0 if each else order for each in coarse)


def _interpolate(x: NDArray[Any], size: Sequence[int], orders: Sequence[Order]) -> NDArray[Any]:
    """Return ``x [C, ...]`` interpolated to ``size``, one axis after another."""
    for axis, (n, order) in enumerate(zip(size, orders, strict=True), start=1):
        if x.shape[axis] != n:
            x = np.moveaxis(np.tensordot(_find_weights(x.shape[axis], n, order), x, (1, axis)), 0, axis)
    return np.ascontiguousarray(x)


@lru_cache(maxsize=64)
def _find_weights(before: int, after: int, order: Order) -> NDArray[np.float32]:
    """Return the weight of each of ``before`` voxels of a line in each of ``after``, ``[after, before]``."""
    from scipy.ndimage import zoom

    lines = [zoom(line, after / before, order=order, mode="nearest", grid_mode=True) for line in np.eye(before)]
    return np.stack(lines, axis=1).astype(np.float32)
