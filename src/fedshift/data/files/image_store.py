"""A client's images as one array, decoded once: a later reading maps the file that the first one has left.

An entry of the cache is a directory named by a digest (BLAKE2b) of the files' paths, sizes and times of change and of
what was asked for. It is written under a name of its own and then renamed, so that an entry is whole or is not there,
and of two processes that decode the same files at the same time each finds a whole one. Pixels are written to it as
they are decoded, so that memory never holds more than an image a thread. The array is mapped copy-on-write
(NumPy's mode "c"): its pages are read when they are needed, and writing to them does not reach the file.
How much is kept is in :mod:`fedshift.data.files.image_cache`.

Gray integers of more than 8 bits become ``value / (2^bits - 1) * 2 - 1`` with ``bits`` the smallest of 8, 10, 12, 14
and 16 that holds the client's largest training value, as cameras and scanners fill 12 bits of 16; floats in [0, 1]
become ``2 value - 1``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from .image_cache import BEGUN, images_in, make_room, mark_used, remove
from .image_decoding import Header, Kind, Unreadable, decode_image, quiet_pillow, read_header
from .read_options import Progress

Pixels = NDArray[np.generic]

_VERSION = 1
_BITS = (8, 10, 12, 14, 16)
_AT_ONCE = 16  # files between two reports of progress


class ImageFile(NamedTuple):
    """A file of a client: ``path`` from the directory that was given, ``part`` (may be empty) and ``category``."""

    path: str
    part: str
    category: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """What is true of all images of a client, and which files stand out.

    ``bits``: 0 unless gray integers were scaled. ``broken``: why a file cannot be used; ``frames``: how many, where
    there are several.
    """

    kind: Kind = "byte"
    channels: int = 1
    height: int = 1
    width: int = 1
    bits: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    frames: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ImageStore:
    """A client's images ``[N, C, H, W]`` in the order of its files, zeros where a file is broken.

    ``unkept`` says why the array is in memory and not in the cache; empty where it is there.
    """

    facts: ImageFacts
    pixels: Pixels
    unkept: str = ""


def cache_entry(cache: Path, root: Path, files: Iterable[ImageFile], *choices: object) -> Path:
    """Where ``cache`` keeps these files of ``root`` decoded under ``choices``."""
    digest = blake2b(repr((_VERSION, str(root.resolve()), *choices)).encode(), digest_size=16)
    for file in files:
        digest.update(repr(tuple(file)).encode())
    return images_in(cache) / digest.hexdigest()


def load_store(place: Path) -> ImageStore | None:
    """The store at ``place`` if a whole one is there; nothing is decoded. What else is found there is removed."""
    if not place.is_dir():
        return None
    try:
        facts = ImageFacts(**json.loads((place / "facts.json").read_text("utf-8")))
        store = ImageStore(facts=facts, pixels=np.load(place / "pixels.npy", mmap_mode="c"))
    except (OSError, ValueError, TypeError, EOFError):
        remove(place)
        return None
    mark_used(place)
    return store


def inspect_all(
    root: Path, paths: Sequence[str], what: str, progress: Progress | None
) -> tuple[dict[str, Header], dict[str, str]]:
    """Headers of the files, and why each of the others is broken."""
    found: dict[str, Header | str] = dict.fromkeys(paths, "")  # in this order, whichever thread is first

    def one(row: int) -> None:
        try:
            found[paths[row]] = read_header(root / paths[row])
        except Unreadable as error:
            found[paths[row]] = str(error)

    _run_in_parallel(one, len(paths), what, progress)
    headers = {path: header for path, header in found.items() if isinstance(header, Header)}
    return headers, {path: why for path, why in found.items() if isinstance(why, str)}


def decode_all(
    root: Path,
    paths: Sequence[str],
    facts: ImageFacts,
    place: Path,
    training: Callable[[frozenset[str]], Iterable[int]],
    what: str,
    progress: Progress | None,
) -> ImageStore:
    """Decode ``paths`` as ``facts`` says into an entry at ``place``, or into memory where that cannot be written.

    ``training(broken)`` gives the rows of the training images once it is known which files are broken.
    """
    shape = (len(paths), facts.channels, facts.height, facts.width)
    dtype = np.dtype(np.uint8 if facts.kind == "byte" else np.float32)

    def fill(put: Callable[[int, Pixels], None]) -> tuple[ImageFacts, dict[int, float]]:
        """Decode every file; what is known then, and the largest value of each row."""
        broken, peaks = dict(facts.broken), {}

        def one(row: int) -> None:
            if paths[row] in facts.broken:
                return
            try:
                pixels, peaks[row] = decode_image(
                    root / paths[row],
                    kind=facts.kind, channels=facts.channels, height=facts.height, width=facts.width,
                )  # fmt: skip
            except Unreadable as error:
                broken[paths[row]] = str(error)
            else:
                put(row, pixels)

        _run_in_parallel(one, len(paths), what, progress)
        top = max((peaks[row] for row in training(frozenset(broken))), default=0.0)
        bits = next(bits for bits in _BITS if top < 2**bits) if facts.kind == "integer" else 0
        return replace(facts, broken=dict(sorted(broken.items())), bits=bits), peaks

    try:
        return _write_store(place, shape, dtype, fill)
    except OSError as error:
        memory = np.zeros(shape, dtype)
        known, peaks = fill(memory.__setitem__)
        _rescale(memory, known, peaks)
        return ImageStore(facts=known, pixels=memory, unkept=error.strerror or str(error))


def _write_store(
    place: Path, shape: tuple[int, ...], dtype: np.dtype[Any], fill: Callable[..., tuple[ImageFacts, dict[int, float]]]
) -> ImageStore:
    """Fill an entry beside ``place`` and rename it to that; raises :class:`OSError` where the disk refuses."""
    beside = place.with_name(f"{place.name}.{uuid4().hex}{BEGUN}")
    make_room(place.parent, math.prod(shape) * dtype.itemsize)
    beside.mkdir(parents=True)
    try:
        array = beside / "pixels.npy"
        start = np.lib.format.open_memmap(array, "w+", dtype, shape).offset
        lock = Lock()
        with array.open("r+b") as file:  # written, not mapped: a full disk is then an error that can be caught

            def put(row: int, pixels: Pixels) -> None:
                with lock:
                    file.seek(start + row * pixels.nbytes)
                    file.write(np.ascontiguousarray(pixels).data)

            facts, peaks = fill(put)
            file.flush()
            os.fsync(file.fileno())
        if facts.kind != "byte":
            mapped = np.lib.format.open_memmap(array, "r+")
            _rescale(mapped, facts, peaks)
            mapped.flush()
            del mapped
        (beside / "facts.json").write_text(json.dumps(asdict(facts)), "utf-8")
        beside.rename(place)
    except OSError:
        if not place.exists():  # else another process was first, and its entry is as good
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    store = load_store(place)
    if store is None:
        raise OSError(f"{place} cannot be read")
    return store


def _rescale(pixels: Pixels, facts: ImageFacts, rows: Iterable[int]) -> None:
    """Bring gray values of more than 8 bits to [-1, 1] in place; larger ones than ``bits`` holds become 1."""
    if facts.kind != "byte":
        top = 2**facts.bits - 1 if facts.kind == "integer" else 1
        for row in rows:
            pixels[row] = np.minimum(pixels[row] / np.float32(top), 1) * 2 - 1


def _run_in_parallel(work: Callable[[int], None], count: int, what: str, progress: Progress | None) -> None:
    """Call ``work`` with 0..``count - 1`` on a few threads (Pillow decodes without the interpreter's lock)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def some(start: int) -> int:
        end = min(start + _AT_ONCE, count)
        for row in range(start, end):
            work(row)
        return end

    with quiet_pillow(), ThreadPoolExecutor(min(cores, 8)) as pool:
        for done in pool.map(some, range(0, count, _AT_ONCE)):
            if progress is not None:
                progress(what, done, count)
