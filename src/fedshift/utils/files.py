"""Atomic writes: a crash at any moment leaves the old file or the new one, whole."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from .errors import FedshiftError


def cache_directory() -> Path:
    """Where what can be made again is kept: ``FEDSHIFT_CACHE``, else the user's cache directory."""
    given = os.environ.get("FEDSHIFT_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedshift"


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new one, never a part.

    Raises :class:`FedshiftError` where the disk is full or refuses; the old file is then untouched.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        if os.name == "posix":  # elsewhere a directory cannot be opened, nor need it be
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except OSError as error:
        with suppress(OSError):  # a disk that only reads refuses this too
            beside.unlink()
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> FedshiftError:
    """What a person should read when ``path`` could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    fix = "free some space" if full else "make the place writable"
    return FedshiftError(
        f"cannot write {path}: {error.strerror}. What was saved before is intact: {fix}, then go on with --resume"
    )
