"""A mod for a Flower ClientApp that keeps a method's local entries on the client: FedBN in an existing app.

Before the app trains, the client's entries replace the received ones; afterwards they are removed from the
reply and kept on disk or in Flower's context. The app sees complete models, and the server never sees local entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable
from torch import nn
from typing_extensions import override

from ...core.method import Method
from ...methods.fedbn import fedbn
from ...results.checkpoint import load_checkpoint, save_checkpoint
from ...utils.errors import FedshiftError, UsageError
from ...utils.files import disk_error
from ...utils.state import State, add_prefix, entries_under, pick
from ..transport.arrays import RefusedMessage, check_finite, check_state, from_record, to_record
from .dropin import DONE, LAST, resolve_plan

KEPT = "fedshift-kept-"
"""Prefix of the records with local entries in Flower's context; the number of their round follows."""


def list_local_entries(model: nn.Module, method: Method | None = None) -> frozenset[str]:
    """Return the names of the entries of ``model`` that ``method`` (default: FedBN) keeps on a client.

    Raises :class:`UsageError` if the method does not fit the model or a Flower app.
    """
    return resolve_plan(method or fedbn(), model).personal


class LocalStateStore(ABC):
    """The local entries of ``client``, at ``place``; ``initial``: entries before any training.

    The entries after the last two rounds are kept: a server that failed may repeat a round, which must then start from
    the same entries.
    """

    def __init__(self, client: str, place: str, initial: State) -> None:
        self.client, self.place, self.initial = client, place, initial

    @abstractmethod
    def _read(self) -> dict[int, State]:
        """Return the stored entries, by round."""

    @abstractmethod
    def _write(self, held: Mapping[int, State]) -> None:
        """Replace the stored entries."""

    def load_after(self, done: int, last: int) -> tuple[int, State] | None:
        """Return the newest entries of the first ``done`` rounds and their round; None if the client never trained.

        ``last``: the last round that the client finished, according to the server (0: none). Raises
        :class:`FedshiftError` if entries are missing, older than ``last``, newer than ``done``, or of another model.
        """
        held = self._read()
        for state in held.values():
            try:
                check_state(state, self.initial, "the kept state")
            except RefusedMessage as error:
                raise FedshiftError(
                    f"{self.client} kept the entries of another model ({self.place}): {error}; use the model that it "
                    "was begun with, or name the experiment otherwise"
                ) from error
        usable = [number for number in held if number <= done]
        if not held and last == 0:
            return None
        if held and not usable:
            raise FedshiftError(
                f"{self.client} holds entries of round {min(held)} ({self.place}), but the server has done {done} "
                "rounds: to start over, remove that file or rename the experiment; to continue, restore the server's "
                "state"
            )
        if max(usable, default=0) < last:
            found = f"are of round {max(usable)}" if usable else "are missing"
            raise FedshiftError(
                f"{self.client} finished round {last}, but its own entries {found} ({self.place}): put them back, or "
                "begin an experiment of another name; they are not made up"
            )
        return max(usable), held[max(usable)]

    def write(self, before: tuple[int, State], round: int, state: State) -> None:
        """Store ``state`` as the state after ``round``, together with the state ``before`` it."""
        self._write({before[0]: before[1], round: state})


class FileStore(LocalStateStore):
    """Local entries in a file below ``folder``, which survives restarts of nodes and servers.

    ``asked``: run, rounds done, round of Flower (which counts repetitions) and node of a message; two nodes of one
    name differ only in the last.
    """

    def __init__(self, folder: Path, experiment: str, client: str, initial: State, asked: tuple[object, ...]) -> None:
        self._asked = asked
        self.path = folder / _to_file_name(experiment) / f"{_to_file_name(client)}.safetensors"
        super().__init__(f"client {client!r} of experiment {experiment!r}", str(self.path), initial)

    @override
    def _read(self) -> dict[int, State]:
        if not self.path.exists():
            return {}
        tensors, facts = load_checkpoint(self.path)
        *when, node = facts.get("asked", self._asked)
        if when == [*self._asked[:-1]] and node != self._asked[-1]:
            raise FedshiftError(
                f"{self.client} is two nodes, {node} and {self._asked[-1]}, which would take each other's entries "
                f"({self.place}): give each its own name or partition-id (--node-config), and name the experiment anew"
            )
        return {int(number): entries_under(str(number), tensors) for number in facts["rounds"]}

    @override
    def _write(self, held: Mapping[int, State]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise disk_error(self.path, error) from error
        self._read()  # another node may have written since
        tensors = {name: x for number, state in held.items() for name, x in add_prefix(str(number), state).items()}
        save_checkpoint(self.path, tensors, {"client": self.client, "rounds": sorted(held), "asked": [*self._asked]})


class ContextStore(LocalStateStore):
    """Local entries in the memory that Flower keeps for a node during one run only."""

    def __init__(self, context: Context, initial: State) -> None:
        place = "Flower's context, which is lost if a node restarts: with a name, an experiment has its entries on disk"
        super().__init__(f"node {context.node_id} of run {context.run_id}", place, initial)
        self._records = context.state.array_records

    @override
    def _read(self) -> dict[int, State]:
        return {int(key.removeprefix(KEPT)): from_record(self._records[key]) for key in self._held()}

    @override
    def _write(self, held: Mapping[int, State]) -> None:
        for key in self._held():
            del self._records[key]
        for number, state in held.items():
            self._records[f"{KEPT}{number}"] = to_record(state)

    def _held(self) -> list[str]:
        return [key for key in self._records if key.startswith(KEPT)]


class LocalEntriesMod:
    """The mod that :func:`keep_local` returns."""

    def __init__(self, model: nn.Module, method: Method, experiment: str | None, folder: Path | None) -> None:
        self._plan = resolve_plan(method, model)
        self._initial = pick(self._plan.initial, self._plan.personal)
        self._experiment, self._folder = experiment, folder

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Pass ``message`` with the client's own entries to the app, and return the reply without them."""
        kind = message.metadata.message_type.partition(".")[0]
        if kind not in ("train", "evaluate") or not self._initial:
            reply = call_next(message, context)
            self._strip(reply)
            return reply
        done, last = _read_rounds(message, training=kind == "train")
        asked = [config.get("server-round") for config in message.content.config_records.values()]
        kept = self._open_store(context, (context.run_id, done, *asked, context.node_id))
        start = kept.load_after(done, last)
        if start is None and kind == "evaluate":
            raise FedshiftError(f"{kept.client} has not trained yet, so that it has no model to evaluate")
        start = start or (0, self._initial)
        self._merge(message, start[1])
        reply = call_next(message, context)
        if kind == "train" and reply.has_content():
            kept.write(start, done + 1, self._take_entries(reply, kept.client))
        self._strip(reply)
        return reply

    def _open_store(self, context: Context, asked: tuple[object, ...]) -> LocalStateStore:
        experiment = self._experiment or context.run_config.get("experiment")
        if not experiment and self._folder is None:
            return ContextStore(context, self._initial)
        if not experiment:
            raise UsageError("keep_local: the experiment has no name: give experiment=..., or that key in run-config")
        client = context.node_config.get("name", context.node_config.get("partition-id"))
        if client is None:
            raise UsageError(
                f"keep_local: node {context.node_id} has no name to keep its entries under: start it with "
                "--node-config 'name=\"...\"' (the node's number changes when it restarts)"
            )
        folder = self._folder or Path.home() / ".fedshift" / "flower"
        return FileStore(folder, str(experiment), str(client), self._initial, asked)

    def _merge(self, message: Message, own: State) -> None:
        key, came = _single_record(message, "the message from the server")
        if lacking := self._plan.loaded - came.keys():
            raise FedshiftError(f"the message from the server lacks entry {min(lacking)!r} of the model")
        mine = to_record(own)
        whole = {name: mine[name] if name in own else came[name] for name in self._plan.initial}
        message.content[key] = ArrayRecord({**whole, **{n: array for n, array in came.items() if n not in whole}})

    def _take_entries(self, reply: Message, who: str) -> State:
        """Return the client's entries in the reply; refuse a reply with NaN before anything is written."""
        _, sent = _single_record(reply, f"the reply of {who}")
        try:
            state = from_record(sent)
            for name, tensor in state.items():
                check_finite(name, tensor, "the reply")
            own = pick(state, self._plan.personal)
            check_state(own, self._initial, "the reply")
        except RefusedMessage as error:
            raise FedshiftError(
                f"{who}: {error}. A reply holds ArrayRecord(model.state_dict()) of a model whose training went well"
            ) from error
        return {name: own[name] for name in self._initial}

    def _strip(self, reply: Message) -> None:
        """Remove from every record the entries that the method does not send."""
        if reply.has_content():
            secret = self._plan.initial.keys() - self._plan.sent
            for key, record in list(reply.content.array_records.items()):
                reply.content[key] = ArrayRecord({n: array for n, array in record.items() if n not in secret})


def keep_local(
    model: nn.Module,
    method: Method | None = None,
    *,
    experiment: str | None = None,
    folder: str | Path | None = None,
) -> LocalEntriesMod:
    """Return a mod that makes a ClientApp follow ``method``.

    Make it the last of the app's mods, so that the other mods see what is actually sent. Clients are identified by
    ``name`` or ``partition-id`` in their node's configuration. If entries on disk are missing or do not fit during a
    run, the mod raises :class:`FedshiftError`, which Flower reports as the node's error; entries are never made up.

    Args:
        model: the app's network; its values of the local entries are every client's starting point.
        method: the method, FedBN by default.
        experiment: name of the experiment that owns entries on disk; by default ``experiment`` in the run's
            configuration. Without a name, entries are kept in Flower's context for one run, while the node is running.
        folder: directory for the entries, by default ``~/.fedshift/flower``.

    Raises:
        UsageError: in the same cases as :func:`list_local_entries`.

    """
    return LocalEntriesMod(model, method or fedbn(), experiment, Path(folder).expanduser() if folder else None)


def _single_record(message: Message, what: str) -> tuple[str, ArrayRecord]:
    records = list(message.content.array_records.items())
    if len(records) != 1:
        raise FedshiftError(f"{what} holds {len(records)} array records: send only one, the model")
    return records[0]


def _read_rounds(message: Message, *, training: bool) -> tuple[int, int]:
    """Return the rounds done by the server, and the last round that this client finished according to it (or 0)."""
    for config in message.content.config_records.values():
        for key, ahead in ((DONE, 0), ("server-round", int(training))):
            if isinstance(number := config.get(key), int) and isinstance(last := config.get(LAST, 0), int):
                return number - ahead, last
    raise FedshiftError(f"the message from the server holds neither {DONE!r} nor 'server-round', its round: send one")


def _to_file_name(name: str) -> str:
    """Return ``name`` as a portable file name, without separators or leading dots."""
    return quote(name, safe="").replace(".", "%2E")
