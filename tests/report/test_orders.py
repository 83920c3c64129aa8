"""Which orders of methods may be claimed: neighbors by their macro mean, paired over seeds, corrected by Holm."""

import pytest
from scipy import stats

from fedshift.report.orders import order_sentences, orders
from fedshift.report.page import render_page

MINUS = "\N{MINUS SIGN}"


def macro(*values):
    """Hits whose macro accuracy is so many percent, under each seed."""
    return [{"a": value, "b": 3 * value} for value in values]


CLEAR = {"low": macro(50, 51, 52), "high": macro(70, 71, 73), "middle": macro(60, 61, 64)}


def test_neighbors_are_compared_best_first(make_study):
    high, low = orders(make_study(CLEAR))
    assert [(each.better, each.worse) for each in (high, low)] == [("high", "middle"), ("middle", "low")]
    expected = [
        stats.ttest_rel([0.70, 0.71, 0.73], [0.60, 0.61, 0.64]).pvalue,
        stats.ttest_rel([0.60, 0.61, 0.64], [0.50, 0.51, 0.52]).pvalue,
    ]
    assert [high.found.p, low.found.p] == pytest.approx(expected)
    assert [high.p, low.p] == pytest.approx([2 * min(expected), max(2 * min(expected), max(expected))])
    assert high.significant
    assert low.significant


def test_an_order_that_is_not_significant_is_warned_of(make_study):
    study = make_study({"fedavg": macro(60, 62, 64), "fedbn": macro(61, 65, 63)})
    assert order_sentences(study) == [
        f"fedbn is 1.00 points above fedavg, [{MINUS}3.97, +5.97] over 3 seeds: not significant, do not claim this "
        "order (p 0.478)."
    ]
    assert order_sentences(study)[0] in render_page(study).replace("&#39;", "'")


def test_several_orders_are_corrected_for_their_number(make_study):
    said = order_sentences(make_study({**CLEAR, "odd": macro(50, 49, 54)}))
    assert said[0] == (
        "high is 9.67 points above middle, [+8.23, +11.10] over 3 seeds: significant (p 0.004, corrected for 3 orders)."
    )
    assert len(said) == 3
    assert "do not claim this order" in said[2]


def test_a_correction_can_take_an_order_away(make_study):
    pair = {"one": macro(60, 61, 62), "two": macro(65, 67, 70)}
    alone = orders(make_study(pair))[0]
    assert alone.significant
    crowd = {f"method {number}": macro(20 + number, 23 - number, 20) for number in range(3)}
    among = {(each.better, each.worse): each for each in orders(make_study({**pair, **crowd}))}["two", "one"]
    assert among.found == alone.found
    assert alone.p < 0.05 < among.p
    assert not among.significant


def test_of_many_orders_those_that_are_not_significant_are_named(make_study):
    steps = {f"step {number}": macro(*(50 + 5 * number + noise for noise in (0, 1, number % 2))) for number in range(8)}
    close = {"near": macro(85, 84, 86)}
    said = order_sentences(make_study({**steps, **close}, rounds=1))
    named = [each for each in orders(make_study({**steps, **close}, rounds=1)) if not each.significant]
    assert len(named) < 8
    assert said[:-1] == [sentence for sentence in said if "do not claim" in sentence]
    assert len(said) == len(named) + 1
    assert said[-1] == f"Significant: the other {8 - len(named)} orders of neighbors by macro accuracy."


@pytest.mark.parametrize(("seeds", "told"), [(1, "one seed says"), (2, "2 seeds say")])
def test_one_or_two_seeds_tell_no_order(seeds, told, make_study):
    study = make_study({name: runs[:seeds] for name, runs in CLEAR.items()})
    assert order_sentences(study) == [
        f"Claim no order of these methods: {told} too little. --seeds 5 gives intervals that can tell."
    ]


def test_a_pair_that_shares_too_few_seeds_is_warned_of(make_study):
    study = make_study(CLEAR, keep=lambda row: (row["method"], row["seed"]) != ("low", 2))
    assert (
        order_sentences(study)[1] == "middle is 10.00 points above low over 2 seeds: too few, do not claim this order."
    )
    assert "corrected" not in order_sentences(study)[0].replace("corrected for 2 orders", "")


def test_methods_are_ordered_over_the_clients_that_all_have_and_those_not_measured_have_no_place(make_study):
    study = make_study(CLEAR, keep=lambda row: (row["method"], row["client"]) != ("middle", "a"))
    assert [(each.better, each.worse) for each in orders(study)] == [("high", "middle"), ("middle", "low")]
    assert not orders(make_study(CLEAR, keep=lambda row: row["method"] == "high"))
    assert not order_sentences(make_study({"fedbn": CLEAR["low"]}))


def test_an_order_that_common_seeds_turn_is_never_claimed(make_study):
    study = make_study(
        {"a": macro(50, 50, 50, 90), "b": macro(52, 52, 53, 53)},
        keep=lambda row: (row["method"], row["seed"]) != ("b", 3),
    )
    (order,) = orders(study)
    assert (order.better, order.significant) == ("a", False)
    assert f"a is {MINUS}2.33 points above b" in order_sentences(study)[0]
