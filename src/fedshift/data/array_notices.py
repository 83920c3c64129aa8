"""Notices of arrays that networks cannot learn from as they are, or that may be meant otherwise.

Arrays are prepared by their owner: floats reach a network as they are, in 32 bits, and 8-bit pixels scaled. Where that
is unlikely to be meant, one line says so before any work. Values are judged on some samples of each array, evenly
spaced; of a dataset whose items are decoded on demand, on the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..utils.errors import FedshiftError
from .stores import DatasetStore, LazyStore, read_rows

LOOKED_AT = 1000
"""Number of samples of an array to judge it by; of one that is not in memory, its ``probed``."""
ROUNDED = 0.01
"""Rounding to 32 bits that is said, as a share of a feature's standard deviation."""
CONSTANT = 1e-12
"""Standard deviation, as a share of the largest magnitude, up to which a feature is constant but for rounding."""
UNSCALED = 10.0
"""Root mean square of images of floats from which it is said that they are not scaled."""
APART = 50.0
"""Ratio of the root mean squares of two clients' images from which it is said."""
DARK = 16
"""Largest value of 8-bit pixels, at all clients, up to which it is said that 255 is white."""
VECTOR_OF_PIXELS = 64
"""Vectors of at least this many whole numbers 0..255 are taken for pixels."""
SIGNALS = "samples of shape {} x {} are signals with {} channels; give gray images as [N, 1, H, W]"
"""Notice of floats that are not images, although they have as many axes as gray images."""
IMAGES = "samples of shape {} x {} are gray images; give signals of {} channels as [N, {}, {}]"
"""Notice of floats that are gray images, and might be signals whose channels are the last axis."""
CHANNELS = "samples {} have {} channels, in front, and sides of {}; give images with channels last as [N, C, H, W] too"
"""Notice of images whose channels might be the last axis."""


@dataclass(frozen=True, kw_only=True)
class _Values:
    """Facts about some samples of an array; ``rounded``: sentence on a feature that 32 bits cannot hold, or empty."""

    low: float
    high: float
    size: float
    whole: bool
    rounded: str


def describe_arrays(stores: Mapping[str, Tensor | LazyStore], *, several: bool) -> list[str]:
    """Return notices of arrays ``[N, ...]`` of training samples, by their names in messages.

    ``several``: their rows are several inputs of a network.
    """
    if all(store.dtype == torch.int64 for store in stores.values()):
        return []
    values = {where: _measure(x) for where, store in stores.items() if (x := _take_some(store)) is not None}
    values = {where: x for where, x in values.items() if np.isfinite(x.size)}  # others are refused
    if several:
        return list(_describe_rounding(values))
    images = {where: x for where, x in values.items() if _holds_images(stores[where], x)}
    dark = {where: stores[where] for where in images if stores[where].dtype == torch.uint8}
    floats = {where: x for where, x in images.items() if stores[where].is_floating_point()}
    return [
        *_describe_shape(stores),
        *_describe_rounding(values),
        *_describe_scale(floats),
        *_describe_dark(dark, values),
    ]


def _take_some(store: Tensor | LazyStore) -> Tensor | None:
    """Return some samples; None if they cannot be read, which a check reports."""
    if isinstance(store, DatasetStore):
        return store.sample
    count = store.probed if isinstance(store, LazyStore) else LOOKED_AT
    rows = np.unique(np.linspace(0, len(store) - 1, min(count, len(store))).astype(np.int64))
    try:
        return read_rows(store, torch.from_numpy(rows)) if len(rows) else None
    except FedshiftError:
        return None


def _measure(x: Tensor) -> _Values:
    x = x.double()
    low, high = map(float, x.aminmax())
    return _Values(
        low=low, high=high, size=float(x.square().mean().sqrt()), whole=bool((x == x.round()).all()),
        rounded=_name_rounded(x),
    )  # fmt: skip


def _name_rounded(x: Tensor) -> str:
    """Return a sentence on the feature or channel of ``x [n, ...]`` that loses most in 32 bits; empty if none does."""
    x_FN = x.flatten(2).transpose(0, 1).flatten(1) if x.ndim > 2 else x.T
    error_F, spread_F = (x_FN - x_FN.float().double()).abs().amax(1), x_FN.std(1, correction=0)
    share_F = torch.where(spread_F > CONSTANT * x_FN.abs().amax(1), error_F / spread_F, 0)
    at = int(share_F.nan_to_num(0).argmax())
    if not share_F[at] > ROUNDED:
        return ""
    shown = ", ".join(f"{value:.15g}" for value in x_FN[at, :3].tolist())
    return (
        f"feature {at} ({shown}, ...) varies by {spread_F[at]:.2g} (standard deviation), and floats of 32 bits, in "
        f"which networks compute, round it by up to {error_F[at]:.2g}"
    )


def _holds_images(store: Tensor | LazyStore, values: _Values) -> bool:
    """Return whether samples are images or volumes, or long vectors of gray levels."""
    levels = values.whole and values.low >= 0 and 1 < values.high <= 255
    return len(store.shape) > 3 or (len(store.shape) == 2 and store.shape[1] >= VECTOR_OF_PIXELS and levels)


def _describe_rounding(values: Mapping[str, _Values]) -> Iterator[str]:
    found = {where: x.rounded for where, x in values.items() if x.rounded}
    if found:
        where, said = next(iter(found.items()))
        more = f" (and in {len(found) - 1} more arrays)" if len(found) > 1 else ""
        yield f"{where}: {said}{more}: subtract an offset and standardize it beforehand, or compute in float64"


def _describe_scale(values: Mapping[str, _Values]) -> Iterator[str]:
    """Yield notices of images of floats that are large, or much larger in one array than in another."""
    if not values:
        return
    least, most = (choose(values, key=lambda where: values[where].size) for choose in (min, max))
    ranges = {where: f"{where}: {values[where].low:g} to {values[where].high:g}" for where in (least, most)}
    if values[most].size > APART * values[least].size > 0:
        yield f"images of floats have other scales, {ranges[least]}, but {ranges[most]}: divide all by the same number"
    elif values[most].size > UNSCALED:
        yield (
            f"images of floats reach the network as they are, {ranges[most]}: divide them, or give uint8 from 0 to "
            "255, which is scaled"
        )


def _describe_dark(pixels: Mapping[str, Tensor | LazyStore], values: Mapping[str, _Values]) -> Iterator[str]:
    """Yield a notice of 8-bit pixels that are all small."""
    high = max((values[where].high for where in pixels), default=0)
    if 0 < high <= DARK and all(not isinstance(store, Tensor) or int(store.max()) <= DARK for store in pixels.values()):
        yield (
            f"8-bit pixels are 0 to {high:g} at all clients, and 0 to 255 is scaled to -1 to 1: multiply them by "
            f"{255 // high:g} if {high:g} is white, or give Booleans"
        )


def _describe_shape(stores: Mapping[str, Tensor | LazyStore]) -> Iterator[str]:
    """Yield a notice of the first array's axes if they may be meant otherwise."""
    first = next(iter(stores.values()))
    shape, floats = tuple(first.shape[1:]), first.is_floating_point()
    if floats and len(shape) == 2 and shape[0] > 1:
        yield SIGNALS.format(*shape, shape[0])
    if floats and len(shape) == 3 and shape[0] == 1 and shape[1] >= 2 * shape[2]:
        yield IMAGES.format(*shape[1:], shape[2], *shape[:0:-1])
    elif len(shape) > 2 and shape[0] in (1, 3) and shape[-1] in (1, 3) and prod(shape) > shape[-1]:
        yield CHANNELS.format(*(" x ".join(map(str, part)) for part in (shape, shape[:1], shape[1:])))
