"""Which orders of methods may be claimed: neighbors by their macro mean, tested among all pairs, corrected by Holm."""

import re

import pytest
from scipy import stats

from fedshift.analysis.statistics import holm_correction
from fedshift.report.claims import collect_claims, describe_ranking, rank_methods
from fedshift.report.page import render_page

MINUS = "\N{MINUS SIGN}"


def macro(*values):
    """Hits whose macro accuracy is so many percent, under each seed."""
    return [{"a": value, "b": 3 * value} for value in values]


CLEAR = {"low": macro(50, 51, 52), "high": macro(70, 71, 73), "middle": macro(60, 61, 64)}


def test_neighbors_are_compared_best_first(make_study):
    study = make_study(CLEAR)
    assert rank_methods(study) == ["high", "middle", "low"]
    values = {"high": [0.70, 0.71, 0.73], "middle": [0.60, 0.61, 0.64], "low": [0.50, 0.51, 0.52]}
    pairs = [("high", "middle"), ("middle", "low"), ("high", "low")]
    expected = [stats.ttest_rel(values[one], values[other]).pvalue for one, other in pairs]
    made = collect_claims(study)
    assert [made.between(*pair).p for pair in pairs] == pytest.approx(holm_correction(expected))
    assert [sentence.split(" by ")[0] for sentence in describe_ranking(study)] == [
        "high is above middle", "middle is above low",
    ]  # fmt: skip


def test_an_order_that_is_not_significant_is_no_claim(make_study, undrawn):
    study = make_study({"fedavg": macro(60, 62, 64), "fedbn": macro(61, 65, 63)})
    support = f"95% interval {MINUS}3.97 to +5.97 over 3 seeds, p 0.478"
    said = f"fedbn is not significantly different from fedavg: difference +1.00 points ({support})."
    assert describe_ranking(study) == [said]
    page = render_page(study)
    row = f"fedbn {MINUS} fedavg|not significantly different|+1.00|{MINUS}3.97 to +5.97|0.478|3|"
    assert row in re.sub(r"(<[^>]*>)+", "|", page)
    assert "</strong> percent, not significantly different from fedavg." in page


def test_the_headline_says_what_the_best_is_told_apart_from(make_study, undrawn):
    assert "</strong> percent, significantly different from every other method, on " in render_page(make_study(CLEAR))
    few = make_study({name: runs[:2] for name, runs in CLEAR.items()})
    assert "</strong> percent, too few seeds for a significance test, 3 at least." in render_page(few)


def test_a_correction_can_take_an_order_away(make_study):
    pair = {"one": macro(60, 61, 62), "two": macro(65, 67, 70)}
    alone = collect_claims(make_study(pair)).between("two", "one")
    assert alone.is_significant
    crowd = {f"method {number}": macro(20 + number, 23 - number, 20) for number in range(3)}
    among = collect_claims(make_study({**pair, **crowd})).between("two", "one")
    assert (among.mean, among.error, among.comparisons) == (alone.mean, alone.error, 10)
    assert alone.p < 0.05 < among.p
    assert not among.is_significant
    assert among.low < 0


def test_of_many_orders_those_that_are_not_significant_are_named(make_study):
    noise = [(0, 1, 0, 1, 1), (1, 0, 0, 1, 0)]
    steps = {f"step {n}": macro(*(20 + 8 * n + more for more in noise[n % 2])) for n in range(8)}
    study = make_study({**steps, "near": macro(77, 76, 76, 77, 77)}, rounds=1)
    *named, last = describe_ranking(study)
    assert len(named) == 1
    assert all("not significantly different" in sentence for sentence in named)
    assert last == (
        "Significantly different on these test samples, but not on new samples of these clients: 7 pairs of neighbors "
        "by macro accuracy."
    )


@pytest.mark.parametrize(("seeds", "told"), [(1, "one seed is"), (2, "2 seeds are")])
def test_one_or_two_seeds_tell_no_order(seeds, told, make_study):
    study = make_study({name: runs[:seeds] for name, runs in CLEAR.items()})
    assert describe_ranking(study) == [
        f"Do not claim an order of these methods: {told} too few. Use --seeds 5 for intervals."
    ]


def test_a_pair_that_shares_too_few_seeds_is_no_claim(make_study):
    study = make_study(CLEAR, keep=lambda row: (row["method"], row["seed"]) != ("low", 2))
    first, second = describe_ranking(study)
    assert second == "middle is 10.00 points above low over 2 seeds: too few for a significance test."
    assert "corrected" not in first  # nothing else could be tested


def test_methods_are_ordered_over_the_clients_that_all_have_and_those_not_measured_have_no_place(make_study):
    study = make_study(CLEAR, keep=lambda row: (row["method"], row["client"]) != ("middle", "a"))
    assert rank_methods(study) == ["high", "middle", "low"]
    assert not describe_ranking(make_study(CLEAR, keep=lambda row: row["method"] == "high"))
    assert not describe_ranking(make_study({"fedbn": CLEAR["low"]}))


def test_an_order_that_common_seeds_turn_is_said_as_they_have_it(make_study):
    study = make_study(
        {"a": macro(50, 50, 50, 90), "b": macro(52, 52, 53, 53)},
        keep=lambda row: (row["method"], row["seed"]) != ("b", 3),
    )
    assert rank_methods(study) == ["a", "b"]
    assert describe_ranking(study)[0].startswith("b is above a by 2.33 points on these test samples, but")
