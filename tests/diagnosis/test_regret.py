"""The benchmark of advice: a search made from records is the search itself, and luck does not make a best method."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fedshift
from fedshift.diagnosis import budget as planning
from fedshift.diagnosis.search import Candidate
from fedshift.experiments.python_settings import make_python_experiment


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import advise

    yield advise
    for name in ("advise", "methods", "federations"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_search_made_from_records_is_the_search_itself(benchmark, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "FINALISTS", 2)
    settings = {"rounds": 3, "batch_size": 8, "validation": 0.2}
    search = fedshift.advise(str(tiny_folder), methods="fedavg, fedbn", rates=[0.01, 0.1], **settings).search
    experiment = make_python_experiment({"data": str(tiny_folder), "methods": "fedavg", **settings})
    again = benchmark.replay(replace(search, results=()), benchmark.Trials(experiment, tmp_path))
    assert again.rungs == search.rungs
    assert again.results == search.results
    kept = (tmp_path / "trials.jsonl").read_text()
    benchmark.replay(replace(search, results=()), benchmark.Trials(experiment, tmp_path))
    assert (tmp_path / "trials.jsonl").read_text() == kept  # nothing was trained again


@pytest.mark.slow
def test_fair_regret_measures_on_one_half_what_was_best_on_the_other(benchmark):
    random = np.random.default_rng(5)
    names = [f"method{number}" for number in range(30)]
    candidates = {name: Candidate(name=f"{name}@0.1", method=name, rate=0.1) for name in ("fedavg", *names)}
    regrets, fair = [], []
    for _ in range(40):  # all methods are equally good, and each half of the test samples has its luck
        found = {
            each.name: {"validation": {"a": 0.5}, "halves": [{"a": value} for value in random.normal(0.5, 0.02, 2)]}
            for each in candidates.values()
        }
        trials = SimpleNamespace(finish=lambda each, found=found: found[each.name])
        advised = SimpleNamespace(best=candidates["method3"], expected=SimpleNamespace(mean=0.01))
        advised.candidates = tuple(candidates[name] for name in ("fedavg", *names[:7]))
        row, lost = benchmark.compare(advised, candidates, trials)
        regrets.append(row["regret"])
        fair.append(row["fair"])
        assert lost["method3"] == row["fair"]
        chosen = {name: found[each.name]["halves"] for name, each in candidates.items()}
        best = [max(chosen, key=lambda name, half=half: chosen[name][half]["a"]) for half in (0, 1)]
        wanted = [chosen[best[half]][1 - half]["a"] - chosen["method3"][1 - half]["a"] for half in (0, 1)]
        assert row["fair"] == pytest.approx(100 * np.mean(wanted))
    assert np.mean(regrets) > 2
    assert abs(np.mean(fair)) < 0.5
