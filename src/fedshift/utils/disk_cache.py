"""Disk cache of measurements on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from .errors import FedshiftError
from .files import cache_directory, write_atomically

Found = TypeVar("Found")


def cached_measurement(name: str, facts: object, measure: Callable[[], dict[str, Found]]) -> dict[str, Found]:
    """Return ``measure()``, or its cached result on the same kind of machine for the same ``facts``.

    Results are cached as JSON in the file ``name`` of the cache directory, if it can be written. ``facts`` must hold
    everything else the measurement depends on, and are compared by their repr.
    """
    key = blake2b(repr((describe_processors(), facts)).encode(), digest_size=12).hexdigest()
    path = cache_directory() / name
    known: dict[str, dict[str, Found]] = _read(path)
    if key not in known:
        known[key] = measure()
        with suppress(OSError, FedshiftError):  # a cache that cannot be written stays empty
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(known, indent=1).encode())
    return known[key]


def describe_processors() -> str:
    """Return the processor models of this machine as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return " ".join(sorted({line for line in lines if line.startswith(("model name", "vendor_id", "model\t"))}))


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {key: dict(found) for key, found in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):  # missing or damaged
        return {}
