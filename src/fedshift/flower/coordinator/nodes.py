"""The connected sites, and questions to them over a Flower grid; every wait has a timeout.

With TLS, a site's name is the one under which the coordinator has its key. If that key is removed or replaced
meanwhile, the node gets no more questions, and its answers are ignored. A node that restarts introduces itself again
and gets its unanswered questions again. A node that has left gets none, and the coordinator does not wait for it if
enough others answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Event
from typing import NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from ...engines.engine import Diverged
from ...utils.errors import FedshiftError, as_flag
from ...utils.printable import to_printable
from ...utils.version import __version__, find_series, is_own_series
from ..messages import VERSION, Exchange
from .descriptions import SiteDescription

POLL_SECONDS = 0.25
"""Seconds between two polls for answers."""
MOST_PULLS = 64
"""Maximum number of answers to fetch at a time."""
PULL_SECONDS = 0.5
"""Seconds to wait for answers that are being fetched before those that have arrived are processed."""
TELL_SECONDS, CONFIRM_SECONDS = 600.0, 7 * 86400.0
"""Seconds in which a site may hear a line of text, and in which its operator may allow its description."""
KINDS = {"train": "train", "evaluate": "evaluate"}
"""Flower's types of messages; all other questions are queries."""


class StopRequested(FedshiftError):
    """A stop was requested while waiting for sites."""


class _Address(NamedTuple):
    node: int
    activated: str
    key: bytes


class Nodes:
    """The sites behind a Flower ``grid``.

    ``hello``: the question that asks a new node for its description. ``notify``: called with a line of text when a node
    connects or leaves. ``known``: earlier descriptions of clients. ``keys``: returns the public key of each client's
    node; None: any node may claim any name. ``changed``: called when a client has connected. ``stop``: ends waiting.
    """

    def __init__(
        self, grid: Grid, hello: Exchange, notify: Callable[[str], None], *,
        known: Mapping[str, SiteDescription] | None = None, keys: Callable[[], Mapping[str, bytes]] | None = None,
        changed: Callable[[], None] = lambda: None, stop: Event | None = None,
    ) -> None:  # fmt: skip
        self.grid, self.hello, self.stop = grid, hello, stop or Event()
        self.keys, self.changed, self._notify = keys, changed, notify
        self.known = dict(known or {})
        self._online: dict[str, _Address] = {}
        self._greetings: dict[_Address, str] = {}  # id of the pending greeting, "" once it is answered
        self._told = set[str]()
        self._pool, self._pulling = ThreadPoolExecutor(MOST_PULLS), dict[str, Future[list[Message]]]()

    def say(self, text: str, to: str | _Address = "") -> None:
        """Report a line of text without control characters, and tell it to the site ``to`` if that is connected."""
        text = to_printable(text)
        self._notify(text)
        address = self._online.get(to) if isinstance(to, str) else to
        if address:
            self._told.add(self._push(address, Exchange(kind="tell", facts={"say": text}), TELL_SECONDS))

    @property
    def online(self) -> frozenset[str]:
        """The clients whose nodes are connected."""
        return frozenset(self._online)

    def refresh(self) -> None:
        """Greet new nodes, read their descriptions, and forget nodes that have left or whose key is invalid."""
        listed = {_Address(node.node_id, node.last_activated_at, node.public_key) for node in self.grid.get_nodes()}
        for address in listed - self._greetings.keys():
            self._greetings[address] = self._push(address, self.hello, CONFIRM_SECONDS)
        self._told -= {number for number, _ in self._pull(self._told)}  # so that Flower keeps no answers
        waiting = {number: address for address, number in self._greetings.items() if number}
        for number, reply in self._pull(waiting):
            self._greetings[waiting[number]] = ""
            self._introduce(waiting[number], reply)
        self._greetings = {address: number for address, number in self._greetings.items() if address in listed}
        for name, address in list(self._online.items()):
            if address not in listed:
                del self._online[name]
                self.say(f"{name} has left ({len(self._online)} connected)")
            elif not self._holds_key(name, address):
                del self._online[name]
                self.say(f"the key of {name} was removed or replaced: refused ({len(self._online)} connected)")

    def wait(self, number: int, seconds: float, among: frozenset[str] | None = None) -> None:
        """Wait until ``number`` training clients (of ``among``, unless None) are connected.

        Raises :class:`FedshiftError` with the names of the connected clients after ``seconds``, or
        :class:`StopRequested`.
        """
        until = time.monotonic() + seconds
        while True:
            self.refresh()
            idle = frozenset(name for name in self.online if self.known[name].validates)
            present = (self.online if among is None else self.online & among) - idle
            if len(present) >= number:
                return
            if self.stop.is_set():
                raise StopRequested(f"stopped while waiting for {number} sites")
            if time.monotonic() > until:
                more = f" (not counting {', '.join(sorted(idle))}, which validate only)" if idle else ""
                raise FedshiftError(
                    f"{number} sites must be connected (--min-clients), but after {seconds:g} seconds there are "
                    f"{len(present)}: {', '.join(sorted(present)) or 'none'}{more}. Start the others, and continue "
                    "with --resume"
                )
            time.sleep(POLL_SECONDS)

    def ask(
        self, asked: Mapping[str, Exchange], enough: int, seconds: float
    ) -> Iterator[tuple[str, Exchange | FedshiftError]]:
        """Send each client its question; yield clients with their answers, or the error instead, as they arrive.

        Ends when all have answered, after ``seconds``, or when ``enough`` clients have answered and all others have
        left.
        """
        until, missing, answered, stopping = time.monotonic() + seconds, set(asked), 0, False
        sent: dict[str, tuple[_Address, str]] = {}  # address and message id ("": lost)
        while missing and time.monotonic() < until:
            self.refresh()
            self._send(asked, missing, sent, until)
            numbers = {number: name for name, (_, number) in sent.items() if number and name in missing}
            for number, reply in self._pull(sorted(numbers, key=numbers.__getitem__)):
                name = numbers[number]  # an error reply does not have the node as its sender
                if name not in missing:  # it answered once more
                    continue
                if isinstance(reply, Message) and reply.has_error():  # the message or its answer was lost
                    sent[name] = sent[name][0], ""
                    continue
                missing.discard(name)
                answer = _read_reply(reply)
                answered += isinstance(answer, Exchange)
                yield name, answer
            lost = {name for name in missing if name not in self._online or (name in sent and not sent[name][1])}
            if missing and missing == lost and answered >= enough:
                break
            if missing and self.stop.is_set() and not stopping:
                stopping = True
                left = until - time.monotonic()
                self.say(f"waiting for {', '.join(sorted(missing))}, {left:.0f} seconds at most, to end this round")
            time.sleep(POLL_SECONDS if missing else 0)
        for _, number in sent.values():
            self._pulling.pop(number, None)  # ignore late answers
        for name in sorted(missing):
            yield name, FedshiftError("it did not answer in time" if name in self._online else "it has left")

    def _send(
        self, asked: Mapping[str, Exchange], missing: set[str], sent: dict[str, tuple[_Address, str]], until: float
    ) -> None:
        """Send questions to nodes that have none or have reconnected; forget those sent to keys that are invalid."""
        for name in [name for name, (address, _) in sent.items() if not self._holds_key(name, address)]:
            self._pulling.pop(sent.pop(name)[1], None)
        for name in sorted(missing & self.online):
            address = self._online[name]
            if name not in sent or sent[name][0] != address:
                sent[name] = address, self._push(address, asked[name], until - time.monotonic())

    def _pull(self, numbers: Iterable[str]) -> Iterator[tuple[str, Message | FedshiftError]]:
        """Yield the answers that have arrived, or the errors in reading them, with the ids of their messages.

        Each answer is fetched in its own thread, so that an answer that Flower cannot read, or whose upload stalls,
        does not block the others.
        """
        wanted = list(numbers)
        for number in wanted:
            if number not in self._pulling:
                self._pulling[number] = self._pool.submit(lambda it: list(self.grid.pull_messages([it])), number)
        wait([self._pulling[number] for number in wanted], timeout=PULL_SECONDS)
        for number in [number for number in wanted if self._pulling[number].done()]:
            try:
                replies = self._pulling.pop(number).result()
            except Exception as error:
                yield number, FedshiftError(f"Flower cannot read its answer ({type(error).__name__}: {error})")
            else:
                yield from ((number, reply) for reply in replies)

    def _introduce(self, address: _Address, reply: Message | FedshiftError) -> None:
        answer = _read_reply(reply)
        try:
            if isinstance(answer, FedshiftError):
                raise answer
            described = SiteDescription.of(answer.facts)
            before = self._check_description(described, address)
        except FedshiftError as error:
            self.say(f"{self._call(address)} does not take part: {error.render(as_flag)}", address)
            return
        name = described.name
        if name in self._online and self._online[name].activated > address.activated:
            return
        if before and before.version != described.version:
            self.say(f"{name} now runs fedshift {described.version} instead of {before.version}")
        self.known[name], self._online[name] = described, address
        train, test = described.samples.get("train"), described.samples["test"]
        does = f"validates only, on {test} test samples" if described.validates else f"{train} training samples"
        self.say(f"{name} is connected, {does} ({len(self._online)} connected)", address)
        self.changed()

    def _check_description(self, described: SiteDescription, address: _Address) -> SiteDescription | None:
        """Return the earlier description of the same site; raise :class:`FedshiftError` if it may not take part."""
        name, before = described.name, self.known.get(described.name)
        if not self._holds_key(name, address):
            raise FedshiftError(f"it claims to be {name!r}, but does not have its key: leave --name out, or correct it")
        if not is_own_series(described.version):
            raise FedshiftError(
                f"it runs fedshift {described.version} and this coordinator {__version__}, whose results may differ: "
                f"install fedshift {find_series(__version__)} there"
            )
        if before and replace(before, version=described.version) != described:
            raise FedshiftError(
                f"{name!r} has reconnected with other data or in another role than before: give it the data that it "
                "began with, or begin a new experiment"
            )
        return before

    def _holds_key(self, name: str, address: _Address) -> bool:
        """Return whether a node has the key that the coordinator knows for client ``name``, or keys are not used."""
        return self.keys is None or self.keys().get(name) == address.key

    def _call(self, address: _Address) -> str:
        """Return a node's name according to its key, not its claim, or its number if the key is unknown."""
        known = self.keys() if self.keys else {}
        return next((name for name, key in known.items() if key == address.key), f"a node (number {address.node})")

    def _push(self, address: _Address, exchange: Exchange, seconds: float) -> str:
        """Send a question to a node; return the message's id, or "" if Flower did not accept it."""
        exchange = replace(exchange, facts={**exchange.facts, VERSION: __version__})
        message = Message(
            exchange.content(), address.node, KINDS.get(exchange.kind, "query"), ttl=max(1.0, seconds),
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
    except Exception as error:
        return FedshiftError(f"its answer cannot be read ({type(error).__name__})")
    return answer
