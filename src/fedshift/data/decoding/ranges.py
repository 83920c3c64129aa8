"""The range of a file's values that becomes -1 to 1: one rule for pictures and medical images.

- Gray of more than 8 bits: from 0 to the largest value of :data:`BITS` bits, the fewest that hold all but
  :data:`EXCESS` of the pixels above 0 of all clients' training images together. Values beyond become 1.
- Medical images in Hounsfield units (DICOM's Modality CT): one range for all, the medians over all clients' training
  images of their :data:`PERCENTILES`, since equal values mean equal tissue.
- Other medical images: :data:`PERCENTILES` of each channel of each image, since MRI, ultrasound and nuclear medicine
  have no common unit (as nnU-Net does, Isensee et al. 2021, doi:10.1038/s41592-020-01008-z, for all but CT). Where one
  value fills more than :data:`SPARSE` of a channel, such as 0 around a few lesions, they are those of all other voxels,
  widened to that value.
- A window in the settings replaces all of these. Clients that join others, and exported models, use the others' range.

A hot pixel, an empty image or a small share of voxels thus changes neither the range of others nor makes its own empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import Ref, UsageError
from ...utils.words import Information

Window = tuple[float, float]
"""Values that become -1 and 1."""
Levels = tuple[int, ...]
"""Result of :func:`count_levels`."""

BITS = (8, 10, 12, 14, 16)
EXCESS = 0.005
PERCENTILES = (0.5, 99.5)
SPARSE = 0.9

_LARGE = 1e30
"""Numbers above it, and spans below its inverse, are not left to float32."""
UNIT_RANGE = (0.0, 1.0)
"""Range of gray floats."""
_TOPS = (0, *(2**bits - 1 for bits in BITS))
NO_LEVELS = (0,) * len(_TOPS)
"""Levels of a file that is not gray of more than 8 bits."""


def parse_window(text: str | None) -> Window | None:
    """Return the values that ``LOW,HIGH`` names; raise :class:`UsageError` if these are not two rising numbers."""
    if text is None:
        return None
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low, high = 0.0, 0.0
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(
            "{}: give the values that become -1 and 1, such as -160,240 for soft tissue in Hounsfield units",
            Ref(window=text),
        )
    return low, high


def count_levels(gray: NDArray[Any]) -> Levels:
    """Return how many values of a gray image are above 0, and above the largest value of each of :data:`BITS`."""
    return tuple(int(np.count_nonzero(gray > top)) for top in _TOPS)


def choose_gray(levels: Iterable[Levels]) -> tuple[Window, int]:
    """Return the range of gray, and how many pixels are above it, from :func:`count_levels` of all training images."""
    positive, *above = np.sum([NO_LEVELS, *levels], axis=0).tolist()
    top, count = next((top, count) for top, count in zip(_TOPS[1:], above, strict=True) if count <= EXCESS * positive)
    return (0.0, float(top)), count


def describe_gray(window: Window, clipped: int, positive: int) -> str:
    """Return a notice of the range of gray, more than a remark if ``clipped`` of ``positive`` pixels are above it."""
    text = f"gray read as {round(math.log2(window[1] + 1))} bits, 0..{window[1]:g} scaled to [-1, 1], at all clients"
    if not clipped:
        return Information(text)
    share = f"{clipped:,} of {positive:,} training pixels above 0 are beyond and become 1"
    return f"{text}; {share} (--window 0,65535 keeps all)"


def choose_shared(ends: Sequence[Window]) -> Window | None:
    """Return one range for images in one unit from those of all training images; None if all are constant."""
    wide = [each for each in ends if each[0] < each[1]]
    if not wide:
        return None
    low, high = np.median(np.array(wide), axis=0).tolist()
    return low, high


def find_range(stored: NDArray[Any], resampled: NDArray[Any]) -> Window:
    """Return the range of one channel; a sparse one's is found before its values are ``resampled``, which blurs them.

    The ends are equal if the values are.
    """
    middle = np.percentile(stored, 50)
    others = stored[stored != middle]
    if not 0 < others.size < (1 - SPARSE) * stored.size:
        low, high = np.percentile(resampled, PERCENTILES).tolist()
        return low, high
    low = min(middle, np.percentile(others, PERCENTILES[0], method="higher"))
    return float(low), float(max(middle, np.percentile(others, PERCENTILES[1], method="lower")))


def choose_float(low: float, high: float) -> type[np.float32 | np.float64]:
    """Return float64 if float32 would round values from ``low`` to ``high`` to a few, else float32."""
    low, high = float(low), float(high)  # numbers of numpy may overflow
    largest, span = max(abs(low), abs(high)), high - low
    return np.float32 if (largest <= min(span * 2**12, _LARGE) and span >= 1 / _LARGE) or span == 0 else np.float64


def scale(values: NDArray[Any], ends: Sequence[Window]) -> NDArray[np.float32]:
    """Return ``values [C, ...]`` from -1 to 1, clipped beyond; a channel whose ends are equal becomes -1.

    ``ends``: the range of each channel, or one for all.
    """
    kind = np.float64 if any(choose_float(*pair) is np.float64 for pair in ends) else np.float32
    low, high = np.array(ends, kind).reshape(-1, 2, *[1] * (values.ndim - 1)).swapaxes(0, 1)
    scaled = np.clip(values.astype(kind), low, high)
    scaled -= low
    scaled /= np.where(high > low, high - low, 1)
    scaled *= 2
    scaled -= 1
    shares: NDArray[np.float32] = scaled.astype(np.float32, copy=False)
    return shares
