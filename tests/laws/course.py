"""A trial of the laws, on unequal clients and a model with everything, and its rounds, run once for all laws."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedshift.core.method import Method
from fedshift.core.optimizer import SGD
from fedshift.core.plan import Plan
from fedshift.core.states import ServerState, Update
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.federation import Federation
from fedshift.experiments.client_store import to_tensors
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.results.schema import Row
from fedshift.utils.state import State, clone

ROUNDS = 3
CONSTANTS = {
    "short": torch.tensor([1 / 3], dtype=torch.float16), "multiplier": torch.tensor([6364136223846793005, 2**53 + 1]),
}  # fmt: skip
"""Buffers that no arithmetic leaves as they are."""


class Network(nn.Module):
    """Normalization of both kinds, dropout, a shortcut whose BatchNorm has no telling name, what does not train."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 4, 3, padding=1)
        self.first = nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.subnet = nn.Linear(4 * shape[1] * shape[2], 6)
        self.second = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(6, classes)
        self.scale = nn.Parameter(torch.full((1,), 0.7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(self.stem(x)))
        x = torch.relu(x + self.downsample(x)).flatten(1)
        return self.head(self.dropout(torch.relu(self.second(self.subnet(x))))) * self.scale


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    net = Network(shape, classes).double()
    for name, value in CONSTANTS.items():
        net.register_buffer(name, value.clone())
    return net


def unequal(sizes: dict[str, int] | None = None) -> Federation:
    """Clients of unequal size with ragged last batches; ``c``'s last batch of 8 would hold a single sample."""
    rng = np.random.default_rng(0)
    clients = {}
    for shift, (name, size) in enumerate((sizes or {"a": 21, "b": 16, "c": 9}).items()):
        y = np.arange(2 * size) % 3
        x = rng.normal(shift, 1 + shift, (2 * size, 1, 5, 5)) + y[:, None, None, None]
        clients[name] = (x[:size], y[:size], x[size:], y[size:])
    return federation(clients).check()


def make_trial(method: Method, engine: str = "sequential", **changes: Any) -> Trial:
    """A trial of the laws; keyword arguments override its defaults."""
    data = changes.pop("data", None) or unequal()
    model = changes.pop("model", None) or network
    seed = changes.pop("seed", 3)
    settings = {
        "rounds": ROUNDS,
        "work": Work(batch_size=8, epochs=1),
        "optimizer": SGD(lr=0.05, momentum=0.0),
        "engine": engine,
        "workers": 2 if engine == "ray" else None,
        "evaluate_every": ROUNDS,
        "moments": ("loaded",) if engine == "identity" else ("loaded", "trained"),
        **changes,
    }
    return Trial(method, model, data, Settings(**settings), seed)


PLANS: dict[tuple[str, Any], Plan] = {}


def make_plan(method: Method, model: Any = network) -> Plan:
    """The plan of a trial of the laws, which is made once."""
    key = method.text, model
    if key not in PLANS:
        PLANS[key] = make_trial(method, model=model).plan
    return PLANS[key]


def client_tensors(trial: Trial, name: str) -> State:
    """Return all that client ``name`` keeps."""
    return to_tensors(trial.clients[name], trial.plan.rule_names)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A trial after a round: its measurements and uploads, all state as flat tensors, each client's and its model."""

    rows: list[Row]
    updates: dict[str, Update]
    tensors: State
    facts: dict[str, Any]
    server: ServerState
    clients: dict[str, State]
    states: dict[str, State]


class Course:
    """``ROUNDS`` rounds of a method on an engine: ``course[k]``, and its checkpoint ``k.safetensors`` in ``folder``."""

    def __init__(self, method: Method, engine: str, folder: Path) -> None:
        self.folder = folder
        running = make_trial(method, engine)
        self.plan, self.start = running.plan, running.server
        self.clients = {name: running.clients[name] for name in running.train}
        train, sent = running.engine.train, {}

        def watched(server, clients):
            for name, done in train(server, clients):
                sent[name] = done.update
                yield name, done

        running.engine.train = watched
        self._moments = []
        for number in range(1, ROUNDS + 1):
            sent.clear()
            rows = running.advance().rows
            tensors, facts = running.to_tensors()
            self._moments.append(
                Moment(
                    rows=rows, updates=dict(sent), tensors=clone(tensors), facts=facts, server=running.server,
                    clients={name: clone(client_tensors(running, name)) for name in running.train},
                    states={name: clone(running.model_state(name)) for name in running.data.names},
                )
            )  # fmt: skip
            running.save(folder, f"{number}.safetensors")
        running.close()

    def __getitem__(self, number: int) -> Moment:
        return self._moments[number - 1]
