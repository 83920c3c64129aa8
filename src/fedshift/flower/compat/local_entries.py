"""A mod for a Flower ClientApp that keeps a method's local entries on the client: FedBN in an app that exists.

Before the app trains, its entries from disk take their places in the arrays that came; afterwards they are taken out
of the reply and written to disk. So the app sees whole models, and the server never sees what is local.
"""

from __future__ import annotations

from pathlib import Path

from ..transport import no_telemetry as no_telemetry  # isort: split

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable
from torch import nn

from ...core.method import Method
from ...methods.fedbn import fedbn
from ...utils.errors import FedshiftError, UsageError
from ...utils.state import State, pick
from ..transport.arrays import RefusedMessage, check_finite, check_state, from_record, to_record
from .dropin import DONE, LAST, resolve_plan
from .local_state_store import LocalStateStore


def list_local_entries(model: nn.Module, method: Method | None = None) -> frozenset[str]:
    """Names of the entries of ``model`` that a client keeps to itself under ``method`` (FedBN).

    Raises :class:`UsageError` where the method does not fit the model or an app of Flower's.
    """
    return resolve_plan(method or fedbn(), model).personal


class LocalEntriesMod:
    """The mod that :func:`keep_local` makes."""

    def __init__(self, model: nn.Module, method: Method, experiment: str | None, folder: Path | None) -> None:
        self._plan = resolve_plan(method, model)
        self._initial = pick(self._plan.initial, self._plan.personal)
        self._experiment, self._folder = experiment, folder

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Pass ``message`` on to the app with the client's own entries, and the reply back without them."""
        kind = message.metadata.message_type.partition(".")[0]
        if kind not in ("train", "evaluate") or not self._initial:
            reply = call_next(message, context)
            self._strip(reply)
            return reply
        kept = self._load_entries(context)
        done, last = _read_rounds(message, training=kind == "train")
        start = kept.load_after(done, last)
        if start is None and kind == "evaluate":
            raise FedshiftError(f"{kept.who} has not trained yet, so that it has no model of its own to evaluate")
        start = start or (0, self._initial)
        self._merge(message, start[1])
        reply = call_next(message, context)
        if kind == "train" and reply.has_content():
            kept.write(start, done + 1, self._take_entries(reply, kept.who))
        self._strip(reply)
        return reply

    def _load_entries(self, context: Context) -> LocalStateStore:
        experiment = self._experiment or context.run_config.get("experiment")
        if not experiment:
            raise UsageError("keep_local: the experiment has no name: give experiment=..., or that key in run-config")
        client = context.node_config.get("name", context.node_config.get("partition-id"))
        if client is None:
            raise UsageError(
                f"keep_local: node {context.node_id} has no name to keep its entries under: start it with "
                "--node-config 'name=\"...\"' (the node's number changes when it restarts)"
            )
        folder = self._folder or Path.home() / ".fedshift" / "flower"
        return LocalStateStore(folder, str(experiment), str(client), self._initial)

    def _merge(self, message: Message, own: State) -> None:
        key, came = _single_record(message, "the message from the server")
        if lacking := self._plan.loaded - came.keys():
            raise FedshiftError(f"the message from the server lacks entry {min(lacking)!r} of the model")
        mine = to_record(own)
        whole = {name: mine[name] if name in own else came[name] for name in self._plan.initial}
        message.content[key] = ArrayRecord({**whole, **{n: array for n, array in came.items() if n not in whole}})

    def _take_entries(self, reply: Message, who: str) -> State:
        """The client's entries in the reply; one that holds NaN anywhere is refused before anything is written."""
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
        """Take out of every record what the method does not send."""
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
    """A mod that makes a ClientApp follow ``method`` (FedBN).

    It is the last of the app's mods, so that the others see what travels. ``model``: the app's network, whose values of
    the local entries every client starts from. ``experiment``: its name, by default ``experiment`` of the run's
    configuration; entries on disk belong to it. ``folder``: where they are, by default ``~/.fedshift/flower``. Clients
    are told apart by ``name`` or ``partition-id`` of their node's configuration.

    Raises :class:`UsageError` as :func:`list_local_entries`. While it works it raises :class:`FedshiftError`, which Flower
    reports as the node's error, where entries on disk are missing or do not fit: they are never made up.
    """
    return LocalEntriesMod(model, method or fedbn(), experiment, Path(folder).expanduser() if folder else None)


def _single_record(message: Message, what: str) -> tuple[str, ArrayRecord]:
    records = list(message.content.array_records.items())
    if len(records) != 1:
        raise FedshiftError(f"{what} holds {len(records)} array records, of which one is the model: send one")
    return records[0]


def _read_rounds(message: Message, *, training: bool) -> tuple[int, int]:
    """Rounds that the server had done, and the last that it knows this client to have finished (0: none known)."""
    for config in message.content.config_records.values():
        for key, ahead in ((DONE, 0), ("server-round", int(training))):
            if isinstance(number := config.get(key), int) and isinstance(last := config.get(LAST, 0), int):
                return number - ahead, last
    raise FedshiftError(f"the message from the server holds neither {DONE!r} nor 'server-round', its round: send one")
