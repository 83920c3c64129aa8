"""A worker, run in a thread: it answers for the trials that it was told of, until nobody is there to ask."""

import os
import pickle
import socket
import threading
from multiprocessing.connection import Connection

import pytest
import torch
from torch import nn

from fedshift.core.kernel import init_client, init_server
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.work import Work
from fedshift.data.samples import Samples
from fedshift.engines.engine import Diverged
from fedshift.engines.process_pool import Worker, send_buffer
from fedshift.engines.sequential import Sequential
from fedshift.engines.shared_memory import SharedMemoryBuffer
from fedshift.methods.fedbn import fedbn
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal

DATA = {
    name: Samples(x=torch.randn(size, 4, generator=torch.Generator().manual_seed(size)), y=torch.arange(size) % 3)
    for name, size in {"ann": 9, "bob": 6}.items()
}


def plan_with(loss=nn.functional.cross_entropy):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    return prepare(fedbn(), net, work=Work(batch_size=3, epochs=1), optimizer=SGD(lr=0.1), loss=loss)


class Asker:
    """The parent's end of a worker in a thread."""

    def __init__(self):
        self.ours, self.theirs = socket.socketpair()
        self.buffers = {"own": SharedMemoryBuffer()}
        send_buffer(self.ours, self.buffers["own"])
        self.worker = Worker(self.theirs)
        self.thread = threading.Thread(target=self.worker.serve)
        self.thread.start()
        self.connection = Connection(os.dup(self.ours.fileno()))

    def tell(self, *message):
        self.connection.send_bytes(pickle.dumps(message))

    def trial(self, number, plan, seed=5):
        trial, broadcast = self.buffers[number] = SharedMemoryBuffer(), SharedMemoryBuffer()
        self.tell("trial", number, trial.write((plan, DATA, seed)))
        for shelf in (trial, broadcast):
            send_buffer(self.ours, shelf)

    def server(self, number, server):
        self.tell("server", number, self.buffers[number][1].write(server))

    def work(self, number, name, client):
        """The answer, or the error that there was instead; and the seconds."""
        self.tell("work", number, name, self.buffers["own"].write(client))
        found, seconds = pickle.loads(self.connection.recv_bytes())
        return (self.buffers["own"].read(found) if isinstance(found, bytes) else found), seconds

    def end(self):
        """Go away, as a parent that ends; returns when the worker has."""
        self.connection.close()
        self.ours.close()
        self.thread.join()


@pytest.fixture
def asker():
    asking = Asker()
    yield asking
    asking.end()
    asking.theirs.close()
    asking.worker.connection.close()


def same(found, expected):
    return (
        is_equal(found.update.shared, expected.update.shared)
        and is_equal(found.client.personal, expected.client.personal)
        and (found.client.steps, found.update.weight, found.loss_sum)
        == (expected.client.steps, expected.update.weight, expected.loss_sum)
    )


def test_its_answers_are_those_of_the_sequential_engine(asker):
    plan = plan_with()
    engine, server, client = Sequential(plan, DATA, 5), init_server(plan), init_client(plan)
    asker.trial(0, plan)
    asker.server(0, server)
    for _ in range(2):
        for name in DATA:
            found, seconds = asker.work(0, name, client)
            assert same(found, engine.train_client(server, name, client))
            assert {"data", "forward and backward", "update"} <= seconds.keys()
    moved = engine.train_client(server, "ann", client)
    assert same(asker.work(0, "ann", moved.client)[0], engine.train_client(server, "ann", moved.client))


def test_the_last_broadcast_of_each_trial_counts(asker):
    plans = {0: plan_with(), 1: plan_with(nn.functional.multi_margin_loss)}
    for number, plan in plans.items():
        asker.trial(number, plan, seed=number)
        asker.server(number, init_server(plan))
    moved = init_server(plans[0])
    moved.shared["0.weight"] = moved.shared["0.weight"] + 1
    asker.server(0, moved)
    for number, server in ((0, moved), (1, init_server(plans[1])), (0, moved)):
        client = init_client(plans[number])
        expected = Sequential(plans[number], DATA, number).train_client(server, "bob", client)
        assert same(asker.work(number, "bob", client)[0], expected)


def test_a_trial_that_ended_is_forgotten_and_the_others_are_not(asker):
    plan = plan_with()
    for number in (0, 1):
        asker.trial(number, plan)
        asker.server(number, init_server(plan))
    asker.tell("forget", 0)
    found, _ = asker.work(0, "ann", init_client(plan))
    assert (type(found), str(found)) == (RuntimeError, "KeyError: 0")
    assert asker.work(1, "ann", init_client(plan))[0].client.steps == 3
    assert asker.worker.engines.keys() == asker.worker.servers.keys() == asker.worker.buffers.keys() == {1}


def test_a_trial_may_be_forgotten_before_its_first_round(asker):
    plan = plan_with()
    asker.trial(0, plan)
    asker.tell("forget", 0)
    assert str(asker.work(0, "ann", init_client(plan))[0]) == "KeyError: 0"
    assert not asker.worker.engines


@pytest.mark.parametrize("last", ["nothing", "half a message"])
def test_it_ends_with_whoever_asked(asker, last):
    if last == "half a message":
        asker.ours.send(b"\0\0")
    asker.end()
    assert not asker.thread.is_alive()


def raising(make):
    """The error that arrives where the loss raises what ``make`` gives."""

    def loss(outputs, y):
        raise make()

    return plan_with(loss)


def outcome(asker, plan):
    asker.trial(0, plan)
    asker.server(0, init_server(plan))
    return asker.work(0, "ann", init_client(plan))[0]


def test_errors_of_this_package_arrive_as_they_are(asker):
    found = outcome(asker, raising(lambda: UsageError("choose another loss")))
    assert (type(found), str(found)) == (UsageError, "choose another loss")


def test_divergence_arrives_as_in_the_sequential_engine(asker):
    plan = plan_with(lambda outputs, y: outputs.sum() * float("inf"))
    found = outcome(asker, plan)
    with pytest.raises(Diverged) as expected:
        Sequential(plan, DATA, 5).train_client(init_server(plan), "ann", init_client(plan))
    assert type(found) is Diverged
    assert str(found) == str(expected.value)


def local_error():
    class Odd(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} and {second}")
            self.lock = threading.Lock()

    return Odd("this", "that")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ValueError("labels are odd"), "ValueError: labels are odd"),
        (lambda: KeyError("color"), "KeyError: 'color'"),
        (lambda: SystemExit(3), "SystemExit: 3"),
        (lambda: UnicodeDecodeError("ascii", b"\xff", 0, 1, "no"), "UnicodeDecodeError: 'ascii' codec"),
        (local_error, "Odd: this and that"),
    ],
    ids=["value", "key", "exit", "unicode", "unpicklable"],
)
def test_other_errors_arrive_as_text_with_where_they_were_raised(asker, make, text):
    found = outcome(asker, raising(make))
    assert type(found) is RuntimeError
    assert str(found).startswith(text)
    (note,) = found.__notes__
    assert note.startswith("In the worker process:\nTraceback")
    assert "in loss" in note


def test_it_goes_on_after_an_error(asker):
    plan = plan_with()
    asker.trial(0, plan)
    assert str(asker.work(0, "ann", init_client(plan))[0]) == "KeyError: 0"  # there was no broadcast yet
    asker.server(0, init_server(plan))
    assert str(asker.work(0, "eve", init_client(plan))[0]) == "KeyError: 'eve'"
    assert asker.work(0, "ann", init_client(plan))[0].client.steps == 3
