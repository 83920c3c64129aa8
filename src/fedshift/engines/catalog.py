"""The engines that exist, by name."""

from __future__ import annotations

from collections.abc import Mapping

from .engine import Engine
from .identity import Identity
from .process_pool import Pool
from .ray import Ray
from .sequential import Sequential
from .stacked import Stacked

ENGINES: Mapping[str, type[Engine]] = {
    "sequential": Sequential,
    "stacked": Stacked,
    "pool": Pool,
    "ray": Ray,
    "identity": Identity,
}
"""All but ``sequential`` must equal it (``tests/laws``)."""
