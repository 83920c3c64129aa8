"""The cache of decoded images keeps to a limit: the entries least recently used are removed where a new one needs room.

An entry that this program has mapped is never removed by it. One that another program has mapped may be: on Linux and
macOS the mapping outlives the file, and on Windows the removal is refused and the entry stays. An entry is renamed
before it is removed, so that other programs find a whole one or none, and decode again where there is none.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from ...utils.errors import UsageError

VARIABLE = "FEDSHIFT_CACHE_LIMIT"
LIMIT = 20.0
"""Gigabytes (10^9 bytes) unless :data:`VARIABLE` says otherwise."""
BEGUN = ".tmp"
"""Suffix of entries that are being written or removed."""
ABANDONED = 24 * 3600
"""Seconds after which one of these that did not change is what a crash has left."""

_mapped: set[Path] = set()
"""Entries that this program has mapped, whatever became of the mapping."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of the cache: its directory, its bytes, and when it was last used, in nanoseconds since 1970."""

    place: Path
    size: int
    used: int


def images_in(cache: Path) -> Path:
    """The directory of decoded images in a cache directory."""
    return cache / "images"


def limit() -> float:
    """Bytes that decoded images may take. Raises :class:`UsageError` where the variable holds no such number."""
    given = os.environ.get(VARIABLE) or str(LIMIT)
    try:
        gigabytes = float(given)
    except ValueError:
        gigabytes = -1.0
    if not gigabytes >= 0:
        raise UsageError(f"{VARIABLE}={given}: give gigabytes, 0 or more, or inf for no limit")
    return gigabytes * 1e9


def entries(images: Path) -> list[Entry]:
    """What is in the directory ``images``, the least recently used first; also entries that are being written."""
    found = []
    with suppress(OSError):
        for place in images.iterdir():
            with suppress(OSError):  # removed in the meantime
                stats = [path.stat() for path in (place, *place.iterdir())]
                written = place.suffix == BEGUN
                used = max(stat.st_mtime_ns for stat in stats) if written else stats[0].st_mtime_ns
                found.append(Entry(place=place, size=sum(stat.st_size for stat in stats[1:]), used=used))
    return sorted(found, key=lambda entry: (entry.used, entry.place.name))


def taken(images: Path) -> int:
    """Bytes of all that is in the directory ``images``."""
    return sum(entry.size for entry in entries(images))


def mark_used(place: Path) -> None:
    """Note that this program uses the entry at ``place`` now."""
    _mapped.add(place)
    with suppress(OSError):  # of a cache that can only be read
        os.utime(place)


def make_room(images: Path, size: int) -> None:
    """Remove entries until ``size`` more bytes are within the limit, or all that is left is in use by this program."""
    known = entries(images)
    over = sum(entry.size for entry in known) + size - limit()
    now = time.time_ns()
    for entry in known:
        written = entry.place.suffix == BEGUN
        kept = entry.used > now - ABANDONED * 10**9 if written else over <= 0 or entry.place in _mapped
        if not kept and remove(entry.place):
            over -= entry.size


def clear(images: Path) -> None:
    """Remove all entries; programs that are writing some keep their images in memory."""
    for entry in entries(images):
        remove(entry.place)


def remove(place: Path) -> bool:
    """Remove an entry; False where it is still there, as on Windows while a program has it mapped."""
    gone = place.with_name(f"{place.name.partition('.')[0]}.{uuid4().hex}{BEGUN}")
    try:
        place.rename(gone)
    except FileNotFoundError:  # another program has removed it
        return True
    except OSError:
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True
