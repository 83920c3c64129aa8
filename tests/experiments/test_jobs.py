"""Trials side by side: the bits of one after another, whoever dies or stops, and when it is of use."""

import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from threading import Event
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from fedshift.core.selection import buffers, everything, norm_layers, nothing
from fedshift.engines.auto import EngineChoice
from fedshift.engines.engine import Diverged
from fedshift.experiments import jobs, loggers
from fedshift.experiments.callbacks import Callback, Callbacks
from fedshift.experiments.jobs import choose_jobs, list_devices
from fedshift.experiments.trial_run import TrialRun
from fedshift.results.summary import read_summary
from fedshift.utils import processors
from fedshift.utils.errors import FedshiftError, UsageError
from fedshift.utils.execution.executor import InProcess
from fedshift.utils.execution.shared_memory import SharedMemoryBuffer
from fedshift.utils.profiling import record_seconds

ENGINES = {
    "fedavg": EngineChoice(engine="pool", reason=""),
    "fedbn": EngineChoice(engine="sequential", threads=1, reason=""),
    "scaffold": EngineChoice(engine="stacked", threads=1, reason=""),
}


@pytest.fixture
def chosen(monkeypatch):
    """Choose the engines in ``ENGINES``, in this process: a worker is told its trial's."""
    monkeypatch.setattr("fedshift.experiments.trial.choose_engine", lambda plan, *_, **__: ENGINES[plan.method.name])


class Hearing(Callback):
    """Keeps each trial's events, told apart by ``trial`` and ``turn``."""

    def __init__(self):
        self.heard = defaultdict(list)

    def on_trial_begin(self, method, seed, done):
        self.now = method, seed
        self.heard[self.now].append(("trial", done))

    def on_turn(self, method, seed):
        self.now = method, seed

    def on_recorded(self, rows):
        self.heard[self.now].append(("recorded", rows[0]["round"]))

    def on_client_end(self, client, loss):
        self.heard[self.now].append((client, loss))

    def on_round_end(self, done):
        assert {(row["method"], row["seed"]) for row in done.rows} == {self.now}
        self.heard[self.now].append(("round", done.round))


@pytest.mark.slow
def test_bits_records_and_events_are_those_of_one_after_another(make, tmp_path, assert_same, chosen):
    experiment, events = make(methods="fedavg,fedbn,scaffold", seeds=2, rounds=2, workers=1), []
    for name, number in (("one", 1), ("two", 2)):
        callback = Hearing()
        with record_seconds() as seconds:
            assert experiment.run(tmp_path / name, callback=Callbacks(callback), jobs=number)
        assert {"forward and backward", "evaluation", "checkpoint", "aggregation"} <= seconds.keys()
        events.append(callback.heard)
    assert_same(tmp_path / "one", tmp_path / "two")
    one, two = (read_summary(tmp_path / name) for name in ("one", "two"))
    assert one.rows.equals(two.rows)
    assert one.notices == two.notices
    assert len(one.notices) == 2  # on merged batches
    assert {trial: sorted(map(str, heard)) for trial, heard in events[0].items()} == {
        trial: sorted(map(str, heard)) for trial, heard in events[1].items()
    }
    assert len(events[1]) == 6


class Trap(nn.Module):
    """Ends a worker, which is not ``parent``, where there is a file ``marker``, which it removes."""

    def __init__(self, marker: Path, parent: int):
        super().__init__()
        self.marker, self.parent = marker, parent

    def forward(self, x):
        if os.getpid() != self.parent and self.marker.exists():
            self.marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return x


@pytest.mark.slow
def test_a_worker_that_dies_is_named_and_its_trial_goes_on(make, tmp_path, assert_same, Listener):
    marker, here = tmp_path / "now", os.getpid()
    experiment = replace(
        make(methods="fedavg,fedprox", seeds=2, rounds=3),
        model=lambda shape, classes: nn.Sequential(Trap(marker, here), nn.Flatten(), nn.Linear(192, classes)),
    )
    experiment.run(tmp_path / "whole")
    said = (
        r"the worker process that ran fed(avg|prox), seed [01], was killed by SIGKILL, most often because memory ran "
        "out. What was saved before is intact: continue with resume=True, or with fewer jobs"
    )
    watch = Listener(lambda done: marker.touch() if len(watch.rounds) == 3 else None)
    with pytest.raises(FedshiftError, match=said):
        experiment.run(tmp_path / "run", callback=watch, jobs=2)
    assert len(watch.rounds) < 12
    assert experiment.run(tmp_path / "run", resume=True, jobs=2)
    assert_same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_a_trial_that_diverges_is_told_as_one_after_another_and_the_others_go_on(make, tmp_path, assert_same):
    experiment = make(methods="fedprox(mu=1e+30),fedavg", seeds=2, rounds=2)
    errors = []
    for name, number in (("one", 1), ("two", 2)):
        with pytest.raises(Diverged) as caught:
            experiment.run(tmp_path / name, jobs=number)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert_same(tmp_path / "one", tmp_path / "two")
    one, two = (read_summary(tmp_path / name).notices for name in ("one", "two"))
    assert one == two
    assert sum("training diverged" in text for text in one) == 2


class Book(loggers.Logger):
    """Logger that keeps what it is told, under the trial for which it was opened."""

    written: ClassVar = defaultdict(list)

    def open(self, method, seed):
        self.trial = method, seed
        return 0

    def write(self, number, values):
        self.written[self.trial].append((number, values["train/loss/macro"]))

    def close(self, status):
        self.written[self.trial].append(status)

    def describe(self):
        return "a book"


@pytest.mark.slow
def test_each_trial_has_its_log(make, tmp_path, monkeypatch):
    monkeypatch.setitem(loggers.LOGGERS, "book", Book)
    monkeypatch.setitem(loggers.NEEDED, "book", ())
    experiment = replace(make(methods="fedavg,fedprox(mu=1e+30)", rounds=2), log=("book",))
    logs = []
    for name, number in (("one", 1), ("two", 2)):
        monkeypatch.setattr(Book, "written", defaultdict(list))
        with pytest.raises(Diverged):
            experiment.run(tmp_path / name, jobs=number)
        logs.append(dict(Book.written))
    assert logs[0] == logs[1]
    assert [entry if isinstance(entry, str) else entry[0] for entry in logs[1]["fedavg", 0]] == [1, 2, "finished"]
    assert logs[1]["fedprox(mu=1e+30)", 0][-1] == "failed"


def test_what_cannot_be_sent_to_another_process_runs_here(make, tmp_path, monkeypatch):
    lock = threading.Lock()

    def model(shape, classes):
        with lock:
            return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))

    experiment = replace(make(methods="fedavg,fedprox", rounds=1), model=model)
    with pytest.raises(UsageError, match=r"jobs=2: .* cannot be sent to another process \(.*lock.*\): use jobs=1"):
        experiment.run(tmp_path / "run", jobs=2)
    monkeypatch.setattr(jobs, "WORTH", 0.0)
    monkeypatch.setattr(jobs, "available_processors", lambda: 2)
    assert experiment.run(tmp_path / "auto", jobs="auto")


def test_selections_that_are_told_apart_by_identity_stay_what_they_are():
    buffer = SharedMemoryBuffer()
    chosen = [everything, nothing, buffers, norm_layers & ~nothing]
    found = buffer.read(buffer.write(chosen))
    assert all(one is other for one, other in zip(found[:3], chosen[:3], strict=True))
    assert str(found[3]) == str(chosen[3])
    assert found[3].parts[1].parts[0] is nothing
    buffer.close()


@pytest.mark.slow
def test_stopped_and_interrupted_trials_go_on_bit_for_bit(make, tmp_path, assert_same, Listener):
    def interrupt(done):
        raise KeyboardInterrupt

    experiment, stop = make(methods="fedavg,fedbn", seeds=2, rounds=4, evaluate_every=1), Event()
    experiment.run(tmp_path / "whole")
    assert not experiment.run(tmp_path / "run", callback=Listener(lambda done: stop.set()), stop=stop, jobs=2)
    trials = [path.parent.name for path in (tmp_path / "run").glob("trials/*/rounds.jsonl")]
    assert 1 <= len(trials) <= 2  # those that ran
    heard = Hearing()
    with pytest.raises(KeyboardInterrupt):
        experiment.run(tmp_path / "run", resume=True, callback=Callbacks(heard, Listener(interrupt)), jobs=2)
    assert any(kind == "recorded" for events in heard.heard.values() for kind, _ in events)
    assert experiment.run(tmp_path / "run", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "run")


# Which trials run side by side


@pytest.fixture
def find(make, monkeypatch, tmp_path, chosen):
    """Return the numbers of the jobs of three methods and two seeds, and how many run at a time on four processors."""
    monkeypatch.setattr(jobs, "available_processors", lambda: 4)
    monkeypatch.setattr(jobs, "available_memory", lambda: 1e12)
    monkeypatch.setattr(jobs, "WORTH", 0.0)

    def call(number="auto", **settings):
        experiment = make(**{"methods": "fedavg,fedbn,scaffold", "seeds": 2, **settings})
        each = [(seed, method.name) for seed in experiment.seeds for method in experiment.methods]
        runs = [
            TrialRun(number=number, method=method, seed=seed, folder=tmp_path / f"{method}-{seed}")
            for number, (seed, method) in enumerate(each)
        ]
        found, processes = choose_jobs(runs, experiment._make_first_trials(), number)
        return sorted(found), processes

    return call


def test_trials_on_one_thread_run_side_by_side_as_many_as_there_are_processors(find, monkeypatch):
    assert find() == ([0, 1, 2, 3, 4, 5], 4)
    assert find(3) == ([0, 1, 2, 3, 4, 5], 3)
    assert find(seeds=1) == ([0, 1, 2], 3)
    assert find(1) == find(methods="fedavg", seeds=1) == find(9, methods="fedavg", seeds=1) == ([], 1)
    monkeypatch.setattr(jobs, "available_processors", lambda: 1)
    assert find() == ([], 1)
    assert find(2) == ([0, 1, 2, 3, 4, 5], 2)


def test_a_trial_that_uses_all_processors_runs_alone(find, monkeypatch):
    monkeypatch.setitem(ENGINES, "fedbn", EngineChoice(engine="sequential", reason=""))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert find() == ([0, 2, 3, 5], 4)
    assert find(2) == ([0, 1, 2, 3, 4, 5], 2)
    assert find(engine="ray") == find(2, engine="ray") == find(engine="pool") == find(engine="sequential") == ([], 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert find(engine="sequential")[1] == 4


def test_the_pool_stays_where_trials_are_fewer_than_processors_that_it_can_use(find):
    assert find(methods="fedavg", seeds=2) == ([], 1)  # three clients
    assert find(methods="fedavg", seeds=3) == ([0, 1, 2], 3)
    assert find(2, methods="fedavg", seeds=2) == ([0, 1], 2)


def test_little_work_and_little_memory_start_no_worker(find, monkeypatch):
    monkeypatch.setattr(jobs, "available_memory", lambda: 4.5 * jobs.WORKER)
    assert find()[1] == 2
    monkeypatch.setattr(jobs, "available_memory", lambda: 2.5 * jobs.WORKER)
    assert find() == ([], 1)
    assert find(2)[1] == 2
    monkeypatch.undo()
    monkeypatch.setattr(jobs, "available_processors", lambda: 4)
    assert find() == ([], 1)


def test_trials_fill_devices_whose_free_memory_is_known_and_take_one_each_otherwise(find, monkeypatch):
    def count(number="auto", **free):
        monkeypatch.setattr(jobs, "list_devices", lambda device: free)
        return find(number)[1]

    assert count(a=0.0) == 1
    assert count(a=0.0, b=0.0, c=0.0) == 3
    assert count(a=5 * jobs.CONTEXT, b=0.0) == 2 + 1
    monkeypatch.setattr(jobs, "available_processors", lambda: 6)
    assert count(a=1e12) == jobs.SHARING
    assert count(3, a=0.0) == 3
    monkeypatch.setattr(jobs, "available_processors", lambda: 1)
    assert count(a=0.0, b=0.0) == 2


def test_cuda_is_all_gpus_like_the_current_one_and_a_numbered_one_is_itself(monkeypatch):
    free = (10, 30, 90, 20)  # the third is another kind
    cuda = SimpleNamespace(
        device_count=lambda: 4,
        current_device=lambda: 0,
        mem_get_info=lambda number: (free[number], 100),
        get_device_properties=lambda n: SimpleNamespace(name="AB"[n == 2], total_memory=100, multi_processor_count=8),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    assert list(list_devices("cuda").items()) == [("cuda:1", 30), ("cuda:3", 20), ("cuda:0", 10)]
    assert list_devices("cuda:2") == {"cuda:2": 90}
    assert list_devices("mps") == {"mps": 0}
    assert list_devices("cpu") == {}


def test_each_trial_runs_on_the_device_with_the_fewest_and_gives_the_same_bits(
    make, tmp_path, monkeypatch, assert_same, Listener
):
    begin, end, running, most = TrialRun.begin, TrialRun.end, defaultdict(int), defaultdict(int)

    def count(run, *given):
        assert running[run.device] == min(running.values())
        running[run.device] += 1
        most[run.device] = max(most[run.device], running[run.device])
        begun = begin(run, *given)
        assert run.experiment.settings.device == run.trial.settings.device == run.device
        return begun

    def leave(run):
        running[run.device] -= 1
        return end(run)

    experiment, heard = make(methods="fedavg,fedbn,fedprox", seeds=2, rounds=2), Listener()
    experiment.run(tmp_path / "one")
    monkeypatch.setattr("fedshift.experiments.experiment.Workers", InProcess)
    for module in ("jobs", "experiment"):
        monkeypatch.setattr(f"fedshift.experiments.{module}.list_devices", lambda _: {"cpu:1": 9.0, "cpu:0": 8.0})
    monkeypatch.setattr(TrialRun, "begin", count)
    monkeypatch.setattr(TrialRun, "end", leave)
    running.update({"cpu:1": 0, "cpu:0": 0})
    assert experiment.run(tmp_path / "two", jobs=4, callback=heard)
    assert most == {"cpu:1": 2, "cpu:0": 2}
    assert any("4 trials run side by side on cpu:1 and cpu:0" in text for text in heard.notices)
    assert_same(tmp_path / "one", tmp_path / "two")


def test_free_memory_is_what_linux_and_the_container_grant(monkeypatch, tmp_path):
    machine = processors.available_memory()
    assert machine > 0
    monkeypatch.setattr(processors, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert processors.available_memory() > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    assert processors.available_memory() == 300


@pytest.mark.slow
def test_counting_operations_leaves_the_compiler_out():
    code = (
        "import sys; from fedshift.experiments.trial import Trial; from fedshift.experiments.settings import Settings\n"
        "from fedshift.engines.auto import count_operations; from fedshift import digits, fedavg\n"
        "from fedshift.experiments.factory import resolve_model\n"
        "trial = Trial(fedavg(), resolve_model('small-cnn', (3, 28, 28)), digits(), Settings(rounds=1), 0)\n"
        "assert count_operations(trial.plan, trial.train) > 0; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_trial_whose_first_seed_is_elsewhere_is_that_of_its_own_seed(make, tmp_path, monkeypatch):
    experiment = make(methods="fedavg,fedbn", seeds=2, rounds=1)
    experiment.run(tmp_path / "run")
    for method in ("fedavg", "fedbn"):
        rmtree(tmp_path / "run" / "trials" / f"{method}-seed0")
    monkeypatch.setattr("fedshift.experiments.experiment.Workers", InProcess)
    assert experiment.run(tmp_path / "run", resume=True, jobs=2)
