"""Samples with labels, and the arrays of a person made into them.

Images are kept as they come, uint8 ``[N, C, H, W]`` from 0 to 255, and are scaled to [-1, 1] when a batch is taken
(as in FedBN's experiments, Li et al. 2021, arXiv:2102.07623, section 5.1); floating-point arrays are used as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..base.errors import UsageError


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Samples ``x`` (uint8 images ``[N, C, H, W]`` or floats ``[N, ...]``) with labels ``y`` (int64 ``[N]``)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> Split:
        """The samples at ``index`` (int64), in that order."""
        return Split(x=self.x[index], y=self.y[index])

    def inputs(self, index: Tensor | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Samples at ``index`` as a network takes them: images scaled from 0..255 to [-1, 1], floats untouched."""
        x = self.x[index].to(dtype, copy=True)  # the network's own: an in-place layer must not reach the data
        return x.div_(127.5).sub_(1.0) if self.x.dtype == torch.uint8 else x

    def to(self, device: torch.device) -> Split:
        """The same samples on ``device``."""
        return Split(x=self.x.to(device), y=self.y.to(device))

    def check(self, where: str, classes: int) -> None:
        """Raise :class:`UsageError`, beginning with ``where``, unless samples and labels can be trained on."""
        if len(self) == 0:
            raise UsageError(f"{where}: empty; every client needs at least one sample in each split")
        if len(self.x) != len(self.y):
            raise UsageError(f"{where}: {len(self.x)} samples but {len(self.y)} labels; both must be equal")
        wrong = self.y[(self.y < 0) | (self.y >= classes)]
        if len(wrong):
            raise UsageError(
                f"{where}: label {int(wrong[0])} is out of range; labels must be 0..{classes - 1} "
                "(correct the labels, or say the number of classes)"
            )
        if self.x.is_floating_point():
            bad = ~self.x.isfinite().flatten(1).all(dim=1)
            if bad.any():
                first = int(bad.nonzero()[0, 0])
                raise UsageError(f"{where}: sample {first} has NaN or infinite values; remove or impute them")


def as_split(x: ArrayLike, y: ArrayLike, where: str = "data") -> Split:
    """Arrays as a :class:`Split`.

    ``x``: images ``[N, H, W]``, ``[N, H, W, C]`` or ``[N, C, H, W]`` with 1 or 3 channels (integers 0..255 become
    uint8; floats stay), or features ``[N, D]``. ``y``: integer labels ``[N]`` or ``[N, 1]``. Both are copied. Raises
    :class:`UsageError`, which begins with ``where``, for anything else.
    """
    x_array, y_array = np.asarray(x), np.asarray(y)
    if x_array.dtype.kind not in "uifb" or y_array.dtype.kind not in "uifb":
        raise UsageError(f"{where}: arrays of type {x_array.dtype} and {y_array.dtype}; both must be numbers")
    if y_array.ndim == 2 and y_array.shape[1] == 1:
        y_array = y_array[:, 0]
    if x_array.ndim < 2 or y_array.ndim != 1 or len(x_array) != len(y_array):
        raise UsageError(
            f"{where}: samples of shape {x_array.shape} and labels of shape {y_array.shape}; "
            "samples need two or more dimensions, and labels one number a sample"
        )
    if y_array.dtype.kind == "f" and not (np.isfinite(y_array).all() and (y_array == np.round(y_array)).all()):
        raise UsageError(f"{where}: labels are not whole numbers; give classes as 0, 1, 2, ...")
    return Split(x=_as_samples(x_array, where), y=torch.from_numpy(y_array.astype(np.int64)))


def _as_samples(x: np.ndarray, where: str) -> Tensor:
    if x.ndim == 2:
        return torch.from_numpy(x.astype(np.float64 if x.dtype == np.float64 else np.float32))
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 4 or x.shape[1] not in (1, 3):
        raise UsageError(
            f"{where}: samples of shape {x.shape}; images are [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 "
            "channels, features are [N, D]"
        )
    if x.dtype.kind == "f":
        return torch.from_numpy(np.array(x, dtype=x.dtype if x.dtype == np.float64 else np.float32, order="C"))
    if x.size and (x.min() < 0 or x.max() > 255):
        raise UsageError(f"{where}: integer pixels from {x.min()} to {x.max()}; they must lie in 0..255")
    return torch.from_numpy(np.array(x, dtype=np.uint8, order="C"))
