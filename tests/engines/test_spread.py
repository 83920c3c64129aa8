"""Clients spread over processes and over Ray: the sequential engine's bits, and no round spoiled by a lost lane.

What executors do by themselves is checked in ``tests/utils/test_execution.py``.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fedshift.data.samples import Samples
from fedshift.engines import spread
from fedshift.engines.sequential import Sequential
from fedshift.engines.spread import Pool, Ray
from fedshift.utils.errors import FedshiftError, UsageError
from fedshift.utils.execution.executor import InProcess
from fedshift.utils.state import is_equal
from tests.engines.conftest import (
    BOB,
    DATA,
    FEATURES,
    SIZES,
    assert_rounds,
    divergence_of,
    outcomes,
    plan_of,
    trial,
    when,
)

pytestmark = pytest.mark.usefixtures("one_thread")
RAY = pytest.param("ray", marks=pytest.mark.slow)
BOTH = pytest.mark.parametrize("engine", ["pool", RAY])


@pytest.fixture
def begin(shared_workers):
    """Begin a trial of an engine; it is closed at the end."""
    begun = []

    def make(engine, *given, **options):
        shared = {"executor": shared_workers} if engine == "pool" else {}
        begun.append(trial(engine, *given, **shared, **options))
        return begun[-1]

    yield make
    for each in begun:
        each.close()


@pytest.fixture
def spread_over(shared_workers):
    """Make an engine of a plan; it is closed at the end."""
    made = []

    def make(engine, plan, at_once=2):
        pool = partial(Pool, executor=shared_workers)
        made.append((pool if engine == "pool" else Ray)(plan, DATA, 0, at_once))
        return made[-1]

    yield make
    for each in made:
        each.close()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, trained in found.items():
        other = expected[name]
        assert is_equal(trained.update.shared, other.update.shared)
        assert all(map(is_equal, trained.update.memory, other.update.memory))
        assert is_equal(trained.client.personal, other.client.personal)
        assert all(map(is_equal, trained.client.memory, other.client.memory))
        assert (trained.client.steps, trained.loss_sum) == (other.client.steps, other.loss_sum)


@BOTH
def test_the_client_with_most_work_begins_and_workers_bound_how_many_run(spread_over, engine):
    assert list(outcomes(spread_over(engine, plan_of(), 1))) == ["bob", "cid", "ann"]


def test_there_are_never_more_at_once_than_clients_or_than_allowed(monkeypatch):
    asked, run_all = [], spread.run_all
    monkeypatch.setattr(spread, "run_all", lambda *given: asked.append(given[2]) or run_all(*given))
    executor = InProcess()
    executor.lanes = 2
    for workers in (8, 1, None):
        outcomes(Pool(plan_of(), DATA, 0, workers, executor=executor))
    assert asked == [3, 1, 2]


def test_in_this_process_it_is_the_sequential_engine_on_one_thread_and_sends_nothing():
    held = threading.Lock()
    plan = plan_of(loss=lambda outputs, y: nn.functional.cross_entropy(outputs, y) if held else outputs.sum())
    torch.set_num_threads(2)
    found = outcomes(Pool(plan, DATA, 0, executor=InProcess()))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert_same(found, outcomes(Sequential(plan, DATA, 0)))


def test_an_engine_without_an_executor_opens_its_own_and_ends_it(monkeypatch):
    opened = []
    monkeypatch.setattr(spread, "Workers", lambda: opened.append(InProcess()) or opened[-1])
    closed = []
    monkeypatch.setattr(InProcess, "close", lambda self: closed.append(self))
    engine = Pool(plan_of(), DATA, 0)
    expected = outcomes(Sequential(engine.plan, DATA, 0))
    for _ in range(2):
        assert_same(outcomes(engine), expected)
        outcomes(engine)
        engine.close()
    assert len(opened) == 2
    assert closed == opened


@pytest.mark.slow
def test_only_a_clients_own_samples_travel_to_other_hosts(spread_over):
    engine = spread_over("ray", plan_of())
    outcomes(engine)
    for name, size in SIZES.items():
        _, raw = sys.modules["ray"].get(engine._handles[f"data of {name}"].held)
        assert sum(each.nbytes for each in raw) == size * (FEATURES * 4 + 8)


@BOTH
def test_a_network_of_a_function_and_a_loss_without_a_name_travel(spread_over, engine):
    scale = 2.0
    plan = plan_of(loss=lambda outputs, y: scale * nn.functional.cross_entropy(outputs, y))
    assert_same(outcomes(spread_over(engine, plan)), outcomes(Sequential(plan, DATA, 0)))


# What goes wrong


@pytest.mark.slow
@BOTH
def test_a_lane_that_is_lost_is_named_and_spoils_nothing(begin, tmp_path, engine):
    marker = tmp_path / "now"
    running = begin(engine, when(marker, BOB, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    running.advance()
    tensors, facts = running.to_tensors()
    marker.touch()
    how = "was killed by SIGKILL, most often because memory ran out. What was saved"
    said = f"trained client 'bob' in round 2 {how if engine == 'pool' else 'was lost (WorkerCrashedError: '}"
    with pytest.raises(FedshiftError, match=re.escape(said)) as caught:
        running.advance()
    assert type(caught.value) is FedshiftError
    assert "engine='sequential'" in str(caught.value)
    assert running.to_tensors()[1] == facts
    assert is_equal(running.to_tensors()[0], tensors)
    marker.unlink()
    running.advance()
    assert_rounds(running, count=2)


@BOTH
def test_an_error_in_a_persons_code_says_what_and_where(begin, tmp_path, engine):
    def confused():
        raise KeyError("color")

    marker = tmp_path / "now"
    running = begin(engine, when(marker, BOB, confused))
    marker.touch()
    with pytest.raises(RuntimeError) as caught:
        running.advance()
    line = confused.__code__.co_firstlineno + 1
    said = f"KeyError: 'color'; in tests/engines/test_spread.py, line {line}, in confused"
    assert (type(caught.value), str(caught.value)) == (RuntimeError, said)
    assert running.server.round == 0
    marker.unlink()
    running.advance()
    assert_rounds(running)


@BOTH
def test_divergence_is_told_as_by_the_sequential_engine(spread_over, engine):
    told = divergence_of(partial(spread_over, engine))
    assert told == divergence_of(lambda plan: Sequential(plan, DATA, 0))
    assert "client 'cid', round 1, step 3 of 3" in told[1]


@pytest.mark.slow
def test_a_task_that_ray_cannot_run_is_named_with_its_last_words(spread_over, monkeypatch):
    def elsewhere(*_):
        raise ModuleNotFoundError("No module named 'fedshift'")

    engine = spread_over("ray", plan_of())
    outcomes(engine)
    lacking = sys.modules["ray"].remote(max_retries=0)(elsewhere)
    monkeypatch.setattr("fedshift.utils.execution.ray_cluster._remote_task", lambda: lacking)
    with pytest.raises(FedshiftError, match=r"client '...' in round 1 was lost .*No module named 'fedshift'"):
        outcomes(engine)


# Refusals


@pytest.mark.parametrize("held", [threading.Lock(), (n for n in range(3))], ids=["lock", "generator"])
def test_what_cannot_be_pickled_is_refused(held):
    plan = plan_of(loss=lambda outputs, y: outputs.sum() if held else outputs.mean())
    with pytest.raises(UsageError) as caught:
        Pool(plan, DATA, 0)
    said = str(caught.value)
    assert said.startswith("the pool engine cannot send fedavg or the model to another process (cannot pickle")
    assert f"{type(held).__name__}' object): use the sequential engine, which runs anything, or auto" in said
    assert "cannot send fedavg" in Ray.refusal(plan, DATA)


@pytest.mark.parametrize("engine", [Pool, Ray])
def test_other_systems_devices_and_a_missing_package_are_refused(monkeypatch, engine):
    plan, name = plan_of(), engine.__name__.lower()
    elsewhere = {"ann": Samples(x=torch.zeros(3, FEATURES, device="meta"), y=torch.zeros(3, device="meta"))}
    with pytest.raises(UsageError, match=f"the {name} engine uses processors, but the device is meta: use the seq"):
        engine(plan, elsewhere, 0)
    assert engine.refusal(plan, DATA) is None
    monkeypatch.setattr(os, "name", "nt")
    monkeypatch.setattr(spread, "find_spec", lambda name: None)
    assert (
        engine.refusal(plan, DATA)
        == {
            Pool: "needs POSIX shared memory, which this operating system lacks",
            Ray: "needs the package ray (pip install 'fedshift[ray]')",
        }[engine]
    )


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.engines import conftest as tests
assert tests.trial("auto").engine_choice and "ray" not in sys.modules
running = tests.trial("ray")
running.advance()
tests.assert_rounds(running, 1)
running.close()
import psutil, ray
print(ray.nodes()[0]["NodeManagerAddress"], [each.pid for each in psutil.Process().children(recursive=True)])
"""


@pytest.mark.slow
def test_a_cluster_of_its_own_is_of_the_loopback_leaves_no_file_at_home_and_ends_with_the_program(
    tmp_path, tmp_path_factory
):
    environment = {**os.environ, "HOME": str(tmp_path), "FEDSHIFT_CACHE": str(tmp_path_factory.mktemp("cache"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE, str(Path(__file__).parents[2])],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    address, pids = done.stdout.split(maxsplit=1)
    assert (address, done.stderr) == ("127.0.0.1", "")
    assert list(tmp_path.iterdir()) == []
    started = json.loads(pids)
    assert len(started) > 2
    for pid in started:
        assert not Path(f"/proc/{pid}").exists()
