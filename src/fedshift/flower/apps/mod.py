"""A mod for a Flower ClientApp that keeps a method's local entries on the client: FedBN in an existing app.

Before the app trains, the client's entries replace the received ones; afterwards they are removed from the reply and
kept in a file. The app sees complete models; other mods see only what is sent, and the server never more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod
from safetensors.torch import load
from torch import Tensor, nn

from ...core.method import Method
from ...core.plan import Plan
from ...methods.fedbn import fedbn
from ...results.checkpoint import load_checkpoint, save_checkpoint
from ...utils.errors import FedshiftError, UsageError
from ...utils.state import State, entries_under, join_states, pick
from ..messages import check_state, from_record, to_record
from .plans import EXPERIMENT, FIRST, ROUNDS, resolve_plan, take_single

FOLDER = Path(".fedshift", "flower")
"""Directory of all kept entries, in the user's home directory."""


def keep_local(model: nn.Module, method: Method | None = None, *, folder: str | Path | None = None) -> Mod:
    """Return a mod that makes a ClientApp follow ``method``; list it as the last mod.

    Mods before it see only what is sent; a mod after it, which would see what clients keep, is refused. Clients are
    identified by ``name`` or ``partition-id`` in their node's configuration. If entries on disk are missing or do not
    fit, the mod raises :class:`FedshiftError`, which Flower reports as the node's error.

    Args:
        model: the app's network; its values of the local entries are a client's starting point, unless the server's
            initial arrays hold them.
        method: the method, FedBN by default.
        folder: directory for the entries, by default ``~/.fedshift/flower``.

    Raises:
        UsageError: in the same cases as :func:`fedshift.flower.list_local_entries`.

    """
    plan, root = resolve_plan(fedbn() if method is None else method, model), _find_root(folder)

    def keep(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if str(getattr(getattr(call_next, "func", call_next), "__module__", "")).startswith("flwr."):
            raise UsageError(
                "a mod after keep_local would see what the client keeps, and a client_fn is not supported: list "
                "keep_local last, and beside a function's mods, @app.train(mods=[..., keep_local(model, method)])"
            )
        return _follow(plan, root, call_next, message, context)

    return keep


def load_client_model(
    model: nn.Module, shared: str | Path | Mapping[str, Tensor] | ArrayRecord, client: str | int, *,
    folder: str | Path | None = None,
) -> nn.Module:  # fmt: skip
    """Return a copy of ``model`` as ``client`` uses it: the server's entries, and its own after its last round.

    Args:
        model: the app's network, from :func:`fedshift.flower.prepare_model` if the method has surgery.
        shared: the server's entries: the file that ``MethodStrategy(checkpoint=...)`` wrote; or ``result.arrays`` or
            their ``state_dict``, for the run in which the client trained last.
        client: ``name`` or ``partition-id`` of the client, which must have trained on this machine.
        folder: the ``folder`` of :func:`keep_local`.

    Raises:
        FedshiftError: if the client's entries are missing or damaged, or entries do not fit the model.

    """
    experiment = "*"
    if isinstance(shared, str | Path):
        saved, facts = load_checkpoint(Path(shared))
        shared, experiment = entries_under("shared", saved), facts["experiment"]
    common = from_record(shared) if isinstance(shared, ArrayRecord) else dict(shared)
    root, place = _find_root(folder), f"{experiment}/{_escape(str(client))}.safetensors"
    newest = max(root.glob(place), key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        raise FedshiftError(
            f"there is no {root}/{place}: give the client's name or partition-id, and keep_local's folder"
        )
    tensors, facts = load_checkpoint(newest)
    state = common | entries_under(str(max(facts["rounds"])), tensors)
    check_state(state, model.state_dict(), "the client's model")
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(state)
    return loaded.eval()


@dataclass(frozen=True)
class LocalStore:
    """The entries that client ``who`` keeps at ``path`` after its last two rounds; ``initial``: before any training.

    A server may repeat a round, which must then start from the same entries. ``asked``: run, rounds done, round of
    Flower (which counts repetitions) and node of a message; two nodes of one name differ only in the last.
    """

    path: Path
    who: str
    initial: State
    asked: list[Any]

    def load_after(self, done: int, last: int) -> tuple[int, State] | None:
        """Return the newest entries of the first ``done`` rounds and their round; None if the client never trained.

        ``last``: the last round that the client finished, according to the server (0: none). Raises
        :class:`FedshiftError` if entries are missing, older than ``last``, newer than ``done``, or of another model.
        """
        states = self._read()
        newest = max((number for number in states if number <= done), default=-1)
        if newest >= last:
            return newest, states[newest]
        if not states and not last:
            return None
        raise FedshiftError(
            f"{self.who} keeps entries of rounds {sorted(states)}, but the server needs those of round {last}, which "
            "are not made up: put that file or the server's state back, or begin anew, with another checkpoint"
        )

    def write(self, states: Mapping[int, State]) -> None:
        """Store ``states``, by round; raise :class:`FedshiftError` if that fails."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._read()  # another node may have written since
        tensors = join_states(map(str, states), states.values())
        save_checkpoint(self.path, tensors, {"rounds": sorted(states), "asked": self.asked})

    def _read(self) -> dict[int, State]:
        if not self.path.exists():
            return {}
        tensors, facts = load_checkpoint(self.path)
        *when, node = facts["asked"]
        if when == self.asked[:-1] and node != self.asked[-1]:
            raise FedshiftError(
                f"{self.who} is two nodes, {node} and {self.asked[-1]}, which would take each other's entries: give "
                "each its own name or partition-id (--node-config), and begin anew"
            )
        states = {number: entries_under(str(number), tensors) for number in facts["rounds"]}
        for state in states.values():
            check_state(state, self.initial, f"what {self.who} keeps (of this model and method, or begin anew)")
        return states


def _follow(plan: Plan, root: Path, function: ClientAppCallable, message: Message, context: Context) -> Message:
    kind = message.metadata.message_type.partition(".")[0]
    if kind not in ("train", "evaluate") or not plan.personal:
        return _strip(plan, function(message, context))
    config, done, last = _read_rounds(message, training=kind == "train")
    key, came = take_single(message.content.array_records, "the message from the server")
    if lacking := plan.loaded - came.keys():
        raise FedshiftError(
            f"the message from the server lacks entry {min(lacking)!r} of the model: give the strategy "
            "ArrayRecord(model.state_dict())"
        )
    store = _open_store(plan, root, context, config, done)
    first, start = _read_first(store, came, config.pop(FIRST, None)), store.load_after(done, last)
    if start is None and kind == "evaluate":
        raise FedshiftError(f"{store.who} has not trained yet, so that it has no model to evaluate")
    number, own = start or (0, first)
    whole = {**came, **to_record(own)}
    message.content[key] = ArrayRecord({name: whole[name] for name in (*plan.initial, *came)})
    reply = function(message, context)
    if kind == "train" and reply.has_content():
        state = from_record(take_single(reply.content.array_records, f"the reply of {store.who}")[1])
        check_state(state, plan.initial, f"the reply of {store.who}")
        store.write({number: own, done + 1: pick(state, plan.personal)})
    return _strip(plan, reply)


def _open_store(plan: Plan, root: Path, context: Context, config: ConfigRecord, done: int) -> LocalStore:
    client = context.node_config.get("name", context.node_config.get("partition-id"))
    if client is None:
        raise UsageError(
            f"keep_local: node {context.node_id} has no name to keep its entries under: start it with "
            "--node-config 'name=\"...\"' (the node's number changes when it restarts)"
        )
    experiment = str(config.get(EXPERIMENT, f"run-{context.run_id}"))
    path = root / _escape(experiment) / f"{_escape(str(client))}.safetensors"
    asked = [context.run_id, done, config.get("server-round"), context.node_id]
    return LocalStore(path, f"client {str(client)!r} ({path})", pick(plan.initial, plan.personal), asked)


def _read_first(store: LocalStore, came: ArrayRecord, packed: object) -> State:
    """Return the entries of a client before any training: the server's, as far as it sent some."""
    whole = from_record({name: array for name, array in came.items() if name in store.initial})
    return store.initial | whole | (load(packed) if isinstance(packed, bytes) else {})


def _strip(plan: Plan, reply: Message) -> Message:
    """Return ``reply`` after removing from every record the entries that the method does not send."""
    secret = plan.initial.keys() - plan.sent
    for key, record in list(reply.content.array_records.items()) if reply.has_content() else ():
        reply.content[key] = ArrayRecord({name: array for name, array in record.items() if name not in secret})
    return reply


def _read_rounds(message: Message, *, training: bool) -> tuple[ConfigRecord, int, int]:
    """Return the server's configuration, its rounds done, and this client's last round according to it (or 0)."""
    for config in message.content.config_records.values():
        match config.get(ROUNDS), config.get("server-round"):
            case [int(done), int(last)], _:
                return config, done, last
            case _, int(number):
                return config, number - training, 0
    raise FedshiftError("the message from the server holds no 'server-round', the number of its round: send one")


def _find_root(folder: str | Path | None) -> Path:
    return Path(folder or Path.home() / FOLDER).expanduser()


def _escape(name: str) -> str:
    """Return ``name`` as a portable name of a file or folder, without separators or leading dots."""
    return quote(name, safe="").replace(".", "%2E")
