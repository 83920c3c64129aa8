"""Atomic writes: a crash at any moment leaves either the old file or the new one, complete; and cached measurements."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from .errors import FedshiftError
from .processors import describe_processors

Found = TypeVar("Found")


def cache_directory() -> Path:
    """Return the cache directory: ``FEDSHIFT_CACHE``, else ``fedshift`` in the user's cache directory."""
    given = os.environ.get("FEDSHIFT_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedshift"


def cached_measurement(name: str, facts: object, measure: Callable[[], dict[str, Found]]) -> dict[str, Found]:
    """Return ``measure()``, or its cached result on the same kind of machine for the same ``facts``.

    Results are cached as JSON in the file ``name`` of the cache directory, if it can be written. ``facts`` must hold
    everything else the measurement depends on, and are compared by their repr. Of processes that measure the same at
    the same moment, the first to end determines the result of those that end later.
    """
    key = blake2b(repr((describe_processors(), facts)).encode(), digest_size=12).hexdigest()
    path = cache_directory() / name
    known = _read_measurements(path)
    if key in known:
        return known[key]
    measured = measure()
    known = _read_measurements(path)
    if key not in known:
        known[key] = measured
        with suppress(OSError, FedshiftError):  # a cache that cannot be written stays empty
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(known, indent=1).encode())
    return known[key]


def _read_measurements(path: Path) -> dict[str, dict[str, Any]]:
    with suppress(OSError, ValueError, AttributeError, TypeError):  # missing or damaged
        return {old: dict(found) for old, found in json.loads(path.read_text(encoding="utf-8")).items()}
    return {}


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` so that a reader sees either the old file or the new one, never a part.

    Raises :class:`FedshiftError` if the disk is full or not writable; the old file is then untouched.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        if os.name == "posix":  # on other systems a directory cannot be opened and needs no sync
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except OSError as error:
        with suppress(OSError):  # fails too on a read-only disk
            beside.unlink()
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> FedshiftError:
    """Return the error for a ``path`` that could not be written, with the fix."""
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return FedshiftError(f"cannot write {path}: a part of this path is a file; choose another directory")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    fix = "free some space" if full else "make the directory writable"
    return FedshiftError(
        f"cannot write {path}: {error.strerror}. What was saved before is intact: {fix}, then go on with --resume"
    )
