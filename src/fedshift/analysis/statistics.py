"""Statistics over seeds: mean, sample standard deviation, and intervals of paired differences.

A comparison over seeds is paired: both methods saw the same initial network, split and batch order under one seed, so
the difference is taken within each seed, and its interval is Student's (1908, "The Probable Error of a Mean",
Biometrika 6(1)). One rule holds for every interval: it is given only where it can decide (:func:`decides`), and is as
wide as the number of comparisons that hold together requires (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from ..utils.errors import UsageError

Floats = NDArray[np.float64]

WIDEST = 2.45
"""Largest half of an interval that is printed, in standard deviations between seeds.

With three seeds, even the interval of a single comparison is wider, and verdicts differ between processors.
"""
ROUNDING = 1e-9
"""Spread, relative to the values, that floating-point rounding causes between equal differences."""


FEWEST_UNITS = 10
"""Fewest test units (patients, else samples) of an interval."""


def mean_and_std(values: Iterable[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation, sqrt(sum((x - mean)^2) / (n - 1)), of the values that are not NaN.

    The deviation of a single value is NaN, and both results are NaN without values.
    """
    present = np.array([value for value in values if not math.isnan(value)], dtype=float)
    mean = float(present.mean()) if present.size else math.nan
    std = float(present.std(ddof=1)) if present.size > 1 else math.nan
    return mean, std


def half_interval(
    error: float, seeds: int, sample_error: float = math.nan, units: int = 0, comparisons: int = 1
) -> float:
    """Return half of the 95 % interval of a mean over ``seeds``, for ``comparisons`` together (Bonferroni).

    It is the root of the sum of squares of half of Student's interval over seeds (standard error ``error``) and, where
    ``sample_error`` is known, half of Student's interval over test ``units`` (Zou and Donner 2008, "Construction of
    confidence limits about effect measures", Statistics in Medicine 27(10)). NaN where ``error`` is.
    """
    tail = 1 - 0.05 / (2 * comparisons)
    sampled = 0.0 if math.isnan(sample_error) else float(stdtrit(max(1, units - 1), tail)) * sample_error
    return math.hypot(float(stdtrit(seeds - 1, tail)) * error, sampled) if seeds > 1 else math.nan


def decides(seeds: int, comparisons: int = 1) -> bool:
    """Return whether intervals over so many ``seeds`` are narrow enough to be printed for so many ``comparisons``.

    Half of them is then at most :data:`WIDEST` standard deviations between seeds: 3 seeds decide nothing, 4 decide 3
    comparisons, 5 decide 9, 6 decide 26.
    """
    return seeds > 1 and half_interval(1 / math.sqrt(seeds), seeds, comparisons=comparisons) <= WIDEST


def count_needed_seeds(comparisons: int) -> int:
    """Return the smallest number of seeds that decide so many ``comparisons``."""
    return next(seeds for seeds in count(2) if decides(seeds, comparisons))


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Mean of the differences within ``pairs`` pairs, their sample standard deviation, and the mean's interval.

    ``low`` and ``high`` are NaN where the interval could not decide (:func:`decides`).
    """

    pairs: int
    mean: float
    std: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Return whether the interval excludes 0, so that a difference may be claimed."""
        return self.low > 0 or self.high < 0


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], *, comparisons: int = 1, widest: float = math.inf
) -> PairedDifference:
    """Return ``ours - theirs`` over pairs, with Student's 95 % interval of the mean.

    ``comparisons``: number of differences whose intervals hold together (Bonferroni); ``widest``: range of the metric,
    beyond which there is no interval. A pair with a NaN does not count. Equal differences have no interval unless they
    are 0. Raises :class:`UsageError` for sequences of unequal length.
    """
    if len(ours) != len(theirs):
        raise UsageError(f"{len(ours)} values cannot be paired with {len(theirs)}: give one of each for every seed")
    values = np.array([ours, theirs], dtype=float)
    values = values[:, ~np.isnan(values).any(axis=0)]
    gaps, pairs = values[0] - values[1], values.shape[1]
    mean, std = mean_and_std(gaps)
    half = half_interval(std / math.sqrt(max(1, pairs)), pairs, comparisons=comparisons)
    equal = std <= ROUNDING * np.abs(values).max(initial=0.0) and mean != 0
    if equal or not decides(pairs, comparisons) or 2 * half > widest:
        half = math.nan
    return PairedDifference(pairs=pairs, mean=mean, std=std, low=mean - half, high=mean + half)
