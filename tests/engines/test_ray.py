"""Clients as tasks of a Ray cluster: the sequential engine's bits, and no round spoiled by a worker that dies."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from fedshift.engines.ray import Ray
from fedshift.engines.sequential import Sequential
from fedshift.utils.errors import FedshiftError
from fedshift.utils.profiling import record_seconds
from tests.engines.conftest import BOB, DATA, FEATURES, SIZES, assert_rounds, divergence_of, outcomes, plan_of, when
from tests.engines.conftest import trial as any_trial

pytestmark = [pytest.mark.usefixtures("one_thread")]
trial = partial(any_trial, "ray")


@pytest.mark.slow
def test_trials_that_take_turns_have_the_bits_of_the_sequential_engine():
    first, second = trial(), trial(seed=4)
    for _ in range(2):
        first.advance()
        second.advance()
    second.close()
    first.advance()
    assert_rounds(first, 3)
    assert_rounds(second, 2, seed=4)
    first.close()


def test_the_client_with_most_work_begins_and_workers_bound_how_many_run():
    engine = Ray(plan_of(), DATA, 0, workers=1)
    assert list(outcomes(engine)) == ["bob", "cid", "ann"]
    engine.close()


@pytest.mark.slow
def test_only_a_clients_own_samples_travel():
    engine = Ray(plan_of(), DATA, 0, workers=2)
    outcomes(engine)
    for name, place in engine._samples.items():
        _, raw = sys.modules["ray"].get(place)
        assert sum(each.nbytes for each in raw) == SIZES[name] * (FEATURES * 4 + 8)
    engine.close()


@pytest.mark.slow
def test_seconds_of_the_workers_count_for_whoever_records():
    engine = Ray(plan_of(), DATA, 0, workers=2)
    with record_seconds() as seconds:
        outcomes(engine)
    assert {"hand over", "data", "forward and backward", "update"} <= seconds.keys()
    engine.close()


@pytest.mark.slow
def test_divergence_is_told_as_by_the_sequential_engine():
    told = divergence_of(lambda plan: Ray(plan, DATA, 0, 2))
    assert told == divergence_of(lambda plan: Sequential(plan, DATA, 0))
    assert "client 'cid', round 1, step 3 of 3" in told[1]


def confused():
    def act():
        raise KeyError("color")

    return act


@pytest.mark.slow
def test_an_error_in_a_persons_code_says_what_and_where(tmp_path):
    marker = tmp_path / "now"
    running = trial(trouble=when(marker, BOB, confused()))
    marker.touch()
    with pytest.raises(RuntimeError) as caught:
        running.advance()
    said = f"KeyError: 'color'; in tests/engines/test_ray.py, line {confused().__code__.co_firstlineno + 1}, in act"
    assert (type(caught.value), str(caught.value)) == (RuntimeError, said)
    assert "in act" in caught.value.__notes__[0]
    assert running.server.round == 0
    marker.unlink()
    running.advance()
    assert_rounds(running, 1)
    running.close()


def test_a_worker_that_dies_is_named_and_spoils_nothing(tmp_path):
    marker = tmp_path / "now"
    running = trial(trouble=when(marker, BOB, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    running.advance()
    marker.touch()
    with pytest.raises(FedshiftError, match="trained client 'bob' in round 2 was lost") as caught:
        running.advance()
    assert type(caught.value) is FedshiftError
    assert "was lost (WorkerCrashedError: The worker died" in str(caught.value)
    assert "engine='sequential'" in str(caught.value)
    marker.unlink()
    running.advance()
    assert_rounds(running, 2)
    running.close()


@pytest.mark.slow
def test_a_round_stopped_half_way_leaves_no_answer_for_the_next():
    def stop(client, loss):
        raise KeyboardInterrupt

    running = trial()
    with pytest.raises(KeyboardInterrupt):
        running.advance(stop)
    assert running.server.round == 0
    running.advance()
    assert_rounds(running, 1)
    running.close()


@pytest.mark.slow
def test_a_task_that_ray_cannot_run_is_named_with_its_last_words(monkeypatch):
    def elsewhere(*_):
        raise ModuleNotFoundError("No module named 'fedshift'")

    engine = Ray(plan_of(), DATA, 0, workers=2)
    outcomes(engine)
    lacking = sys.modules["ray"].remote(max_retries=0)(elsewhere)
    monkeypatch.setattr("fedshift.engines.ray._remote_task", lambda: lacking)
    with pytest.raises(FedshiftError, match=r"client '...' in round 1 was lost .*No module named 'fedshift'"):
        outcomes(engine)
    engine.close()


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.engines import test_ray as tests
assert tests.any_trial("auto").engine_choice and "ray" not in sys.modules
running = tests.trial()
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
