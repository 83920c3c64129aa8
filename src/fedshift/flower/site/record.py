"""Record of what a site's data were used for: a row for each answer and each decision of the operator, in SQLite.

The limits of a policy are sums over the rows that `fedshift ledger` prints, so that they cannot disagree. A coordinator
can rename an experiment, take another seed, or ask another program of the site: rows belong to the data, known by their
path and by a fingerprint of their files, also once they were moved or grew. An answer is sent only after its row is on
disk. Each row has the digest of the row before, so that a changed or removed row shows, and whoever keeps the last
digest elsewhere (a log collector) notices a file that was rewritten.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

from ...data.stores import digest_files
from ...utils.errors import FedshiftError, UsageError

FILE = "record.db"
Spending = Literal["uploads", "evaluations", "descriptions"]
SPENDING: tuple[Spending, ...] = get_args(Spending)
TABLES = """
CREATE TABLE IF NOT EXISTS data (book INTEGER, place TEXT, fingerprint TEXT);
CREATE TABLE IF NOT EXISTS entry (
    number INTEGER PRIMARY KEY AUTOINCREMENT, time TEXT NOT NULL, book INTEGER NOT NULL, event TEXT NOT NULL,
    trial TEXT, round INTEGER, question TEXT, uploads INTEGER NOT NULL DEFAULT 0,
    evaluations INTEGER NOT NULL DEFAULT 0, descriptions INTEGER NOT NULL DEFAULT 0,
    spent REAL NOT NULL DEFAULT 0, steps INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0, content TEXT NOT NULL, digest TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS entry_question ON entry (question);
"""


class RecordFailed(FedshiftError):
    """A row cannot be written, so that nothing may leave."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row: its ``number``, ``time`` and ``event``, and its content."""

    number: int
    time: str
    event: str
    trial: str | None
    round: int | None
    content: Mapping[str, Any]
    digest: str


class Record:
    """The record in file ``path``, of the data at ``place`` whose files have ``fingerprint``; "": only to read it.

    Raises :class:`UsageError` if the file is damaged, or cannot be written.
    """

    def __init__(self, path: Path, place: str = "", fingerprint: str = "") -> None:
        self.path, self.place, self.fingerprint = path, place, fingerprint
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA synchronous = FULL")
            self._file.executescript(TABLES)
            self._book = self._find_book() if place else 0
        except (OSError, sqlite3.Error, RecordFailed) as error:
            raise UsageError(
                f"{path}, which counts what the data were used for, is damaged or cannot be written ({error}): name "
                "another file (--account), or bring it back from a copy"
            ) from error

    def count(self, what: Spending, *, trial: str = "", without: str = "/") -> int:
        """Count ``what`` in ``trial`` ("": in all), except in trials whose name begins with ``without``.

        An answer that left again, bit for bit, counts once.
        """
        return int(self._sum(f"COUNT(DISTINCT question) FROM entry WHERE {what} AND", trial, without))

    def sum_spent(self, *, without: str = "/") -> float:
        """Return the privacy that uploads spent (:func:`.review.compute_spent`), except in trials ``without``."""
        return float(self._sum("COALESCE(SUM(spent), 0) FROM entry WHERE", "", without))

    def sum_bytes(self, trial: str, round: int) -> int:
        """Return the bytes of entries that ``round`` of ``trial`` moved, to and from the site, repetitions included."""
        asked = "COALESCE(SUM(bytes), 0) FROM entry WHERE book = ? AND trial = ? AND round = ?"
        return int(self._value(asked, self._book, trial, round))

    def reached(self, trial: str) -> tuple[int, int]:
        """Return the last round with an upload, and the local steps in uploads so far."""
        where = "FROM entry WHERE book = ? AND trial = ? AND uploads"
        last, steps = (
            self._value(f"COALESCE(MAX({name}), 0) {where}", self._book, trial) for name in ("round", "steps")
        )
        return last, steps

    def holds(self, event: str, question: str) -> bool:
        """Return whether there is such an event about ``question``."""
        asked = "EXISTS (SELECT 1 FROM entry WHERE book = ? AND event = ? AND question = ?)"
        return bool(self._value(asked, self._book, event, question))

    def append(
        self, event: str, content: Mapping[str, Any], check: Callable[[], None] = lambda: None, **columns: Any
    ) -> None:
        """Write a row unless ``check`` raises; no other program writes in between.

        Raises :class:`RecordFailed` if the disk is full, or the file cannot be written.
        """
        time, text = datetime.now(UTC).isoformat(timespec="milliseconds"), json.dumps(content)
        with self._writing():
            check()
            before = self._value("COALESCE((SELECT digest FROM entry ORDER BY number DESC LIMIT 1), '')")
            row = {"time": time, "book": self._book, "event": event, **columns, "content": text}
            row["digest"] = _digest(before, row)
            names = ", ".join(row)
            self._file.execute(f"INSERT INTO entry ({names}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))

    def read(self) -> Iterator[Entry]:
        """Yield all rows, each compared with its digest; raise :class:`FedshiftError` at one that differs."""
        before, rows = "", self._file.execute("SELECT * FROM entry ORDER BY number")
        names = [column[0] for column in rows.description]
        for values in rows:
            row = dict(zip(names, values, strict=True))
            number, digest = row.pop("number"), row.pop("digest")
            if _digest(before, row) != digest:
                raise FedshiftError(f"{self.path}: entry {number} or the one before was changed, removed or added")
            before = digest
            yield Entry(
                number=number, time=row["time"], event=row["event"], trial=row["trial"], round=row["round"],
                content=json.loads(row["content"]), digest=digest,
            )  # fmt: skip

    def list_totals(self) -> Iterator[str]:
        """Yield a sentence for the data at each place: how much was sent of them in all."""
        counts = ", ".join(f"COUNT(DISTINCT CASE WHEN {what} THEN question END)" for what in SPENDING)
        asked = "SELECT book, GROUP_CONCAT(DISTINCT place) FROM data GROUP BY book"
        for book, places in self._file.execute(asked).fetchall():
            totals = self._file.execute(f"SELECT {counts} FROM entry WHERE book = ?", (book,)).fetchone()
            sent = ", ".join(f"{number} {what}" for what, number in zip(SPENDING, totals, strict=True))
            yield f"{places}: {sent} in all"

    def _find_book(self) -> int:
        """Return the number of the data's rows; rows of several places or fingerprints that are theirs become one."""
        with self._writing():
            own = "SELECT DISTINCT book FROM data WHERE place = ? OR fingerprint = ? ORDER BY book"
            books = [book for (book,) in self._file.execute(own, (self.place, self.fingerprint))]
            book = books[0] if books else self._value("COALESCE(MAX(book), 0) + 1 FROM data")
            for other in books[1:]:
                for table in ("data", "entry"):
                    self._file.execute(f"UPDATE {table} SET book = ? WHERE book = ?", (book, other))
            self._file.execute("INSERT INTO data VALUES (?, ?, ?)", (book, self.place, self.fingerprint))
            return int(book)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            self._file.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._file.execute("COMMIT")
            except BaseException:
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise RecordFailed(
                f"{self.path} cannot be written ({error}), and nothing leaves without a row there: make room, or make "
                "it writable, and join again"
            ) from error

    def _sum(self, what: str, trial: str, without: str) -> Any:
        where = "book = ? AND ? IN ('', trial) AND INSTR(COALESCE(trial, ''), ?) <> 1"
        return self._value(f"{what} {where}", self._book, trial, without)

    def _value(self, asked: str, *values: Any) -> Any:
        return self._file.execute(f"SELECT {asked}", values).fetchone()[0]


def _digest(before: str, row: Mapping[str, Any]) -> str:
    written = {name: value for name, value in row.items() if value not in (None, 0) and name != "book"}
    return sha256((before + json.dumps(written, sort_keys=True)).encode()).hexdigest()


def name_data(data: str, name: str | None) -> tuple[str, str]:
    """Return the place of ``data`` (of client ``name``, if they are known by name), and a fingerprint of their files.

    The fingerprint finds the rows of data that were moved or copied (:func:`~fedshift.data.stores.digest_files`);
    whether a question was asked of the same samples before, their own fingerprint shows.
    """
    path = Path(data)
    if not path.exists():
        place = f"{data}/{name}"
        return place, sha256(place.encode()).hexdigest()
    path = path.resolve()
    files = [path] if path.is_file() else [Path(at, file) for at, _, names in os.walk(path) for file in names]
    return str(path), digest_files([[file for file in files if file.is_file()]]).hex()
