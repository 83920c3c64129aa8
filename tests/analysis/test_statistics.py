"""Mean, deviation and paired differences against hand-computed values and scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from fedshift.analysis.statistics import (
    Moments,
    correct_family,
    holm_correction,
    mean_and_std,
    paired_difference,
    paired_tests,
    welch_interval,
    wilson_interval,
)
from fedshift.utils.errors import UsageError


def test_mean_and_std_by_hand():
    assert mean_and_std([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5, math.sqrt(5 / 3)))


def test_one_value_has_no_deviation_and_nan_counts_as_absent():
    mean, std = mean_and_std([0.5, math.nan])
    assert mean == 0.5
    assert math.isnan(std)


def test_no_value_gives_nan():
    assert all(map(math.isnan, mean_and_std([])))


def test_paired_difference_by_hand():
    found = paired_difference([0.70, 0.73, 0.76], [0.65, 0.67, 0.69])
    assert (found.pairs, found.level) == (3, 0.95)
    assert found.mean == pytest.approx(0.06)
    assert found.std == pytest.approx(0.01)
    half = 4.302652729911275 * 0.01 / math.sqrt(3)  # t quantile 0.975 with 2 degrees of freedom
    assert (found.low, found.high) == pytest.approx((0.06 - half, 0.06 + half))


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("pairs", [3, 5, 10])
def test_paired_difference_equals_scipy(pairs, level):
    random = np.random.default_rng(pairs)
    ours, theirs = random.normal(0.8, 0.02, pairs), random.normal(0.79, 0.02, pairs)
    expected = stats.ttest_rel(ours, theirs)
    interval = expected.confidence_interval(level)
    found = paired_difference(ours.tolist(), theirs.tolist(), level)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_fewer_than_three_pairs_have_no_interval(pairs):
    found = paired_difference([0.5, 0.75][:pairs], [0.25, 0.3][:pairs])
    assert found.pairs == pairs
    assert all(map(math.isnan, (found.low, found.high, found.p)))
    assert not found.is_significant


def test_a_pair_of_which_one_is_missing_is_no_pair():
    full = paired_difference([0.70, 0.73, 0.76], [0.65, 0.67, 0.69])
    assert paired_difference([0.70, math.nan, 0.73, 0.76, 0.5], [0.65, 0.6, 0.67, 0.69, math.nan]) == full
    assert math.isnan(paired_difference([0.5, 0.6, math.nan], [0.1, 0.1, 0.1]).p)


def test_equal_differences_are_tested_by_what_the_grid_can_resolve():
    """k of 20 under each of five seeds: the error of the difference is uniform, sqrt(2 / 12) of a twentieth."""
    ours, theirs = [0.5, 0.6, 0.55, 0.7, 0.65], [0.35, 0.45, 0.4, 0.55, 0.5]
    grid = math.sqrt(2 / 12) / 20
    found = paired_difference(ours, theirs, grid=grid)
    assert found.error == grid
    assert found.p == pytest.approx(2 * stats.t.sf(0.15 / grid, 4))
    assert found.high - found.low == pytest.approx(2 * stats.t.ppf(0.975, 4) * grid)
    unknown = paired_difference(ours, theirs)  # nor does 0.15 - 1e-17 make a spread
    assert (unknown.pairs, unknown.mean) == (5, pytest.approx(0.15))
    assert math.isnan(unknown.p)
    assert not unknown.is_significant
    assert paired_difference(ours, ours).p == 1
    wide = paired_difference(ours, [0.1, 0.6, 0.3, 0.2, 0.5], grid=1e-3)
    assert wide == paired_difference(ours, [0.1, 0.6, 0.3, 0.2, 0.5])


def test_many_comparisons_at_once_are_those_one_by_one():
    values = np.random.default_rng(1).integers(0, 4, (2, 60, 4)) / 3
    mean, error, p = paired_tests(*values, grid=0.1)
    alone = [paired_difference(*pair, grid=0.1) for pair in values.transpose(1, 0, 2).tolist()]
    assert mean.tolist() == pytest.approx([each.mean for each in alone])
    assert error.tolist() == [each.error for each in alone]
    assert p.tolist() == [each.p for each in alone]


def test_intervals_exclude_zero_exactly_where_holm_claims():
    random = np.random.default_rng(2)
    for _ in range(200):
        gaps = random.normal(random.choice([0, 1, 3], (6, 1)), 1, (6, 4)).tolist()
        raw = [paired_difference(gap, [0.0] * 4) for gap in gaps]
        found = correct_family(raw)
        assert [each.p for each in found] == holm_correction([each.p for each in raw])
        for one, each in zip(raw, found, strict=True):
            assert each.is_significant == (each.low > 0 or each.high < 0)
            assert each.low <= one.low
            assert each.comparisons == 6
            assert each.own_level >= 0.95


def test_the_smallest_p_has_bonferronis_interval():
    found = correct_family([paired_difference(gaps, [0.0] * 3) for gaps in ([1.0, 1.1, 1.2], [0.1, -0.2, 0.3])])
    half = stats.t.ppf(1 - 0.05 / 4, 2) * 0.1 / math.sqrt(3)
    assert (found[0].low, found[0].high) == pytest.approx((1.1 - half, 1.1 + half))
    assert found[1].own_level == 0.95


def test_wrong_use_is_refused():
    with pytest.raises(UsageError, match="cannot be paired"):
        paired_difference([1.0], [1.0, 2.0])
    with pytest.raises(UsageError, match="confidence level"):
        paired_difference([1.0, 2.0], [1.0, 2.0], level=95)


def test_holm_by_hand():
    # Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, and 0.04 x 1, which must not be below the one before it.
    assert holm_correction([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_correction([0.6, 0.4]) == pytest.approx([0.8, 0.8])
    assert holm_correction([0.9, 0.9]) == [1, 1]
    assert holm_correction([0.03]) == [0.03]
    assert holm_correction([]) == []


def test_holm_leaves_what_was_not_tested_out():
    first, missing, second = holm_correction([0.01, math.nan, 0.02])
    assert (first, second) == pytest.approx((0.02, 0.02))
    assert math.isnan(missing)


@pytest.mark.parametrize("level", [0.01, 0.05, 0.2])
def test_holm_rejects_step_by_step(level):
    """Holm's own words: reject the smallest below level / n, the next below level / (n - 1), until one is not."""
    random = np.random.default_rng(3)
    for _ in range(100):
        values = (random.random(6) ** 4).tolist()
        rejected: set[float] = set()
        for step, value in enumerate(sorted(values)):
            if value > level / (6 - step):
                break
            rejected.add(value)
        assert {value for value, p in zip(values, holm_correction(values), strict=True) if p <= level} == rejected


@pytest.mark.parametrize(("hits", "samples"), [(0, 5), (5, 5), (7, 12), (903, 1000)])
def test_the_interval_of_a_share_is_wilsons(hits, samples):
    theirs = stats.binomtest(hits, samples).proportion_ci(0.9, method="wilson")
    assert wilson_interval(hits, samples, 0.9) == pytest.approx(tuple(theirs))


@pytest.mark.parametrize("sizes", [(5, 5), (3, 8)])
def test_the_interval_of_unpaired_means_is_welchs(sizes):
    rng = np.random.default_rng(0)
    ours, theirs = (rng.normal(size, size, size) for size in sizes)
    expected = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.9)
    found = welch_interval(*(Moments(*mean_and_std(values), len(values)) for values in (ours, theirs)), level=0.9)
    assert found == pytest.approx(tuple(expected), rel=1e-12)


def test_two_values_or_constant_ones_give_no_interval():
    moments = Moments(1.0, 0.5, 5)
    assert all(map(math.isnan, welch_interval(moments, moments._replace(size=2))))
    assert all(map(math.isnan, welch_interval(moments._replace(std=0.0), moments._replace(std=0.0))))
    low, high = welch_interval(moments._replace(std=0.0), moments)  # a constant beside four degrees of freedom
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, 4) * 0.5 / math.sqrt(5))


def test_a_share_of_no_samples_or_of_too_few_is_refused():
    for hits, samples in ((0, 0), (6, 5)):
        with pytest.raises(UsageError, match="not a proportion"):
            wilson_interval(hits, samples)
