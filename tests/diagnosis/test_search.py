"""``fedshift advise``: the plan within a budget, the rungs, the expected gain, and a search that was stopped."""

import os
import signal
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch

import fedshift
from fedshift.cli import advise as command
from fedshift.core.optimizer import SGD, AdamW, as_optimizer
from fedshift.diagnosis import budget as planning
from fedshift.diagnosis import diagnose
from fedshift.diagnosis import search as searching
from fedshift.diagnosis.budget import Cost, fit_budget, plan_rungs, predict_seconds
from fedshift.diagnosis.search import Candidate, Search, parse_rates, read_search
from fedshift.diagnosis.search_report import describe_search, format_search, tabulate_search
from fedshift.diagnosis.shift_report import choose_methods
from fedshift.experiments import duration
from fedshift.experiments.python_settings import make_python_experiment
from fedshift.results.schema import read_rows
from fedshift.results.trial_records import load_facts
from fedshift.utils.errors import FedshiftError, UsageError

CLIENTS = ("ann", "bob", "cid", "dan")


@pytest.fixture
def quick(monkeypatch):
    """A step of every method takes a millisecond, as a machine may measure it, and few permutations are drawn."""
    monkeypatch.setattr(duration, "time_rounds", lambda *_, **__: {"sequential": 0.001})
    monkeypatch.setattr(searching, "diagnose", partial(diagnose, permutations=99))


def made(values, rungs=None, baseline="fedavg", **changes):
    """A search whose rungs were run with these ``values``: macro of each client by (method, rate)."""
    candidates = tuple(Candidate(name=f"{method}@{rate:g}", method=method, rate=rate) for method, rate in values[0])
    results = tuple(
        {f"{m}@{r:g}": dict(zip(CLIENTS, row, strict=False)) for (m, r), row in rung.items()} for rung in values
    )
    methods = {each.method for each in candidates}
    given = {
        "federation": "made", "metric": "accuracy", "seeds": 1, "baseline": baseline,
        "reasons": {each.method: f"because of {each.method}" for each in candidates}, "refused": {}, "findings": (),
        "candidates": candidates, "rungs": rungs or plan_rungs(len(candidates), 9, len(methods)),
        "seconds": 60.0, "asked": 9, "budget": 10.0, "results": results,
    }  # fmt: skip
    return Search(**given | changes)


@pytest.mark.parametrize(
    ("candidates", "methods", "rounds"),
    [(30, 6, 20), (40, 8, 2), (9, 3, 9), (8, 2, 7), (2, 2, 1), (64, 30, 200), (20, 20, 30)],
)
def test_rungs_keep_a_third_and_the_last_trains_for_all_rounds(candidates, methods, rounds):
    rungs = plan_rungs(candidates, rounds, methods)
    assert (rungs[0].candidates, rungs[-1].rounds) == (candidates, rounds)
    for one, other in pairwise(rungs):
        assert one.rounds < other.rounds <= 3 * one.rounds
        assert other.candidates < one.candidates
    if rounds >= 9:
        assert rungs[-1].candidates <= 8
    if len(rungs) > 1 and methods < candidates:
        assert rungs[1].candidates >= methods or rounds < 3


def test_a_smaller_budget_takes_rounds_then_rates_then_methods_and_is_kept():
    costs, rates = [Cost(round=1, evaluation=0.5), Cost(round=3, evaluation=2)], (0.1, 0.003, 0.01, 0.3, 0.03)
    rungs = plan_rungs(10, 9, 2)
    assert [(rung.candidates, rung.rounds) for rung in rungs] == [(10, 3), (4, 9)]
    first = 5 * (3 * 1 + 0.5) + 5 * (3 * 3 + 2)
    rest = 2 * (6 * 3 + 2) + 2 * (6 * 1 + 0.5)  # at most two rates of a method
    assert predict_seconds(rungs, costs, 5) == pytest.approx(first + rest)
    costs, size = {name: Cost(round=1.0, evaluation=0.1) for name in ("fedavg", "fedbn", "gn", "single")}, 20
    assert fit_budget(costs, rates, 30, 1e9) == (list(costs), sorted(rates), 30)
    for seconds in (900, 150, 60, 30, 9, 3):
        methods, left, rounds = fit_budget(costs, rates, 30, seconds)
        rungs = plan_rungs(len(methods) * len(left), rounds, len(methods))
        assert predict_seconds(rungs, [costs[name] for name in methods], len(left)) <= seconds
        assert methods == list(costs)[: len(methods)]
        assert (0.03 in left, len(methods) * len(left) <= size) == (True, True)
        size = len(methods) * len(left)
    assert (len(methods), left, rounds) == (2, [0.03], 1)
    with pytest.raises(UsageError, match=r"budget=0.01 minutes: one round of fedavg and fedbn .* about 0.037 min"):
        fit_budget(costs, rates, 30, 0.6)


def test_the_best_go_on_at_two_rates_of_a_method_at_most_and_the_baseline_always():
    rng = np.random.default_rng(3)
    level, rates = {"fedavg": 0.2, "fedbn": 0.7, "gn": 0.4}, (0.003, 0.01, 0.03, 0.1, 0.3)
    first = {(m, r): (level[m] + rng.uniform(0, 0.1, 4)).tolist() for m in level for r in rates}
    found = made([first])
    assert [(rung.candidates, rung.rounds) for rung in found.rungs] == [(15, 3), (5, 9)]
    order = sorted(first, key=lambda key: -np.mean(first[key]))
    by_method = {m: [key for key in order if key[0] == m] for m in level}
    wanted = {*by_method["fedbn"][:2], *by_method["gn"][:2], by_method["fedavg"][0]}
    assert {(each.method, each.rate) for each in found.members(1)} == wanted
    lower = replace(found, metric="rmse")
    assert lower.members(1)[0].method == "fedavg"
    assert lower.rank(0)[0].name == "{}@{:g}".format(*order[-1])


def test_a_choice_that_loses_where_it_had_no_part_gives_way_to_the_baseline():
    rows = {
        ("fedavg", 0.1): [0.60, 0.60, 0.60, 0.60], ("fedbn", 0.1): [0.99, 0.50, 0.50, 0.50],
        ("gn", 0.1): [0.40, 0.70, 0.65, 0.62],
    }  # fmt: skip
    found = made([rows], rungs=plan_rungs(3, 9, 3))
    assert found.rank(-1)[0].name == "fedbn@0.1"
    assert found.expected.mean == pytest.approx((-0.20 - 0.10 - 0.10 - 0.10) / 4)
    assert found.best.name == "fedavg@0.1"
    said = " ".join(describe_search(found, "--data made"))
    assert "Advised: fedavg at learning rate 0.1. fedbn at learning rate 0.1 is better on validation data" in said
    assert "loses at the others" in said


def test_the_expected_gain_is_measured_at_each_client_for_what_is_best_at_the_others():
    rows = {
        ("fedavg", 0.1): [0.50, 0.60, 0.55, 0.52], ("fedavg", 0.3): [0.58, 0.50, 0.50, 0.50],
        ("fedbn", 0.1): [0.60, 0.62, 0.70, 0.60], ("gn", 0.1): [0.90, 0.55, 0.56, 0.53],
    }  # fmt: skip
    found = made([rows], rungs=plan_rungs(4, 9, 3))
    gains = []
    for place in range(4):
        others = {key: np.mean([v for n, v in enumerate(row) if n != place]) for key, row in rows.items()}
        chosen = max(others, key=others.get)
        base = max((key for key in others if key[0] == "fedavg"), key=others.get)
        gains.append(rows[chosen][place] - rows[base][place])
    assert found.best.name == "gn@0.1"  # by one client, which cannot vouch for itself
    assert found.expected.mean == pytest.approx(np.mean(gains))
    half = 3.182446 * np.std(gains, ddof=1) / 2  # Student's t with three degrees of freedom
    assert (found.expected.low, found.expected.high) == pytest.approx((np.mean(gains) - half, np.mean(gains) + half))
    assert found.gain(found.best, -1).mean == pytest.approx(np.mean(np.subtract(rows["gn", 0.1], rows["fedavg", 0.1])))
    said = " ".join(describe_search(found, "--data made"))
    assert "Advised: gn at learning rate 0.1" in said
    assert "fedshift compare --data made --methods fedavg@0.1,gn@0.1 --rounds 9" in said


def test_advice_is_compared_with_training_alone_which_is_advised_where_nothing_is_gained():
    rows = {
        ("fedavg", 0.1): [0.50, 0.50, 0.50, 0.50], ("fedbabu", 0.1): [0.99, 0.58, 0.58, 0.59],
        ("single", 0.1): [0.70, 0.65, 0.65, 0.66],
    }  # fmt: skip
    found = made([rows], rungs=plan_rungs(3, 9, 3))
    assert found.rank(-1)[0].method == "fedbabu"  # by one client
    assert found.expected_over("single").mean == pytest.approx((0 - 0.07 - 0.07 - 0.07) / 4)
    assert found.best.method == "single"
    said = " ".join(describe_search(found, "--data made"))
    assert (
        "no better than local training at clients whose data did not choose it, and local training is simpler" in said
    )
    better = made([rows | {("fedbabu", 0.1): [0.80, 0.79, 0.81, 0.80]}], rungs=plan_rungs(3, 9, 3))
    said = " ".join(describe_search(better, "--data made"))
    gaps = np.subtract([0.80, 0.79, 0.81, 0.80], rows["single", 0.1])
    half = 3.182446 * np.std(gaps, ddof=1) / 2
    low, high = 100 * (gaps.mean() - half), 100 * (gaps.mean() + half)
    assert f"+{100 * gaps.mean():.2f} points, 95 % interval +{low:.2f} to +{high:.2f} over 4 clients (paired)." in said
    assert "--methods fedavg@0.1,single@0.1,fedbabu@0.1 " in said


@pytest.mark.slow
def test_a_search_ends_with_its_budget(cli, small, tiny_folder, tmp_path):
    assert cli("advise", "--data", tiny_folder, *WORDS, "--out", "found").code == 0
    search = replace(read_search(tmp_path / "found"), results=(), budget=1e-9, spent=0.0)
    experiment = searching.hold_out(
        lambda held: make_python_experiment({"data": str(tiny_folder), "methods": "fedavg", "rounds": 3, **held})
    )
    ended = searching.continue_search(experiment, search, tmp_path / "late", jobs=1)
    assert (ended.overtime, ended.results) == (True, ())
    said = " ".join(describe_search(ended))
    assert "the budget of 1e-09 minutes is used up: 0 of 2 rungs have ended; the next one trains 4 candidates" in said


def test_diverged_candidates_and_unmeasured_clients_are_left_out_and_said():
    rows = {
        ("fedavg", 0.1): [0.5, 0.6, None, 0.5], ("fedavg", 0.3): [None] * 4,
        ("fedbn", 0.1): [0.6, 0.7, 0.9, 0.5], ("gn", 0.1): [None] * 4,
    }  # fmt: skip
    found = made([rows], rungs=plan_rungs(4, 9, 3))
    assert list(found.table(0).index) == ["ann", "bob", "dan"]
    assert [each.name for each in found.rank(0)] == ["fedbn@0.1", "fedavg@0.1"]
    table = tabulate_search(found)
    assert list(table.index) == ["fedbn", "fedavg", "gn"]
    assert table.loc["fedbn", "gain"] == pytest.approx(0.2 / 3)
    assert [row[2].text for row in format_search(found).rows] == ["9", "9", "diverged"]
    with pytest.raises(FedshiftError, match="fedavg diverged at every learning rate"):
        made([rows | {("fedavg", 0.1): [None] * 4}], rungs=plan_rungs(4, 9, 3)).find_baseline(0)
    with pytest.raises(FedshiftError, match="no client has a validation accuracy for every candidate after 9"):
        made([rows | {("fedbn", 0.1): [None, None, 0.9, None]}], rungs=plan_rungs(4, 9, 3)).rank(0)


@pytest.mark.parametrize(("rates", "optimizer", "expected"), [
    ("0.1, 1e-2", SGD(lr=1), (0.1, 0.01)), ("auto", SGD(lr=1), searching.RATES),
    ("auto", AdamW(lr=1), searching.ADAMW_RATES),
    ("auto", as_optimizer(torch.optim.RMSprop, lr=1.0), (0.001, 0.003, 0.01, 0.03, 0.1)),
    ("auto", as_optimizer(partial(torch.optim.SGD, maximize=True), lr=1.0), searching.RATES),
    *((wrong, SGD(lr=1), "rates=") for wrong in ("", "0.1,0.1", "fast", "-1", "nan", [0.0], 3)),
])  # fmt: skip
def test_learning_rates_are_read_and_refused(rates, optimizer, expected):
    with pytest.raises(UsageError, match=expected) if isinstance(expected, str) else nullcontext():
        assert parse_rates(rates, optimizer) == expected


WORDS = ("--methods", "fedavg,fedbn", "--rates", "0.01,0.1", "--rounds", 3, "--batch-size", 8)


@pytest.fixture
def small(quick, unpublished, monkeypatch):
    """Two rungs for four candidates, and no pages."""
    monkeypatch.setattr(planning, "FINALISTS", 2)


@pytest.mark.slow
def test_a_search_trains_as_a_comparison_does_and_python_finds_the_same(cli, small, tiny_folder, tmp_path):
    outcome = cli("advise", "--data", tiny_folder, *WORDS, "--out", "found")
    assert (outcome.code, outcome.err) == (0, "")
    found = read_search(tmp_path / "found")
    assert [(rung.candidates, rung.rounds) for rung in found.rungs] == [(4, 1), (2, 3)]
    assert f"Advised: {found.best.method} at learning rate {found.best.rate:g}, the best" in outcome.out
    assert "Testing all sites ..." in outcome.out
    files = (tmp_path / "found" / "search" / "trials").glob("*/*.jsonl")
    rows = [row for path in files for row in read_rows(path)]
    assert {row["split"] for row in rows if "split" in row} == {"train", "validation"}
    assert "Expected gain over fedavg:" in outcome.out
    assert "Searched: 4 candidates in rungs, 4 for 1, 2 for 3 rounds, predicted to take" in outcome.out
    methods = ",".join(each.name for each in found.members(1))
    same = ("--rounds", 3, "--batch-size", 8, "--validation", 0.2, "--evaluate-every", 1)
    assert cli("compare", "--data", tiny_folder, "--methods", methods, *same, "--out", "plain").code == 0
    for each in found.members(1):
        one, other = (
            tmp_path / run / "trials" / f"{each.method}+tuned-lr={each.rate:g}-seed0" / "checkpoint.safetensors"
            for run in ("found/search", "plain")
        )
        assert one.read_bytes() == other.read_bytes()
    run = fedshift.read_run(tmp_path / "plain")
    table = run.table(split="validation")
    for each in found.members(1):
        values = found.results[1][each.name]
        assert list(values.values()) == table[each.name]["mean"][list(values)].tolist()
    advice = fedshift.advise(
        str(tiny_folder), methods=["fedavg", fedshift.fedbn()], rates=[0.01, 0.1], rounds=3, batch_size=8
    )
    assert advice.search == replace(found, federation=advice.search.federation)
    assert advice.method == found.best.name
    assert str(advice).splitlines()[: len(found.findings)] == list(found.findings)
    pd.testing.assert_frame_equal(advice.table(), tabulate_search(found))
    made = {file.name: file.read_bytes() for file in (tmp_path / "found" / "tables").iterdir()}
    assert set(made) == {"advice.md", "advice.tex", "advice.csv"}
    again = cli("report", "found")
    assert (again.code, again.out.splitlines()[-1]) == (0, outcome.out.splitlines()[-1])


@pytest.mark.slow
def test_stopped_by_ctrl_c_a_search_goes_on_where_it_was(
    cli, small, tiny_folder, tmp_path, monkeypatch, assert_same, Listener
):
    told = ("advise", "--data", tiny_folder, *WORDS)
    assert cli(*told, "--out", "whole").code == 0
    heard = []

    def interrupt(done):
        heard.append(done.round)
        if len(heard) in (2, 5):  # within the first rung, and the second
            os.kill(os.getpid(), signal.SIGINT)

    @contextmanager
    def listening(console, own=()):
        yield Listener(interrupt)

    monkeypatch.setattr(command, "show_progress", listening)
    first = cli(*told, "--out", "stopped", "--jobs", 1)
    assert (first.code, "PARTIAL: the search was stopped: 0 of 2 rungs have ended" in first.out) == (130, True)
    assert "continue with: fedshift advise --resume stopped" in first.out
    second = cli("advise", "--resume", "stopped", "--jobs", 1)
    assert (second.code, "PARTIAL: the search was stopped: 1 of 2 rungs have ended" in second.out) == (130, True)
    assert cli("advise", "--resume", "stopped", "--jobs", 1).code == 0
    assert len(heard) == 4 + 2 * len(read_search(tmp_path / "whole").members(1))
    assert read_search(tmp_path / "stopped") == read_search(tmp_path / "whole")
    assert_same(tmp_path / "stopped" / "search", tmp_path / "whole" / "search")
    other = cli("advise", "--resume", "stopped", "--rounds", 9)
    assert (other.code, "stopped was begun with rounds=3" in other.err) == (2, True)
    facts = load_facts(next((tmp_path / "whole" / "search" / "trials").glob("*/checkpoint.safetensors")))
    assert facts["round"] in (1, 3)


def refuse_fedbn(_, method, __):
    if method.name == "fedbn":
        raise UsageError("matches no entry")
    return Cost(round=1.0, evaluation=0.1)


def test_candidates_follow_the_diagnosis_the_batch_size_and_the_network(quick, tiny, monkeypatch):
    monkeypatch.setattr(searching, "measure_cost", refuse_fedbn)
    found = diagnose(tiny, permutations=99)
    few, many = (searching.list_candidates(found, size) for size in (2, 16))
    assert list(few)[:3] == ["fedavg", "gn", "fedwon"]
    assert "batches of 2 samples" in few["gn"]
    advised = choose_methods(found)
    assert list(many)[: len(advised)] == list(advised)
    assert {"single", "fedbn", "gn"} <= {*many}
    experiment = make_python_experiment({"data": tiny, "methods": "fedavg", "rounds": 9, "validation": 0.2})
    short, whole = (searching.begin_search(experiment, None, (0.01, 0.1), minutes) for minutes in (0.2, 1000.0))
    assert short.refused["fedbn"] == "matches no entry"
    assert set(short.reasons) == {"fedavg", "single", "gn"}
    assert set(whole.reasons) - set(short.reasons) <= set(short.dropped)
    assert len(whole.reasons) <= searching.MOST_METHODS
    said = " ".join(describe_search(short))
    assert f"Not tried, because the budget does not allow them: {', '.join(short.dropped)}." in said


@pytest.mark.slow
def test_what_cannot_be_searched_is_refused_before_anything_starts(cli, quick, tiny_folder, tmp_path):
    for words, said in (
        (("--methods", "fedavg"), "a search needs two"),
        (("--methods", "fedavg,fixbn"), "freezes after a share of all rounds"),
        (("--methods", "fedavg,fedbn", "--budget", 1e-9), "budget=1e-09 minutes: one round of fedavg and fedbn"),
        (("--domains", "ann"), "has only one client"),
        (("--patience", 2, "--validation", 0.2), "patience ends trials early"),
    ):  # fmt: skip
        outcome = cli("advise", "--data", tiny_folder, "--out", "none", *words)
        assert (outcome.code, said in outcome.err) == (2, True), outcome.err
        assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="resume=True: say which search"):
        fedshift.advise(str(tiny_folder), resume=True)


def test_a_function_that_a_searchs_file_names_is_not_called():
    foreign = searching.Candidate(name="x", method="os:system(command='touch called')", rate=None)
    with pytest.raises(UsageError, match=r"method 'os:system' is a function of this machine that nobody allowed"):
        searching._make_method(foreign, {})
    assert searching._make_method(searching.Candidate(name="x", method="fedbn", rate=None), {}).name == "fedbn"
