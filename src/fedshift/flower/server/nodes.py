"""The connected sites, and questions to them over a Flower grid; every wait has a timeout.

A node introduces itself by its client's name; with TLS, that name is bound to the key that the coordinator has for it.
If that key is removed or replaced meanwhile, the node gets no more questions, and its answers are ignored. A node that
restarts introduces itself again and gets its unanswered questions again. A node that has left gets none, and the
coordinator does not wait for it if enough others answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Event
from typing import NamedTuple

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from httpx import HTTPError

from ...engines.engine import Diverged
from ...utils.errors import FedshiftError, as_flag
from ...utils.printable import to_printable
from ...utils.version import __version__, find_series, is_own_series
from ..transport.exchange import BACK, HEAD, VERSION, Exchange, MalformedMessage
from .anchors import Anchors
from .registry import SiteDescription

Say = Callable[[str], None]
POLL = 0.25
"""Seconds between two polls for answers."""
MOST_PULLS, PATIENCE = 64, 0.5
"""Maximum number of answers to fetch at a time, and seconds to wait before processing those that have arrived."""
KINDS = {"describe": "query", "end": "query", "introduce": "query", "train": "train", "evaluate": "evaluate"}
"""Flower's message types."""
FAILED = (ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.INVALID_FAB)
"""Errors that a connected node reports; all others mean that the message or its answer was lost."""


class StopRequested(FedshiftError):
    """A stop was requested while waiting for sites."""


class _Address(NamedTuple):
    node: int
    activated: str


class Nodes:
    """The sites behind ``grid``.

    Args:
        grid: a Flower grid.
        hello: the question that asks a new node for its description.
        say: called with a line of text when a node connects or leaves.
        known: earlier descriptions of clients.
        keys: returns the public key of each client's node; None: any node may claim any name.
        changed: called when a client has connected.
        signed: signs a question.
        stop: ends waiting when set.
        allow: called before each question with the maximum number of bytes for the entries of an answer.
        anchors: the record of the heads of the sites' ledgers; None: heads are not recorded.
        alert: called with the event (:mod:`.alerts`) and the line of text, if it needs attention at once.

    """

    def __init__(
        self, grid: Grid, hello: Exchange, say: Say, *, known: Mapping[str, SiteDescription] | None = None,
        keys: Callable[[], Mapping[str, bytes]] | None = None, changed: Callable[[], None] = lambda: None,
        signed: Callable[[Exchange], Exchange] = lambda exchange: exchange, stop: Event | None = None,
        allow: Callable[[int], None] = lambda _: None, anchors: Anchors | None = None,
        alert: Callable[[str, str], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        self.anchors, self._alert = anchors, alert
        self.grid, self.hello, self.stop = grid, hello, stop or Event()
        self._say = say
        self.keys, self.changed, self.signed, self.allow = keys, changed, signed, allow
        self.known = dict(known or {})
        self._online: dict[str, _Address] = {}
        self._greeted: dict[_Address, str] = {}  # id of the pending greeting, "" once it is answered
        self._keys: dict[int, bytes] = {}
        self._pool, self._pulling = ThreadPoolExecutor(MOST_PULLS), dict[str, Future[list[Message]]]()

    def say(self, text: str, event: str = "") -> None:
        """Report a line of text without control characters, also as an alert if there is an ``event``."""
        clean = to_printable(text)
        self._say(clean)
        if event:
            self._alert(event, clean)

    @property
    def online(self) -> frozenset[str]:
        """The clients whose nodes are connected."""
        return frozenset(self._online)

    def refresh(self) -> None:
        """Greet new nodes, read their descriptions, and forget nodes that have left or whose key is invalid."""
        listed = self._list_nodes()
        for address in listed:
            if address not in self._greeted:
                self._greeted[address] = self._push(address, self.hello, 3600.0)
        waiting = {number: address for address, number in self._greeted.items() if number}
        for number, reply in self._pull(waiting):
            self._greeted[waiting[number]] = ""
            self._introduce(waiting[number], reply)
        self._greeted = {address: number for address, number in self._greeted.items() if address in listed}
        for name in [name for name, address in self._online.items() if address not in listed]:
            del self._online[name]
            self.say(f"{name} has left ({len(self._online)} connected)")
        for name in [name for name, address in self._online.items() if not self._holds_key(name, address)]:
            del self._online[name]
            self.say(f"the key of {name} was revoked or replaced: refused ({len(self._online)} connected)")

    def wait(self, number: int, seconds: float, among: frozenset[str] | None = None) -> None:
        """Wait until ``number`` training clients (of ``among``, unless None) are connected.

        Raises :class:`FedshiftError` with the names of the connected clients after ``seconds``, or
        :class:`StopRequested`.
        """
        until = time.monotonic() + seconds
        while True:
            self.refresh()
            present = frozenset(name for name in self.online if not self.known[name].validates)
            present = present if among is None else present & among
            if len(present) >= number:
                return
            if self.stop.is_set():
                raise StopRequested(f"stopped while waiting for {number} sites")
            if time.monotonic() > until:
                names = ", ".join(sorted(present)) or "none"
                idle = sorted(name for name in self.online if self.known[name].validates)
                more = f" (not counting {', '.join(idle)}, which validate only)" if idle else ""
                raise FedshiftError(
                    f"{number} sites must be connected (--min-clients), but after {seconds:g} seconds there are "
                    f"{len(present)}: {names}{more}. Start the others, and continue with --resume"
                )
            time.sleep(POLL)

    def ask(
        self, asked: Mapping[str, Exchange], enough: int, seconds: float
    ) -> Iterator[tuple[str, Exchange | FedshiftError]]:
        """Send each client its question; yield clients with their answers, or the error instead, as they arrive.

        Ends when all have answered, after ``seconds``, or when ``enough`` clients have answered and all others have
        left.
        """
        until = time.monotonic() + seconds
        missing, answered = set(asked), 0
        sent: dict[str, tuple[_Address, str]] = {}  # address and message id ("": lost)
        while missing and time.monotonic() < until:
            self.refresh()
            for name in [name for name, (address, _) in sent.items() if not self._holds_key(name, address)]:
                self._pulling.pop(sent.pop(name)[1], None)
            for name in sorted(missing & self.online):
                address = self._online[name]
                if name not in sent or sent[name][0] != address:
                    sent[name] = address, self._push(address, asked[name], until - time.monotonic())
            numbers = {number: name for name, (_, number) in sent.items() if number and name in missing}
            for number, reply in self._pull(sorted(numbers, key=numbers.__getitem__)):
                name = numbers[number]  # an error reply does not have the node as its sender
                if isinstance(reply, Message) and reply.has_error() and reply.error.code not in FAILED:
                    sent[name] = sent[name][0], ""
                    continue
                missing.discard(name)
                answer = self._anchor(name, _read_reply(reply))
                answered += isinstance(answer, Exchange)
                yield name, answer
            lost = {name for name in missing if name not in self._online or (name in sent and not sent[name][1])}
            if missing and missing == lost and answered >= enough:
                break
            time.sleep(POLL if missing else 0)
        for _, number in sent.values():
            self._pulling.pop(number, None)  # ignore late answers
        for name in sorted(missing):
            yield name, FedshiftError("it did not answer in time" if name in self._online else "it has left")

    def _pull(self, numbers: Iterable[str]) -> Iterator[tuple[str, Message | FedshiftError]]:
        """Yield the answers that have arrived, or the errors in reading them, with the ids of their messages.

        Each answer is fetched in its own thread, so that an answer that Flower cannot read, or whose upload stalls,
        does not block the others.
        """
        wanted = list(numbers)
        for number in wanted:
            if number not in self._pulling:
                self._pulling[number] = self._pool.submit(lambda it: list(self.grid.pull_messages([it])), number)
        wait([self._pulling[number] for number in wanted], timeout=PATIENCE)
        for number in [number for number in wanted if self._pulling[number].done()]:
            try:
                replies = self._pulling.pop(number).result()
            except (HTTPError, OSError):  # the SuperLink has ended
                raise
            except Exception as error:
                yield number, FedshiftError(f"Flower cannot read its answer ({type(error).__name__}: {error})")
            else:
                yield from ((number, reply) for reply in replies)

    def _introduce(self, address: _Address, reply: Message | FedshiftError) -> None:
        answer = _read_reply(reply)
        try:
            if isinstance(answer, FedshiftError):
                raise answer
            facts = {key: value for key, value in answer.facts.items() if key not in (HEAD, BACK)}
            described = SiteDescription.of(facts)
        except FedshiftError as error:
            self.say(f"{self._call(address)} does not take part: {error.render(as_flag)}")
            return
        name, before = described.name, self.known.get(described.name)
        if not self._holds_key(name, address):
            self.say(f"{self._call(address)} claims to be {name!r}, but does not have its key: refused")
            return
        if not is_own_series(described.version):
            self.say(
                f"{name} runs fedshift {described.version} and this coordinator {__version__}: refused, since their "
                f"results may differ; install fedshift {find_series(__version__)} there"
            )
            return
        if before and replace(before, version=described.version) != described:
            self.say(f"{name} has reconnected with other data or in another role than before: refused")
            return
        if name in self._online and self._online[name].activated > address.activated:
            return
        if isinstance(answer := self._anchor(name, answer), FedshiftError):
            self.say(f"{self._call(address)} does not take part: {answer}")
            return
        if before and before.version != described.version:
            self.say(f"{name} now runs fedshift {described.version} instead of {before.version}")
        self.known[name], self._online[name] = described, address
        train, test = described.samples.get("train"), described.samples["test"]
        does = f"validates only, on {test} test samples" if described.validates else f"{train} training samples"
        self.say(f"{name} is connected, {does} ({len(self._online)} connected)")
        self.changed()

    def _holds_key(self, name: str, address: _Address) -> bool:
        """Return whether a node has the key that the coordinator knows for client ``name``, or keys are not used."""
        return self.keys is None or self.keys().get(name) == self._keys.get(address.node, b"")

    def _anchor(self, name: str, answer: Exchange | FedshiftError) -> Exchange | FedshiftError:
        """Record the ledger's head in an answer and return the answer without it, or the error if it is invalid."""
        if isinstance(answer, FedshiftError):
            return answer
        facts = dict(answer.facts)
        head, back = facts.pop(HEAD, None), facts.pop(BACK, None)
        try:
            if self.anchors:
                self.anchors.note(name, head, back)
        except FedshiftError as error:
            return error
        return replace(answer, facts=facts)

    def _call(self, address: _Address) -> str:
        """Return a node's name according to its key, not its claim, or its number if the key is unknown."""
        held, known = self._keys.get(address.node, b""), self.keys() if self.keys else {}
        owner = next((name for name, key in known.items() if key == held), None)
        return f"a node (number {address.node})" if owner is None else f"{owner} (node number {address.node})"

    def _list_nodes(self) -> set[_Address]:
        if not hasattr(self.grid, "get_nodes"):  # another implementation of the interface
            return {_Address(node, "") for node in self.grid.get_node_ids()}
        nodes = list(self.grid.get_nodes())
        self._keys |= {node.node_id: node.public_key for node in nodes}
        return {_Address(node.node_id, node.last_activated_at) for node in nodes}

    def _push(self, address: _Address, exchange: Exchange, seconds: float) -> str:
        """Send a question to a node; return the message's id, or "" if the SuperLink did not accept it."""
        exchange = replace(exchange, facts={**exchange.facts, VERSION: __version__})
        if self.anchors:
            exchange = replace(exchange, facts={**exchange.facts, HEAD: self.anchors.head.facts()})
        message = Message(
            self.signed(exchange).content(), address.node, KINDS[exchange.kind], ttl=max(1.0, seconds),
            group_id=str(exchange.facts.get("round", "")),
        )  # fmt: skip
        return next(iter(self.grid.push_messages([message])), "") or ""


def _read_reply(reply: Message | FedshiftError) -> Exchange | FedshiftError:
    try:
        if isinstance(reply, FedshiftError):
            raise reply
        if reply.has_error():
            raise FedshiftError(f"its app failed ({reply.error.reason})")
        answer = Exchange.of(reply.content)
        if answer.kind == "refused":
            raise (Diverged if answer.facts.get("diverged") is True else FedshiftError)(str(answer.facts.get("why")))
    except FedshiftError as error:
        return type(error)(to_printable(error.render(as_flag)))
    except MalformedMessage as error:
        return FedshiftError(f"it sent {to_printable(str(error))}")
    except Exception as error:
        return FedshiftError(f"its answer cannot be read ({type(error).__name__})")
    return answer
