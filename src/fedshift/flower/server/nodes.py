"""The sites that are connected, and what is asked of them over one of Flower's grids; nothing here waits for ever.

A node introduces itself by its client's name; under TLS that name is bound to the key that the coordinator knows for
it. One that restarts introduces itself again, and is asked again what it had not answered. One that is gone is not
asked, and not waited for where enough others answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event

from ..transport import no_telemetry as no_telemetry  # isort: split

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from ...engines.engine import Diverged
from ...utils.errors import FedshiftError
from ..transport.exchange import Exchange, MalformedMessage
from .registry import SiteDescription

Say = Callable[[str], None]
POLL = 0.25
"""Seconds between two looks for answers."""
TOGETHER = 2**26
"""Bytes of answers that are fetched at a time, were they as large as the questions; at least one is."""
KINDS = {"describe": "query", "end": "query", "train": "train", "evaluate": "evaluate"}
"""Flower's types of messages."""
FAILED = (ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.INVALID_FAB)
"""Errors of a node that is there; others say that the message or its answer got lost."""


class StopRequested(FedshiftError):
    """Somebody asked to stop while sites were waited for."""


@dataclass(frozen=True)
class _Address:
    node: int
    activated: str


class Nodes:
    """The sites behind ``grid``.

    ``hello`` asks a new node to describe itself; ``known``: how clients did before. ``keys`` gives the public key of
    each client's node; None: any node may say that it is any client. ``signed`` makes what is sent carry proof of who
    asks. ``say`` hears who comes and goes, and ``changed`` is called when someone came.
    """

    def __init__(
        self, grid: Grid, hello: Exchange, say: Say, *, known: Mapping[str, SiteDescription] | None = None,
        keys: Callable[[], Mapping[str, bytes]] | None = None, changed: Callable[[], None] = lambda: None,
        signed: Callable[[Exchange], Exchange] = lambda exchange: exchange, stop: Event | None = None,
    ) -> None:  # fmt: skip
        self.grid, self.hello, self.say, self.stop = grid, hello, say, stop or Event()
        self.keys, self.changed, self.signed = keys, changed, signed
        self.known = dict(known or {})
        self._online: dict[str, _Address] = {}
        self._greeted: dict[_Address, str] = {}  # and the number of the message
        self._keys: dict[int, bytes] = {}

    @property
    def online(self) -> frozenset[str]:
        """The clients whose nodes are connected."""
        return frozenset(self._online)

    def refresh(self) -> None:
        """Look who is there: greet new nodes, hear how they describe themselves, and see who has left."""
        listed = self._list_nodes()
        for address in listed:
            if address not in self._greeted:
                self._greeted[address] = self._push(address, self.hello, 3600.0)
        waiting = {number: address for address, number in self._greeted.items() if number}
        for reply in self.grid.pull_messages(waiting) if waiting else ():
            address = waiting[reply.metadata.reply_to_message_id]
            self._greeted[address] = ""
            self._introduce(address, reply)
        self._greeted = {address: number for address, number in self._greeted.items() if address in listed}
        for name in [name for name, address in self._online.items() if address not in listed]:
            del self._online[name]
            self.say(f"{name} has left ({len(self._online)} connected)")

    def wait(self, number: int, seconds: float, among: frozenset[str] | None = None) -> None:
        """Return once ``number`` clients (of those ``among``) are connected.

        Raises :class:`FedshiftError` naming those who are after ``seconds``, and :class:`StopRequested`.
        """
        until = time.monotonic() + seconds
        while True:
            self.refresh()
            there = self.online if among is None else self.online & among
            if len(there) >= number:
                return
            if self.stop.is_set():
                raise StopRequested(f"stopped while {number} sites were waited for")
            if time.monotonic() > until:
                names = ", ".join(sorted(there)) or "none"
                raise FedshiftError(
                    f"{number} sites must be connected (--min-clients), but after {seconds:g} seconds there are "
                    f"{len(there)}: {names}. Start the others, and go on with --resume"
                )
            time.sleep(POLL)

    def ask(
        self, asked: Mapping[str, Exchange], enough: int, seconds: float
    ) -> Iterator[tuple[str, Exchange | FedshiftError]]:
        """Each of the clients ``asked`` with its answer, or why there is none, as they come.

        Ends when all have answered, after ``seconds``, or when only clients that are gone are missing and ``enough``
        others have answered; those who are missing then have no answer.
        """
        until = time.monotonic() + seconds
        missing, answered = set(asked), 0
        together = max(1, TOGETHER // max((1, *map(_exchange_size, asked.values()))))
        sent: dict[str, tuple[_Address, str]] = {}  # where, and the number of the message ("": lost)
        while missing and time.monotonic() < until:
            self.refresh()
            for name in sorted(missing & self.online):
                address = self._online[name]
                if name not in sent or sent[name][0] != address:
                    sent[name] = address, self._push(address, asked[name], until - time.monotonic())
            numbers = {number: name for name, (_, number) in sent.items() if number and name in missing}
            for reply in self._pull(sorted(numbers, key=numbers.__getitem__), together):
                name = numbers[reply.metadata.reply_to_message_id]  # an error's sender is not the node
                if reply.has_error() and reply.error.code not in FAILED:
                    sent[name] = sent[name][0], ""
                    continue
                missing.discard(name)
                answer = _read_reply(reply)
                answered += isinstance(answer, Exchange)
                yield name, answer
            lost = {name for name in missing if name not in self._online or (name in sent and not sent[name][1])}
            if missing and missing == lost and answered >= enough:
                break
            time.sleep(POLL if missing else 0)
        for name in sorted(missing):
            there = "did not answer in time" if name in self._online else "is gone"
            yield name, FedshiftError(f"it {there}")

    def _pull(self, numbers: Sequence[str], together: int) -> Iterator[Message]:
        """The answers that are there to messages ``numbers``, fetched ``together`` at a time and then let go."""
        for start in range(0, len(numbers), together):
            yield from self.grid.pull_messages(numbers[start : start + together])

    def _introduce(self, address: _Address, reply: Message) -> None:
        answer = _read_reply(reply)
        if isinstance(answer, FedshiftError):
            self.say(f"a node (number {address.node}) does not take part: {answer}")
            return
        try:
            described = SiteDescription.of(answer.facts)
        except FedshiftError as error:
            self.say(f"a node (number {address.node}) does not take part: {error}")
            return
        name, before = described.name, self.known.get(described.name)
        if self.keys is not None and self.keys().get(name) != self._keys.get(address.node, b""):
            self.say(f"a node (number {address.node}) says that it is {name!r}, but does not hold its key: refused")
            return
        if before and before != described:
            self.say(f"{name} is back with other data or another version than it began with: refused")
            return
        if name in self._online and self._online[name].activated > address.activated:
            return
        self.known[name], self._online[name] = described, address
        self.say(f"{name} is connected, {described.samples['train']} training samples ({len(self._online)} connected)")
        self.changed()

    def _list_nodes(self) -> set[_Address]:
        if not hasattr(self.grid, "get_nodes"):  # a grid of someone's own
            return {_Address(node, "") for node in self.grid.get_node_ids()}
        found = list(self.grid.get_nodes())
        self._keys = {node.node_id: node.public_key for node in found}
        return {_Address(node.node_id, node.last_activated_at) for node in found}

    def _push(self, address: _Address, exchange: Exchange, seconds: float) -> str:
        """Send to a node; the number of the message, "" where the SuperLink would not take it."""
        message = Message(
            self.signed(exchange).content(), address.node, KINDS[exchange.kind], ttl=max(1.0, seconds),
            group_id=str(exchange.facts.get("round", "")),
        )  # fmt: skip
        return next(iter(self.grid.push_messages([message])), "") or ""


def _exchange_size(exchange: Exchange) -> int:
    return sum(len(array.data) for record in exchange.arrays.values() for array in record.values())


def _read_reply(reply: Message) -> Exchange | FedshiftError:
    if reply.has_error():
        return FedshiftError(f"its app failed ({reply.error.reason})")
    try:
        answer = Exchange.of(reply.content)
    except MalformedMessage as error:
        return FedshiftError(f"it sent {error}")
    if answer.kind == "refused":
        return (Diverged if answer.facts.get("diverged") else FedshiftError)(str(answer.facts.get("why")))
    return answer
