"""The benchmark of advice: regrets are those of the advised method against the benchmark's records."""

import sys
from pathlib import Path

import pandas as pd
import pytest


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import advise

    yield advise
    for name in ("advise", "ranking", "methods", "federations"):
        sys.modules.pop(name, None)


def test_regret_is_of_the_best_on_test_data_and_fair_regret_of_the_best_on_validation_data(benchmark):
    tested = pd.Series({"fedavg": 60.0, "fedbn": 70.0, "gn": 72.0, "fedwon": float("nan")})
    validated = pd.Series({"fedavg": 61.0, "fedbn": 75.0, "gn": 65.0, "fedwon": 90.0})
    row, lost = benchmark.compare(("tuned(lr=0.3)+silobn", 71.0), tested, validated)
    assert (row["best on validation"], row["best on test data"]) == ("fedbn", "gn")
    assert (row["fair"], row["regret"]) == (-1.0, 1.0)
    assert lost.to_dict() == {"fedavg": 10.0, "fedbn": 0.0, "gn": -2.0}


def test_a_setting_is_judged_by_its_own_validation_data(benchmark):
    known = {"federation": "digits", "left_out": "", "rounds": 20, "method": "fedavg", "momentum": 0.0, "own": "{}"}
    rows = [
        {"rate": 0.1, "measured": "search", "client": "a", "value": 50.0},
        {"rate": 0.1, "measured": "search", "client": "b", "value": 60.0},
        {"rate": 0.3, "measured": "search", "client": "a", "value": 90.0},
        {"rate": 0.1, "measured": "as trained", "client": "a", "value": 10.0},
        {"rate": 0.1, "measured": "as trained", "client": "b", "value": 10.0},
    ]
    records = pd.DataFrame([{**known, **row} for row in rows])
    assert benchmark.find_validated(records, "digits", 20).to_dict() == {"fedavg": 55.0}
