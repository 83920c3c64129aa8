"""How an engine is chosen: by the work, by timings that are remembered, and on resume by what the run began with."""

import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD, as_optimizer
from fedshift.core.work import Work
from fedshift.data.digits import digits
from fedshift.engines import auto
from fedshift.engines.auto import count_operations, measure_peak
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.ditto import ditto
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.results.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def data():
    return digits().limit_samples(20)


def network(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, 40), nn.BatchNorm1d(40), nn.Linear(40, classes))


def linear(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, classes))


def trial(data, method=None, model=network, **changes):
    settings = {"rounds": 10**6, "work": Work(batch_size=10, epochs=1), "optimizer": SGD(lr=0.1), "evaluate_every": 99}
    return Trial(method or fedbn(), model, data, Settings(**{**settings, **changes}), 0)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and a machine of four processors."""
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path))
    monkeypatch.setattr(auto, "available_processors", lambda: 4)


@pytest.fixture
def timings(cache, monkeypatch):
    """Seconds of a client's step on each engine, and how often they were taken."""
    taken = []

    def set_to(**seconds):
        monkeypatch.setattr(auto, "_time_engines", lambda *_: taken.append(1) or seconds)
        return taken

    return set_to


def test_operations_are_three_forward_passes_of_products_and_convolutions(data):
    running = trial(data)
    assert count_operations(running.plan, running.train) == 3 * 2 * (3 * 28 * 28 * 40 + 40 * 10)
    kernels = trial(data, fedavg(), lambda s, c: nn.Sequential(nn.Conv2d(3, c, 28), nn.Flatten()))
    assert count_operations(kernels.plan, kernels.train) == 3 * 2 * 3 * 28 * 28 * 10


def test_little_work_runs_one_client_after_another_and_is_not_timed(data, timings):
    taken = timings(sequential=1.0, stacked=0.1)
    choice = trial(data, rounds=1).engine_choice
    assert (choice.engine, choice.threads) == ("sequential", 1)
    assert "too few" in choice.reason
    choice = trial(data, fedavg(), linear, work=Work(batches=1), rounds=1).engine_choice
    assert (choice.engine, choice.threads) == ("identity", None)
    assert "one step on all batches" in choice.reason
    assert not taken


def test_one_batch_of_all_clients_is_chosen_where_it_is_the_fastest(data, timings, monkeypatch):
    monkeypatch.setattr(auto, "LITTLE", 1)
    timings(identity=0.001, stacked=0.002, sequential=0.01)
    assert trial(data, fedavg(), linear, work=Work(batches=1)).engine_choice.engine == "identity"


@pytest.mark.parametrize(
    ("seconds", "engine"),
    [
        ({"sequential": 0.001, "stacked": 0.002, "pool": 0.004}, "sequential"),
        ({"sequential": 0.003, "stacked": 0.001, "pool": 0.009}, "stacked"),
        ({"sequential": 0.03, "stacked": 0.04, "pool": 0.03}, "pool"),
        ({"sequential": 0.003, "sequential on one thread": 0.001, "stacked": 0.002}, "sequential"),
        ({"sequential": 0.0001, "pool": 0.0001}, "sequential"),  # handing clients over takes longer than their work
    ],
)
def test_the_fastest_is_chosen_and_the_others_times_are_told(data, timings, seconds, engine):
    timings(**seconds)
    choice = trial(data).engine_choice
    assert choice.engine == engine
    assert all(f"{name} " in choice.reason for name in seconds)
    assert choice.threads == (1 if len(seconds) == 3 and "pool" not in seconds else None)
    assert "MFLOP per sample" in choice.reason


def test_of_an_optimizer_of_torch_the_choice_says_what_the_stacked_engine_cannot(data, timings):
    timings(sequential=1.0, stacked=0.1, pool=0.5)  # as of a network that prints the same
    choice = trial(data, optimizer=as_optimizer(torch.optim.NAdam, lr=0.1)).engine_choice
    assert choice.engine == "pool"
    assert "the stacked engine cannot run" in choice.reason
    assert "torch.optim:NAdam(lr=0.1)" in choice.reason


def test_starting_processes_must_pay_for_a_run(data, timings, monkeypatch):
    timings(sequential=0.02, pool=0.02)
    monkeypatch.setattr(auto, "LITTLE", 1)
    assert trial(data, rounds=100).engine_choice.engine == "pool"
    assert trial(data, rounds=10).engine_choice.engine == "sequential"


def test_timings_are_remembered_by_what_they_depend_on(data, timings):
    taken = timings(sequential=0.003, stacked=0.001)
    for batch_size, times in ((10, 1), (10, 1), (20, 2)):
        assert trial(data, work=Work(batch_size=batch_size, epochs=1)).engine_choice.engine == "stacked"
        assert len(taken) == times


@pytest.mark.parametrize(
    ("method", "changes", "timed", "steps"),
    [
        (fedavg(), {}, 6, {"sequential": 2, "stacked": 6}),  # the first steps of some clients
        (fedavg(), {}, 100, {"sequential": 10, "stacked": 50}),  # whole rounds
        (ditto(epochs=1), {}, 6, {"sequential": 2 + 2, "stacked": 3 * (2 + 2)}),  # with the phase of a model beside
        (fedavg(), {"model": linear, "work": Work(batches=1)}, 100, {"sequential": 1, "stacked": 5, "identity": 5}),
        (fedavg(), {"optimizer": as_optimizer(torch.optim.NAdam, lr=0.1)}, 6, {"sequential": 6}),
    ],
    ids=["short", "whole", "phases", "one step", "sequential only"],
)
def test_rounds_are_timed_by_step_on_every_engine_that_can_run_them(
    data, cache, monkeypatch, method, changes, timed, steps
):
    def time_in_turns(works, *_):
        for work in works.values():
            work()
        return dict.fromkeys(works, 12.0)

    monkeypatch.setattr(auto, "time_in_turns", time_in_turns)
    running = trial(data, method, **{"work": Work(batch_size=10, epochs=5), **changes})
    monkeypatch.setattr(auto, "TIMED", timed * auto._count_step(running.plan, running.train) / auto.LITTLE)
    before = running.plan.initial["1.weight"].clone()
    found = auto._time_engines(running.plan, running.train, 5, 4, None, False)
    assert found == {name: 12 / count for name, count in steps.items()} | {"pool": 12 / steps["sequential"]}
    assert torch.equal(before, running.plan.initial["1.weight"])


def test_threads_are_limited_while_clients_train_and_no_longer(data, timings, monkeypatch):
    timings(**{"sequential": 0.003, "sequential on one thread": 0.001})
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(
        "fedshift.engines.sequential.client_step_", lambda *_: seen.append(torch.get_num_threads()) or 1 / 0
    )
    running = trial(data)
    assert running.engine_choice.threads == 1
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            running.advance()
        assert torch.get_num_threads() == 2
        assert seen == [1]
    finally:
        torch.set_num_threads(before)


def test_a_resumed_run_keeps_the_engine_that_it_began_with(data, timings, tmp_path):
    timings(**{"sequential": 0.003, "stacked on one thread": 0.001})
    begun = trial(data)
    begun.advance()
    begun.save(tmp_path, "checkpoint.safetensors")
    timings(sequential=0.001, stacked=0.003)
    resumed = trial(data, work=Work(batch_size=10, epochs=1))
    resumed.restore(*load_checkpoint(tmp_path / "checkpoint.safetensors"), tmp_path)
    chosen = resumed.engine_choice
    assert (chosen.engine, chosen.threads, chosen.reason) == ("stacked", 1, "as the run was begun")


def test_the_peak_is_measured_and_leaves_the_threads_alone():
    threads = torch.get_num_threads()
    assert min(measure_peak(1).values()) > 1e8
    assert torch.get_num_threads() == threads


def test_works_take_turns_of_one_length_whatever_slows_them(monkeypatch):
    now, ran = [0.0], []
    monkeypatch.setattr(auto.time, "perf_counter", lambda: now[0])

    def work(name, seconds):
        def run():
            ran.append(name)
            now[0] += seconds * (10 if 0.5 < now[0] < 1.0 else 1)  # something else runs for half a second

        return run

    found = auto.time_in_turns({"short": work("short", 0.001), "long": work("long", 0.03)}, 5, 0.05)
    assert found == {"short": pytest.approx(0.001), "long": pytest.approx(0.03)}
    turns = ran[4:]  # two runs of each to see how long one takes
    assert turns == (["short"] * 50 + ["long"] * 2) * 5
