"""Stratified random splits: the same share of every class is drawn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..utils.errors import UsageError


def split_stratified(
    y: NDArray[np.int64], fraction: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split the indices of labels ``y`` ``[N]`` into those that remain and those that are drawn, both ascending.

    Of a class of n samples ``fraction * n`` are drawn, rounded, but where n is 2 or more at least one is drawn and at
    least one remains; a single sample remains. Raises :class:`UsageError` for a ``fraction`` outside 0..1.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"test_fraction={fraction:g}: must lie between 0 and 1")
    drawn = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        places = rng.permutation(np.flatnonzero(y == label))
        drawn[places[: min(len(places) - 1, max(1, round(fraction * len(places))))]] = True
    return np.flatnonzero(~drawn), np.flatnonzero(drawn)
