"""Notices of arrays that networks can hardly learn from, or that may be meant otherwise.

Arrays are prepared by their owner: floats reach a network unchanged, in 32 bits, and 8-bit pixels scaled. Where their
owner can hardly mean that, there is a notice before any work. Values are judged on some samples of each array, evenly
spaced; of a dataset whose items are decoded on demand, on the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..utils.errors import FedshiftError
from .stores import DatasetStore, LazyStore, read_store

LOOKED_AT = 1000
"""Number of samples to judge arrays by, in all, but at least 10 of each; of stores, at most those ``probed``."""
ROUNDED = 0.01
"""Least rounding to 32 bits for a notice, as a share of a feature's standard deviation."""
CONSTANT = 1e-12
"""Standard deviation of a constant feature at most, as a share of its largest magnitude, due to rounding."""
UNSCALED = 10.0
"""Least root mean square of images of floats for a notice that they are not scaled."""
APART = 50.0
"""Least ratio of the root mean squares of two clients' images for a notice."""
DARK = 16
"""Largest value of 8-bit pixels, at all clients, for a notice that 255 is white."""
VECTOR_OF_PIXELS = 64
"""Vectors of at least this many whole numbers 0..255 are taken for pixels."""


def describe_arrays(stores: Mapping[str, Tensor | LazyStore], *, several: bool) -> list[str]:
    """Return notices of arrays ``[N, ...]`` of training samples, by their names in messages.

    ``several``: their rows are several inputs of a network.
    """
    if all(store.dtype == torch.int64 for store in stores.values()):
        return []
    count = max(10, LOOKED_AT // max(1, len(stores)))
    some = {where: _take_some(store, count) for where, store in stores.items()}
    some = {where: x for where, x in some.items() if x.numel() and x.isfinite().all()}  # others are refused
    doubles = {where: x for where, x in some.items() if stores[where].dtype == torch.float64}
    if several:
        return list(_describe_rounding(doubles))
    images = {where: x for where, x in some.items() if _holds_images(x)}
    floats = {where: x for where, x in images.items() if stores[where].is_floating_point()}
    pixels = {where: stores[where] for where in images if stores[where].dtype == torch.uint8}
    return [
        *_describe_shape(stores),
        *_describe_rounding(doubles),
        *_describe_scale(floats),
        *_describe_dark(pixels, some),
    ]


def _take_some(store: Tensor | LazyStore, count: int) -> Tensor:
    """Return ``count`` samples, spread evenly, in float64; none if they cannot be read, which a check reports."""
    if isinstance(store, DatasetStore):
        return store.sample.double()
    count = min(count, len(store), store.probed if isinstance(store, LazyStore) else count)
    rows = np.linspace(0, len(store) - 1, count).astype(np.int64)
    try:
        return read_store(store, torch.from_numpy(rows)).double()
    except FedshiftError:
        return torch.empty(0)


def _holds_images(x: Tensor) -> bool:
    """Return whether samples are images or volumes, or long vectors of gray levels."""
    levels = x.ndim == 2 and x.shape[1] >= VECTOR_OF_PIXELS and bool((x == x.round()).all())
    return x.ndim > 3 or (levels and bool(x.min() >= 0) and 1 < float(x.max()) <= 255)


def _describe_rounding(some: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a notice of the first array with a feature or channel that loses its digits in 32 bits."""
    found = [f"{where}: {said}" for where, x in some.items() if (said := _name_rounded(x))]
    if found:
        more = f" (and in {len(found) - 1} more arrays)" if len(found) > 1 else ""
        yield f"{found[0]}{more}: subtract an offset and standardize it beforehand, or compute in float64"


def _name_rounded(x: Tensor) -> str:
    """Return a sentence on the feature or channel of ``x [n, ...]`` that loses most in 32 bits; empty if none does."""
    x_FN = x.flatten(2).transpose(0, 1).flatten(1) if x.ndim > 2 else x.T
    error_F = x_FN.float().double().sub_(x_FN).abs_().amax(1)
    if not error_F.any():
        return ""
    spread_F = x_FN.std(1, correction=0)
    share_F = torch.where(spread_F > CONSTANT * x_FN.abs().amax(1), error_F / spread_F, 0)
    at = int(share_F.argmax())
    if not share_F[at] > ROUNDED:
        return ""
    shown = ", ".join(f"{value:.15g}" for value in x_FN[at, :3].tolist())
    return (
        f"feature {at} ({shown}, ...) varies by {spread_F[at]:.2g} (standard deviation), and floats of 32 bits, in "
        f"which networks compute, round it by up to {error_F[at]:.2g}"
    )


def _describe_scale(images: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a notice of images of floats that are large, or of other ranges in one array than in another."""
    size = {where: float(x.square().mean().sqrt()) for where, x in images.items()}
    if not size:
        return
    least, most = (choose(size, key=size.__getitem__) for choose in (min, max))
    ends = {where: (float(x.min()), float(x.max())) for where, x in images.items()}
    ranges = {where: f"{where}: {low:g} to {high:g}" for where, (low, high) in ends.items()}
    unsigned = [where for where, (low, high) in ends.items() if low >= 0 and 0.5 < high <= 1]
    signed = [where for where, (low, high) in ends.items() if -1 <= low < -0.5 and high <= 1]
    if size[most] > APART * size[least] > 0 or (unsigned and signed):
        one, other = (unsigned[0], signed[0]) if unsigned and signed else (least, most)
        yield f"images of floats have other scales, {ranges[one]}, but {ranges[other]}: bring all to one range"
    elif size[most] > UNSCALED:
        yield (
            f"images of floats reach the network unscaled, {ranges[most]}: divide them, or give uint8 from 0 to 255, "
            "which is scaled"
        )


def _describe_dark(pixels: Mapping[str, Tensor | LazyStore], some: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a notice of 8-bit pixels that are all small."""
    high = max((int(some[where].max()) for where in pixels), default=0)
    if 0 < high <= DARK and all(not isinstance(store, Tensor) or store.max() <= DARK for store in pixels.values()):
        yield (
            f"8-bit pixels are 0 to {high} at all clients, and 0 to 255 is scaled to -1 to 1: multiply them by "
            f"{255 // high} if {high} is white, or give Booleans"
        )


def _describe_shape(stores: Mapping[str, Tensor | LazyStore]) -> Iterator[str]:
    """Yield a notice of the first array's axes if they may be meant otherwise."""
    first = next(iter(stores.values()))
    (channels, *sides), floats = first.shape[1:], first.is_floating_point()
    told = " x ".join(map(str, sides))
    shape = f"samples of shape {channels} x {told}"
    if floats and len(sides) == 1 and channels > 1:
        yield f"{shape} are signals with {channels} channels; give gray images as [N, 1, H, W]"
    if floats and len(sides) == 2 and channels == 1 and sides[0] >= 2 * sides[1]:
        yield f"{shape} are gray images; give signals of {sides[1]} channels as [N, {sides[1]}, {sides[0]}]"
    elif len(sides) > 1 and channels in (1, 3) and sides[-1] in (1, 3) and prod(sides) * channels > sides[-1]:
        yield f"{shape} have {channels} channels, in front; give images with channels last as [N, C, H, W] too"
