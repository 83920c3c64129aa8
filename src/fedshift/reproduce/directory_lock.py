"""The directory in which tables are run, held by one program at a time, so that none writes over another's results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..results.run_directory import LOCK, OWNER, acquire_lock
from ..utils.errors import UsageError

KNOWN = frozenset(("index.html", "results", "runs", LOCK, OWNER))
"""What lies in such a directory."""


@contextmanager
def lock_directory(place: Path) -> Iterator[None]:
    """``place``, made if need be, for this program alone inside the block.

    Raises :class:`UsageError` where it cannot be written, and :class:`FedshiftError` where another program holds it.
    """
    try:
        lock = acquire_lock(place)
    except OSError as error:
        raise UsageError(f"--out {place}: {error.strerror}; give a directory that can be written") from error
    try:
        yield
    finally:
        lock.release()
