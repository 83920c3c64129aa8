"""A trial: one method with one seed, round after round, that can be stopped and resumed bit for bit.

Everything that a trial knows besides its settings is in its state: the server, and each client that has taken part.
Draws come from keyed streams, so a trial restored from a checkpoint goes on as if it had never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .base.errors import UsageError
from .base.state import State, prefixed, under
from .base.streams import torch_stream
from .core.kernel import (
    Client,
    Server,
    Update,
    global_state,
    init_client,
    init_server,
    personal_state,
    server_round,
)
from .core.method import Method
from .core.plan import forward
from .core.prepare import operate, prepare
from .data.augment import check_augmentable
from .data.federation import ClientData, Federation, label_counts, training_pool
from .engines.catalog import ENGINES
from .evaluate import evaluate_clients
from .facts import downlink, uplink
from .newcomers import check_policy, newcomer_state
from .records import Row
from .settings import Settings

ModelFactory = Callable[[tuple[int, ...], int], nn.Module]


@dataclass(frozen=True, kw_only=True)
class RoundDone:
    """What one round left: who took part, bytes moved by all clients, seconds of training, and rows of measurements."""

    round: int
    participants: tuple[str, ...]
    down: int
    up: int
    seconds: float
    rows: list[Row]


class Trial:
    """One method with one seed on one federation; see the module's text."""

    def __init__(self, method: Method, model: ModelFactory, data: Federation, settings: Settings, seed: int) -> None:
        self.data, self.settings, self.seed = data, settings, seed
        device = torch.device(settings.device)
        for name in settings.newcomers:
            data.client(name)
        members = tuple(name for name in data.names if name not in settings.newcomers)
        if not members:
            raise UsageError("newcomers names every client: leave some to train")
        share = settings.participation
        if isinstance(share, int) and share > len(members) and not method.pooled:
            raise UsageError(
                f"participation={share}: only {len(members)} clients train; give at most as many, or leave it out"
            )
        training = data.only(members)
        trained_on = training_pool(training) if method.pooled else training
        self.model = model
        with torch_stream(seed, "init"):
            network = make_network(model, data.sample_shape, data.classes).to(device)
        if settings.augment:
            check_augmentable(training)
        sample = data.clients[0].train.inputs(slice(0, 1)).to(device)
        with torch_stream(seed, "surgery"):
            self.plan = prepare(
                method,
                network,
                work=settings.work,
                optimizer=settings.optimizer,
                loss=settings.loss.resolved(label_counts(training)),
                augment=settings.augment,
                sample=sample,
                rounds=settings.rounds,
                clients=len(members),
            )
        gives = tuple(forward(self.plan, self.plan.initial, sample.to(self.plan.dtype)).shape[1:])
        if gives != (data.classes,):
            raise UsageError(
                f"the model's outputs for a sample have shape {gives}, but the data have {data.classes} classes: make "
                f"it give ({data.classes},), one score a class"
            )
        for client in trained_on.clients:
            if len(client.train) < self.plan.smallest_batch:
                raise UsageError(
                    f"client {client.name!r} has one training sample, over which batch normalization has no variance: "
                    "leave the client out, or use a model without BatchNorm"
                )
        if check := getattr(method.aggregate, "check", None):
            check(self.plan, len(settings.participants(seed, 1, trained_on.names)))
        if self.plan.personalizes:
            check_policy(self.plan, settings.unseen)
        self.measured = data.to(device)
        placed = trained_on.to(device) if method.pooled else self.measured.only(members)
        self.train = {client.name: client.train for client in placed.clients}
        self.server = init_server(self.plan)
        self.clients = {client.name: init_client(self.plan) for client in trained_on.clients}

    @property
    def seen(self) -> frozenset[str]:
        """Clients that have taken part."""
        return frozenset(name for name, client in self.clients.items() if client.steps)

    def merged_batches(self) -> tuple[str, ...]:
        """Clients whose last batch would hold a single sample, which joins the batch before it."""
        work, smallest = self.plan.work, self.plan.smallest_batch
        sizes = {name: len(split) for name, split in self.train.items()}
        return tuple(name for name, size in sizes.items() if work.bounds(size, smallest) != work.bounds(size))

    @property
    def identity(self) -> dict[str, str]:
        """What must be the same for a checkpoint to be continued, by setting."""
        shapes = " ".join(f"{name}{tuple(tensor.shape)}" for name, tensor in self.plan.initial.items())
        return {
            "method": self.plan.method.text,
            "seed": str(self.seed),
            "model": f"{shapes} {self.plan.module}",
            "data": self.data.fingerprint,
            "work": str(self.plan.work),
            "freeze": str(self.plan.freeze_from),
            "optimizer": str(self.plan.optimizer),
            "participation": str(self.settings.participation),
            "newcomers": str(self.settings.newcomers),
            "unseen": self.settings.unseen,
            "select": self.settings.select,
            "metric": self.settings.metric,
            "loss": str(self.settings.loss),
            "augment": str(self.settings.augment),
        }

    def advance(self, progress: Callable[[str, float], None] | None = None) -> RoundDone:
        """Run the next round and evaluate where it is due. ``progress(client, loss)`` hears of each client as it ends.

        Raises ``Diverged`` where a loss becomes NaN; the trial is then as it was before the round.
        """
        began = time.perf_counter()
        number = self.server.round + 1
        names = self.settings.participants(self.seed, number, tuple(self.clients))
        working = {name: self.clients[name] for name in names}
        updates: dict[str, Update] = {}
        after: dict[str, Client] = {}
        rows: list[Row] = []
        for name, trained in ENGINES[self.settings.engine](self.plan, self.server, working, self.train, self.seed):
            after[name], updates[name] = trained.client, trained.update
            used = int(trained.update.weight)
            rows.append(
                {
                    "client": name, "split": "train", "model": "personal", "moment": "trained", "samples": used,
                    "loss_sum": trained.loss_sum, "hits": None, "support": None, "auc": None,
                }
            )  # fmt: skip
            if progress:
                progress(name, trained.loss_sum / used)
        down = len(names) * self._down()
        up = 0 if self.plan.method.pooled else sum(map(uplink, updates.values()))
        self.server = server_round(self.plan, self.server, updates, len(self.clients))
        self.clients |= after
        seconds = time.perf_counter() - began
        rows.sort(key=lambda row: names.index(row["client"]))
        if self.settings.evaluates(number):
            rows += self.evaluate()
        rows = [{"method": self.plan.method.name, "seed": self.seed, "round": number, **row} for row in rows]
        return RoundDone(round=number, participants=names, down=down, up=up, seconds=seconds, rows=rows)

    def evaluate(self) -> list[Row]:
        """Rows for every client's test data, and validation data where all have some."""
        splits = ("test", "validation") if all(client.validation for client in self.data.clients) else ("test",)
        return evaluate_clients(self.plan, self.server, self.measured, splits, self.personal_state)

    def _down(self) -> int:
        return 0 if self.plan.method.pooled else downlink(self.plan, self.server)

    def state_of(self, client: str | None = None) -> State | None:
        """The server's model (``client=None``; None where there is none), or the model that ``client`` would use."""
        if client is None:
            return global_state(self.plan, self.server)
        state = self.personal_state(self.measured.client(client))
        if state is None:
            raise UsageError(
                f"client {client!r} has never trained, and {self.plan.method.name} keeps its models on clients: use a "
                "policy for unseen clients (unseen='average'), or a method with a global model"
            )
        return state

    def personal_state(self, client: ClientData) -> State | None:
        """The model that ``client`` would use; None where it has none and the policy makes none."""
        if not self.plan.personalizes:
            return global_state(self.plan, self.server)
        own = self.clients.get(client.name)
        if own and own.steps:
            return personal_state(self.plan, own, self.server)
        seen = {name: (each, len(self.train[name])) for name, each in self.clients.items() if each.steps}
        return newcomer_state(self.plan, self.server, seen, client.train, self.settings.unseen)

    def network(self) -> nn.Module:
        """A network of the trial's kind, after the method's surgery, with weights of no meaning."""
        return operate(self.plan.method, make_network(self.model, self.data.sample_shape, self.data.classes))

    def tensors(self) -> tuple[State, dict[str, Any]]:
        """All state as flat tensors and JSON facts, for a checkpoint; clients that never took part are left out."""
        seen = [name for name, client in self.clients.items() if client.steps]
        flat: State = {}
        for part in ("shared", "memory", "optimizer"):
            flat |= prefixed(f"server/{part}", getattr(self.server, part))
        for number, name in enumerate(seen):
            client = self.clients[name]
            for part in ("personal", "optimizer", "memory"):
                flat |= prefixed(f"client/{number}/{part}", getattr(client, part))
        steps = {name: self.clients[name].steps for name in seen}
        return flat, {"round": self.server.round, "steps": steps, "identity": self.identity}

    def accept(self, facts: Mapping[str, Any], seed: int) -> None:
        """Raise :class:`UsageError` unless a checkpoint with ``facts`` is of this trial, but under ``seed``."""
        for key, now in {**self.identity, "seed": str(seed)}.items():
            then = str(facts["identity"].get(key))
            if then != now:
                same = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), 0)
                start = max(0, same - 40)
                raise UsageError(
                    f"this run was begun with another {key}: then {then[start : start + 120]!r}, now "
                    f"{now[start : start + 120]!r}. Resume it with the settings it was begun with, or start a new run "
                    "in another directory"
                )
        if facts["round"] > self.settings.rounds:
            raise UsageError(
                f"this run has done {facts['round']} rounds, more than rounds={self.settings.rounds}: ask for at least "
                "as many, or start a new run in another directory"
            )

    def restore(self, tensors: State, facts: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint; :class:`UsageError` where it belongs to another trial."""
        self.accept(facts, self.seed)
        device = torch.device(self.settings.device)
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        parts = {part: under(f"server/{part}", tensors) for part in ("shared", "memory", "optimizer")}
        self.server = Server(round=facts["round"], **parts)
        for number, (name, steps) in enumerate(facts["steps"].items()):
            parts = {part: under(f"client/{number}/{part}", tensors) for part in ("personal", "optimizer", "memory")}
            self.clients[name] = Client(steps=steps, **parts)


def make_network(model: ModelFactory, shape: tuple[int, ...], classes: int) -> nn.Module:
    """What ``model`` makes of a sample's shape and the classes; :class:`UsageError` where that is no network."""
    try:
        network = model(shape, classes)
    except UsageError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the model cannot be made for samples of shape {shape} and {classes} classes ({error}): give a function "
            "(sample_shape, classes) -> nn.Module that takes them"
        ) from error
    if not isinstance(network, nn.Module):
        raise UsageError(f"the model's function made a {type(network).__name__}, not a torch.nn.Module")
    if any(nn.parameter.is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())):
        with torch.no_grad():  # gives lazy layers their shapes, without moving statistics
            network.eval()(torch.zeros(1, *shape))
    return network
