"""A client's images as one array, decoded once and then mapped from a cache of limited size.

A cache entry is a directory named by a digest (BLAKE2b) of the files' paths, sizes and modification times and of the
reading options. It is written under a temporary name and then renamed, so that an entry is either complete or absent,
even if two processes decode the same files at the same time. Pixels are written right after decoding, so that memory
never holds more than one image per thread. The array is mapped copy-on-write (NumPy's mode "c"): pages are read on
demand, and writes do not reach the file.

If a new entry needs space, the least recently used entries are removed, except those that this process has mapped. An
entry that another process has mapped may be removed: on Linux and macOS the mapping survives, and on Windows the
removal fails and the entry stays. An entry is renamed before it is removed, so that other processes find either a
complete entry or none, and then decode again.

Gray integers of more than 8 bits become ``value / (2^bits - 1) * 2 - 1``, where ``bits`` is the smallest of 8, 10, 12,
14 and 16 that fits the client's largest training value, because cameras and scanners use 12 of 16 bits; floats in
[0, 1] become ``2 value - 1``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ..decoding.images import Header, Kind, Unreadable, decode_image, quiet_pillow, read_header
from ..decoding.resizing import describe_stretch
from ..patches import extend
from .read_options import Progress

Pixels = NDArray[np.generic]
Key = TypeVar("Key")
Found = TypeVar("Found")

_VERSION = 2
_DEEP = ("integer", "real")  # kinds whose values are stored as floats
_AT_ONCE = 16  # files between two reports of progress

VARIABLE = "FEDSHIFT_CACHE_LIMIT"
LIMIT = 20.0
"""Default size limit in gigabytes (10^9 bytes); the environment variable :data:`VARIABLE` overrides it."""
ARRAY_FILE = "pixels.npy"
BEGUN = ".tmp"
"""Suffix of entries being written or removed."""
ABANDONED = 24 * 3600
"""Seconds without changes after which such an entry is considered abandoned by a crash."""

_mapped: set[Path] = set()
"""Entries that this process has mapped."""


class ImageFile(NamedTuple):
    """A client's file: ``path`` relative to a given directory, ``part`` (may be empty) and ``category``."""

    path: str
    part: str
    category: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """Common properties of a client's images, and the exceptional files.

    ``levels`` gives the levels of gray of each file with more than 8 bits. ``sizes`` gives the height and width of each
    file if images are padded at their ends, by the lowest value in each channel (masks: by 0), instead of resized.
    ``broken`` gives the reason why a file cannot be used; ``frames`` gives the number of frames of files with several;
    ``stretch``: how proportions changed.
    """

    kind: Kind = "byte"
    channels: int = 1
    height: int = 1
    width: int = 1
    levels: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    frames: dict[str, int] = field(default_factory=dict)
    stretch: str = ""

    def list_extents(self, files: Iterable[ImageFile]) -> NDArray[np.int64]:
        """Return the height and width that each of ``files`` has in the array, ``[N, 2]``."""
        whole = self.height, self.width
        return np.array([self.sizes.get(file.path, whole) for file in files], np.int64)


@dataclass(frozen=True, kw_only=True)
class ImageStore:
    """A client's images ``[N, C, H, W]`` in the order of its files, with their values, and zeros for broken files.

    ``unkept``: the reason why the array is in memory; empty if it is in the cache.
    """

    facts: ImageFacts
    pixels: Pixels
    unkept: str = ""


def cache_entry(cache: Path, root: Path, files: Iterable[ImageFile], *choices: object) -> Path:
    """Return the path in ``cache`` for these files of ``root``, decoded with the options ``choices``."""
    digest = blake2b(repr((_VERSION, str(root.resolve()), *choices)).encode(), digest_size=16)
    for file in files:
        digest.update(repr(tuple(file)).encode())
    return images_in(cache) / digest.hexdigest()


def load_store(place: Path) -> ImageStore | None:
    """Return the store at ``place``, or None unless it exists and is complete; an incomplete one is removed."""
    if not place.is_dir():
        return None
    try:
        facts = ImageFacts(**json.loads((place / "facts.json").read_text("utf-8")))
        store = ImageStore(facts=facts, pixels=np.load(place / ARRAY_FILE, mmap_mode="c"))
    except (OSError, ValueError, TypeError, EOFError):
        remove(place)
        return None
    _mapped.add(place)
    with suppress(OSError):  # in a read-only cache
        os.utime(place)
    return store


def can_write(cache: Path) -> bool:
    """Return whether entries can be written to a cache directory."""
    with suppress(OSError):
        images_in(cache).mkdir(parents=True, exist_ok=True)
    return os.access(images_in(cache), os.W_OK)


def load_array(place: Path) -> NDArray[Any] | None:
    """Return the array at ``place``, mapped, or None unless there is a complete one; a damaged one is removed."""
    try:
        found: NDArray[Any] = np.load(place / ARRAY_FILE, mmap_mode="r")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError):
        remove(place)
        return None
    with suppress(OSError):  # in a read-only cache
        os.utime(place)
    return found


def keep_array(place: Path, x: NDArray[Any]) -> None:
    """Write an entry with the array ``x`` at ``place``; none if the disk is full or the cache cannot be written."""
    beside = place.with_name(f"{place.name}.{uuid4().hex}{BEGUN}")
    try:
        make_room(place.parent, x.nbytes)
        beside.mkdir(parents=True)
        np.save(beside / ARRAY_FILE, x)
        beside.rename(place)
    except OSError:  # also if another process was first
        shutil.rmtree(beside, ignore_errors=True)


def read_all(
    files: Mapping[Key, Path], read: Callable[[Path], Found], what: str, progress: Progress | None
) -> tuple[dict[Key, Found], dict[Key, str]]:
    """Return the result of ``read`` for each readable file, and the reason why each other file is broken."""
    found: dict[Key, Found] = {}
    broken: dict[Key, str] = {}

    def one(key: Key) -> None:
        try:
            found[key] = read(files[key])
        except Unreadable as error:
            broken[key] = str(error)

    run_in_parallel(one, list(files), what, progress)
    return {key: found[key] for key in files if key in found}, {key: broken[key] for key in files if key in broken}


def inspect_all(
    root: Path, files: Sequence[ImageFile], what: str, progress: Progress | None
) -> tuple[dict[str, Header], dict[str, str]]:
    """Return the headers of readable files below ``root``, and the reason why each other file is broken."""
    return read_all({file.path: root / file.path for file in files}, read_header, what, progress)


def describe_headers(
    headers: Mapping[str, Header], broken: dict[str, str], height: int, width: int, *, padded: bool = False
) -> ImageFacts:
    """Return the facts for images with these headers, all of one kind, that are decoded to ``height`` x ``width``."""
    return ImageFacts(
        kind=next((header.kind for header in headers.values()), "byte"),
        channels=max((header.channels for header in headers.values()), default=1),
        height=height,
        width=width,
        sizes={file: (header.height, header.width) for file, header in headers.items()} if padded else {},
        broken=broken,
        frames={file: header.frames for file, header in headers.items() if header.frames > 1},
        stretch=""
        if padded
        else describe_stretch([(each.height, each.width) for each in headers.values()], (height, width)),
    )


def decode_all(
    root: Path,
    files: Sequence[ImageFile],
    facts: ImageFacts,
    place: Path,
    what: str,
    progress: Progress | None,
) -> ImageStore:
    """Decode ``files`` as described by ``facts`` into an entry at ``place``, or into memory if it cannot be written."""
    shape = (len(files), facts.channels, facts.height, facts.width)
    dtype = np.dtype(np.float32 if facts.kind in _DEEP else np.uint8)

    def fill(put: Callable[[int, Pixels], None]) -> ImageFacts:
        """Decode every file; return the completed facts."""
        broken, levels = dict(facts.broken), {}

        def one(row: int) -> None:
            path = files[row].path
            if path in facts.broken:
                return
            size = facts.sizes.get(path, shape[2:])
            try:
                pixels, levels[path] = decode_image(root / path, kind=facts.kind, channels=facts.channels, size=size)
                if facts.sizes:
                    fill = 0 if facts.kind == "mask" else None
                    pixels = extend(torch.from_numpy(np.array(pixels)), shape[2:], fill).numpy()
            except Unreadable as error:
                broken[path] = str(error)
            else:
                put(row, pixels)

        run_in_parallel(one, range(len(files)), what, progress)
        return replace(facts, broken=dict(sorted(broken.items())), levels=levels if facts.kind == "integer" else {})

    try:
        return _write_store(place, shape, dtype, fill)
    except OSError as error:
        memory = np.zeros(shape, dtype)
        known = fill(memory.__setitem__)
        return ImageStore(facts=known, pixels=memory, unkept=error.strerror or str(error))


def _write_store(
    place: Path, shape: tuple[int, ...], dtype: np.dtype[Any], fill: Callable[..., ImageFacts]
) -> ImageStore:
    """Fill an entry next to ``place`` and rename it to ``place``; raise :class:`OSError` if writing fails."""
    beside = place.with_name(f"{place.name}.{uuid4().hex}{BEGUN}")
    make_room(place.parent, math.prod(shape) * dtype.itemsize)
    beside.mkdir(parents=True)
    try:
        array = beside / ARRAY_FILE
        start = np.lib.format.open_memmap(array, "w+", dtype, shape).offset
        lock = Lock()
        with array.open("r+b") as file:  # writing instead of mapping raises an error if the disk is full

            def put(row: int, pixels: Pixels) -> None:
                with lock:
                    file.seek(start + row * pixels.nbytes)
                    file.write(np.ascontiguousarray(pixels).data)

            facts = fill(put)
            file.flush()
            os.fsync(file.fileno())
        (beside / "facts.json").write_text(json.dumps(asdict(facts)), "utf-8")
        beside.rename(place)
    except OSError:
        if not place.exists():  # otherwise another process was first, and its entry is identical
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    store = load_store(place)
    if store is None:
        raise OSError(f"{place} cannot be read")
    return store


def run_in_parallel(work: Callable[[Key], None], items: Sequence[Key], what: str, progress: Progress | None) -> None:
    """Call ``work`` with each of ``items`` on a few threads (Pillow releases the GIL while it decodes)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def some(start: int) -> int:
        end = min(start + _AT_ONCE, len(items))
        for item in items[start:end]:
            work(item)
        return end

    with quiet_pillow(), ThreadPoolExecutor(min(cores, 8)) as pool:
        for done in pool.map(some, range(0, len(items), _AT_ONCE)):
            if progress is not None:
                progress(what, done, len(items))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cache entry: its directory, its size in bytes, and its last use in nanoseconds since 1970."""

    place: Path
    size: int
    used: int


def images_in(cache: Path) -> Path:
    """Return the directory for decoded images in a cache directory."""
    return cache / "images"


def limit() -> float:
    """Return the size limit in bytes for decoded images; raise :class:`UsageError` if the variable is not a number."""
    given = os.environ.get(VARIABLE) or str(LIMIT)
    try:
        gigabytes = float(given)
    except ValueError:
        gigabytes = -1.0
    if not gigabytes >= 0:
        raise UsageError(f"{VARIABLE}={given}: give gigabytes, 0 or more, or inf for no limit")
    return gigabytes * 1e9


def entries(images: Path) -> list[Entry]:
    """Return all entries in ``images``, least recently used first, including those being written."""
    found = []
    with suppress(OSError):
        for place in images.iterdir():
            with suppress(OSError):  # removed in the meantime
                stats = [path.stat() for path in (place, *place.iterdir())]
                written = place.suffix == BEGUN
                used = max(stat.st_mtime_ns for stat in stats) if written else stats[0].st_mtime_ns
                found.append(Entry(place=place, size=sum(stat.st_size for stat in stats[1:]), used=used))
    return sorted(found, key=lambda entry: (entry.used, entry.place.name))


def count_bytes(images: Path) -> int:
    """Return the total size in bytes of all entries in directory ``images``."""
    return sum(entry.size for entry in entries(images))


def make_room(images: Path, size: int) -> None:
    """Remove entries until ``size`` more bytes fit the limit, or only entries in use by this process remain."""
    known = entries(images)
    over = sum(entry.size for entry in known) + size - limit()
    now = time.time_ns()
    for entry in known:
        written = entry.place.suffix == BEGUN
        kept = entry.used > now - ABANDONED * 10**9 if written else over <= 0 or entry.place in _mapped
        if not kept and remove(entry.place):
            over -= entry.size


def clear(images: Path) -> None:
    """Remove all entries; processes that are writing an entry keep their images in memory."""
    for entry in entries(images):
        remove(entry.place)


def remove(place: Path) -> bool:
    """Remove an entry; return False if this fails, for example on Windows while a process has it mapped."""
    gone = place.with_name(f"{place.name.partition('.')[0]}.{uuid4().hex}{BEGUN}")
    try:
        place.rename(gone)
    except FileNotFoundError:  # another process has removed it
        return True
    except OSError:
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True
