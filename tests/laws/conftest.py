"""What the laws run on: every method and a few compositions, every engine.

``FEDSHIFT_LAWS=my_methods:lgfedavg pytest tests/laws`` runs all of them, and nothing else, on a method outside of the
package; what an engine cannot run is skipped.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

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
from fedshift.utils.errors import UsageError
from tests.laws.course import Course, make_trial

COMPOSED = [fedbn(fedprox(mu=0.1)), silobn(scaffold()), fedbn(fedavg(weighting="uniform")), scaffold(fedprox(mu=0.1))]
COMPOSED += [ditto(scaffold(), epochs=2), fedrep(head_epochs=2, body_epochs=1)]
GIVEN = METHODS.parse_all(os.environ["FEDSHIFT_LAWS"]) if os.environ.get("FEDSHIFT_LAWS") else ()
WITHOUT_BATCH_NORM = {"dp_sgd": gn()}
"""Bases of methods that refuse the laws' network."""
CATALOG = [make(WITHOUT_BATCH_NORM.get(name)) for name, make in list_catalog("methods").items()]
METHODS = list(GIVEN) or [*CATALOG, *COMPOSED]
FEDERATED = [method for method in METHODS if not method.pooled]

IN_PROCESSES = {"fedbn", "scaffold", "partialfed_adaptive", "centralized"}
"""The methods that processes of the pool run, too, where tests are not to take minutes; Ray runs none then."""

AGAIN_STACKED = "test_the_order_of_clients_changes_nothing"
"""A law that runs rounds anew which the stacked engine's other laws compare with the loop's."""

CANNOT = r"the \w+ engine (cannot|needs)|here each sample has the inputs"
"""Refusals of what a law tries, which break no law."""

Make = Callable[..., Trial]


def list_parameters(item: pytest.Item) -> dict[str, object]:
    """Return the values with which a test is called."""
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark most methods' laws as slow where clients are other processes' or rounds run anew; keep the given ones'."""
    laws = [item for item in items if Path(__file__).parent in item.path.parents]
    if GIVEN:
        kept = [item for item in laws if any(value in GIVEN for value in list_parameters(item).values())]
        for item in kept:
            item.own_markers = [mark for mark in item.own_markers if mark.name not in ("slow", "sampled")]
        config.hook.pytest_deselected(items=[item for item in laws if item not in kept])
        items[:] = [item for item in items if item in kept or item not in laws]
        return
    for item in laws:
        given = list_parameters(item)
        methods = [value for value in given.values() if isinstance(value, Method)]
        engines = {value for value in given.values() if isinstance(value, str)}
        anew = item.name.startswith("test_without_memory_for_clients") or (
            "stacked" in engines and item.name.startswith(AGAIN_STACKED)
        )
        if "ray" in engines or ((anew or "pool" in engines) and any(each.name not in IN_PROCESSES for each in methods)):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Skip what a given method is refused for."""
    try:
        return (yield)
    except UsageError as error:
        if GIVEN and re.search(CANNOT, str(error)):
            pytest.skip(str(error))
        raise


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
