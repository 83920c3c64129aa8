"""The range of a file's values that becomes -1 to 1: one rule for pictures and medical images.

- Gray of more than 8 bits: from 0 to the largest value of :data:`BITS` bits, the fewest that hold all but
  :data:`EXCESS` of the pixels above 0 of all clients' training images together. Values beyond become 1.
- Medical images in Hounsfield units (DICOM's Modality CT): one range for all, the medians over all clients' training
  images of their :data:`PERCENTILES`, since equal values mean equal tissue.
- Other medical images: :data:`PERCENTILES` of each channel of each image, since MRI, ultrasound and nuclear medicine
  have no common unit (as nnU-Net does, Isensee et al. 2021, doi:10.1038/s41592-020-01008-z, for all but CT). Where one
  value fills more than :data:`SPARSE` of a channel, such as 0 around a few lesions, all other voxels count, and the
  range includes that value.
- A window in the settings replaces all of these. Clients that join others, and exported models, use the others' range.

A hot pixel, an empty image or a small share of voxels thus changes neither the range of others nor makes its own empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import Ref, UsageError
from ...utils.words import Information, join_some

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


def parse_numbers(text: str) -> tuple[float, ...]:
    """Return the finite numbers in ``text``, separated by commas; empty if it holds anything else."""
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        return ()
    return numbers if all(map(math.isfinite, numbers)) else ()


def parse_window(text: str | None) -> Window | None:
    """Return the values that ``LOW,HIGH`` names; raise :class:`UsageError` if these are not two rising numbers."""
    if text is None:
        return None
    ends = parse_numbers(text)
    if len(ends) != 2 or ends[0] >= ends[1]:
        raise UsageError(
            "{}: give the values that become -1 and 1, such as -160,240 for soft tissue in Hounsfield units",
            Ref(window=text),
        )
    return ends


def count_levels(gray: NDArray[Any]) -> Levels:
    """Return how many values of a gray image are above 0, and above the largest value of each of :data:`BITS`."""
    return tuple(int(np.count_nonzero(gray > top)) for top in _TOPS)


def choose_gray(levels: Mapping[str, Sequence[Levels]]) -> tuple[Window, str]:
    """Return the range of gray at all clients, and a notice: a remark unless it clips, or a client alone had another.

    ``levels``: results of :func:`count_levels` for the training images of each client.
    """
    bits, above, positive = _choose_bits([each for images in levels.values() for each in images])
    alone = {name: _choose_bits(images)[0] for name, images in levels.items() if any(each[0] for each in images)}
    text = f"gray of more than 8 bits read as {bits} bits, 0..{2**bits - 1} scaled to [-1, 1], at all clients"
    beyond = f"{above:,} of {positive:,} training pixels above 0 are beyond and become 1 (--window 0,65535 keeps all)"
    said = [beyond] if above else []
    if len(set(alone.values())) > 1:
        needs = join_some(f"{own} at {name!r}" for name, own in alone.items())
        said.append(f"each client alone would need {needs}: write all images in one unit")
    return (0.0, 2.0**bits - 1), "; ".join([text, *said]) if said else Information(text)


def _choose_bits(levels: Iterable[Levels]) -> tuple[int, int, int]:
    """Return the fewest bits that hold almost all pixels, how many do not fit, and how many are above 0."""
    positive, *above = np.sum([NO_LEVELS, *levels], axis=0).tolist()
    bits, count = next((bits, n) for bits, n in zip(BITS, above, strict=True) if n <= EXCESS * positive)
    return bits, count, positive


def choose_shared(ends: Sequence[Window]) -> Window | None:
    """Return one range for images in one unit from the ``ends`` of all training images; None if all are constant."""
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
    shares: NDArray[np.float32] = (2 * scaled - 1).astype(np.float32)
    return shares
