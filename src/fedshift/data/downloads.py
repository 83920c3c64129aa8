"""Downloads of benchmark files from their publisher into ``root/<name>``; interrupted downloads are resumed.

A file is written as ``<file>.part`` and renamed only if its checksum matches the published one. An existing part is
continued if the server supports it (RFC 9110, section 14: a ``Range`` request answered with ``206``) and restarted
otherwise. Nothing is unpacked, and nothing is downloaded except on request.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from http.client import PARTIAL_CONTENT, REQUESTED_RANGE_NOT_SATISFIABLE, HTTPException
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
        with suppress(OSError):
            path.parent.rmdir()  # if empty
        reason = f"{getattr(error, 'reason', None) or error}. Try again (what has come is kept, and goes on)"
        if isinstance(error, HTTPError):
            error.close()
            reason = f"the server answers {error.code} {error.reason}. Try later"
        raise FedshiftError(f"{remote.url} cannot be fetched: {reason}, {by_hand}") from error
    except OSError as error:
        raise FedshiftError(
            f"cannot write {part}: {error.strerror}. Make room, or choose another directory ({{}}); "
            "fetching again goes on from there",
            Ref("root"),
        ) from error
    if wrong := _describe_difference(remote, part):
        part.unlink()
        raise FedshiftError(
            f"{remote.url} gave a file that is not the published one ({wrong}), and it was not kept. Try again; if it "
            f"stays so, the file has changed at its publisher: see {card.homepage}"
        )
    part.replace(path)
    return path


def _download(remote: Remote, part: Path, progress: Progress | None) -> None:
    """Fetch what ``part`` lacks, or all of it where the server sends no parts."""
    start = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "fedshift", **({"Range": f"bytes={start}-"} if start else {})}
    try:
        answer = urlopen(Request(remote.url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        if not (start and error.code == REQUESTED_RANGE_NOT_SATISFIABLE):
            raise
        error.close()
        part.unlink()  # it is at least as long as the file, and may be wrong
        _download(remote, part, progress)
        return
    with answer:
        continued = answer.status == PARTIAL_CONTENT
        if continued and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise HTTPException(f"asked for bytes from {start}, the server sent others")
        done = start if continued else 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length else 0
        with part.open("ab" if continued else "wb") as file:
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
