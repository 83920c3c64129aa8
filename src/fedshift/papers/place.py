"""The directory in which tables are run, held by one program at a time, so that none writes over another's results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ..base.errors import FedshiftError, UsageError
from ..rundir import LOCK, OWNER

KNOWN = frozenset(("index.html", "results", "runs", LOCK, OWNER))
"""What lies in such a directory."""


@contextmanager
def held(place: Path) -> Iterator[None]:
    """``place``, made if need be, for this program alone inside the block.

    Raises :class:`UsageError` where it cannot be written, and :class:`FedshiftError` where another program holds it.
    """
    lock, owner = FileLock(place / LOCK), place / OWNER
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
        owner.write_text(str(os.getpid()), encoding="utf-8")
    except Timeout as error:
        who = owner.read_text(encoding="utf-8") if owner.exists() else "unknown"
        raise FedshiftError(f"{place} is in use by process {who}: wait for it, or name another directory") from error
    except OSError as error:
        raise UsageError(f"--out {place}: {error.strerror}; give a directory that can be written") from error
    try:
        yield
    finally:
        lock.release()
