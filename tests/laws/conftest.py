"""What the laws run on: every method and a few compositions, every engine, unequal clients, a model with everything."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.method import Method
from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.federation import Federation, federation
from fedshift.engines.catalog import ENGINES
from fedshift.methods.ditto import ditto
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedprox import fedprox
from fedshift.methods.fedrep import fedrep
from fedshift.methods.scaffold import scaffold
from fedshift.methods.silobn import silobn
from fedshift.names import catalog
from fedshift.settings import Settings
from fedshift.trial import Trial

COMPOSED = [fedbn(fedprox(mu=0.1)), silobn(scaffold()), fedbn(fedavg(weighting="uniform")), scaffold(fedprox(mu=0.1))]
COMPOSED += [ditto(scaffold(), epochs=2), fedrep(head_epochs=2, body_epochs=1)]
METHODS = [make() for make in catalog("methods").values()] + COMPOSED
FEDERATED = [method for method in METHODS if not method.pooled]

OVER_RAY = {"fedbn", "scaffold", "partialfed_adaptive", "centralized"}
"""The methods that are run over Ray, too, where tests are not to take minutes."""

Make = Callable[..., Trial]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests over Ray are one process's, which starts it once (``--dist loadgroup``); most methods' are slow."""
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "ray" in (value for value in given.values() if isinstance(value, str)):
            item.add_marker(pytest.mark.xdist_group("ray"))
            if any(isinstance(value, Method) and value.name not in OVER_RAY for value in given.values()):
                item.add_marker(pytest.mark.slow)


def by_name(value: object) -> str | None:
    return value.name if isinstance(value, Method) else None


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Normalization of both kinds, dropout, a shortcut whose BatchNorm has no telling name, and a frozen parameter."""

    class Net(nn.Module):
        def __init__(self) -> None:
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

    return Net().double()


def unequal(sizes: dict[str, int] | None = None) -> Federation:
    """Clients of unequal size with ragged last batches; ``c``'s last batch of 8 would hold a single sample."""
    rng = np.random.default_rng(0)
    clients = {}
    for shift, (name, size) in enumerate((sizes or {"a": 21, "b": 16, "c": 9}).items()):
        y = np.arange(2 * size) % 3
        x = rng.normal(shift, 1 + shift, (2 * size, 1, 5, 5)) + y[:, None, None, None]
        clients[name] = (x[:size], y[:size], x[size:], y[size:])
    return federation(clients).check()


@pytest.fixture(params=METHODS, ids=by_name)
def method(request: pytest.FixtureRequest) -> Method:
    return request.param


@pytest.fixture(params=FEDERATED, ids=by_name)
def federated(request: pytest.FixtureRequest) -> Method:
    return request.param


GENERAL = sorted(ENGINES.keys() - {"identity"})
"""The engines that run anything that the laws run on."""


@pytest.fixture(params=GENERAL)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=sorted(ENGINES))
def any_engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def trial() -> Make:
    """Makes a trial; keyword arguments override the defaults of the laws."""

    def make(method: Method, engine: str = "sequential", **changes: object) -> Trial:
        data = changes.pop("data", None) or unequal()
        model = changes.pop("model", None) or network
        seed = changes.pop("seed", 3)
        settings = {
            "rounds": 4,
            "work": Work(batch_size=8, epochs=1),
            "optimizer": SGD(lr=0.05, momentum=0.0),
            "engine": engine,
            "workers": 2 if engine == "ray" else None,
            "evaluate_every": 4,
            **changes,
        }
        return Trial(method, model, data, Settings(**settings), seed)

    return make
