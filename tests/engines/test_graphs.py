"""Steps replayed in place: a recording of one step gives the bits of all, and what cannot be recorded runs without."""

import inspect

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fedshift.config.expressions import list_catalog
from fedshift.core.optimizer import SGD, AdamW
from fedshift.core.schedule import SCHEDULES
from fedshift.engines import graphs
from fedshift.engines.tape import Tape
from fedshift.methods import METHODS
from fedshift.methods.fedbn import fedbn
from fedshift.utils.errors import UsageError
from tests.laws.course import make_trial, unequal

SIZES = {"a": 29, "b": 24, "c": 24}
"""Three steps of all clients, and one of a single client, which is no graph."""


class Recorded(graphs.Replay):
    """Replays the operations of one step on the same tensors, with all that Python decided, as a CUDA graph does."""

    def capture(self):
        self._run()
        held = inspect.getclosurevars(self._run).nonlocals
        static = held["self"]
        self.buffers = tree_leaves((static._leaves, static._counter, held["batch"], held["loss"]))
        self.tape = Tape(lambda *_: self._run() or [], self.buffers)

    def replay(self):
        self.tape(*self.buffers)


class Failing(graphs.Replay):
    def capture(self):
        self._run()  # a failure may come after the buffers were written
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


class Wrong(graphs.Replay):
    def replay(self):
        self._run()
        inspect.getclosurevars(self._run).nonlocals["loss"].mul_(1.01)


def copy_(into, values):
    """Copy by operations that a tape can record."""
    for one, other in zip(into, values, strict=True):
        if one is not other:
            one.copy_(other)


@pytest.fixture
def train(monkeypatch, one_thread):
    """Return what a trial holds after rounds in which ``kind`` replays steps, its notices, and how many steps it was.

    ``copies``: whether copying in place is what a tape can record.
    """

    def call(method, kind, *, rounds=2, sizes=None, copies=True, **settings):
        with monkeypatch.context() as patched:
            patched.setattr(graphs, "REPLAYS", {"cpu": kind} if kind else {})
            if copies:
                patched.setattr(graphs, "_copy_", copy_)
            taken = []
            step = graphs.StaticSteps.step
            patched.setattr(graphs.StaticSteps, "step", lambda *given: (taken.append(1), step(*given))[1])
            trial = make_trial(method, "stacked", data=unequal(sizes or SIZES), **settings)
            trial.introduce()
            for _ in range(rounds):
                trial.advance()
            return trial.to_tensors()[0], trial.engine_notices, len(taken)

    return call


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_recorded_step_gives_the_bits_of_all(train):
    for text, optimizer in (
        ("silobn+scaffold", SGD(lr=0.05)),
        ("partialfed_adaptive", AdamW(lr=0.01, keep=True)),
    ):
        (method,) = METHODS.parse_all(text)
        expected, *_ = train(method, None, optimizer=optimizer)
        found, notices, steps = train(method, Recorded, optimizer=optimizer)
        assert (notices, steps) == ([], 6)
        assert_same(expected, found)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Failing, "operation not permitted when stream is capturing"), (Wrong, "its steps gave other values")],
)
def test_a_graph_that_fails_or_differs_is_not_used(train, kind, why):
    optimizer = SGD(lr=0.05, momentum=0.9)
    expected, *_ = train(fedbn(), None, optimizer=optimizer)
    found, notices, steps = train(fedbn(), kind, optimizer=optimizer, copies=False)
    assert notices == [f"CUDA graphs are not used for some steps, which run without them: {why}"]
    assert steps == 6
    assert_same(expected, found)


def test_graphs_are_switched_off_by_the_environment_and_where_the_rate_changes(train, monkeypatch):
    falling = SGD(lr=0.05, schedule=SCHEDULES.parse("cosine(rounds=2)"))
    assert train(fedbn(), graphs.Replay, optimizer=falling)[2] == 0
    monkeypatch.setenv("FEDSHIFT_CUDA_GRAPHS", "0")
    assert train(fedbn(), graphs.Replay)[2] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.05), SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01), AdamW(lr=0.01, keep=True)]
)
def test_recorded_steps_of_every_method_give_the_same_bits(train, optimizer):
    recorded = 0
    for text in (*list_catalog("methods"), "ditto(epochs=2)+scaffold"):
        (method,) = METHODS.parse_all(text)
        try:
            expected, *_ = train(method, None, sizes={"a": 24, "b": 24}, optimizer=optimizer)
        except UsageError:  # the method, the optimizer or the network do not fit
            continue
        found, notices, steps = train(method, Recorded, sizes={"a": 24, "b": 24}, optimizer=optimizer)
        assert not notices, (text, notices)
        assert_same(expected, found)
        recorded += steps > 0
    assert recorded > 40
