"""Connected sites, their keys, and questions until a deadline; time goes on only where someone sleeps."""

import threading
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedshift import __version__
from fedshift.engines.engine import Diverged
from fedshift.flower.coordinator.nodes import Nodes, StopRequested
from fedshift.flower.messages import VERSION, Exchange
from fedshift.utils.errors import FedshiftError
from tests.flower.sites import SiteGrid

HELLO = Exchange(kind="describe")
ASKED = Exchange(kind="train", facts={"round": 4})
ANSWER = Exchange(kind="trained")
FIRST, LATER = "2026-01-01", "2026-01-02"
"""When nodes were activated first, and after a restart."""


SOUND = {
    "shape": [3, 8, 8], "dtype": "uint8", "classes": 2, "class_names": [], "samples": {"train": 6, "test": 4},
    "labels": None,
}  # fmt: skip


class Grid(SiteGrid):
    """``here``: the nodes that are connected. ``messages``: all that Flower accepted.

    ``answers(node, question)`` is the answer of each (see ``SiteGrid.tamper``), but for introductions. ``taken(node)``:
    whether Flower accepts a question to it.
    """

    def __init__(self):
        super().__init__({})
        self.here, self.messages = {}, []
        self.answers, self.taken = (lambda node, question: ANSWER), (lambda node: True)
        self.tamper = lambda node, asked, said: said if asked.kind == "describe" else self.answers(node, asked)

    def join(self, node, name, *, at=FIRST, key=None, said=None, **changes):
        key = f"key of {name}".encode() if key is None else key
        said = said or Exchange(kind="described", facts=SOUND | {"name": name, "version": __version__} | changes)
        self.here[node] = SimpleNamespace(node_id=node, last_activated_at=at, public_key=key)
        self.sites[node] = SimpleNamespace(answer=lambda question: said)

    @property
    def trained(self):
        """The nodes that were asked to train."""
        return [node for node, question in self.asked if question.kind == "train"]

    def told(self, node):
        return [question.facts["say"] for at, question in self.asked if (at, question.kind) == (node, "tell")]

    def get_nodes(self):
        return list(self.here.values())

    def push_messages(self, messages):
        if not all(self.taken(message.metadata.dst_node_id) for message in messages):
            return [None]
        self.messages += messages
        return super().push_messages(messages)


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
    return connect(grid, heard)


def connect(grid, heard, **options):
    made = Nodes(grid, HELLO, heard.append, **options)
    made.refresh()
    return made


def ask(nodes, *names, enough=2, seconds=10.0):
    """The kind of each answer, or why there is none."""
    answers = [*nodes.ask(dict.fromkeys(names or ("ann", "bob"), ASKED), enough, seconds)]
    assert len({name for name, _ in answers}) == len(answers)
    return {name: answer.kind if isinstance(answer, Exchange) else str(answer) for name, answer in answers}


BOTH = {"ann": "trained", "bob": "trained"}


def test_nodes_introduce_themselves_once_and_hear_that_they_are_connected(grid, heard):
    changes = []
    nodes = Nodes(grid, HELLO, heard.append, changed=lambda: changes.append(sorted(nodes.online)))
    nodes.refresh()
    nodes.refresh()
    assert sorted(node for node, question in grid.asked if question.kind == "describe") == [1, 2]
    assert sorted(heard)[0].startswith("ann is connected, 6 training samples (")
    assert sorted(grid.told(1) + grid.told(2)) == sorted(heard)
    assert changes[-1] == ["ann", "bob"]
    assert nodes.known["ann"].shape == (3, 8, 8)
    ask(nodes, seconds=30.0)  # messages say version, round and how long they hold
    facts = [(message.metadata.message_type, Exchange.of(message.content).facts[VERSION]) for message in grid.messages]
    assert set(facts) == {("query", __version__), ("train", __version__)}
    trained = [message.metadata for message in grid.messages if message.metadata.message_type == "train"]
    assert [(data.group_id, data.ttl) for data in trained] == [("4", 30.0)] * 2


def test_a_name_belongs_to_a_key_and_a_node_without_it_hears_why_it_takes_no_part(grid, heard):
    grid.join(3, "ann", key=b"key of cid")  # a key of the federation, but not ann's
    grid.join(4, "dan")  # unknown to the coordinator
    keys = {name: f"key of {name}".encode() for name in ("ann", "bob", "cid")}
    nodes = connect(grid, heard, keys=lambda: keys)
    assert ask(nodes) == BOTH
    assert grid.trained == [1, 2]
    assert nodes.online == {"ann", "bob"}
    for node, called, name in ((3, "cid", "ann"), (4, "a node (number 4)", "dan")):
        why = f"it claims to be {name!r}, but does not have its key: leave --name out, or correct it"
        assert grid.told(node) == [f"{called} does not take part: {why}"]
        assert grid.told(node)[0] in heard
    keys["dan"] = b"key of dan"
    grid.join(4, "dan", at=LATER)
    nodes.refresh()
    assert nodes.online == {"ann", "bob", "dan"}


def test_a_key_that_is_removed_or_replaced_is_refused_at_once_also_in_mid_round(grid, heard, clock):
    keys = {name: f"key of {name}".encode() for name in ("ann", "bob")}
    nodes, pull = connect(grid, heard, keys=lambda: keys), grid.pull_messages

    def remove():
        del keys["ann"]
        grid.pull_messages = pull

    grid.pull_messages = lambda numbers: []  # answers are on their way
    clock.then.append(remove)
    for _ in range(2):
        assert ask(nodes, enough=1) == {"ann": "it has left", "bob": "trained"}
    assert "the key of ann was removed or replaced: refused (1 connected)" in heard
    assert grid.trained.count(1) == 1
    keys["ann"] = b"the next key of ann"
    grid.join(5, "ann", key=b"the next key of ann")
    assert ask(nodes) == BOTH
    assert grid.trained.count(1) == 1


def test_a_node_that_left_before_its_introduction_was_read_is_not_known(grid, heard, clock):
    grid.join(3, "dan", key=b"")
    pull, grid.pull_messages = grid.pull_messages, lambda numbers: []
    nodes = connect(grid, heard, keys=dict)
    grid.here.clear()
    grid.pull_messages = pull
    nodes.refresh()
    assert not nodes.known


def test_of_two_nodes_with_one_name_the_later_is_asked(nodes, grid):
    grid.join(7, "ann", at="2026-01-03")
    grid.join(5, "ann", at=LATER)
    nodes.refresh()
    assert ask(nodes) == BOTH
    assert set(grid.trained) == {2, 7}


OLD = "it runs fedshift {} and this coordinator 0.1.4, whose results may differ: install fedshift 0.1 there"
DIFFERS = (
    "'ann' has reconnected with other data or in another role than before: give it the data that it began with, or "
    "begin a new experiment"
)
BACK = [
    ({"samples": {"train": 7, "test": 4}}, DIFFERS), ({"validates": True, "samples": {"test": 4}}, DIFFERS),
    ({"shape": [1, 8, 8]}, DIFFERS), ({"version": "0.1.99"}, None),
    *(({"version": version}, OLD.format(version)) for version in ("0.2.0", "1.1.0", "what")),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "why"), BACK)
def test_a_site_comes_back_with_the_same_data_and_another_patch_release_or_hears_why_not(
    changes, why, grid, heard, monkeypatch
):
    for module in ("utils.version", "flower.coordinator.nodes"):
        monkeypatch.setattr(f"fedshift.{module}.__version__", "0.1.4")
    grid.join(1, "ann", version="0.1.3")
    grid.join(2, "bob", version="0.1.4")
    nodes = connect(grid, heard)
    grid.join(1, "ann", at=LATER, **{"version": "0.1.3"} | changes)
    nodes.refresh()
    assert nodes.online == ({"bob"} if why else {"ann", "bob"})
    if why is None:
        assert "ann now runs fedshift 0.1.99 instead of 0.1.3" in heard
    else:
        refused = f"a node (number 1) does not take part: {why}"
        assert heard[-2:] == [refused, "ann has left (1 connected)"]
        assert grid.told(1)[-1] == refused


LOST = {
    "left": lambda grid: grid.here.pop(1),
    "not taken": lambda grid: setattr(grid, "taken", lambda node: node != 1 or grid.here[1].last_activated_at == LATER),
    "silent": None, **{code: code for code in (
        ErrorCode.NODE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    )},
}  # fmt: skip


@pytest.mark.parametrize("lost", LOST)
def test_a_question_that_got_lost_is_asked_again_when_its_node_is_back(lost, nodes, grid, clock):
    """A node that sends an error in place of an answer is one whose question got lost: it holds nobody up."""
    if callable(LOST[lost]):
        LOST[lost](grid)
    else:
        first = lambda node: node == 1 and grid.here[1].last_activated_at == FIRST  # noqa: E731
        grid.answers = lambda node, question: LOST[lost] if first(node) else ANSWER
    why = "it has left" if lost == "left" else "it did not answer in time"
    assert ask(nodes, enough=1) == {"bob": "trained", "ann": why}
    assert clock.seconds == (10.0 if lost == "silent" else 0.0)  # no answer that counts is on its way
    before = clock.seconds
    clock.then = [lambda: None, lambda: grid.join(1, "ann", at=LATER)]
    assert ask(nodes) == BOTH
    assert grid.trained[-1] == 1
    assert 0.5 <= clock.seconds - before <= 1.0


NOT_OURS = "it sent a message that is not fedshift's (KeyError: 'config')"


def test_a_refusal_is_passed_on_in_plain_text_and_the_site_not_asked_again(nodes, grid, clock):
    for answer, why in (
        (Exchange(kind="refused", facts={"why": "\x1b[2Jno\ndata\N{RIGHT-TO-LEFT OVERRIDE}"}), "no data"),
        (Exchange(kind="refused"), "None"),
        (RecordDict(), NOT_OURS),
    ):
        grid.asked, grid.answers = [], lambda node, question, answer=answer: answer if node == 1 else ANSWER
        assert {name: text.strip() for name, text in ask(nodes).items()} == {"ann": why, "bob": "trained"}
        assert grid.trained == [1, 2]
    assert clock.seconds == 0.0
    grid.answers = lambda *_: Exchange(kind="refused", facts={"why": "NaN", "diverged": True})
    assert [type(answer) for _, answer in nodes.ask({"ann": ASKED}, 1, 1.0)] == [Diverged]


def test_of_answers_that_are_repeated_the_first_counts_and_none_is_waited_for_longer(nodes, grid, clock):
    """Otherwise one site would be as many as are needed."""
    pull = grid.pull_messages
    grid.answers = lambda node, question: ANSWER if node == 1 else None
    grid.pull_messages = lambda numbers: pull(numbers) * 3
    del grid.here[2]
    assert ask(nodes, enough=2) == {"ann": "trained", "bob": "it has left"}
    assert clock.seconds == 10.0
    assert ask(nodes, "ann", seconds=0.0) == {"ann": "it did not answer in time"}
    assert clock.seconds == 10.0


def test_a_node_whose_introduction_fails_takes_no_part_and_hears_why(grid, heard):
    grid.join(1, "ann", said=Exchange(kind="refused", facts={"why": "no such folder"}))
    grid.join(2, "bob", said=RecordDict({"more": ConfigRecord()}))
    grid.join(3, "cid", said=ErrorCode.CLIENT_APP_RAISED_EXCEPTION)
    nodes = connect(grid, heard)
    nodes.refresh()
    assert nodes.online == frozenset()
    reasons = enumerate(("no such folder", NOT_OURS, "its app failed (made to  order)"), 1)
    refused = [f"a node (number {node}) does not take part: {why}" for node, why in reasons]
    assert [grid.told(node) for node in (1, 2, 3)] == [[text] for text in refused]
    assert sorted(heard) == refused


def test_the_first_sites_are_waited_for_until_the_deadline_or_a_stop(nodes, grid, clock):
    nodes.wait(2, 60.0)
    assert clock.seconds == 0.0
    clock.then = [lambda: grid.join(3, "cid", validates=True, samples={"test": 4}), lambda: grid.join(4, "dan")]
    nodes.wait(3, 60.0)
    assert clock.seconds == 0.5
    one = r"2 sites .* after 60 seconds there are 1: ann \(not counting cid, .* Start"
    with pytest.raises(FedshiftError, match=one):
        nodes.wait(2, 60.0, frozenset({"ann", "eve"}))
    assert 60.0 <= clock.seconds <= 61.0
    clock.then = [nodes.stop.set]
    with pytest.raises(StopRequested):
        nodes.wait(9, 1e9)


def test_a_stop_says_whom_it_waits_for_and_how_long_at_most(nodes, grid, clock, heard):
    del grid.here[1]
    clock.then = [lambda: None, lambda: None, nodes.stop.set]
    assert ask(nodes, seconds=60.0) == {"ann": "it has left", "bob": "trained"}
    assert clock.seconds == 60.0
    assert [text for text in heard if "waiting" in text] == ["waiting for ann, 59 seconds at most, to end this round"]
    ask(nodes, seconds=30.0)  # measurements, which are asked for after the stop
    assert heard[-1] == "waiting for ann, 30 seconds at most, to end this round"


def test_an_upload_that_stalls_holds_up_neither_others_nor_the_end(nodes, grid, clock, monkeypatch):
    monkeypatch.setattr("fedshift.flower.coordinator.nodes.PULL_SECONDS", 0.01)
    pull, stalled = grid.pull_messages, threading.Event()

    def pull_or_stall(numbers):
        found = pull(numbers)
        if any(reply.metadata.src_node_id == 2 for reply in found):
            stalled.wait()
        return found

    grid.pull_messages = pull_or_stall
    try:
        assert ask(nodes) == {"ann": "trained", "bob": "it did not answer in time"}
        assert clock.seconds >= 10.0
    finally:
        stalled.set()
    assert ask(nodes) == BOTH
