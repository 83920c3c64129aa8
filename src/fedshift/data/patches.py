"""Patches of large cases for training, and windows that cover whole cases for everything else.

A case is an image with its mask, of any size. A store keeps cases padded at their ends to one size, with the number of
voxels that each has in truth (``true_sizes``). Each visit of a sample in training cuts one patch from its case. Its
place is drawn from a stream with the key of the step and the sample's row, so that engines, resumed runs and other
orders of clients make the same draws. The last samples of a batch, a third of it (in a batch of one, with probability
1/3), are centered on a random voxel of a random class in their mask, except the background, as in nnU-Net
(Isensee et al. 2021, doi:10.1038/s41592-020-01008-z). A patch is within its case; along an axis on which the case is
smaller, it begins with the case and ends with the case's lowest value in each channel, and with ignored voxels of the
mask.

Windows have the size of a patch and MONAI's positions (``sliding_window_inference``): steps of half their size, and the
last one ends with the case. The scores of a voxel are the mean over its windows, weighted by a Gaussian around the
window's center with a deviation of 1/8 of its size, and at least :data:`LEAST_WEIGHT`. One window has no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..tasks.segmentation import IGNORED
from ..utils.errors import Ref, UsageError
from ..utils.random_streams import Key, stream

OVERLAP = 0.5
DEVIATION = 1 / 8
"""Standard deviation of the weights of a window, as a share of its size."""
LEAST_WEIGHT = 1e-3
CENTERED = 1 / 3
"""Share of a batch whose patches are centered on a class other than the background."""
AT_ONCE = 4
"""Windows in a pass of the network."""

Size = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Patches:
    """The ``size`` of patches, ``(D, H, W)`` or ``(H, W)``, and the true size of each row of a store.

    ``true_sizes``: int64 ``[rows, axes]``. ``resized``: size of files after resizing; empty: they keep theirs.
    """

    size: Size
    true_sizes: NDArray[np.int64]
    resized: Size = ()

    @classmethod
    def whole(cls, size: Size, places: Size, rows: int, *, resized: Size = ()) -> Patches:
        """Return patches of a store whose ``rows`` are all of ``places`` voxels."""
        return cls(size, np.tile(np.array(places, np.int64), (rows, 1)), resized)

    def take(self, rows: Tensor) -> Patches:
        """Return the patches of a store that has only these ``rows``, int64 ``[N]``."""
        return replace(self, true_sizes=self.true_sizes[rows.numpy()])

    def draw(self, rows: Sequence[int], masks: Sequence[Tensor], key: tuple[Key, ...]) -> NDArray[np.int64]:
        """Return the first voxel of a patch of each case, int64 ``[B, axes]``.

        Args:
            rows: Rows of the store.
            masks: Class of each voxel of these cases, uint8, padded as the store is.
            key: Key of the batch; empty: no batch, and no patch is centered on a class.

        """
        first = round(len(rows) * (1 - CENTERED)) if len(rows) > 1 else 0
        places = np.zeros((len(rows), len(self.size)), np.int64)
        for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            rng = stream(0, "patch", *key, row)
            room = np.maximum(self.true_sizes[row] - self.size, 0)
            places[number] = np.floor(rng.random(len(self.size)) * (room + 1))
            chance, *draws = rng.random(3)
            if key and number >= first and (len(rows) > 1 or chance < CENTERED):
                voxel = _choose_voxel(mask, draws)
                if voxel is not None:
                    places[number] = np.clip(voxel - np.array(self.size) // 2, 0, room)
        return places

    def cut(self, x: Tensor, place: NDArray[np.int64], fill: int | None = None) -> Tensor:
        """Return a copy of the patch at ``place`` of ``x [..., *axes]``, padded with ``fill``; None: its lowest."""
        return extend(x[make_box(place.tolist(), self.size)], self.size, fill, x)

    def crop(self, x: Tensor, row: int) -> Tensor:
        """Return a view of what ``x [..., *axes]`` has of the case in ``row``."""
        return x[make_box([0] * len(self.size), self.true_sizes[row].tolist())]


def make_box(first: Sequence[int], size: Sequence[int]) -> tuple[Any, ...]:
    """Return the index of ``size`` voxels from ``first`` on along the last axes."""
    return (..., *(slice(start, start + n) for start, n in zip(first, size, strict=True)))


def _choose_voxel(mask: Tensor, draws: Sequence[float]) -> NDArray[np.int64] | None:
    """Return a random voxel of a random class of ``mask`` except the background, ``[axes]``; None: there is none."""
    present = torch.bincount(mask.flatten(), minlength=IGNORED + 1)[1:IGNORED].nonzero()[:, 0] + 1
    if not len(present):
        return None
    chosen = (mask == present[int(draws[0] * len(present))]).flatten().nonzero()[:, 0]
    return np.array(np.unravel_index(int(chosen[int(draws[1] * len(chosen))]), tuple(mask.shape)))


def extend(x: Tensor, size: Sequence[int], fill: int | None = None, whole: Tensor | None = None) -> Tensor:
    """Return a copy of ``x [..., *axes]`` with at least ``size``, padded at the ends.

    ``fill``: value of what is added; None: the lowest value in each channel of ``whole [C, *axes]``, by default ``x``.
    """
    axes = len(size)
    lacking = [max(0, n - has) for n, has in zip(size, x.shape[-axes:], strict=True)]
    if not any(lacking):
        return x.clone()
    pads = [each for lack in reversed(lacking) for each in (0, lack)]
    if fill is not None:
        return F.pad(x, pads, value=fill)
    lowest = (x if whole is None else whole).flatten(-axes).amin(dim=-1)
    lowest = lowest.reshape(*lowest.shape, *[1] * axes)
    outside = F.pad(torch.zeros(x.shape[-axes:], dtype=torch.bool, device=x.device), pads, value=True)
    return torch.where(outside, lowest, F.pad(x, pads))


def list_starts(places: Sequence[int], size: Size) -> list[tuple[int, ...]]:
    """Return the first voxel of each window of ``size`` over a case of ``places`` voxels, the last axis fastest."""
    axes = []
    for n, width in zip(places, size, strict=True):
        step = max(1, int(width * (1 - OVERLAP)))
        count = 1 + max(0, -(-(n - width) // step))
        axes.append([min(number * step, max(0, n - width)) for number in range(count)])
    return list(product(*axes))


def weigh_window(size: Size) -> Tensor:
    """Return the weight of each voxel of a window, float32 of shape ``size``."""
    weight = torch.ones((), dtype=torch.float64)
    for n in size:
        from_middle = torch.arange(n, dtype=torch.float64) - (n - 1) / 2
        weight = weight[..., None] * torch.exp(-0.5 * (from_middle / (DEVIATION * n)) ** 2)
    return weight.clamp(min=LEAST_WEIGHT).float()


def slide(score: Callable[[Tensor], Tensor], x: Tensor, size: Size) -> Tensor:
    """Return the scores ``[1, K, *axes]`` of one case ``x [1, C, *axes]`` from windows of ``size``.

    ``score`` returns the scores ``[N, K, *size]`` of windows ``[N, C, *size]``.
    """
    own = make_box([0] * len(size), x.shape[2:])
    x = extend(x[0], size)
    starts = list_starts(x.shape[1:], size)
    windows = [make_box(first, size) for first in starts]
    if len(windows) == 1:
        return score(x[None])[own]
    total, weight = torch.zeros(0), weigh_window(size).to(x.device)
    share = torch.zeros(x.shape[1:], device=x.device)
    for at in range(0, len(windows), AT_ONCE):
        some = windows[at : at + AT_ONCE]
        for window, scores in zip(some, score(torch.stack([x[window] for window in some])), strict=True):
            total = total if len(total) else scores.new_zeros(len(scores), *x.shape[1:])
            total[window] += scores * weight.to(scores.dtype)
            share[window] += weight
    return (total / share.to(total.dtype))[None][own]


def parse_size(text: str | None) -> Size:
    """Return the numbers that a text names, slices before rows before columns; empty for None.

    Raises :class:`UsageError` unless these are one to three whole numbers.
    """
    if text is None:
        return ()
    try:
        size = tuple(map(int, text.split(",")))
    except ValueError:
        size = ()
    if not (1 <= len(size) <= 3 and min(size) >= 1):
        raise UsageError(
            "{}: give the voxels of a patch along columns, rows and slices, such as 64,64,32, or one number for all",
            Ref(patch=text),
        )
    return size[::-1]
