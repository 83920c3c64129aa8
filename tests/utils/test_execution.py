"""One contract for all executors: order, values, errors, lanes that are killed, interrupts, and the parent's death."""

import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from contextlib import closing
from functools import partial

import cloudpickle
import pytest
import torch

from fedshift.utils.errors import FedshiftError, UsageError
from fedshift.utils.execution.executor import InProcess, LaneLost, capture_error, run_all
from fedshift.utils.execution.ray_cluster import RayCluster, deserialize, serialize
from fedshift.utils.execution.workers import Worker, Workers, describe_exit
from fedshift.utils.profiling import record_seconds, timed_section
from fedshift.utils.random_streams import torch_stream

MAKERS = {"here": InProcess, "workers": Workers, "ray": partial(RayCluster, 2)}
HERE, WORKERS = pytest.param("here", id="here"), pytest.param("workers", id="workers")
RAY = pytest.param("ray", id="ray", marks=pytest.mark.slow)
EACH = pytest.mark.parametrize("kind", [HERE, WORKERS, RAY], indirect=True)
ELSEWHERE = pytest.mark.parametrize("kind", [WORKERS, RAY], indirect=True)
KEEPING = pytest.mark.parametrize("kind", [HERE, WORKERS], indirect=True)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes do not find tests


@pytest.fixture(scope="module")
def opened():
    """One executor of each kind, which the tests share, as runs do."""
    executors = {}
    yield executors
    processes = [worker.process for worker in executors["workers"]._workers.values()] if "workers" in executors else []
    for executor in executors.values():
        executor.close()
    assert all(process.returncode == -signal.SIGKILL for process in processes)


@pytest.fixture
def kind(request, opened):
    """The executor of a kind; it is left as usable as it was."""
    if request.param not in opened:
        opened[request.param] = MAKERS[request.param]()
    return opened[request.param]


def once(function, *args):
    """A chain of one call."""
    return (yield function, *args)


def results(executor, at_once=2, **chains):
    return list(run_all(executor, chains.items(), at_once))


def double(number):
    return 2 * number


# Order and values


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [HERE, WORKERS, pytest.param("ray", id="ray")], indirect=True)
def test_one_at_a_time_they_end_in_the_order_in_which_they_are_given(kind):
    chains = {name: once(double, number) for number, name in enumerate("cab")}
    assert results(kind, 1, **chains) == [("c", 0), ("a", 2), ("b", 4)]


@pytest.mark.slow
@EACH
def test_chains_go_on_with_what_they_learn_and_no_more_run_than_are_allowed(kind):
    def grow(number, until):
        while number < until:
            number = yield double, number
        return number

    def count():
        for first in (1, 100, 200):
            taken.append(first)
            assert len(taken) - len(ended) <= 2
            yield first, grow(first, 8 * first)

    taken, ended = [], []
    for name, found in run_all(kind, count(), 2):
        ended.append(name)
        assert found == 8 * name
    assert sorted(ended) == [1, 100, 200]


def change(state, number):
    state["seen"].append(number)
    return list(state["seen"]), os.getpid()


@KEEPING
def test_what_a_call_does_to_a_value_the_next_on_its_lane_sees(kind):
    def chain(number):
        value = kind.put({"seen": []})
        for step in range(3):
            found, process = yield change, value, step
            processes.setdefault(number, set()).add(process)
        kind.drop(value)
        return found

    processes = {}
    assert sorted(results(kind, one=chain(1), two=chain(2))) == [("one", [0, 1, 2]), ("two", [0, 1, 2])]
    assert [len(each) for each in processes.values()] == [1, 1]


@EACH
def test_tensors_arrive_bit_for_bit_and_one_stays_one(kind):
    with torch_stream(0, "x"):
        x = {"floats": torch.randn(3, 5).t(), "low": torch.randn(4).bfloat16(), "none": torch.empty(0, 2)}
    handle = kind.put(x)
    for given in (handle, x):
        ((_, found),) = results(kind, it=once(lambda state: (state, dict(state)), given))
        for name, tensor in x.items():
            assert found[0][name] is found[1][name]
            assert found[0][name].dtype == tensor.dtype
            assert torch.equal(found[0][name], tensor)
    kind.drop(handle)


@ELSEWHERE
def test_calls_compute_on_one_thread_elsewhere(kind):
    ((_, (threads, process)),) = results(kind, it=once(lambda: (torch.get_num_threads(), os.getpid())))
    assert threads == 1
    assert process != os.getpid()


@EACH
def test_seconds_of_the_calls_count_for_whoever_records(kind):
    def work():
        with timed_section("work"):
            return 1

    with record_seconds() as seconds:
        results(kind, it=once(work))
    assert "work" in seconds


# Errors


@EACH
def test_an_error_ends_its_chain_alone_and_can_be_caught_in_it(kind):
    def fail(text):
        raise UsageError(text)

    def catching():
        try:
            yield fail, "choose another"
        except UsageError as error:
            return (yield double, len(str(error)))

    found = dict(results(kind, bad=once(fail, "no"), good=once(double, 4), caught=catching()))
    assert (type(found["bad"]), str(found["bad"])) == (UsageError, "no")
    assert (found["good"], found["caught"]) == (8, 28)


@EACH
def test_what_cannot_be_sent_fails_its_chain_where_it_has_to_be_sent(kind):
    lock = threading.Lock()
    found = dict(results(kind, 1, given=once(id, lock), returned=once(threading.Lock), good=once(double, 2)))
    assert found["good"] == 4
    sent = isinstance(kind, InProcess)
    assert sent == (found["given"] == id(lock)) == (type(found["returned"]) is type(lock))
    for name in () if sent else ("given", "returned"):
        assert "cannot pickle" in str(found[name])


class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.lock = threading.Lock()


ERRORS = {
    "ValueError: labels are odd": ValueError("labels are odd"),
    "KeyError: 'color'": KeyError("color"),
    "SystemExit: 3": SystemExit(3),
    "UnicodeDecodeError: 'ascii' codec": UnicodeDecodeError("ascii", b"\xff", 0, 1, "no"),
    "Odd: this and that": Odd("this", "that"),
}


@pytest.mark.parametrize("text", ERRORS)
def test_other_errors_arrive_as_text_with_where_they_were_raised(text):
    def fail():
        raise ERRORS[text]

    found = pickle.loads(pickle.dumps(capture_error(fail)))
    assert type(found) is RuntimeError
    assert str(found).startswith(text)
    assert str(found).endswith(f"tests/utils/test_execution.py, line {fail.__code__.co_firstlineno + 1}, in fail")
    (note,) = found.__notes__
    assert note.startswith("In the worker process:\nTraceback")
    assert type(capture_error(lambda: _raise(FedshiftError("disk")))) is FedshiftError


def _raise(error):
    raise error


# Lanes that die


def die(by):
    print("first\nthe disk is on fire", file=sys.stderr, flush=True)
    if by is None:
        os._exit(3)
    os.kill(os.getpid(), by)


@ELSEWHERE
def test_a_lane_that_is_killed_fails_its_own_call_and_the_next_call_runs(kind):
    def chain():
        assert (yield double, 1) == 2
        yield die, signal.SIGKILL

    found = dict(results(kind, killed=chain(), good=once(double, 1), later=once(double, 2)))
    assert (found["good"], found["later"]) == (2, 4)
    assert type(found["killed"]) is LaneLost
    how = "was killed by SIGKILL, most often because memory ran out: the disk is on fire"
    assert str(found["killed"]) == how or str(found["killed"]).startswith("was lost (WorkerCrashedError: The worker")
    assert results(kind, again=once(double, 3)) == [("again", 6)]


@pytest.mark.parametrize("kind", [WORKERS], indirect=True)
def test_how_a_worker_ended_is_said_with_its_last_words(kind):
    ((_, found),) = results(kind, left=once(die, None))
    assert str(found) == "ended with exit code 3: the disk is on fire"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WORKERS], indirect=True)
def test_a_worker_that_dies_between_calls_is_replaced_unless_a_chain_needs_what_it_knew(kind):
    def chain():
        kill((yield (os.getpid,)))
        yield double, 1

    def kill(process):
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        return process

    ((_, lost),) = results(kind, it=chain())
    assert (type(lost), str(lost)) == (LaneLost, "was killed by SIGKILL, most often because memory ran out")
    ((_, first),) = results(kind, it=once(os.getpid))
    kill(first)
    ((_, second),) = results(kind, it=once(os.getpid))
    assert first != second


# Interrupts and ends


@pytest.mark.slow
@EACH
def test_whoever_stops_half_way_leaves_no_answer_for_the_next(kind):
    def chains():
        for number in range(4):
            yield number, once(double, number)

    running = run_all(kind, chains(), 2)
    next(running)
    running.close()
    assert sorted(results(kind, a=once(double, 10), b=once(double, 11))) == [("a", 20), ("b", 22)]


@ELSEWHERE
def test_an_interrupt_stops_the_calls_in_progress_and_closes_their_chains(kind, tmp_path):
    def interrupted():
        yield double, 1
        raise KeyboardInterrupt

    def endless():
        try:
            yield (threading.Event().wait,)
        finally:
            closed.append(True)

    closed = []
    with pytest.raises(KeyboardInterrupt):
        results(kind, endless=endless(), interrupted=interrupted())
    assert closed == [True]
    assert results(kind, again=once(double, 3)) == [("again", 6)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WORKERS], indirect=True)
def test_a_hand_over_interrupted_half_way_leaves_no_worker_confused(kind, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    assert results(kind, 1, it=once(double, 1)) == [("it", 2)]
    value = kind.put(torch.arange(3))
    with monkeypatch.context() as patch:
        patch.setattr(kind._workers[0], "share_buffer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            results(kind, 1, it=once(torch.sum, value))
    assert results(kind, 1, it=once(torch.sum, value)) == [("it", torch.tensor(3))]
    kind.drop(value)


@pytest.mark.parametrize("kind", [WORKERS], indirect=True)
def test_ctrl_c_is_not_for_workers(kind):
    def twice():
        first = yield (os.getpid,)
        os.kill(first, signal.SIGINT)
        return first == (yield (os.getpid,))

    assert results(kind, it=twice()) == [("it", True)]


def count_known():
    return [(len(each.values), len(each.layouts)) for each in gc.get_objects() if isinstance(each, Worker)]


@pytest.mark.parametrize("kind", [WORKERS], indirect=True)
def test_workers_forget_what_is_dropped(kind):
    def known():
        ((_, ((values, layouts),)),) = results(kind, 1, it=once(count_known))
        assert values == layouts
        return values

    before, kept, dropped = known(), kind.put({"a": torch.ones(3)}), kind.put([1])
    results(kind, 1, it=once(lambda *values: len(values), kept, dropped))
    assert known() == before + 2
    kind.drop(dropped)
    assert known() == before + 1
    kind.drop(kept)
    assert known() == before


@pytest.mark.slow
def test_each_lane_has_the_environment_that_it_is_given():
    given = [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    with closing(Workers(given)) as workers:
        assert workers.lanes == 2
        calls = {name: once(os.getenv, "CUDA_VISIBLE_DEVICES") for name in "ab"}
        assert sorted(found for _, found in results(workers, **calls)) == ["0", "3"]


FOR_EVER = """
import os, threading
from fedshift.utils.execution.executor import run_all
from fedshift.utils.execution.workers import Workers

def work():
    print("working", flush=True)
    threading.Event().wait()

def chain():
    yield work,

list(run_all(Workers(), ((n, chain()) for n in range(2)), 2))
"""


@pytest.mark.slow
def test_workers_end_with_their_parent_even_in_the_middle_of_a_call():
    parent = subprocess.Popen([sys.executable, "-c", FOR_EVER], stdout=subprocess.PIPE, text=True)
    assert [parent.stdout.readline() for _ in range(2)] == ["working\n"] * 2
    parent.kill()
    rest, _ = parent.communicate(timeout=60)  # ends when nobody holds the pipe, which workers inherit
    assert (rest, parent.returncode) == ("", -signal.SIGKILL)


# What Ray carries


def test_what_ray_carries_lies_in_writable_memory_of_its_own():
    x = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    packed, raw = serialize({"it": x, "same": x, "flags": torch.tensor([True, False])})
    assert len(raw) == 2
    for each in (copies := [each.copy() for each in raw]):
        each.flags.writeable = False
    found = deserialize((packed, copies))
    assert found["it"] is found["same"]
    assert torch.equal(found["it"], x)
    assert found["it"].zero_().is_contiguous()
    with pytest.raises((TypeError, pickle.PicklingError), match=re.compile("cannot pickle", re.IGNORECASE)):
        serialize(threading.Lock())


@pytest.mark.slow
def test_a_worker_starts_without_libraries_that_training_does_not_use():
    names = {"sklearn", "scipy.stats", "scipy.ndimage", "matplotlib"}
    for module, others in (("engines.spread", {"pandas", "scipy"}), ("experiments.trial_run", set())):
        code = f"import sys, fedshift.{module}; print(*sys.modules)"
        loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        assert f"fedshift.{module}" in loaded
        assert not (names | others) & set(loaded)
