"""Engines run the clients' local work of a round. They depend only on the kernel, and methods do not depend on engines.

An engine is a subclass of :class:`fedshift.engines.engine.Engine`. Engines in :data:`ENGINES` are available by name and
are tested by ``tests/laws``; a user's engine is named by its class, ``package.module:Class``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config.expressions import find_user_function
from ..utils.errors import UsageError, unknown_name
from .engine import Engine
from .identity import Identity
from .sequential import Sequential
from .spread import Pool, Ray
from .stacked import Stacked

ENGINES: Mapping[str, type[Engine]] = {
    "sequential": Sequential,
    "stacked": Stacked,
    "pool": Pool,
    "ray": Ray,
    "identity": Identity,
}
"""Engines by name; all must equal ``sequential`` (``tests/laws``)."""


def find_engine(name: str) -> type[Engine]:
    """Return the engine called ``name``, or the user's class ``package.module:Class``; raise :class:`UsageError`."""
    if name in ENGINES:
        return ENGINES[name]
    if not {".", ":"} & set(name):
        raise unknown_name("engine", name, (*ENGINES, "auto")).about("engine")
    try:
        found = find_user_function("engine", name)
    except UsageError as error:
        raise error.about("engine") from None
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise UsageError(
            f"engine {name!r} is no engine: give a subclass of fedshift.engines.engine.Engine, for example of "
            "fedshift.engines.sequential.Sequential"
        ).about("engine")
    return found
