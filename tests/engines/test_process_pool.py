"""Clients in worker processes: the sequential engine's bits, and no round spoiled by one that dies or is stopped."""

import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from torch import nn

from fedshift.core.kernel import init_client
from fedshift.core.optimizer import SGD
from fedshift.data.samples import Samples
from fedshift.engines import process_pool
from fedshift.engines.process_pool import Pool
from fedshift.engines.sequential import Sequential
from fedshift.methods.scaffold import scaffold
from fedshift.utils.errors import FedshiftError, UsageError
from fedshift.utils.profiling import record_seconds
from fedshift.utils.state import is_equal
from tests.engines.conftest import BOB, DATA, FEATURES, assert_rounds, divergence_of, outcomes, plan_of, rounds, when
from tests.engines.conftest import trial as any_trial

pytestmark = [pytest.mark.usefixtures("one_thread")]
trial = partial(any_trial, "pool")


@pytest.fixture(scope="module", autouse=True)
def dismissed():
    """The workers, which the tests share, end with them."""
    yield
    process_pool.dismiss()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, trained in found.items():
        other = expected[name]
        assert is_equal(trained.update.shared, other.update.shared)
        assert all(map(is_equal, trained.update.memory, other.update.memory))
        assert is_equal(trained.client.personal, other.client.personal)
        assert all(map(is_equal, trained.client.memory, other.client.memory))
        assert (trained.client.steps, trained.loss_sum) == (other.client.steps, other.loss_sum)


def ids():
    return [hand.process.pid for hand in process_pool._WORKERS]


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_bits_are_those_of_the_sequential_engine_for_any_number_of_workers(workers):
    for options in ({}, {"method": scaffold(), "optimizer": SGD(lr=0.05)}):
        running = trial(workers=workers, **options)
        rounds(running, 3)
        assert_rounds(running, count=3, **options)
        running.close()


def test_there_are_never_more_workers_than_clients_or_than_allowed(monkeypatch):
    hire, hired = process_pool._ensure_workers, []
    monkeypatch.setattr(process_pool, "_ensure_workers", lambda number: hired.append(number) or hire(number))
    monkeypatch.setattr(process_pool, "available_processors", lambda: 2)
    for workers in (8, 1, None):
        engine = Pool(plan_of(), DATA, 0, workers)
        outcomes(engine)
        engine.close()
    assert hired == [3, 1, 2]
    assert len(ids()) <= 3


def test_the_client_with_most_work_begins():
    engine = Pool(plan_of(), DATA, 0, workers=1)
    assert list(outcomes(engine)) == ["bob", "cid", "ann"]
    engine.close()


@pytest.mark.slow
def test_trials_that_take_turns_share_workers():
    first, second = trial(workers=3), trial(workers=2, seed=4)
    first.advance()
    before = ids()
    second.advance()
    first.advance()
    second.advance()
    assert ids() == before
    assert_rounds(first, count=2)
    assert_rounds(second, count=2, seed=4)
    second.close()
    first.advance()
    assert_rounds(first, count=3)
    first.close()


def test_workers_forget_a_trial_that_is_closed():
    engine = Pool(plan_of(), DATA, 0, workers=1)
    outcomes(engine)
    engine.close()
    hand = process_pool._WORKERS[0]
    hand.send("work", engine._number, "ann", hand.buffer.write(init_client(engine.plan)))
    assert str(hand.receive_result("ann", 1)) == f"KeyError: {engine._number}"
    assert_same(outcomes(engine), outcomes(Sequential(engine.plan, DATA, 0)))  # told anew
    engine.close()


def test_seconds_of_the_workers_count_for_whoever_records():
    engine = Pool(plan_of(), DATA, 0, workers=2)
    with record_seconds() as seconds:
        outcomes(engine)
    assert {"hand over", "data", "forward and backward", "update"} <= seconds.keys()
    engine.close()


def test_a_network_of_a_function_and_a_loss_without_a_name_travel():
    scale = 2.0
    plan = plan_of(loss=lambda outputs, y: scale * nn.functional.cross_entropy(outputs, y))
    engine = Pool(plan, DATA, 0, workers=2)
    assert_same(outcomes(engine), outcomes(Sequential(plan, DATA, 0)))
    engine.close()


def killed():
    return lambda: os.kill(os.getpid(), signal.SIGKILL)


KILLED = "was killed by SIGKILL, most often because memory ran out. What was saved"


def left():
    def leave():
        print("first\nthe disk is on fire", file=sys.stderr)
        os._exit(3)

    return leave


@pytest.mark.parametrize(
    ("end", "text"),
    [
        pytest.param(killed, KILLED, marks=pytest.mark.slow),  # as the one below that dies between rounds
        (left, "ended with exit code 3: the disk is on fire. What was saved"),
    ],
)
def test_a_worker_that_dies_is_named_and_spoils_nothing(tmp_path, end, text):
    marker = tmp_path / "now"
    running = trial(trouble=when(marker, BOB, end()))
    running.advance()
    before, (tensors, facts) = ids(), running.to_tensors()
    marker.touch()
    with pytest.raises(FedshiftError, match=re.escape(f"trained client 'bob' in round 2 {text}")) as caught:
        running.advance()
    assert type(caught.value) is FedshiftError
    assert "engine='sequential'" in str(caught.value)
    assert running.to_tensors()[1] == facts
    assert is_equal(running.to_tensors()[0], tensors)
    marker.unlink()
    running.advance()
    assert len(set(before) & set(ids())) == len(before) - 1
    assert_rounds(running, count=2)
    running.close()


def end_first(hands):
    """Kill the first of ``hands`` and wait until it is dead, which nobody has been told then."""
    os.kill(hands[0].process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, hands[0].process.pid, os.WEXITED | os.WNOWAIT)
    return hands


def test_a_worker_that_dies_between_rounds_is_replaced(monkeypatch):
    running, hire = trial(workers=1), process_pool._ensure_workers
    running.advance()
    (gone, *_) = ids()
    end_first(process_pool._WORKERS)
    running.advance()
    assert gone not in ids()
    monkeypatch.setattr(process_pool, "_ensure_workers", lambda number: end_first(hire(number)))  # as late as it can be
    with pytest.raises(FedshiftError, match=f"trained client 'bob' in round 3 {KILLED}"):
        running.advance()
    monkeypatch.undo()
    running.advance()
    assert_rounds(running, count=3)
    running.close()


def test_other_signals_say_nothing_of_memory():
    assert process_pool._describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"


def test_an_error_in_a_persons_code_says_what_and_where(tmp_path):
    def confused():
        raise KeyError("color")

    marker = tmp_path / "now"
    running = trial(trouble=when(marker, BOB, confused))
    marker.touch()
    with pytest.raises(RuntimeError) as caught:
        running.advance()
    line = confused.__code__.co_firstlineno + 1
    said = f"KeyError: 'color'; in tests/engines/test_process_pool.py, line {line}, in confused"
    assert (type(caught.value), str(caught.value)) == (RuntimeError, said)
    assert "in confused" in caught.value.__notes__[0]
    assert running.server.round == 0
    before = ids()
    marker.unlink()
    running.advance()
    assert ids() == before
    assert_rounds(running)
    running.close()


def test_divergence_is_told_as_by_the_sequential_engine():
    told = divergence_of(lambda plan: Pool(plan, DATA, 0, 2))
    assert told == divergence_of(lambda plan: Sequential(plan, DATA, 0))
    assert "client 'cid', round 1, step 3 of 3" in told[1]


def test_a_round_stopped_half_way_leaves_no_answer_for_the_next():
    def stop(client, loss):
        heard.append(client)
        raise KeyboardInterrupt

    running, heard = trial(), []
    with pytest.raises(KeyboardInterrupt):
        running.advance(stop)
    assert len(heard) == 1
    assert running.server.round == 0
    rounds(running, 2)
    assert_rounds(running, count=2)
    running.close()


def test_a_hand_over_stopped_half_way_leaves_no_worker_confused(monkeypatch):
    def stop(hand, shelf):
        raise KeyboardInterrupt

    running = trial(workers=1)
    running.advance()
    other = trial(workers=1, seed=4)
    with monkeypatch.context() as patch:
        patch.setattr(process_pool._WorkerHandle, "share_buffer", stop)
        with pytest.raises(KeyboardInterrupt):
            other.advance()
    running.advance()
    other.advance()
    assert_rounds(running, count=2)
    assert_rounds(other, seed=4)
    running.close()
    other.close()


def test_ctrl_c_is_not_for_workers():
    running = trial(trouble=lambda place: os.kill(os.getpid(), signal.SIGINT), workers=2)
    running.advance()
    before = ids()
    for pid in before:
        os.kill(pid, signal.SIGINT)
    running.advance()
    assert ids() == before
    assert_rounds(running, count=2)
    running.close()


FOR_EVER = """
import os, sys, threading, torch
from torch import nn
from fedshift.core.kernel import init_client, init_server
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.data.samples import Samples
from fedshift.engines.process_pool import Pool
from fedshift.methods.fedavg import fedavg

assert "pandas" not in sys.modules  # a worker has no use for it, and starts sooner without

class Net(nn.Linear):
    def forward(self, x):
        print("working", flush=True)
        threading.Event().wait()

plan = prepare(fedavg(), Net(2, 2), optimizer=SGD(lr=0.1))
data = {name: Samples(x=torch.ones(4, 2), y=torch.zeros(4, dtype=torch.int64)) for name in "ab"}
dict(Pool(plan, data, 0, 2).train(init_server(plan), {name: init_client(plan) for name in data}))
"""


@pytest.mark.slow
def test_workers_end_with_their_parent_even_in_the_middle_of_a_step():
    parent = subprocess.Popen([sys.executable, "-c", FOR_EVER], stdout=subprocess.PIPE, text=True)
    assert [parent.stdout.readline() for _ in range(2)] == ["working\n"] * 2
    parent.kill()
    rest, _ = parent.communicate(timeout=60)  # ends when nobody holds the pipe, which workers inherit
    assert (rest, parent.returncode) == ("", -signal.SIGKILL)


@pytest.mark.parametrize("held", [threading.Lock(), (n for n in range(3))], ids=["lock", "generator"])
def test_what_cannot_be_pickled_is_refused(held):
    plan = plan_of(loss=lambda outputs, y: outputs.sum() if held else outputs.mean())
    with pytest.raises(UsageError) as caught:
        Pool(plan, DATA, 0)
    said = str(caught.value)
    assert said.startswith("the pool engine cannot send fedavg or the model to another process (cannot pickle")
    assert f"{type(held).__name__}' object): use the sequential engine, which runs anything, or auto" in said


def test_an_open_file_is_refused(tmp_path):
    with (tmp_path / "log").open("w") as file:

        class Logged(nn.Linear):
            def forward(self, x):
                file.write("called")
                return super().forward(x)

        assert "cannot send fedavg or the model to another process" in Pool.refusal(plan_of(Logged(FEATURES, 3)), DATA)


def test_other_systems_and_devices_are_refused(monkeypatch):
    plan = plan_of()
    elsewhere = {"ann": Samples(x=torch.zeros(3, FEATURES, device="meta"), y=torch.zeros(3, device="meta"))}
    with pytest.raises(UsageError, match="the pool engine uses processors, but the device is meta: use the sequential"):
        Pool(plan, elsewhere, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        why = Pool.refusal(plan, DATA)
    assert why == "shares memory in a way that this operating system does not have"
    assert Pool.refusal(plan, DATA) is None
