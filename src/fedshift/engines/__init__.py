"""Engines carry out the clients' work of a round. They know only the kernel; no method knows which engine runs it.

An engine is a subclass of :class:`fedshift.engines.engine.Engine`. Listing it in :data:`ENGINES` makes it available to
the command line and subjects it to ``tests/laws``.
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
"""Engines by name; all others must equal ``sequential`` (``tests/laws``)."""
