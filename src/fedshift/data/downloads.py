"""Downloads of benchmark files from their publisher into ``root/<name>``.

A file is written as ``<file>.part`` and renamed only if its checksum matches the published one. Nothing is unpacked,
and nothing is downloaded except on request.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ..utils.errors import FedshiftError, Ref, UsageError
from .datasets._card import Card, Remote
from .source import Progress

TIMEOUT = 60.0
"""Seconds to wait for the server's response."""

_BLOCK = 1 << 20


def fetch(name: str, card: Card, root: Path, *, progress: Progress | None = None) -> list[Path]:
    """Fetch the files of benchmark ``name`` into ``root/<name>`` and return their paths.

    Args:
        name: Name of the benchmark.
        card: Its card.
        root: Directory of the data.
        progress: Called with ``(file, bytes so far, total bytes)``; the total is 0 if the server does not report it.

    Raises:
        UsageError: Nothing can be fetched.
        FedshiftError: The server does not respond, the connection was lost, the disk is full, or a file differs from
            the published one. The message has the address and a remedy.

    """
    folder = root / name
    if card.generated:
        raise UsageError(f"benchmark {name!r} is made by fedshift itself: there is nothing to fetch")
    if not card.remotes:
        raise UsageError(
            f"benchmark {name!r} cannot be fetched: get it from {card.homepage} and put into {folder} {card.layout}"
        )
    return [_fetch_file(remote, folder / remote.name, card, progress) for remote in card.remotes]


def _fetch_file(remote: Remote, path: Path, card: Card, progress: Progress | None) -> Path:
    if path.is_file():
        if wrong := _describe_difference(remote, path):
            raise FedshiftError(f"{path} is not the published file ({wrong}): move it away to download it again")
        return path
    part = path.with_name(path.name + ".part")
    by_hand = f"or get it by hand (see {card.homepage}) and put it at {path}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(remote, part, progress)
    except (URLError, ConnectionError, TimeoutError, SSLError, HTTPException) as error:
        _remove(part)
        reason = f"{getattr(error, 'reason', None) or error}. Try again"
        if isinstance(error, HTTPError):
            error.close()
            reason = f"the server answers {error.code} {error.reason}. Try later"
        raise FedshiftError(f"{remote.url} cannot be fetched: {reason}, {by_hand}") from error
    except OSError as error:
        _remove(part)
        raise FedshiftError(
            f"cannot write {part}: {error.strerror}. Make room, or choose another directory ({{}})", Ref("root")
        ) from error
    if wrong := _describe_difference(remote, part):
        _remove(part)
        raise FedshiftError(
            f"{remote.url} gave a file that is not the published one ({wrong}), and it was not kept. Try again; if it "
            f"stays so, the file has changed at its publisher: see {card.homepage}"
        )
    part.replace(path)
    return path


def _remove(part: Path) -> None:
    """Remove ``part``, and its folder if it is empty."""
    with suppress(OSError):
        part.unlink(missing_ok=True)
        part.parent.rmdir()


def _download(remote: Remote, part: Path, progress: Progress | None) -> None:
    request, done = Request(remote.url, headers={"User-Agent": "fedshift"}), 0
    with urlopen(request, timeout=TIMEOUT) as answer, part.open("wb") as file:
        total = int(answer.headers.get("Content-Length") or 0)
        while block := answer.read(_BLOCK):
            file.write(block)
            done += len(block)
            if progress is not None:
                progress(part.name.removesuffix(".part"), done, total)
    if done < total:
        raise HTTPException(f"the connection was cut after {done} of {total} bytes")


def _describe_difference(remote: Remote, path: Path) -> str:
    """Describe how the file at ``path`` differs from the published one; empty if no difference is known."""
    kind, _, published = remote.checksum.partition(":")
    if not published:
        return ""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, kind).hexdigest()
    return "" if digest == published.lower() else f"its {kind} is {digest}, published is {published}"
