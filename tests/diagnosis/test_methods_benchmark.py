"""The benchmark of methods: the rate is chosen on validation data, results are means over seeds, nothing runs twice."""

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedshift
from fedshift.diagnosis.search import Candidate


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import methods

    yield methods
    for name in ("methods", "federations"):
        sys.modules.pop(name, None)


def candidates(*methods, rates=(0.01, 0.1)):
    return [Candidate(name=f"{name}+tuned(lr={rate})", method=name, rate=rate) for name in methods for rate in rates]


@pytest.mark.slow
def test_a_method_has_its_best_rate_and_all_seeds_and_one_that_comes_later_is_trained_alone(
    benchmark, tmp_path, monkeypatch
):
    data = fedshift.digits().limit_samples(20).select_clients(("pen", "print"))
    known = candidates("fedavg", "fedbn")
    monkeypatch.setattr(benchmark, "list_candidates", lambda *_: known)
    benchmark.measure(data, 1, tmp_path, (0.01, 0.1), seeds=3)
    (place,) = tmp_path.iterdir()
    first, more = (fedshift.read_run(place / name) for name in ("rates", "seeds"))
    assert (first.summary.seeds, more.summary.seeds) == ((0,), (1, 2))
    validated = first.table(split="validation").loc["macro"].unstack()["mean"]
    found = benchmark.read_folder(tmp_path)
    for name, row in found.iterrows():
        rate = max((0.1, 0.01), key=lambda rate: (validated[f"{name}+tuned(lr={rate})"], rate == 0.01))
        chosen = f"{name}+tuned(lr={rate})"
        one, two = (run.table().loc["macro", (chosen, "mean")] for run in (first, more))
        assert row["test"] == pytest.approx(100 * (one + 2 * two) / 3)
        assert row["worst"] <= row["test"]
        assert row["rate"] == rate
    known += candidates("single")
    trained = []
    train = benchmark.train
    monkeypatch.setattr(benchmark, "train", lambda each, *rest: trained.append(each) or train(each, *rest))
    benchmark.measure(data, 1, tmp_path, (0.01, 0.1), seeds=1)
    assert [{each.method for each in part} for part in trained] == [{"single"}]
    assert set(benchmark.read_folder(tmp_path).index) == {"fedavg", "fedbn", "single"}
    benchmark.measure(data, 1, tmp_path, (0.01, 0.1), seeds=1)
    assert len(trained) == 1


def test_tables_rank_what_has_all_federations_and_mark_what_is_not_chance(benchmark, capsys):
    random = np.random.default_rng(0)
    results = {}
    for number in range(8):
        base = random.uniform(50, 90)
        test = {"fedavg": base, "better": base + 5 + random.normal(0, 0.5), "noise": base + random.normal(0, 5)}
        test |= {"fedbn": base + 1 + random.normal(0, 5)} | ({"late": base + 3} if number > 3 else {})
        results[f"federation{number}"] = pd.DataFrame(
            {"test": test, "worst": {name: value - 10 for name, value in test.items()}}
        ).assign(down=100.0, up=50.0, seconds=1.0, rate=benchmark.RATES[-1])
    benchmark.print_tables(results)
    first, second, third = capsys.readouterr().out.strip().split("\n\n")
    cells = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in first.splitlines()[2:]}
    assert {name for name, row in cells.items() if row[0].endswith("*")} == {"better"}
    assert "late" not in cells
    assert cells["fedavg"][0].startswith("+0.0")
    mean = np.mean([each.loc["better", "test"] - each.loc["fedavg", "test"] for each in results.values()])
    assert cells["better"][0].startswith(f"{mean:+.1f} (")
    assert cells["better"][1] == f"{mean:+.1f}"  # of the worst client
    assert re.search(r"\| late \| 4 \| \+3\.0", second)
    assert len(third.splitlines()) == 2 + 8


def test_tables_of_clients_that_are_alike_have_a_column_too(benchmark, capsys):
    found = pd.DataFrame({"test": {"fedavg": 80.0, "fedbn": 79.0}, "worst": {"fedavg": 70.0, "fedbn": 70.0}})
    benchmark.print_tables({"digits-iid": found.assign(down=100.0, up=50.0, seconds=1.0, rate=0.1)})
    heading, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert "gain, clients alike (1)" in heading
    assert rows[1].startswith("| fedbn | -1.0 |")
