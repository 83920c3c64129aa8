"""What was measured on this machine, kept in the cache directory so that it is measured once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from .errors import FedshiftError
from .files import cache_directory, write_atomically


def remembered(name: str, facts: object, measure: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """What ``measure()`` gives, or gave on such a machine before, under ``facts``, all that it depends on.

    Kept in the file ``name`` of the cache directory, where that can be written; ``facts`` are told apart by their repr.
    """
    key = blake2b(repr((machine(), facts)).encode(), digest_size=12).hexdigest()
    place = cache_directory() / name
    known = _read(place)
    if key not in known:
        known[key] = dict(measure())
        with suppress(OSError, FedshiftError):  # nothing is remembered where nothing can be written
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, json.dumps(known, indent=1).encode())
    return known[key]


def machine() -> str:
    """The kinds of processor that this machine has, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return " ".join(sorted({line for line in lines if line.startswith(("model name", "vendor_id", "model\t"))}))


def _read(place: Path) -> dict[str, dict[str, float]]:
    try:
        known = json.loads(place.read_text(encoding="utf-8"))
        return {key: {name: float(value) for name, value in found.items()} for key, found in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):  # none, or damaged
        return {}
