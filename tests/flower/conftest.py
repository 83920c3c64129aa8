"""A Flower grid within the process: each message goes to a ClientApp and back, as bytes, as over the wire."""

from collections import Counter
from itertools import count
from types import SimpleNamespace

from tests.flower.sites import as_sent  # isort: skip  (before anything of flwr: it keeps Flower quiet)

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid(Grid):
    """``apps``: the ClientApp of each node; nodes ``silent`` do not answer. ``seen``: all messages, both ways."""

    def __init__(self, apps, run_config=None):
        self.apps, self.run_config = apps, run_config or {}
        self.silent, self.seen, self.wire, self._numbers = set(), [], [], count(1)
        self.names = {node: str(node) for node in apps}
        self.states = {node: RecordDict() for node in apps}
        self.tamper = lambda reply: reply

    def _sent(self, message):
        """``message`` as it arrives on the other side."""
        self.wire.append(message_to_proto(message).SerializeToString())
        self.seen.append(as_sent(message))  # one of its own, since mods change the message that arrives
        return as_sent(message)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"message {next(self._numbers)}"
            arrived = self._sent(message)
            if node in self.silent:
                continue
            config = {"partition-id": node, "name": self.names[node]}
            context = Context(1, node, config, self.states[node], dict(self.run_config))
            try:
                reply = self.apps[node](arrived, context)
            except Exception as error:
                reply = Message(Error(0, f"{type(error)}:<'{error}'>"), reply_to=arrived)
                reply.metadata.__dict__["_src_node_id"] = 1  # as Flower's own error replies
            tampered = self.tamper(reply)
            replies += [] if tampered is None else [self._sent(tampered)]
        return replies

    def get_node_ids(self):
        return list(self.apps)

    def arrays(self):
        """How often each entry's name stood in a message."""
        records = [r for m in self.seen if m.has_content() for r in m.content.array_records.values()]
        return Counter(name for record in records for name in record)

    def set_run(self, run):
        raise NotImplementedError

    run = property()
    create_message = push_messages = pull_messages = set_run


def _be_a_server(patch):
    """Make this process what Flower's server process is."""
    for number in ("_run_id", "_node_id", "_task_id"):
        patch.setattr(TaskIdentity, number, 1)


@pytest.fixture
def local_grid(monkeypatch):
    """The class :class:`LocalGrid`, in a process that is what Flower's server process is."""
    _be_a_server(monkeypatch)
    return LocalGrid


@pytest.fixture(scope="module")
def machine():
    """A process that is what Flower's server process is, and looks for answers without waiting."""
    with pytest.MonkeyPatch.context() as patch:
        _be_a_server(patch)
        patch.setattr("fedshift.flower.coordinator.nodes.POLL_SECONDS", 0.0)
        yield


@pytest.fixture
def clock(machine, monkeypatch):
    """The coordinator's time, which goes on only where it sleeps; ``then``: what happens in its first sleeps."""
    now = SimpleNamespace(seconds=0.0, then=[])

    def sleep(seconds):
        now.seconds += seconds
        if now.then and seconds:
            now.then.pop(0)()

    time = SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    monkeypatch.setattr("fedshift.flower.coordinator.nodes.time", time)
    monkeypatch.setattr("fedshift.flower.coordinator.nodes.POLL_SECONDS", 0.25)
    return now
