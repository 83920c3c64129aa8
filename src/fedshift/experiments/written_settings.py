"""Settings in a run's records: each is stored as text that parses to its value.

A run from Python writes the same settings as one from the command line. An object is written as text if that text
parses to an equal object; otherwise, as for a function of a notebook, the table ``python`` describes it.
"""

from __future__ import annotations

from dataclasses import fields
from types import NoneType
from typing import Any

from ..config.catalog import list_several
from ..config.expressions import EMBEDDED, find_user_function
from ..config.spec import PYTHON, Spec, find_catalog
from ..core.method import Method
from ..core.optimizer import OPTIMIZERS, Optimizer
from ..core.schedule import SCHEDULES
from ..data.federation import Federation
from ..utils.user_code import describe_function

PLAIN = (str, int, float, NoneType)
"""Types of values that a file stores unchanged."""
OF_OPTIMIZER = ("optimizer", "lr", "schedule")
"""Settings that an optimizer object has itself."""


def write_settings(spec: Spec, optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings ``spec`` as a file stores them; ``optimizer``: the one that they make."""
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    described: dict[str, str] = {}
    if not (isinstance(spec.optimizer, str) and isinstance(spec.schedule, str)):
        texts = _write_optimizer(optimizer, spec.rounds)
        described |= {} if texts else {"optimizer": repr(optimizer)}
        values |= texts or dict.fromkeys(OF_OPTIMIZER)
    for name, value in values.items():
        if not isinstance(value, PLAIN):
            values[name], said = _write(type(spec), name, value)
            described |= {} if values[name] else {name: said}
    hidden = {*described, *(OF_OPTIMIZER if "optimizer" in described else ())}
    written = {name: value for name, value in values.items() if name not in hidden}
    return written | ({PYTHON: {name: described[name] for name in values if name in described}} if described else {})


def _write_optimizer(made: Optimizer, rounds: int) -> dict[str, Any]:
    """Return the settings that make an optimizer; none if its schedule or its type has no text."""
    texts = OPTIMIZERS.write(made, lr=made.lr, schedule=made.schedule), SCHEDULES.write(made.schedule, rounds=rounds)
    return {} if None in texts else {"optimizer": texts[0], "lr": made.lr, "schedule": texts[1]}


def _write(kind: type[Spec], name: str, value: Any) -> tuple[str | None, str]:
    """Return the text of an object that was given as setting ``name``, if there is one, and a description."""
    if name == "data":
        return _write_data(value)
    if name == "newcomers":
        return None, f"the clients {', '.join(map(repr, value))}"
    catalog = find_catalog(kind, name)
    if catalog is None:
        return None, f"a {type(value).__name__} in memory"
    said = (_describe(one, *catalog.parse_all(one)) for one in list_several(value))
    return catalog.write_all(value), ", ".join(said)


def _write_data(data: Any) -> tuple[str | None, str]:
    if not isinstance(data, Federation):
        return None, f"a {type(data).__name__} in memory"
    known = data.name in EMBEDDED and find_user_function("data", EMBEDDED[data.name])().fingerprint == data.fingerprint
    return data.name if known else None, f"a Federation {data.name!r} of {len(data.clients)} clients"


def _describe(given: object, *made: object) -> str:
    """Describe the object ``given``, which a catalog turned into the values ``made``."""
    if all(isinstance(one, Method) for one in made):
        return ", ".join(one.label for one in made if isinstance(one, Method))
    function = getattr(made[0], "function", given)
    return f"function {describe_function(function)}" if callable(function) else repr(made[0])
