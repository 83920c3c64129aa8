"""Statistics over seeds: mean, sample standard deviation, and paired differences with Student's t.

A comparison over seeds is paired: both methods saw the same initial network, split and batch order under one seed, so
the difference is taken within each seed and its interval is the paired t-interval (Student 1908, "The Probable Error of
a Mean", Biometrika 6(1)). Where several differences are claimed at once, p-values are corrected for their number (Holm
1979, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6(2)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ..base.errors import UsageError


def mean_and_std(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation, sqrt(sum((x - mean)^2) / (n - 1)), of the values that are not NaN.

    The deviation of one value is NaN, and so are both figures where no value is left.
    """
    present = np.array([value for value in values if not math.isnan(value)], dtype=float)
    mean = float(present.mean()) if present.size else math.nan
    std = float(present.std(ddof=1)) if present.size > 1 else math.nan
    return mean, std


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Mean of the differences within ``pairs`` pairs, its interval ``low`` to ``high`` at ``level``, and the p-value.

    ``std`` is the sample standard deviation of the differences; ``p`` is two-sided, for "the mean difference is 0".
    Interval and p-value are NaN below two pairs.
    """

    pairs: int
    mean: float
    std: float
    low: float
    high: float
    p: float
    level: float


def paired_difference(ours: Sequence[float], theirs: Sequence[float], level: float = 0.95) -> PairedDifference:
    """``ours - theirs`` over pairs: d_mean +- t(n - 1, (1 + level) / 2) * s_d / sqrt(n), and t = d_mean sqrt(n) / s_d.

    Where all differences are equal the interval has no width, and p is 1 for a difference of 0, else 0.
    Raises :class:`UsageError` for sequences of unequal length or a level outside 0..1.
    """
    if len(ours) != len(theirs):
        raise UsageError(f"{len(ours)} values cannot be paired with {len(theirs)}: give one of each for every seed")
    if not 0 < level < 1:
        raise UsageError(f"level={level:g} is no confidence level: give a number between 0 and 1, such as 0.95")
    pairs = len(ours)
    mean, std = mean_and_std(np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float))
    if pairs < 2:
        return PairedDifference(pairs=pairs, mean=mean, std=std, low=math.nan, high=math.nan, p=math.nan, level=level)
    error = std / math.sqrt(pairs)
    half = float(stats.t.ppf((1 + level) / 2, pairs - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, pairs - 1)) if error > 0 else float(mean == 0)
    return PairedDifference(pairs=pairs, mean=mean, std=std, low=mean - half, high=mean + half, p=p, level=level)


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for their number: those below a level are claims of which all hold, with that probability.

    The k-th smallest of n is multiplied by ``n - k + 1``, is at least the corrected one before it, and at most 1. NaN
    stays NaN and counts as no claim.
    """
    claims = sorted((value, place) for place, value in enumerate(values) if not math.isnan(value))
    corrected, least = [math.nan] * len(values), 0.0
    for rank, (value, place) in enumerate(claims):
        corrected[place] = least = max(least, min(1.0, (len(claims) - rank) * value))
    return corrected
