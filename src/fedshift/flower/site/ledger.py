"""A site's own record of every message: what was asked, what was measured and what was sent, in a chain of digests.

The ledger is a file with one JSON object per line. Each line contains the SHA-256 of the line before, so that lines
changed, removed or inserted later are detected, except at the very end: to detect that too, save the last digest
elsewhere. An answer is sent only after its line is on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord

from ...results.disclosure import Disclosure, group_disclosures
from ...utils.errors import FedshiftError
from ..transport.arrays import NUMPY_TYPES, RAW_TYPES
from ..transport.exchange import Exchange

FILE = "ledger.jsonl"
TRAINS, VALIDATES = "trains", "validates only"
"""Roles of a site."""
BEGINNING = "0" * 64
"""The first line's value in place of a digest."""


class Ledger:
    """The ledger in ``folder``, to which lines are appended; a line left incomplete by a crash is removed.

    ``role``: what the site does, in words; it is written to each line.
    """

    def __init__(self, folder: Path, role: str = TRAINS) -> None:
        self.role = role
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._last, self._known = BEGINNING, set[str]()
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # the program was killed while writing
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        for line in whole.splitlines():
            self._last = _digest(line)

    def write(self, asked: Exchange, answer: Exchange, disclosed: Sequence[Disclosure] = ()) -> None:
        """Append a line for the question ``asked`` and its ``answer``, which has not been sent yet.

        ``disclosed``: what the answer's arrays reveal, and who receives them.
        """
        trial, round = asked.facts.get("trial"), asked.facts.get("round")
        if asked.kind == "train" and isinstance(round, int):
            round += 1  # the question has the round of the model, from which the next round starts
        entry: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "role": self.role, "run": asked.run,
            "asked": asked.kind, "round": round,
            "settings": _digest_json(trial or asked.facts.get("spec")), "answered": answer.kind,
            "told": dict(answer.facts),
        }  # fmt: skip
        entry["left"] = {record: self._describe(entries) for record, entries in answer.arrays.items()}
        entry["discloses"] = list(map(str, group_disclosures(disclosed)))
        line = json.dumps({**entry, "previous": self._last}).encode()
        with self.path.open("ab") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._last = _digest(line)

    def _describe(self, entries: ArrayRecord) -> dict[str, Any]:
        """Return the number, size and digest of the entries sent, and their names unless an earlier line has them.

        The size is that of their values, as a review and a page give it; a message adds a header to each.
        """
        names, content = sorted(entries), sha256()
        for name in names:
            content.update(name.encode() + b"\0" + entries[name].data)
        which = _digest_json(names)
        described = {
            "entries": len(names), "bytes": sum(map(_count_bytes, entries.values())),
            "digest": content.hexdigest(), "names_digest": which,
        }  # fmt: skip
        if which not in self._known:
            self._known.add(which)
            described["names"] = names
        return described


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """A line of a ledger: its ``number`` from 1, its ``digest`` and its ``content``."""

    number: int
    digest: str
    content: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """Number of bytes of the entries sent."""
        return sum(int(record["bytes"]) for record in self.content["left"].values())


def read_ledger(path: Path) -> Iterator[LedgerEntry]:
    """Yield the entries of the ledger at ``path``, a file or a site's folder, each after it is verified.

    Raises :class:`FedshiftError` if there is no ledger, or at the first line that was changed.
    """
    file = path / FILE if path.is_dir() else path
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise FedshiftError(f"{file} cannot be read ({error.strerror}): name a site's folder (join --state)") from error
    last = BEGINNING
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            chained = content["previous"] == last
        except (ValueError, TypeError, KeyError) as error:
            raise FedshiftError(f"{file}, line {number} was changed: it is no entry of a ledger") from error
        if not chained:
            raise FedshiftError(
                f"{file}: line {number} does not follow line {number - 1}: one of them was changed, or lines between "
                "them were removed or added"
            )
        last = _digest(line)
        yield LedgerEntry(number=number, digest=last, content=content)


def _count_bytes(array: Array) -> int:
    """Return the bytes of an array's values."""
    return prod(array.shape) * {**NUMPY_TYPES, **RAW_TYPES}[array.dtype].itemsize


def _digest(line: bytes) -> str:
    return sha256(line).hexdigest()


def _digest_json(value: Any) -> str:
    return _digest(json.dumps(value, sort_keys=True).encode())
