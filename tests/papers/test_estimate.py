"""How long runs will take: counted by hand, with parts whose costs are given."""

import json
from dataclasses import replace

import pytest

from fedshift.base import remembered
from fedshift.config import RunSpec
from fedshift.papers import estimate
from fedshift.papers.estimate import Costs, Estimates, measured

NOTHING = Costs(step=0.0, sample=0.0, visit=0.0, save=0.0, apart=0.0)
RUN = RunSpec(data="gaussians(samples=80, test_samples=40)", model="synthetic-mlp", batch_size=32, rounds=6)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path))
    return tmp_path


def costing(**costs):
    """Estimates where parts cost so much, and the batches that were timed."""
    timed = []

    def measure(plan, split, batch):
        timed.append(batch)
        return replace(NOTHING, **costs)

    return Estimates(measure), timed


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 2 * 3 * 6),  # 80 samples are batches of 32, 32 and 16
        ({"epochs": 4}, 4 * 2 * 3 * 6),
        ({"batches": 2}, 2 * 1.5 * 6),  # groups of two batches and of one, in turn
        ({"batches": 3}, 2 * 3 * 6),
        ({"batch_size": 0, "data": "gaussians(samples=40)"}, 2 * 6),
        ({"participation": 1}, 3 * 6),
        ({"participation": 0.5, "seeds": 3}, 3 * 3 * 6),
        ({"newcomers": "mixed"}, 3 * 6),
        ({"split": "quantity(clients=2, alpha=1000.0, seed=1)", "batch_size": 1, "model": "fnn2"}, 160 * 6),
        ({"method": "fedmmb(batches=1)"}, 2 * 6),
        ({"method": "centralized"}, 3 * 6),  # batches of 64, 64 and 32
        ({"method": "centralized(scaled=False)"}, 5 * 6),
        ({"method": "fedbn+fedprox"}, 2 * 3 * 6),
    ],
)
def test_steps_are_counted(changes, steps):
    found, _ = costing(step=1.0)
    assert found.of([replace(RUN, **{"method": "fedavg"} | changes)]) == pytest.approx(steps)


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        ({"method": "fedavg", "evaluate_every": 6}, 80),
        ({"method": "fedavg", "evaluate_every": 4}, 2 * 80),  # after rounds 4 and 6
        ({"method": "fedavg"}, 6 * 80),
        ({"method": "fedavg", "split": "iid(clients=4)", "domains": "mixed", "evaluate_every": 6}, 40),  # shared
        ({"method": "fedbn", "split": "iid(clients=4)", "domains": "mixed", "evaluate_every": 6}, 4 * 40),
        ({"method": "ditto", "evaluate_every": 6}, 2 * 80),  # the server's model and the clients' own
        ({"method": "fedavg", "validation": 0.1, "evaluate_every": 6}, 80 + 2 * 8),
    ],
)
def test_samples_of_evaluation_are_counted(changes, samples):
    found, _ = costing(sample=1.0)
    assert found.of([replace(RUN, **changes)]) == samples


def test_clients_are_visited_and_rounds_saved():
    found, _ = costing(visit=1.0, save=10.0)
    assert found.of([RUN, replace(RUN, participation=1)]) == 6 * (2 + 10) + 6 * (1 + 10)


def test_single_steps_of_clients_are_one_where_samples_do_not_meet():
    once = replace(RUN, method="fedsmb", batch_size=8, model="fnn2")
    found, timed = costing(step=1.0)
    assert found.of([once]) == 2 * 6
    together, others = costing(step=1.0, apart=1.0)
    remembered_elsewhere = replace(once, lr=0.5, batch_size=16)
    assert together.of([remembered_elsewhere]) == 6
    assert (timed, others) == ([8], [16, 32])
    assert together.of([replace(remembered_elsewhere, method="fedprox+fedsmb")]) == 2 * 6


def test_of_a_large_batch_a_part_is_timed(monkeypatch):
    monkeypatch.setattr(estimate, "MOST", 20)
    found, timed = costing(step=1.0)
    assert found.of([replace(RUN, method="fedavg", batch_size=40)]) == 2 * 2 * 6 * 2
    monkeypatch.setattr(estimate, "NUMBERS", 100)  # ten samples of ten numbers
    assert found.of([replace(RUN, method="fedavg", batch_size=40)]) == 4 * 2 * 2 * 6
    assert timed == [20, 10]


def test_methods_share_what_was_measured_and_data_are_read_once(monkeypatch, cache):
    read, source = [], estimate.source_of
    monkeypatch.setattr(estimate, "source_of", lambda data, spec: read.append(data) or source(data, spec))
    specs = [
        replace(RUN, method=method, samples=samples, lr=lr)
        for samples in (80, 40)
        for method in ("fedavg", "fedbn", "fedprox", "gn", "scaffold")
        for lr in (0.1, 0.2)
    ]
    found, timed = costing(step=1.0)
    elsewhere = replace(RUN, data="gaussians(samples=40)")
    whole = found.of([*specs[:10], elsewhere, *specs[10:]])
    assert whole == 10 * 2 * (3 + 2) * 6 + 2 * 2 * 6
    assert timed == [32, 32]  # with BatchNorm, and with group normalization in its place
    assert len(read) == 2
    again, none = costing(step=2.0)
    assert again.of([*specs, elsewhere]) == whole
    assert not none
    assert len(json.loads((cache / "steps.json").read_text())) == 2


def test_another_machine_measures_for_itself(monkeypatch):
    first, _ = costing(step=1.0)
    first.of([RUN])
    monkeypatch.setattr(remembered, "machine", lambda: "another")
    second, timed = costing(step=1.0)
    second.of([RUN])
    assert timed == [32]


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1', "\x00"])
def test_a_damaged_memory_is_made_again(cache, content):
    (cache / "steps.json").write_text(content)
    found, timed = costing(step=1.0)
    found.of([RUN])
    assert timed == [32]
    assert json.loads((cache / "steps.json").read_text())


def test_a_place_that_cannot_be_written_costs_only_the_memory(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("FEDSHIFT_CACHE", str(cache / "file" / "below"))
    found, timed = costing(step=1.0)
    assert found.of([RUN, RUN]) == 2 * 2 * 3 * 6
    assert timed == [32]


@pytest.mark.parametrize(("model", "apart"), [("synthetic-mlp", False), ("fnn2", True)])
def test_parts_are_timed_for_real(model, apart, cache):
    assert Estimates(measured).of([replace(RUN, method="fedavg", model=model)]) > 0
    (found,) = json.loads((cache / "steps.json").read_text()).values()
    assert min(found[name] for name in ("step", "sample", "visit", "save")) > 0
    assert found["apart"] == apart
