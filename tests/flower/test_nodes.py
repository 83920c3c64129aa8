"""Who is behind a grid, by which key, and what is asked of whom until when: time goes on only where someone sleeps."""

import threading
from itertools import count
from types import SimpleNamespace

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedshift import __version__
from fedshift.flower.server.nodes import Nodes
from fedshift.flower.transport.exchange import Exchange
from fedshift.utils.errors import FedshiftError
from tests.flower.sites import as_sent

HELLO = Exchange(kind="describe")
ASKED = Exchange(kind="train", facts={"round": 4})
ANSWER = Exchange(kind="trained")
FIRST = "2026-01-01"
"""When nodes that did not restart were activated."""


def described(name, **changes):
    facts = {
        "name": name, "version": __version__, "shape": [3, 8, 8], "dtype": "uint8", "classes": 2, "class_names": [],
        "samples": {"train": 6, "test": 4}, "labels": None,
    }  # fmt: skip
    return Exchange(kind="described", facts=facts | changes)


class Grid:
    """``here``: the nodes that are connected. ``answers(node, question)`` is what each answers: an exchange, a reply's
    content, the code of an error, or None for nothing. ``sent``: what was sent to which node."""

    def __init__(self):
        self.here, self.sent, self.taken = {}, [], lambda node: True
        self._replies, self._numbers = {}, count(1)

    def join(self, node, name, *, at=FIRST, key=None, **changes):
        self.here[node] = SimpleNamespace(
            node_id=node, last_activated_at=at, public_key=key or f"key of {name}".encode()
        )
        self.here[node].introduction = described(name, **changes)

    def answers(self, node, question):
        return ANSWER

    def get_nodes(self):
        return list(self.here.values())

    def push_messages(self, messages):
        (message,) = messages
        node, question = message.metadata.dst_node_id, Exchange.of(message.content)
        if not self.taken(node):
            return [None]
        number = f"message {next(self._numbers)}"
        message.metadata.__dict__["_message_id"] = number
        self.sent.append((node, question.kind))
        answer = self.here[node].introduction if question.kind == "describe" else self.answers(node, question)
        if isinstance(answer, Exchange):
            answer = answer.content()
        if answer is not None:
            content = answer if isinstance(answer, RecordDict) else Error(answer, "made to order")
            self._replies[number] = as_sent(Message(content, reply_to=as_sent(message)))
        return [number]

    def pull_messages(self, numbers):
        return [self._replies.pop(number) for number in list(numbers) if number in self._replies]


@pytest.fixture
def clock(machine, monkeypatch):
    now = SimpleNamespace(seconds=0.0, then=[])

    def sleep(seconds):
        now.seconds += seconds
        if now.then and seconds:
            now.then.pop(0)()

    monkeypatch.setattr(
        "fedshift.flower.server.nodes.time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    )
    monkeypatch.setattr("fedshift.flower.server.nodes.POLL", 0.25)
    return now


@pytest.fixture
def grid(clock):
    made = Grid()
    made.join(1, "ann")
    made.join(2, "bob")
    return made


@pytest.fixture
def heard():
    return []


@pytest.fixture
def nodes(grid, heard):
    return Nodes(grid, HELLO, heard.append)


def asked(nodes, *names, enough=2, seconds=10.0):
    """What each of ``names`` answered: the kind, or why there is none."""
    found = nodes.ask(dict.fromkeys(names, ASKED), enough, seconds)
    return {name: answer.kind if isinstance(answer, Exchange) else str(answer) for name, answer in found}


def test_nodes_introduce_themselves_once(nodes, grid, heard):
    changes = []
    nodes.changed = lambda: changes.append(sorted(nodes.online))
    nodes.refresh()
    nodes.refresh()
    assert nodes.online == {"ann", "bob"}
    assert sorted(grid.sent) == [(1, "describe"), (2, "describe")]
    assert sorted(heard)[0].startswith("ann is connected, 6 training samples (")
    assert changes[-1] == ["ann", "bob"]
    assert nodes.known["ann"].shape == (3, 8, 8)


def test_a_name_belongs_to_a_key(grid, heard):
    grid.join(3, "ann", key=b"key of cid")  # who has a key of the federation, but not ann's
    grid.join(4, "dan", key=b"key of dan")  # whom the coordinator does not know
    keys = {name: f"key of {name}".encode() for name in ("ann", "bob", "cid")}
    nodes = Nodes(grid, HELLO, heard.append, keys=lambda: keys)
    nodes.refresh()
    assert asked(nodes, "ann", "bob") == {"ann": "trained", "bob": "trained"}
    assert [node for node, kind in grid.sent if kind == "train"] == [1, 2]
    assert nodes.online == {"ann", "bob"}
    for node, name in (("cid (node number 3)", "ann"), ("a node (number 4)", "dan")):
        assert f"{node} claims to be {name!r}, but does not have its key: refused" in heard
    keys["dan"] = b"key of dan"
    grid.join(4, "dan", at="2026-01-02", key=b"key of dan")
    nodes.refresh()
    assert nodes.online == {"ann", "bob", "dan"}


def test_a_key_that_is_revoked_or_replaced_is_refused_at_once_also_in_mid_round(grid, heard, clock):
    keys = {name: f"key of {name}".encode() for name in ("ann", "bob")}
    nodes, pull = Nodes(grid, HELLO, heard.append, keys=lambda: keys), grid.pull_messages
    nodes.refresh()

    def revoke():
        del keys["ann"]
        grid.pull_messages = pull

    grid.pull_messages = lambda numbers: []  # answers are on their way
    clock.then.append(revoke)
    assert asked(nodes, "ann", "bob", enough=1) == {"ann": "it has left", "bob": "trained"}
    assert "the key of ann was revoked or replaced: refused (1 connected)" in heard
    assert asked(nodes, "ann", "bob", enough=1) == {"ann": "it has left", "bob": "trained"}
    assert grid.sent.count((1, "train")) == 1
    keys["ann"] = b"the next key of ann"
    grid.join(5, "ann", key=b"the next key of ann")
    assert asked(nodes, "ann", "bob") == {"ann": "trained", "bob": "trained"}
    assert grid.sent.count((1, "train")) == 1


def test_who_left_before_its_name_was_heard_is_nobody(grid, heard, clock):
    grid.join(3, "dan", key=b"")
    nodes = Nodes(grid, HELLO, heard.append, keys=dict)
    pull = grid.pull_messages
    grid.pull_messages = lambda numbers: []
    nodes.refresh()
    grid.here.clear()
    grid.pull_messages = pull
    nodes.refresh()
    assert not nodes.known


def test_of_two_that_say_they_are_one_the_later_is_asked(nodes, grid):
    grid.join(7, "ann", at="2026-01-03")
    grid.join(5, "ann", at="2026-01-02")
    nodes.refresh()
    assert asked(nodes, "ann", "bob") == {"ann": "trained", "bob": "trained"}
    assert {node for node, kind in grid.sent if kind == "train"} == {2, 7}


@pytest.mark.parametrize(
    "changes", [{"samples": {"train": 7, "test": 4}}, {"validates": True, "samples": {"test": 4}}, {"shape": [1, 8, 8]}]
)
def test_who_comes_back_as_another_is_refused(nodes, grid, heard, changes):
    nodes.refresh()
    grid.join(1, "ann", at="2026-01-02", **changes)
    nodes.refresh()
    assert nodes.online == {"bob"}
    assert heard[-2:] == [
        "ann has reconnected with other data or in another role than before: refused",
        "ann has left (1 connected)",
    ]


@pytest.mark.parametrize(("version", "back"), [("0.1.99", True), ("0.2.0", False), ("1.1.0", False), ("what", False)])
def test_who_comes_back_with_another_version_goes_on_if_it_is_a_patch(nodes, grid, heard, version, back, monkeypatch):
    monkeypatch.setattr("fedshift.utils.version.__version__", "0.1.4")
    grid.join(1, "ann", version="0.1.3")
    nodes.refresh()
    grid.join(1, "ann", at="2026-01-02", version=version)
    nodes.refresh()
    assert ("ann" in nodes.online) is back
    said = "ann now runs fedshift 0.1.99 instead of 0.1.3" if back else f"ann runs fedshift {version} and this coord"
    assert any(line.startswith(said) for line in heard)


def test_one_that_leaves_is_not_asked_and_not_waited_for(nodes, grid, heard, clock):
    nodes.refresh()
    del grid.here[1]
    assert asked(nodes, "ann", "bob", enough=1) == {"bob": "trained", "ann": "it has left"}
    assert "ann has left (1 connected)" in heard
    assert (1, "train") not in grid.sent
    assert clock.seconds == 0.0


def test_where_too_few_answer_one_that_is_gone_is_waited_for(nodes, grid, clock):
    nodes.refresh()
    del grid.here[1]
    clock.then = [lambda: None, lambda: grid.join(8, "ann")]
    assert asked(nodes, "ann", "bob") == {"bob": "trained", "ann": "trained"}
    assert [node for node, kind in grid.sent if kind == "train"] == [2, 8]
    assert 0.5 <= clock.seconds <= 1.0


def test_one_that_restarts_is_asked_again_at_its_new_place(nodes, grid, clock):
    grid.answers = lambda node, question: (
        ANSWER if node != 1 or grid.here[1].last_activated_at != "2026-01-01" else None
    )
    clock.then = [lambda: grid.join(1, "ann", at="2026-01-02")]
    nodes.refresh()
    assert asked(nodes, "ann", "bob") == {"bob": "trained", "ann": "trained"}
    assert [node for node, kind in grid.sent if kind == "train"] == [1, 2, 1]


@pytest.mark.parametrize("lost", [ErrorCode.NODE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "not taken"])
def test_a_question_that_got_lost_is_asked_again_when_its_node_is_back(lost, nodes, grid, clock):
    nodes.refresh()

    def first(node):
        return node == 1 and grid.here[1].last_activated_at == FIRST

    if lost == "not taken":
        grid.taken = lambda node: not first(node)
    else:
        grid.answers = lambda node, question: lost if first(node) else ANSWER
    assert asked(nodes, "ann", "bob", enough=1) == {"bob": "trained", "ann": "it did not answer in time"}
    assert clock.seconds == 0.0  # nobody who counts is missing
    clock.then = [lambda: grid.join(1, "ann", at="2026-01-02")]
    assert asked(nodes, "ann", "bob") == {"bob": "trained", "ann": "trained"}
    assert clock.seconds <= 1.0


def test_who_does_not_answer_is_waited_for_until_the_deadline(nodes, grid, clock):
    nodes.refresh()
    grid.answers = lambda node, question: ANSWER if node == 2 else None
    assert asked(nodes, "ann", "bob", enough=1) == {"bob": "trained", "ann": "it did not answer in time"}
    assert clock.seconds == 10.0
    del grid.here[2]
    assert asked(nodes, "bob", enough=1) == {"bob": "it has left"}
    assert clock.seconds == 20.0
    assert asked(nodes, "ann", seconds=0.0) == {"ann": "it did not answer in time"}
    assert clock.seconds == 20.0


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "its app failed (made to order)"),
        (ErrorCode.LOAD_CLIENT_APP_EXCEPTION, "its app failed (made to order)"),
        (Exchange(kind="refused", facts={"why": "no data"}), "no data"),
        (Exchange(kind="refused"), "None"),
        (RecordDict(), "it sent a message that is not fedshift's (KeyError: 'config')"),
    ],
)
def test_one_that_fails_says_why_and_is_not_asked_again(answer, why, nodes, grid, clock):
    nodes.refresh()
    grid.answers = lambda node, question: answer if node == 1 else ANSWER
    assert asked(nodes, "ann", "bob") == {"ann": why, "bob": "trained"}
    assert [node for node, kind in grid.sent if kind == "train"] == [1, 2]
    assert clock.seconds == 0.0


def test_one_whose_introduction_fails_takes_no_part(nodes, grid, heard):
    grid.here[1].introduction = Exchange(kind="refused", facts={"why": "no such folder"})
    grid.here[2].introduction = RecordDict()
    nodes.refresh()
    nodes.refresh()
    assert nodes.online == frozenset()
    assert sorted(heard) == [
        "a node (number 1) does not take part: no such folder",
        "a node (number 2) does not take part: it sent a message that is not fedshift's (KeyError: 'config')",
    ]
    assert len(grid.sent) == 2


def test_the_first_are_waited_for_no_longer_than_told(nodes, grid, clock):
    nodes.wait(2, 60.0)
    assert clock.seconds == 0.0
    clock.then = [lambda: grid.join(3, "cid")]
    nodes.wait(3, 60.0)
    assert clock.seconds == 0.25
    with pytest.raises(FedshiftError, match=r"2 sites .* after 60 seconds there are 1: cid. Start the others"):
        nodes.wait(2, 60.0, frozenset({"cid", "dan"}))
    assert 60.0 <= clock.seconds <= 61.0


def test_everything_that_is_sent_is_signed_and_says_its_round(grid, heard):
    nodes = Nodes(grid, HELLO, heard.append, signed=lambda exchange: Exchange(kind=exchange.kind, facts={"proof": 1}))
    seen, push = [], grid.push_messages
    grid.push_messages = lambda messages: seen.extend(messages) or push(messages)
    nodes.refresh()
    asked(nodes, "ann", "bob", seconds=30.0)
    assert all(Exchange.of(message.content).facts == {"proof": 1} for message in seen)
    trained = [message.metadata for message in seen if message.metadata.message_type == "train"]
    assert [(data.group_id, data.ttl) for data in trained] == [("4", 30.0)] * 2


def test_an_upload_that_stalls_half_way_holds_up_neither_others_nor_the_end(nodes, grid, clock, monkeypatch):
    monkeypatch.setattr("fedshift.flower.server.nodes.PATIENCE", 0.01)
    nodes.refresh()
    nodes.refresh()
    pull, stalled = grid.pull_messages, threading.Event()

    def pull_or_stall(numbers):
        found = pull(numbers)
        if any(reply.metadata.src_node_id == 2 for reply in found):
            stalled.wait()
        return found

    grid.pull_messages = pull_or_stall
    try:
        assert asked(nodes, "ann", "bob") == {"ann": "trained", "bob": "it did not answer in time"}
        assert clock.seconds >= 10.0
    finally:
        stalled.set()
    assert asked(nodes, "ann", "bob") == {"ann": "trained", "bob": "trained"}
