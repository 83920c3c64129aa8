"""Files of users and of this program.

Writes are atomic: a crash at any moment leaves either the old file or the new one, complete. Reads never block, and
unpack no more than fits into memory. The next program removes temporary directories of killed programs.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import io
import json
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir, mkdtemp
from types import TracebackType
from typing import IO, Any, TypeVar
from weakref import finalize

from typing_extensions import Buffer, override

from .errors import FedshiftError, Ref, UsageError
from .processors import available_memory, describe_processors

Found = TypeVar("Found")

SCRATCH, MARKER = "fedshift-", ".alive"
"""Beginning of the names of temporary directories, and suffix of each one's lock file."""
MOST_EXPANSION, UNSUSPECTED = 200, 2**30
"""An archive that expands by more than the first factor, to more bytes than the second, is refused as malicious."""
KINDS = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}


class NotRegular(OSError):
    """A path is a pipe, a socket or a device, whose reading may never end."""

    def __str__(self) -> str:
        return f"it {self.strerror}"


MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
"""Encodings by their byte order mark, longest first."""


def open_regular(path: Path) -> IO[bytes]:
    """Open the file ``path`` for reading, without blocking; raise :class:`NotRegular` if it is not a regular file."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        require_regular(path, os.fstat(file.fileno()))
    except NotRegular:
        file.close()
        raise
    return file


def read_text(path: Path) -> str:
    """Return a user's text: UTF-8, or UTF-16 and UTF-32 with a byte order mark.

    Raises :class:`UsageError` naming the line of other bytes.
    """
    with open_regular(path) as file:
        content = file.read()
    marked = (encoding for mark, encoding in MARKS.items() if content.startswith(mark))
    encoding = next(marked, "utf-8-sig")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line, name = content.count(b"\n", 0, error.start) + 1, encoding.removesuffix("-sig").upper()
        raise UsageError(
            f"{path}, line {line}, is not in {name} (byte {content[error.start]:#04x}, as in Latin-1 or another older "
            "encoding): save it as UTF-8 (in Excel: CSV UTF-8)"
        ) from error
    if "\0" in text:
        raise UsageError(f"{path} holds zero bytes, as UTF-16 without a byte order mark does: save it as UTF-8")
    return text


def require_regular(path: Path, status: os.stat_result | None = None) -> None:
    """Raise :class:`NotRegular` if ``path`` is a pipe, a socket or a device; ``status``: its status, if known."""
    kind = KINDS.get(stat.S_IFMT((status or path.stat()).st_mode))
    if kind:
        raise NotRegular(errno.EINVAL, f"is a {kind}, not a regular file", str(path))


def check_archive(path: Path) -> None:
    """Raise :class:`UsageError` if the zip file ``path`` would unpack to more than this machine can store."""
    with open_regular(path) as file, zipfile.ZipFile(file) as packed:
        size = sum(entry.file_size for entry in packed.infolist())
        small = sum(entry.compress_size for entry in packed.infolist())
    check_expansion(path, size, small)


def check_expansion(path: Path, size: int, small: int | None = None) -> None:
    """Raise :class:`UsageError` if ``path`` of ``small`` bytes expands to an implausible or too large ``size``.

    ``small``: None for the file's size.
    """
    small = path.stat().st_size if small is None else small
    if size > UNSUSPECTED and size > MOST_EXPANSION * small:
        raise UsageError(
            f"{path} would unpack to {size / 1e9:.1f} GB, {size / max(small, 1):.0f} times its size: no data do, so it "
            "is not unpacked; write it again, without compression if it is yours"
        )
    if size > available_memory():
        raise UsageError(
            f"{path} holds {size / 1e9:.1f} GB, and {available_memory() / 1e9:.1f} GB of memory are free: use fewer or "
            "smaller samples, or a machine with more memory"
        )


class BoundedReader(io.RawIOBase):
    """A stream of the file ``path`` as ``unpacked`` reads it, up to the size that :func:`check_expansion` allows."""

    def __init__(self, path: Path, unpacked: IO[bytes]) -> None:
        self.path, self._unpacked, self._count, self._checked = path, unpacked, 0, UNSUSPECTED

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        with memoryview(buffer).cast("B") as place:
            content = self._unpacked.read(len(place))
            place[: len(content)] = content
        self._count += len(content)
        if self._count > self._checked:  # each GB, since unpacked data take memory
            check_expansion(self.path, self._count)
            self._checked += UNSUSPECTED
        return len(content)


class ScratchDirectory:
    """A temporary directory ``path``, removed by :meth:`close`, or at the latest when the program ends.

    If the program is killed, the next program that makes one removes it: a file beside it is locked as long as its
    owner lives. Only directories of the same user with such a file are touched.
    """

    def __init__(self, kind: str = "") -> None:
        remove_abandoned()
        self.path = Path(mkdtemp(prefix=f"{SCRATCH}{kind}"))
        marker = self.path.with_name(self.path.name + MARKER)
        while True:
            lock = os.open(marker, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if marker.exists() and os.path.samestat(marker.stat(), os.fstat(lock)):
                break
            os.close(lock)  # another program locked it first, and removed it as abandoned
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._marker, self._lock = marker, lock
        self._remove = finalize(self, _remove_scratch, self.path, marker, lock)

    def close(self) -> None:
        """Remove the directory."""
        self._remove()

    def keep(self) -> None:
        """Leave the directory where it is."""
        if self._remove.detach():
            self._marker.unlink(missing_ok=True)
            os.close(self._lock)

    def __enter__(self) -> ScratchDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_abandoned() -> None:
    """Remove the temporary directories of this user's programs that were killed."""
    for marker in Path(gettempdir()).glob(f"{SCRATCH}*{MARKER}"):
        place = marker.with_name(marker.name.removesuffix(MARKER))
        with suppress(OSError):  # in use, another user's, or gone
            lock = os.open(marker, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                there = os.path.lexists(place)
                if _is_own(os.fstat(lock), stat.S_ISREG) and (not there or _is_own(place.lstat(), stat.S_ISDIR)):
                    rmtree(place, ignore_errors=True)
                    marker.unlink()
            finally:
                os.close(lock)


def _is_own(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    return status.st_uid == os.geteuid() and is_kind(status.st_mode)


def _remove_scratch(path: Path, marker: Path, lock: int) -> None:
    rmtree(path, ignore_errors=True)
    with suppress(OSError):
        marker.unlink()
    os.close(lock)


@contextmanager
def owner_only() -> Iterator[None]:
    """Let files that are made meanwhile, also by programs that are started, be accessible only to their owner."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def require_writable(directory: Path) -> None:
    """Raise :class:`UsageError` if ``directory`` cannot be written; it need not exist and is not created."""
    place = directory.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if place.is_dir() and not os.access(place, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise UsageError(f"cannot write {directory}: {place} is not writable; make it so, or choose another directory")


def cache_directory() -> Path:
    """Return the cache directory: ``FEDSHIFT_CACHE``, else ``fedshift`` in the user's cache directory."""
    given = os.environ.get("FEDSHIFT_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedshift"


def cached_measurement(name: str, facts: object, measure: Callable[[], dict[str, Found]]) -> dict[str, Found]:
    """Return ``measure()``, or its cached result on the same kind of machine for the same ``facts``.

    Results are cached as JSON in the file ``name`` of the cache directory, if it can be written. ``facts`` must contain
    everything else the measurement depends on, and are compared by their repr. If several processes measure the same
    at the same time, the first to finish determines the result of the others.
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
        f"cannot write {path}: {error.strerror}. What was saved before is intact: {fix}, then repeat the command (a "
        "run continues with {})",
        Ref(resume=True),
    )
