"""Decoded files, kept in a cache directory of limited size, and mapped from there (joblib.Memory).

An entry has the digest of all that its content depends on: paths, sizes and times of change of files, how they are
decoded, and the versions of the code and of the libraries that decode. joblib writes an entry under a temporary name
and renames it, so that it is complete or absent, also if processes decode the same files at the same time or are
killed; one that cannot be loaded is decoded again. Arrays are mapped copy-on-write: pages are read on demand, and
writes do not reach the file. An entry that is removed while a process has it mapped stays readable there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from joblib import Memory
from joblib._store_backends import CacheWarning

from ...utils.errors import UsageError
from .. import decoding
from ..decoding.images import Unreadable, quiet_pillow
from ..source import Progress

Key = TypeVar("Key")
Result = TypeVar("Result")

VARIABLE = "FEDSHIFT_CACHE_LIMIT"
LIMIT = 20.0
"""Default size limit in gigabytes (10^9 bytes); the environment variable :data:`VARIABLE` overrides it."""
_LIBRARIES = ("edfio", "joblib", "nibabel", "numpy", "pillow", "pydicom", "scipy", "torch", "wfdb")
_AT_ONCE = 16  # files between two reports of progress


def open_cache(directory: Path) -> Memory:
    """Return the decoded files in a cache directory; raise :class:`OSError` if it can be neither read nor made."""
    return Memory(directory / "images", mmap_mode="c", verbose=0)


def count_bytes(directory: Path) -> int:
    """Return the bytes of all decoded files in a cache directory."""
    return sum(item.size for item in open_cache(directory).store_backend.get_items()) if directory.is_dir() else 0


def clear(directory: Path) -> None:
    """Remove all decoded files from a cache directory."""
    open_cache(directory).clear(warn=False)


def find_limit() -> float:
    """Return the size limit in bytes for decoded files; raise :class:`UsageError` if the variable is not a number."""
    asked = os.environ.get(VARIABLE) or str(LIMIT)
    try:
        gigabytes = float(asked)
    except ValueError:
        gigabytes = -1.0
    if not gigabytes >= 0:
        raise UsageError(f"{VARIABLE}={asked}: give gigabytes, 0 or more, or inf for no limit")
    return gigabytes * 1e9


def make_room(directory: Path, used: int) -> None:
    """Remove the entries that were used least recently beyond the limit, or beyond the ``used`` bytes of this run."""
    limit = max(find_limit(), used)
    with suppress(OSError):
        if limit < float("inf"):
            open_cache(directory).reduce_size(bytes_limit=int(limit))


def keep(directory: Path, facts: Sequence[object], work: Callable[[], Result]) -> tuple[Result, str]:
    """Return the result of ``work``, mapped from the cache, and the reason why it is in memory instead, if it is.

    ``facts``: all that the result depends on, besides code and libraries, as values whose ``repr`` tells them apart.
    """
    results: list[Result] = []

    def work_once() -> Result:
        results.append(work())
        return results[0]

    key = blake2b(repr((_find_versions(), *facts)).encode(), digest_size=16).hexdigest()
    try:
        kept: Result = open_cache(directory).cache(_compute, ignore=["work"])(key, work_once)
    except (OSError, KeyError, CacheWarning) as error:  # KeyError: joblib could not write what it would load
        reason = getattr(error, "strerror", None) or "no space, or no permission to write"
        return (results[0] if results else work()), reason
    return kept, ""


def _compute(key: str, work: Callable[[], Result]) -> Result:  # noqa: ARG001 - joblib finds results by the key
    return work()


@cache
def _find_versions() -> tuple[str, ...]:
    """Return the versions of the libraries that decode files, and a digest of this package's own decoders."""
    versions = []
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions.append(f"{library} {version(library)}")
    sources = sorted(file for folder in decoding.__path__ for file in Path(folder).glob("*.py"))
    return *versions, blake2b(b"".join(file.read_bytes() for file in sources), digest_size=16).hexdigest()


def stamp(files: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return the path, size and time of change of each of ``files``; zeros for one that is not there."""
    stamps = []
    for file in files:
        size, changed = 0, 0
        with suppress(OSError):
            size, changed = (status := file.stat()).st_size, status.st_mtime_ns
        stamps.append((str(file), size, changed))
    return tuple(stamps)


def read_all(
    files: Mapping[Key, Path], read: Callable[[Path], Result], what: str, progress: Progress | None
) -> tuple[dict[Key, Result], dict[Key, str]]:
    """Return the result of ``read`` for each readable file, and the reason why each other file is broken.

    Files are read on a few threads (Pillow releases the GIL while it decodes).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    results, broken = dict[Key, Result](), dict[Key, str]()

    def read_some(keys: Sequence[Key]) -> None:
        for key in keys:
            try:
                results[key] = read(files[key])
            except Unreadable as error:
                broken[key] = str(error)

    pieces = [list(files)[start : start + _AT_ONCE] for start in range(0, len(files), _AT_ONCE)]
    with quiet_pillow(), ThreadPoolExecutor(min(cores, 8)) as pool:
        for number, _ in enumerate(pool.map(read_some, pieces), 1):
            if progress is not None:
                progress(what, min(number * _AT_ONCE, len(files)), len(files))
    return {key: results[key] for key in files if key in results}, {key: broken[key] for key in files if key in broken}
