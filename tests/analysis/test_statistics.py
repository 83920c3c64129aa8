"""Mean, deviation and paired differences against hand-computed values and scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from fedshift.analysis.statistics import mean_and_std, paired_difference
from fedshift.utils.errors import UsageError


def test_mean_and_std_by_hand():
    assert mean_and_std([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5, math.sqrt(5 / 3)))
    mean, std = mean_and_std([0.5, math.nan])
    assert (mean, math.isnan(std)) == (0.5, True)
    assert all(map(math.isnan, mean_and_std([])))


@pytest.mark.parametrize("comparisons", [1, 3])
@pytest.mark.parametrize("pairs", [4, 5, 10])
def test_paired_difference_equals_scipy(pairs, comparisons):
    random = np.random.default_rng(pairs)
    ours, theirs = random.normal(0.8, 0.02, pairs), random.normal(0.79, 0.02, pairs)
    interval = stats.ttest_rel(ours, theirs).confidence_interval(1 - 0.05 / comparisons)
    found = paired_difference(ours.tolist(), theirs.tolist(), comparisons=comparisons)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.excludes_zero == (interval.low > 0 or interval.high < 0)
    missing = paired_difference([*ours, math.nan, 0.5], [*theirs, 0.6, math.nan], comparisons=comparisons)
    assert missing == found  # a pair of which one is missing is no pair


@pytest.mark.parametrize(("pairs", "comparisons"), [(0, 1), (1, 1), (3, 1), (4, 4), (5, 10)])
def test_too_few_pairs_have_no_interval(pairs, comparisons):
    found = paired_difference(np.linspace(0.5, 0.7, pairs), np.zeros(pairs), comparisons=comparisons)
    assert (found.pairs, math.isnan(found.low), found.excludes_zero) == (pairs, True, False)


def test_equal_differences_and_those_beyond_the_range_have_no_interval():
    ours, theirs = [0.5, 0.6, 0.55, 0.7, 0.65], [0.35, 0.45, 0.4, 0.55, 0.5]  # 0.15 - 1e-17 makes no spread
    equal = paired_difference(ours, theirs)
    assert (equal.mean, math.isnan(equal.low)) == (pytest.approx(0.15), True)
    same = paired_difference(ours, ours)
    assert (same.low, same.high, same.excludes_zero) == (0, 0, False)
    wild = [0.0, 1.0, 0.1, 0.9, 0.0]
    assert not math.isnan(paired_difference(wild, theirs).low)
    assert math.isnan(paired_difference(wild, theirs, widest=1.0).low)


def test_wrong_use_is_refused():
    with pytest.raises(UsageError, match="cannot be paired"):
        paired_difference([1.0], [1.0, 2.0])
