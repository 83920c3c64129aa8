"""Engines run the clients' local work of a round. They depend only on the kernel, and methods do not depend on engines.

An engine is a subclass of :class:`fedshift.engines.engine.Engine`. Engines in :data:`ENGINES` are available on the
command line and are tested by ``tests/laws``.
"""

from __future__ import annotations

from collections.abc import Mapping

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
