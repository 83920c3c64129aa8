"""Reports on equal methods claim nothing, reports on others say how they differ, everywhere in the same words."""

import io
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy import stats

from fedshift.analysis.statistics import paired_tests
from fedshift.report import difference_table, page
from fedshift.report.claims import (
    Verdict,
    collect_claims,
    describe_leaders,
    describe_needed_seeds,
    describe_ranking,
    find_leader,
    grid_variance,
    sampling_variance,
    tabulate_pairs,
)
from fedshift.report.page import render_page
from fedshift.report.publication import publish_summary
from fedshift.report.sites import compare_clients
from fedshift.results.cases import Cases
from fedshift.utils.errors import UsageError

METHODS, SEEDS, REPORTS = 8, 5, 1000
CLIENTS = {
    "one of 20": [20],
    "five of 20 to 100": [20, 40, 60, 80, 100],
    "five of 20": [20] * 5,
    "five of 140": [140] * 5,
    "one of 1000": [1000],
}


def equal(sizes, right, seed, *, reports=REPORTS, seeds=SEEDS, methods=METHODS):
    """Hits of equal methods ``[reports, methods, seeds, clients]``: runs differ by chance."""
    random = np.random.default_rng(seed)
    odds = np.log(right / (1 - right)) + random.normal(0, 0.5, (reports, 1, seeds, len(sizes)))
    odds = odds + random.normal(0, 0.2, (reports, methods, seeds, 1))
    return random.binomial(sizes, 1 / (1 + np.exp(-odds)))


def said(study, folder, monkeypatch):
    """Everything that a report says: terminal, tables, and the end of the page's headline."""
    monkeypatch.setattr("fedshift.report.publication.save_figures", lambda *_: None)
    monkeypatch.setattr("fedshift.report.publication.make_report", partial(page.make_report, whole=False))
    monkeypatch.setattr("fedshift.report.publication.write_page", lambda *_: None)
    console = Console(file=io.StringIO(), width=200)
    publish_summary(study, folder, console)
    made = collect_claims(study)
    return console.file.getvalue() + describe_leaders(made, made.methods[:1], made.methods[1:]), made


def smallest_p(hits, sizes):
    """The smallest p-value of all pairs of methods in each report, corrected for their number."""
    macro = (hits / sizes).mean(axis=-1)
    grid = np.sqrt((2 / (12 * np.square(sizes, dtype=float))).sum()) / len(sizes)
    pairs = list(combinations(range(hits.shape[1]), 2))
    return len(pairs) * np.min([paired_tests(macro[:, i], macro[:, j], grid)[2] for i, j in pairs], axis=0)


@pytest.mark.parametrize("right", [0.5, 0.8, 0.97])
@pytest.mark.parametrize("sizes", CLIENTS.values(), ids=CLIENTS.keys())
def test_of_1000_reports_on_eight_equal_methods_at_most_5_percent_claim_anything(sizes, right):
    assert (smallest_p(equal(sizes, right, seed=1), sizes) < 0.05).mean() <= 0.05


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("methods", [2, 3])
def test_nor_do_those_on_few_methods_and_samples(methods, seeds):
    hits = equal([20], 0.9, seed=2, seeds=seeds, methods=methods)
    assert (smallest_p(hits, [20]) < 0.05).mean() <= 0.05


@pytest.mark.slow
def test_a_report_claims_exactly_where_its_smallest_p_does(make_counted, tmp_path, monkeypatch):
    """Of the simulated reports the nearest ones on both sides of the level, in all their sentences and tables."""
    sizes = CLIENTS["five of 20 to 100"]
    hits = equal(sizes, 0.8, seed=1)
    p = smallest_p(hits, sizes)
    order = np.argsort(p)
    first = int((p < 0.05).sum())
    assert first > 1
    for place in order[[0, first - 1, first, first + 1]]:
        study = make_counted(hits[place], sizes)
        text, made = said(study, tmp_path, monkeypatch)
        assert min(each.p for each in made.pairs.values()) == pytest.approx(min(1, p[place]))
        table = difference_table(study)
        tables = any(table["p"] < 0.05), any((table["low"] > 0) | (table["high"] < 0))
        claims = (" is above ", " is below ", "Significantly different", ", significantly different")
        claimed = [*(claim in text for claim in claims), *tables]
        if p[place] >= 0.05:
            assert not any(claimed)
        for one, other in made.pairs:
            found = made.between(one, other)
            assert found.is_significant == (found.low > 0 or found.high < 0)


def test_a_clear_difference_is_claimed_in_all_places(make_counted, tmp_path, monkeypatch):
    sizes = [100] * 5
    hits = equal(sizes, 0.6, seed=3, reports=1)[0]
    hits[0] = np.minimum(hits[0] + 30, 100)
    text, made = said(make_counted(hits, sizes), tmp_path, monkeypatch)
    assert all(made.between("method 0", f"method {other}").is_significant for other in range(1, METHODS))
    assert text.endswith("significantly different from every other method, on new samples of these clients too")
    assert text.count("is below method 0 by") == METHODS - 1
    assert text.count("on new samples of these clients too (95% interval") == METHODS - 1
    rest = [pair for pair in made.pairs if "method 0" not in pair]
    assert not any(made.pairs[pair].is_significant for pair in rest)


def test_differences_are_by_the_metric_and_of_the_model_that_are_asked_for(study):
    accuracy, loss = difference_table(study), difference_table(study, metric="loss")
    assert accuracy.loc["fedbn", "difference"] == pytest.approx(0.06)
    assert loss.loc["fedbn", "difference"] == pytest.approx(-0.06)  # mean losses are 1 - accuracy
    assert difference_table(study, model="global").empty
    assert difference_table(study, level=0.5).loc["fedbn", "low"] > accuracy.loc["fedbn", "low"]


def test_equal_differences_of_one_sample_are_no_claim(make_counted, tmp_path, monkeypatch):
    """One more of 20 right under every seed: a spread of zero, and nothing that 20 samples can tell."""
    text, made = said(make_counted(np.array([[[15]] * 5, [[16]] * 5]), [20]), tmp_path, monkeypatch)
    (found,) = made.pairs.values()
    assert found.high > found.low
    assert found.p == pytest.approx(2 * stats.t.sf(np.sqrt(6), 4))
    assert "method 1 is not significantly different from method 0: difference +5.00 points (95% interval" in text


@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy"])
def test_sampling_variance_is_that_of_the_bootstrap(metric):
    hits, support = [62, 10, 0], [80, 20, 0]
    rows = pd.DataFrame({"hits": [hits], "support": [support], "samples": [100]})
    random = np.random.default_rng(0)
    if metric == "accuracy":
        drawn = random.binomial(100, 72.5 / 101, 100_000) / 100
    else:
        each = [random.binomial(n, (k + 0.5) / (n + 1), 100_000) / n for k, n in ((62, 80), (10, 20))]
        drawn = np.mean(each, axis=0)
    assert sampling_variance(rows, metric)[0] == pytest.approx(drawn.var(), rel=0.02)


@pytest.mark.parametrize(
    ("metric", "step"),
    [("accuracy", [1 / 100]), ("balanced_accuracy", [1 / 160, 1 / 40]), ("auc", [1 / 3200] * 2), ("loss", [0])],
)
def test_grid_variance_is_that_of_uniform_errors_of_one_sample(metric, step):
    rows = pd.DataFrame({"hits": [[62, 10, 0]], "support": [[80, 20, 0]]})
    assert grid_variance(rows, metric)[0] == pytest.approx(np.square(step).sum() / 12)


def test_the_interval_with_test_samples_by_hand(study):
    row = difference_table(study).loc["fedbn"]
    hits = {"fedavg": [(50, 240), (52, 246), (54, 252)], "fedbn": [(60, 240), (63, 249), (66, 258)]}
    p = {name: (np.array(runs) + 0.5) / [101, 301] for name, runs in hits.items()}
    variance = sum((share * (1 - share) / [100, 300]).sum(axis=1).mean() / 4 for share in p.values())
    half = np.hypot(row["difference"] - row["low"], stats.norm.ppf(0.975) * np.sqrt(variance))
    assert (row["test_low"], row["test_high"]) == pytest.approx((row["difference"] - half, row["difference"] + half))


def test_clients_that_share_test_samples_do_not_count_as_two_samples(make_counted):
    sizes, hits = [100] * 4, np.full((2, 3, 4), 50) + np.arange(3)[:, None]
    alone, shared, one = (
        make_counted(hits, sizes),
        make_counted(hits, sizes, same_test={f"client {c}": "client 0" for c in (1, 2, 3)}),
        make_counted(hits[:, :, :1], sizes[:1]),
    )
    claims = [collect_claims(study).fresh_between("method 1", "method 0") for study in (alone, shared, one)]
    variances = [claim.sampled.variance for claim in claims]
    assert variances[1] == pytest.approx(variances[2])
    assert variances[0] == pytest.approx(variances[2] / 4)


def classified(right, truth):
    return {
        "truth": np.asarray(truth, np.uint8),
        "right": np.asarray(right, bool),
        "loss": 1.0 * ~np.asarray(right, bool),
    }


def with_records(study, right_MSCN):
    """Return ``study`` with records of single samples, all of class 0; ``right``: arrays by method, seed and client."""
    records = {
        (f"method {m}", s): {
            (f"client {c}", "personal"): classified(r, np.zeros(len(r))) for c, r in enumerate(clients)
        }
        for m, seeds in enumerate(right_MSCN)
        for s, clients in enumerate(seeds)
    }
    found = {key: Cases(round=1, records=each) for key, each in records.items()}
    return replace(study, read_cases=lambda method, seed: found.get((method, seed)))


def test_a_difference_is_paired_by_sample_as_agresti_and_min_correct_mcnemars(make_counted):
    """Three seeds of equal results: 8 samples of 100 that only one has right, and 2 that only the other has."""
    ours, theirs = np.ones(100, bool), np.ones(100, bool)
    ours[:2], theirs[2:10] = False, False
    study = make_counted(np.array([[[98]] * 3, [[92]] * 3]), [100])
    paired = with_records(study, [[[ours]] * 3, [[theirs]] * 3])
    claim, unpaired = (collect_claims(each).fresh_between("method 0", "method 1").sampled for each in (paired, study))
    assert (claim.paired, unpaired.paired) == (True, False)
    assert claim.variance == pytest.approx((8 + 2 + 1 - (8 - 2) ** 2 / 102) / 102**2)
    assert unpaired.variance == pytest.approx(sum(p * (1 - p) / 100 for p in (98.5 / 101, 92.5 / 101)))
    assert set(difference_table(paired)["test_samples"]) == {"paired"}
    other = replace(paired, read_cases=lambda *run: replace(paired.read_cases(*run), round=9))  # of another round
    assert collect_claims(other).fresh_between("method 0", "method 1").sampled == unpaired


def test_seeds_share_test_samples_and_clients_may(make_counted):
    """The mean over seeds counts once for each sample, and clients with one test set once together."""
    random = np.random.default_rng(0)
    right = random.random((2, 3, 2, 50)) < 0.8
    sizes, hits = [50, 50], right.sum(axis=-1)
    shared = with_records(make_counted(hits, sizes, same_test={"client 1": "client 0"}), right)
    apart = with_records(make_counted(hits, sizes), right)
    gap = (right[0].astype(float) - right[1]).mean(axis=0)  # [client, sample]
    expected = {
        "apart": sum(((d**2).sum() + 1 - d.sum() ** 2 / 52) / 52**2 / 4 for d in gap),
        "shared": ((gap.mean(axis=0) ** 2).sum() + 1 - gap.mean(axis=0).sum() ** 2 / 52) / 52**2,
    }
    for name, study in (("apart", apart), ("shared", shared)):
        assert collect_claims(study).fresh_between("method 0", "method 1").sampled.variance == pytest.approx(
            expected[name]
        )


def test_what_holds_on_these_samples_alone_is_said_so_everywhere(study, tmp_path, monkeypatch):
    """The interval over seeds excludes 0, and the one with test samples does not."""
    text, made = said(study, tmp_path, monkeypatch)
    assert made.judge("fedbn", "fedavg") is Verdict.THESE
    assert "fedbn is above fedavg by 6.00 points on these test samples, but not on new samples of these clients" in text
    only = "significantly different from every other method on these test samples, but not from fedavg on new samples"
    assert describe_leaders(made, ["fedbn"], ["fedavg"]) == only
    assert find_leader(made) == ""
    assert [row[1].text for row in tabulate_pairs(study, made).rows] == ["on these samples"]
    loss = collect_claims(study, "loss")
    assert loss.judge("fedbn", "fedavg") is Verdict.UNTESTED
    assert describe_leaders(loss, ["fedbn"], ["fedavg"]).endswith("on these test samples; new samples were not tested")


def test_discordances_are_of_the_same_family(make_study):
    study = make_study({name: [{"a": 50, "b": 240}, {"a": 52, "b": 246}, {"a": 51, "b": 240}] for name in "xyz"})
    pooled = replace(study, methods={n: replace(fact, pooled=n == "z") for n, fact in study.methods.items()})
    assert {each.comparisons for each in collect_claims(study).pairs.values()} == {3}
    made = collect_claims(pooled)
    assert {each.comparisons for each in [*made.pairs.values(), *made.concordance.values()]} == {5}
    assert describe_ranking(pooled)[0].endswith("corrected for 5 comparisons).")


def test_few_seeds_say_how_many_a_difference_needs(make_study):
    """Differences of 5 and 15 points have a std of 7.07; three of 5, 5 and 6 points suffice, and one says nothing."""
    fedavg, level = {"a": 50, "b": 240}, {"a": 60, "b": 240}
    study = make_study({"fedavg": [fedavg, fedavg], "fedbn": [level, {"a": 80, "b": 240}]})
    (sentence,) = describe_needed_seeds(study, collect_claims(study))
    std = np.std([5, 15], ddof=1)
    power = [stats.nct.sf(stats.t.ppf(0.975, n - 1), n - 1, np.sqrt(n) * 5 / std) for n in range(3, 40)]
    needed = 3 + next(place for place, each in enumerate(power) if each >= 0.8)
    assert sentence.startswith(f"To claim a difference of 5 points you need about {needed} seeds")
    assert "varies by 7.07 points (std over 2 seeds)" in sentence
    for gains in ([10, 10, 12], [10]):
        study = make_study({"fedavg": [fedavg] * len(gains), "fedbn": [{"a": 50 + gain, "b": 240} for gain in gains]})
        assert describe_needed_seeds(study, collect_claims(study)) == []


def test_a_family_chosen_before_the_run_has_its_pairs_alone_everywhere(make_study, tmp_path, monkeypatch):
    right = {"fedavg": (240, 243, 240), "fedbn": (270, 275, 273), "fedprox": (240, 246, 246), "silobn": (279, 285, 286)}
    study = make_study({name: [{"a": hits // 3, "b": hits} for hits in runs] for name, runs in right.items()})
    family, whole = collect_claims(replace(study, compare_with="fedprox")), collect_claims(study)
    assert set(family.pairs) == {pair for pair in whole.pairs if "fedprox" in pair}
    assert {each.comparisons for each in (*family.pairs.values(), *family.fresh.values())} == {3}
    assert {each.comparisons for each in whole.pairs.values()} == {6}
    macro = {name: [(hits // 3 / 100 + hits / 300) / 2 for hits in runs] for name, runs in right.items()}
    grid = np.sqrt(2 / 12 * (1 / 100**2 + 1 / 300**2)) / 2
    alone = [paired_tests(macro[name], macro["fedprox"], grid)[2] for name in family.others]
    assert min(each.p for each in family.pairs.values()) == pytest.approx(3 * min(alone))
    assert family.judge("silobn", "fedavg") is Verdict.OUTSIDE
    assert not Verdict.OUTSIDE.holds
    assert find_leader(family) == ""
    told = "significantly different from fedprox, on new samples of these clients too; not compared with fedbn, fedavg"
    assert describe_leaders(family, ["silobn"], ["fedbn", "fedprox", "fedavg"]) == told
    assert describe_leaders(family, ["silobn"], ["fedbn"]) == "not compared with fedbn"
    study = replace(study, compare_with="fedprox")
    rows = [row[0].text for row in tabulate_pairs(study, family).rows]
    assert len(rows) == 3
    assert all("fedprox" in row for row in rows)
    (sentence,) = describe_ranking(study)
    assert sentence.startswith("The comparisons are those with fedprox, as chosen before the run (--compare-with)")
    assert list(difference_table(study).index) == ["fedavg", "fedbn", "silobn"]
    with pytest.raises(UsageError, match="baseline 'fedavg': this run was begun to compare pairs with fedprox alone"):
        difference_table(study, "fedavg")
    text, _ = said(study, tmp_path, monkeypatch)
    assert "nan" not in text.lower()
    assert "minus fedprox's" in text
    assert "minus fedavg's" not in text
    assert {each.reference for each in compare_clients(replace(study, compare_with="fedavg"))} == {"fedavg"}
    assert compare_clients(study) == ()


@pytest.mark.slow
def test_the_page_names_the_family_that_was_chosen_and_has_no_other_pair(make_study):
    runs = [{"a": 50, "b": 240}, {"a": 52, "b": 246}, {"a": 51, "b": 240}]
    page = render_page(make_study(dict.fromkeys(("fedavg", "fedprox", "silobn"), runs), compare_with="fedprox"))
    assert "fedprox \N{MINUS SIGN} silobn" in page
    assert "the pairs with fedprox, as chosen before the run; other pairs were not compared" in page
    assert "fedavg \N{MINUS SIGN} silobn" not in page
