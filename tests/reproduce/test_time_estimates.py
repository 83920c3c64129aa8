"""How long runs will take: counted by hand, with parts whose costs are given."""

import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedshift.config.spec import RunSpec
from fedshift.reproduce import time_estimates
from fedshift.reproduce.time_estimates import StepCosts, TimeEstimates, VisitCosts
from fedshift.utils import files
from fedshift.utils.errors import UsageError

RUN = RunSpec(data="gaussians(samples=80, test_samples=40)", model="synthetic-mlp", batch_size=32, rounds=6)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path))
    return tmp_path


def costing(step=0.0, sample=0.0, look=0.0, apart=False, visit=0.0, save=0.0):
    """Estimates where parts cost so much, and the surgeries on the networks whose steps and moves were timed."""
    timed, moved = [], []

    def steps(plan, shape, *, pixels, classes, task, augment):
        timed.append(plan.method.surgery)
        return StepCosts(step=step, sample=sample, look=look, apart=apart)

    def moves(plan):
        moved.append(plan.method.surgery)
        return VisitCosts(visit=visit, save=save)

    return TimeEstimates(steps, moves), timed, moved


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
    found, *_ = costing(step=1.0)
    assert found.estimate([replace(RUN, **{"method": "fedavg"} | changes)]) == pytest.approx(steps)


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        ({}, 160),
        ({"epochs": 4}, 4 * 160),
        ({"batches": 2}, 160 / 2),  # two rounds a pass
        ({"batch_size": 0}, 160),
        ({"participation": 1}, 80),
        ({"method": "centralized"}, 160),
    ],
)
def test_samples_of_steps_are_counted(changes, samples):
    found, *_ = costing(sample=1.0)
    assert found.estimate([replace(RUN, **{"method": "fedavg"} | changes)]) == pytest.approx(6 * samples)


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
    found, *_ = costing(look=1.0)
    assert found.estimate([replace(RUN, **changes)]) == samples


def test_a_run_that_would_be_refused_for_a_client_of_one_sample_has_no_estimate():
    """As Digits-Five's stand-in of 300 samples a client, dealt to 200 each under batch normalization."""
    found, *_ = costing(step=1.0)
    dealt = replace(
        RUN, data="digits", domains="pen", split="iid(clients=200)", allow_single_class=True, model="small-cnn"
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"client '.*' has one training sample, over which batch normalization"):
        found.estimate([replace(dealt, method="fedavg")])
    assert found.estimate([replace(dealt, method="fedwon")]) == 200 * 6


def test_clients_are_visited_and_rounds_saved():
    found, *_ = costing(visit=1.0, save=10.0)
    assert found.estimate([RUN, replace(RUN, participation=1)]) == 6 * (2 + 10) + 6 * (1 + 10)


def test_single_steps_of_clients_are_one_where_samples_do_not_meet(cache):
    once = replace(RUN, method="fedsmb", batch_size=8, model="fnn2")
    found, *_ = costing(step=1.0, sample=0.1)
    assert found.estimate([once]) == pytest.approx(6 * (2 + 0.1 * 16))
    (cache / "steps.json").unlink()
    together, *_ = costing(step=1.0, sample=0.1, apart=True)
    assert together.estimate([once]) == pytest.approx(6 * (1 + 0.1 * 16))
    assert together.estimate([replace(once, method="fedprox+fedsmb")]) == pytest.approx(6 * (2 + 0.1 * 16))


def test_methods_share_what_was_measured_and_data_are_read_once(monkeypatch, cache):
    read, source = [], time_estimates.load_source
    monkeypatch.setattr(time_estimates, "load_source", lambda data, spec: read.append(data) or source(data, spec))
    specs = [
        replace(RUN, method=method, samples=samples, lr=lr)
        for samples in (80, 40)
        for method in ("fedavg", "fedbn", "fedprox", "gn", "scaffold")
        for lr in (0.1, 0.2)
    ]
    found, timed, moved = costing(step=1.0)
    elsewhere = replace(RUN, data="gaussians(samples=40)")
    found.gather_sizes([*specs[:10], elsewhere, *specs[10:]])
    whole = found.estimate([*specs[:10], elsewhere, *specs[10:]])
    assert whole == 10 * 2 * (3 + 2) * 6 + 2 * 2 * 6
    assert len(timed) == 2  # with BatchNorm, and with group normalization in its place
    assert len(moved) == 1
    assert len(read) == 2
    again, none, neither = costing(step=2.0)
    assert again.estimate([*specs, elsewhere]) == whole
    assert not none
    assert not neither
    assert len(read) == 2  # sizes are remembered too
    assert len(json.loads((cache / "steps.json").read_text())) == 2


def test_data_that_change_are_looked_at_again(tiny_folder, rewrite):
    spec = RunSpec(data=str(tiny_folder), root=str(tiny_folder), batch_size=1, rounds=1, method="fedavg", model="fnn2")
    assert costing(step=1.0)[0].estimate([spec]) == 26 + 17 + 33
    rewrite("bob", x_train=np.zeros((3, 8, 8, 3), np.uint8), y_train=np.arange(3))
    assert costing(step=1.0)[0].estimate([spec]) == 26 + 3 + 33


def test_what_cannot_be_read_is_said_of_its_own_runs_alone():
    found, *_ = costing(step=1.0)
    wrong = replace(RUN, data="gausians")
    found.gather_sizes([wrong, RUN])
    assert found.estimate([RUN]) == 36
    with pytest.raises(UsageError, match="gausians"):
        found.estimate([wrong])


def test_another_machine_measures_for_itself(monkeypatch):
    first, *_ = costing(step=1.0)
    first.estimate([RUN])
    monkeypatch.setattr(files, "describe_processors", lambda: "another")
    second, timed, _ = costing(step=1.0)
    second.estimate([RUN])
    assert len(timed) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1', "\x00"])
def test_a_damaged_memory_is_made_again(cache, content):
    (cache / "steps.json").write_text(content)
    found, timed, _ = costing(step=1.0)
    found.estimate([RUN])
    assert len(timed) == 1
    assert json.loads((cache / "steps.json").read_text())


def test_a_place_that_cannot_be_written_costs_only_the_memory(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("FEDSHIFT_CACHE", str(cache / "file" / "below"))
    found, timed, _ = costing(step=1.0)
    assert found.estimate([RUN, RUN]) == 2 * 2 * 3 * 6
    assert len(timed) == 1


@pytest.fixture
def patients(tmp_path):
    """A table of patients of two hospitals, with time and event."""
    lines = [f"{'ab'[row % 2]},{row % 7},{row + 1},{row % 3 == 0:d}" for row in range(60)]
    (tmp_path / "patients.csv").write_text("\n".join(("hospital,age,time,event", *lines)))
    return RunSpec(
        data=str(tmp_path / "patients.csv"), client_column="hospital", target="time,event", task="survival",
        model="linear", batch_size=8, rounds=2, loss="cox(ties='order')",
    )  # fmt: skip


@pytest.mark.parametrize(("model", "apart"), [("synthetic-mlp", False), ("fnn2", True), ("survival", True)])
def test_parts_are_timed_for_real(model, apart, cache, patients):
    run = patients if model == "survival" else replace(RUN, model=model)
    assert TimeEstimates().estimate([replace(run, method="fedavg")]) > 0
    (steps,), (moves,) = (json.loads((cache / name).read_text()).values() for name in ("steps.json", "moves.json"))
    assert min(steps["sample"], steps["look"], moves["visit"], moves["save"]) > 0
    assert steps["step"] >= 0
    assert steps["sample"] >= steps["look"]
    assert steps["apart"] == apart


def test_a_step_is_told_from_its_samples(cache, monkeypatch):
    given = iter([0.5 + 2 * 0.1, 0.5 + 16 * 0.1, 16 * 0.04])  # a small batch, a larger one, looks at the latter
    monkeypatch.setattr(time_estimates, "_time_quickest", lambda work, clock: next(given))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(time_estimates, "limit_threads", lambda threads: nullcontext())
    TimeEstimates(visits=lambda plan: VisitCosts(visit=0.0, save=0.0)).estimate([RUN])
    (found,) = json.loads((cache / "steps.json").read_text()).values()
    assert (found["step"], found["sample"], found["look"]) == pytest.approx((0.5, 0.1, 0.04))
