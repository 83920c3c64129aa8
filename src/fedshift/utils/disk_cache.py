"""What was measured on this machine, kept in the cache directory so that it is measured once."""

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
    """What ``measure()`` gives, or gave on such a machine before, under ``facts``, all that it depends on.

    Kept as JSON in the file ``name`` of the cache directory, where that can be written; ``facts`` are told apart by
    their repr.
    """
    key = blake2b(repr((describe_processors(), facts)).encode(), digest_size=12).hexdigest()
    place = cache_directory() / name
    known: dict[str, dict[str, Found]] = _read(place)
    if key not in known:
        known[key] = measure()
        with suppress(OSError, FedshiftError):  # nothing is remembered where nothing can be written
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, json.dumps(known, indent=1).encode())
    return known[key]


def describe_processors() -> str:
    """The kinds of processor that this machine has, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return " ".join(sorted({line for line in lines if line.startswith(("model name", "vendor_id", "model\t"))}))


def _read(place: Path) -> dict[str, Any]:
    try:
        known = json.loads(place.read_text(encoding="utf-8"))
        return {key: dict(found) for key, found in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):  # none, or damaged
        return {}
