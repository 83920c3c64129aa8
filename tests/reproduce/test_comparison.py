"""What is put beside the printed numbers, what follows from it, and what may not be said."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedshift.reproduce.comparison import compare_cells, compare_pairs, compare_values, describe_verdict
from fedshift.reproduce.published_tables import Block, PublishedValue, parse_value
from fedshift.reproduce.recipes import ReproductionOptions
from fedshift.reproduce.results import Result
from tests.reproduce.conftest import make_small_table

STAND_IN = {"own": False, "notes": ("other digits",)}


@pytest.fixture(autouse=True)
def _recipe(tiny):
    """The small table's recipe is used."""


def result_of(theirs, ours, columns=("pen",), by="client", scale=1.0, **more):
    """Rows m0, m1, ... of printed texts and of our numbers, or tuples of one for each seed; None: not run."""
    theirs, ours = ([row if isinstance(row, list) else [row] for row in rows] for rows in (theirs, ours))
    rows = tuple(({"method": f"m{n}"}, tuple(map(parse_value, row))) for n, row in enumerate(theirs))
    values = {
        (row, column): value if isinstance(value, tuple) else (value,)
        for row, several in enumerate(ours)
        for column, value in enumerate(several)
        if value is not None
    }
    block = Block(version="", by=by, columns=columns, keys={}, rows=rows)
    options = ReproductionOptions(root=Path(), scale=scale, seeds=max(map(len, values.values())))
    return Result(table=make_small_table(), block=block, options=options, values=values, **more)


def order_of(result):
    pairs = compare_pairs(result)
    return sum(pair.paper * pair.ours > 0 for pair in pairs), len(pairs)


@pytest.mark.parametrize(
    ("theirs", "ours", "more", "verdict"),
    [
        (["50.0 (1.0)", "60.0 (1.0)"], [51.9, 58.1], {}, "within the paper's spread"),
        (["50.0 (1.0)", "60.0 (1.0)"], [51.9, 58.1], STAND_IN, "same order of methods"),
        (["50.0 (1.0)", "60.0 (1.0)"], [51.9, 58.1], {"scale": 0.5}, "same order of methods"),
        (["50.0 (1.0)", "60.0 (1.0)"], [51.9, 58.1], {"notes": ("fewer samples",)}, "same order of methods"),
        (["50.0 (1.0)", "60.0 (1.0)"], [51.9, 58.1], {"scale": 0.24}, "too short to judge"),
        (["50.0 (1.0)", "60.0 (1.0)"], [52.1, 60.0], {}, "same order of methods"),
        (["50.0 (1.0)", "60.0 (1.0)"], [60.0, 50.0], {}, "neither"),
        (["50.0", "60.0"], [50.0, 60.0], {}, "same order of methods"),  # no spread, so nothing can be within it
        (["50.0", "60.0"], [50.0, 50.0], {}, "neither"),
        (["50.0 (1.0)"], [60.0], {}, "nothing to compare"),
        (["50.0 (3.0)"], [(56.0, 64.0)], {}, "within the paper's spread"),  # 2 sqrt(3^2 + 32) = 12.8
        (["50.0 (3.0)"], [(59.0, 67.0)], {}, "nothing to compare"),
        (["50.0 (0.0)"], [50.09], {}, "within the paper's spread"),  # within twice half of the last digit
        (["50.0 (0.0)"], [50.11], {}, "nothing to compare"),
    ],
)
def test_verdicts(theirs, ours, more, verdict):
    result = result_of(theirs, ours, **more)
    assert describe_verdict(result)[0] == verdict
    assert ("difference" in compare_values(result).header) == (more == {})
    assert len(compare_values(result).rows) == len(theirs)  # the numbers stand there in any case


def test_too_few_rounds_are_said_and_nothing_is_counted(tiny):
    result = result_of(["1", "2"], [(50.0, 51.0), (60.1, 61.0)], scale=0.2499)
    assert describe_verdict(result)[1] == (
        "Verdict (2 seeds, 0.25 of the rounds): too short to judge; the order of methods means nothing below 0.25 of "
        "the rounds."
    )
    tiny["measures"] = {"discordance": "discordance"}
    whole = result_of(["0.1", "0.1"], [0.0, 1e-6], columns=("discordance",), by="metric")
    assert describe_verdict(whole)[0] == "concordant throughout"
    assert describe_verdict(replace(whole, values={(0, 0): (0.0,), (1, 0): (0.02,)}))[0] == "concordant in 1 of 2"
    assert describe_verdict(replace(whole, options=replace(whole.options, scale=0.1)))[0] == "too short to judge"


@pytest.mark.parametrize(
    ("theirs", "ours", "columns", "order"),
    [
        (["1", "2", "3", "3"], [1, 3, 2, 5], ("pen",), (4, 5)),  # the level pair does not count
        (["1", "2"], [5, 5], ("pen",), (0, 1)),
        ([["50.0"] * 3, ["50.0", "50.0", "50.1"]], [[1] * 3, [2] * 3], "abc", (0, 0)),  # means 0.03 apart
        ([["50.0"] * 3, ["50.0", "50.0", "50.2"]], [[1] * 3, [2] * 3], "abc", (1, 1)),
        # equal but for floating point
        ([["66.6", "55.5", "84.3", "84.3"], ["84.3", "66.6", "55.5", "84.3"]], [[1] * 4, [2] * 4], "abcd", (0, 0)),
        # the paper's average has no say where clients have
        ([["50.0", "90.0", "70.0"], ["60.0", "20.0", "40.0"]], [[50, None, 50], [60, None, 60]], "ab-", (1, 1)),
        ([["50.0", "90.0", "70.0"], ["60.0", "20.0", "40.0"]], [[None, None, 50], [None, None, 60]], "ab-", (0, 1)),
    ],
)
def test_pairs_in_the_papers_order_are_counted(theirs, ours, columns, order):
    named = tuple("average" if name == "-" else name for name in columns)
    assert order_of(result_of(theirs, ours, columns=named)) == order


def test_methods_are_ordered_by_the_measure_and_within_the_keys_of_a_recipe(tiny):
    tiny |= {"measures": {"rounds": "rounds", "accuracy": "best"}}
    result = result_of([["300", "70.0"], ["200", "60.0"]], [[30, 60], [20, 70]], columns=("rounds", "accuracy"))
    assert order_of(result) == (0, 1)
    tiny["ranked"] = "rounds"
    assert order_of(result) == (1, 1)
    del tiny["ranked"]
    result = result_of(["1", "2", "9"], [1.0, 2.0, 0.0])
    keys = ({"method": "a", "epochs": 1}, {"method": "b", "epochs": 1}, {"method": "a", "epochs": 4})
    rows = tuple((key, cells) for key, (_, cells) in zip(keys, result.block.rows, strict=True))
    result = replace(result, block=replace(result.block, rows=rows))
    assert order_of(result) == (1, 1)
    tiny["within"] = []
    assert order_of(result) == (1, 3)


def test_intervals_of_pairs_are_students_for_all_together_and_none_stands_where_seeds_cannot_decide():
    rng = np.random.default_rng(0)
    ours = [tuple(mean + rng.normal(0, 0.5, 5)) for mean in (50, 50.1, 60)]
    result = result_of(["1", "3", "2"], ours)
    pairs = compare_pairs(result)
    for pair, (one, other) in zip(pairs, ((0, 1), (0, 2), (1, 2)), strict=True):
        gaps = np.subtract(ours[one], ours[other])
        low, high = stats.ttest_1samp(gaps, 0).confidence_interval(1 - 0.05 / 3)
        assert (pair.low, pair.ours, pair.high) == pytest.approx((low, gaps.mean(), high))
    assert describe_verdict(result)[1].endswith(
        "Intervals that exclude 0, at 95 % together: 1 in the paper's order, 1 against it."
    )
    few = result_of(["1", "3", "2"], [values[:3] for values in ours])
    assert all(math.isnan(pair.low) for pair in compare_pairs(few))
    assert describe_verdict(few)[1].endswith("3 seeds cannot decide an order: --seeds 4 can.")
    same = result_of(["1", "2"], [(50.0, 51.0, 52.0, 53.0), (51.0, 52.0, 53.0, 54.0)])
    assert math.isnan(compare_pairs(same)[0].low)  # equal differences, of unknown resolution
    lost = result_of(["1", "2"], [(math.nan, *ours[0]), (0.0, *ours[1])])  # a seed that diverged is left out of both
    expected = result_of(["1", "2"], ours[:2])
    assert compare_pairs(lost) == compare_pairs(expected)
    assert compare_cells(lost)[0].ours == pytest.approx(np.mean(ours[0]))


@pytest.mark.parametrize("images", [7, 30, 200])
def test_methods_that_are_equally_good_are_rarely_told_apart_though_accuracies_are_counts(images):
    """Of 600 pairs on a test set of so few images, where differences are often equal, about 5 % may be wrong."""
    hits = np.random.default_rng(images).binomial(images, 0.8, (600, 2, 5)) / images * 100
    wrong = 0
    for ours in hits:
        (pair,) = compare_pairs(result_of(["1", "2"], [tuple(values) for values in ours.tolist()]))
        wrong += pair.low > 0 or pair.high < 0
    assert wrong <= 0.05 * 600 + 3 * math.sqrt(600 * 0.05 * 0.95)


def test_the_interval_of_a_difference_is_welchs_and_stands_beside_it():
    ours = (51.0, 53.0, 52.5, 52.0)
    result = result_of(["50.00 (1.00)", "52.00 (1.00)", "50.00"], [ours] * 3)
    result = replace(result, table=replace(result.table, seeds=5))
    test = stats.ttest_ind_from_stats(np.mean(ours), np.std(ours, ddof=1), 4, [50, 52], 1, 5, equal_var=False)
    cells = compare_cells(result)
    low, high = cells[0].low, cells[0].high
    assert (low + high) / 2 == pytest.approx(np.mean(ours) - 50)
    # at the level at which the interval ends at 0, the p-value is 5 %
    variances = np.array([np.var(ours, ddof=1) / 4, 1 / 5])
    freedom = variances.sum() ** 2 / (variances**2 / [3, 4]).sum()
    assert stats.t.ppf(1 - test.pvalue[0] / 2, freedom) == pytest.approx(2.125 / math.sqrt(variances.sum()))
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, freedom) * math.sqrt(variances.sum()))
    assert [p < 0.05 for p in test.pvalue] == [low > 0, cells[1].low > 0] == [True, False]
    assert math.isnan(cells[2].low)
    shown = compare_values(result)
    assert shown.header[3:] == ("difference", "95% interval", "paper's spread")
    assert shown.rows[0][4].text == f"+{low:.2f} to +{high:.2f}"
    assert "1 of 2 intervals of the difference contain 0" in describe_verdict(result)[1]
    few = replace(result, table=replace(result.table, seeds=3))  # which decide nothing
    for without in (replace(result, own=False), few):
        assert all(math.isnan(cell.low) for cell in compare_cells(without))
        assert "95% interval" not in compare_values(without).header


def test_ours_stand_beside_theirs():
    half = math.sqrt(0.125)  # values so far apart on both sides have a deviation of 0.5
    result = result_of(["50.0 (1.0)", "60.0", "70.0"], [(51.5 - half, 51.5 + half), 58.0, None], shown={"pen": "faded"})
    rows = compare_values(result).rows  # what was not run is left out
    assert [cell.text for cell in rows[0]] == [
        "m0: pen (here faded)",
        "51.50 (0.50)",
        "50.00 (1.00)",
        "+1.50",
        "within",
    ]
    assert [cell.text for cell in rows[1]][1:] == ["58.00", "60.00", "\N{MINUS SIGN}2.00", ""]
    assert compare_values(replace(result, own=False)).header == ("", "ours (stand-in)", "paper")
    shown = [compare_values(result_of([text], [ours])).rows[0] for text, ours in (("3e-07", 4e-07), ("2471", 20.0))]
    assert [[cell.text for cell in row[1:3]] for row in shown] == [["0.00000040", "0.00000030"], ["20", "2471"]]


def test_numbers_are_read_as_they_are_printed():
    assert parse_value("62.87 (1.49)") == PublishedValue(62.87, 1.49, 0.01)
    assert parse_value("2471").unit == 1
    assert math.isnan(parse_value("62.87").std)
    assert parse_value("") is None
