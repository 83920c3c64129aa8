"""Statistics over seeds: mean, sample standard deviation, and tests of paired differences.

A comparison over seeds is paired: both methods saw the same initial network, split and batch order under one seed, so
the difference is taken within each seed and its interval is the paired t-interval (Student 1908, "The Probable Error of
a Mean", Biometrika 6(1)). One rule holds for every claim: at least :data:`FEWEST` pairs, a standard error that is not
below what the measuring grid can resolve, and p-values and intervals corrected for the number of claims in the same
report (Holm 1979, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6(2)).

Accuracies are counts, k of n, so that over a few seeds differences are often equal, and Student's formula then divides
by a spread of zero. Readings on a grid of width h hide a uniform error of variance h^2 / 12, which repeating equal
readings does not average away (JCGM 100:2008, "Guide to the Expression of Uncertainty in Measurement", F.2.2.1). The
variance of the mean is therefore the larger of s^2 / n and the grid's variance: if differences spread over several
steps of the grid, it is Student's, since their spread already contains the grid's error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri, stdtr, stdtrit

from ..utils.errors import UsageError

Floats = NDArray[np.float64]

FEWEST = 3
"""Minimum number of pairs for a claim: with fewer, Student's t has one degree of freedom, or none."""
WIDEST = 2.45
"""Largest half of an interval that is printed, in standard deviations between seeds.

With three seeds, even the interval of a single comparison is wider, and verdicts differ between processors.
"""
ROUNDING = 1e-9
"""Spread, relative to the values, that floating-point rounding causes between equal differences."""


def mean_and_std(values: Iterable[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation, sqrt(sum((x - mean)^2) / (n - 1)), of the values that are not NaN.

    The deviation of a single value is NaN, and both results are NaN without values.
    """
    present = np.array([value for value in values if not math.isnan(value)], dtype=float)
    mean = float(present.mean()) if present.size else math.nan
    std = float(present.std(ddof=1)) if present.size > 1 else math.nan
    return mean, std


def wilson_interval(hits: int, samples: int, level: float = 0.95) -> tuple[float, float]:
    """Return the score interval of a share, ``hits`` of ``samples`` (Wilson 1927, J. Am. Stat. Assoc. 22(158))."""
    if not 0 <= hits <= samples or samples < 1:
        raise UsageError(
            f"{hits} hits of {samples} samples are not a proportion: give at least one sample, and no more hits than "
            "samples"
        )
    z, share = float(ndtri((1 + level) / 2)), hits / samples
    center = share + z * z / (2 * samples)
    half = z * math.sqrt(share * (1 - share) / samples + z * z / (4 * samples**2))
    whole = 1 + z * z / samples
    return max(0.0, (center - half) / whole), min(1.0, (center + half) / whole)


class Moments(NamedTuple):
    """Mean and sample standard deviation of ``size`` values."""

    mean: float
    std: float
    size: int


def welch_interval(ours: Moments, theirs: Moments, level: float = 0.95) -> tuple[float, float]:
    """Return the interval of the difference of two means, ``ours - theirs``, of values that are not paired.

    Welch 1947, "The generalization of 'Student's' problem when several different population variances are involved",
    Biometrika 34(1-2): Student's interval with standard error sqrt(a + b), where a and b are the variances of the two
    means, and (a + b)^2 / (a^2 / (n_a - 1) + b^2 / (n_b - 1)) degrees of freedom. NaN with fewer than :data:`FEWEST`
    values in either, or if both are constant.
    """
    a, b = ours.std**2 / max(ours.size, 1), theirs.std**2 / max(theirs.size, 1)
    if min(ours.size, theirs.size) < FEWEST or not a + b > 0:
        return math.nan, math.nan
    freedom = (a + b) ** 2 / (a**2 / (ours.size - 1) + b**2 / (theirs.size - 1))
    half = float(stdtrit(freedom, (1 + level) / 2)) * math.sqrt(a + b)
    gap = ours.mean - theirs.mean
    return gap - half, gap + half


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Mean of the differences within ``pairs`` pairs, its interval ``low`` to ``high``, and the p-value.

    ``std`` is the sample standard deviation of the differences, ``error`` the standard error of their mean; ``p`` is
    two-sided, for "the mean difference is 0". ``level`` is the confidence level of all ``comparisons`` together, for
    whose number :func:`correct_family` adjusts p and interval; ``own_level`` is the level of this interval.
    Interval and p-value are NaN if no test is possible: with fewer than :data:`FEWEST` pairs, and for equal differences
    of unknown resolution.
    """

    pairs: int
    mean: float
    std: float
    error: float
    low: float
    high: float
    p: float
    level: float
    own_level: float
    comparisons: int = 1

    @property
    def is_significant(self) -> bool:
        """Return whether a difference may be claimed, that is, whether the interval excludes 0."""
        return self.p < 1 - self.level

    def __neg__(self) -> PairedDifference:
        """Return the difference with the sign reversed: theirs minus ours."""
        return replace(self, mean=-self.mean, low=-self.high, high=-self.low)


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], level: float = 0.95, *, grid: float = 0.0
) -> PairedDifference:
    """Return ``ours - theirs`` over pairs: d_mean +- t(n - 1, (1 + level) / 2) * error, and t = d_mean / error.

    The error is the larger of s_d / sqrt(n) and ``grid``, the standard deviation of the rounding to the measuring grid
    in one difference (see the module docstring); 0 for continuous values. A pair with a NaN does not count. If all
    differences are 0, p is 1.

    Raises :class:`UsageError` for sequences of unequal length or a level outside 0..1.
    """
    if len(ours) != len(theirs):
        raise UsageError(f"{len(ours)} values cannot be paired with {len(theirs)}: give one of each for every seed")
    if not 0 < level < 1:
        raise UsageError(f"level={level:g} is not a confidence level: give a number between 0 and 1, such as 0.95")
    values = np.array([ours, theirs], dtype=float)
    values = values[:, ~np.isnan(values).any(axis=0)]
    pairs = values.shape[1]
    mean, std = mean_and_std(values[0] - values[1])
    error = p = math.nan
    if pairs >= FEWEST:
        _, error, p = map(float, paired_tests(values[0], values[1], grid))
    half = half_interval(error, pairs, level=level)
    low, high = mean - half, mean + half
    return PairedDifference(
        pairs=pairs, mean=mean, std=std, error=error, low=low, high=high, p=p, level=level, own_level=level
    )


def paired_tests(ours: ArrayLike, theirs: ArrayLike, grid: ArrayLike = 0.0) -> tuple[Floats, Floats, Floats]:
    """Return mean, standard error and p-value of the differences along the last axis, for many comparisons at once.

    At least :data:`FEWEST` pairs are required, and no NaN. See :func:`paired_difference` for error and p-value.
    """
    values = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    gaps = values[0] - values[1]
    pairs, mean = gaps.shape[-1], gaps.mean(axis=-1)
    zero = ROUNDING * np.maximum(*map(np.abs, values)).max(axis=-1)
    std = gaps.std(axis=-1, ddof=1)
    error = np.maximum(np.where(std <= zero, 0.0, std / math.sqrt(pairs)), grid)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = 2 * stdtr(pairs - 1, -np.abs(mean) / error)
    p = np.where(np.abs(mean) <= zero, 1.0, np.where(error > 0, p, math.nan))
    return mean, np.where(np.isnan(p), math.nan, error), p


def correct_family(differences: Sequence[PairedDifference]) -> list[PairedDifference]:
    """Return ``differences`` with p-values and intervals corrected for their number.

    The probability that any of them is wrong is then at most ``1 - level``. p-values: :func:`holm_correction`. The
    interval of the k-th smallest p of n is widened to the level at which Holm tests it, ``1 - (1 - level) / (n - k +
    1)``; all that are not significant get the level of the first of them. An interval excludes 0 exactly if the
    difference is significant, and each covers its difference with probability at least ``level``.
    """
    tested = sorted((each.p, index) for index, each in enumerate(differences) if not math.isnan(each.p))
    family, divisor = list(differences), len(tested)
    for p, (_, index) in zip(holm_correction([p for p, _ in tested]), tested, strict=True):
        each = differences[index]
        own_level = 1 - (1 - each.level) / divisor
        half = half_interval(each.error, each.pairs, level=own_level)
        low, high = each.mean - half, each.mean + half
        family[index] = replace(each, p=p, low=low, high=high, own_level=own_level, comparisons=len(tested))
        divisor -= family[index].is_significant
    return family


def holm_correction(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, so that the chance of any false one below a level is that level.

    The k-th smallest of n is multiplied by ``n - k + 1``, is at least the corrected one before it, and at most 1. NaN
    stays NaN and does not count.
    """
    tested = sorted((value, index) for index, value in enumerate(values) if not math.isnan(value))
    corrected, least = [math.nan] * len(values), 0.0
    for rank, (value, index) in enumerate(tested):
        corrected[index] = least = max(least, min(1.0, (len(tested) - rank) * value))
    return corrected


def half_interval(
    error: float, seeds: int, sample_error: float = math.nan, units: int = 0, comparisons: int = 1, level: float = 0.95
) -> float:
    """Return half of the interval of a mean over ``seeds``, which holds together with ``comparisons`` (Bonferroni).

    It is the root of the sum of squares of half of Student's interval over seeds (standard error ``error``) and, where
    ``sample_error`` is known, half of Student's interval over test ``units`` (Zou and Donner 2008, "Construction of
    confidence limits about effect measures", Statistics in Medicine 27(10)). NaN where ``error`` is.
    """
    tail = 1 - (1 - level) / (2 * comparisons)
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
    return next(seeds for seeds in count(FEWEST) if decides(seeds, comparisons))
