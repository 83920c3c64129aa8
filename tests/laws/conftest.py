"""What the laws run on: every method and a few compositions, every engine.

``FEDSHIFT_LAWS=my_methods:lgfedavg pytest tests/laws -k lgfedavg`` runs them on a method outside of the package.
"""

import os
from collections.abc import Callable

import pytest

from fedshift.config.expressions import list_catalog
from fedshift.core.method import Method
from fedshift.engines import ENGINES
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.methods.ditto import ditto
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedprox import fedprox
from fedshift.methods.fedrep import fedrep
from fedshift.methods.gn import gn
from fedshift.methods.scaffold import scaffold
from fedshift.methods.silobn import silobn
from tests.laws.course import Course, make_trial

COMPOSED = [fedbn(fedprox(mu=0.1)), silobn(scaffold()), fedbn(fedavg(weighting="uniform")), scaffold(fedprox(mu=0.1))]
COMPOSED += [ditto(scaffold(), epochs=2), fedrep(head_epochs=2, body_epochs=1)]
GIVEN = METHODS.parse_all(os.environ["FEDSHIFT_LAWS"]) if os.environ.get("FEDSHIFT_LAWS") else ()
WITHOUT_BATCH_NORM = {"dp_sgd": gn()}
"""Bases of methods that refuse the laws' network."""
METHODS = [make(WITHOUT_BATCH_NORM.get(name)) for name, make in list_catalog("methods").items()]
METHODS += [*COMPOSED, *GIVEN]
FEDERATED = [method for method in METHODS if not method.pooled]

IN_PROCESSES = {"fedbn", "scaffold", "partialfed_adaptive", "centralized"}
"""The methods that processes of the pool run, too, where tests are not to take minutes; Ray runs none then."""

AGAIN_STACKED = "test_the_order_of_clients_changes_nothing"
"""A law that runs rounds anew which the stacked engine's other laws compare with the loop's."""

Make = Callable[..., Trial]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Most methods' laws are slow where clients are other processes' or rounds are run anew."""
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        methods = [value for value in given.values() if isinstance(value, Method)]
        engines = {value for value in given.values() if isinstance(value, str)}
        anew = item.name.startswith("test_without_memory_for_clients") or (
            "stacked" in engines and item.name.startswith(AGAIN_STACKED)
        )
        if "ray" in engines or ((anew or "pool" in engines) and any(each.name not in IN_PROCESSES for each in methods)):
            item.add_marker(pytest.mark.slow)


def by_name(value: object) -> str | None:
    return value.name if isinstance(value, Method) else None


@pytest.fixture(params=METHODS, ids=by_name)
def method(request: pytest.FixtureRequest) -> Method:
    return request.param


@pytest.fixture(params=FEDERATED, ids=by_name)
def federated(request: pytest.FixtureRequest) -> Method:
    return request.param


GENERAL = sorted(ENGINES.keys() - {"identity"})
"""The engines that run anything that the laws run on."""
OTHERS = [name for name in GENERAL if name != "sequential"]
"""Those that are compared with the sequential engine."""


@pytest.fixture(params=GENERAL)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=OTHERS)
def other_engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=sorted(ENGINES))
def any_engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def trial() -> Make:
    return make_trial


@pytest.fixture(scope="session")
def course(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Course]:
    """The rounds of a method on an engine, which are run once."""
    known: dict[tuple[str, str], Course] = {}

    def run(method: Method, engine: str = "sequential") -> Course:
        key = method.text, engine
        if key not in known:
            known[key] = Course(method, engine, tmp_path_factory.mktemp("course"))
        return known[key]

    return run
