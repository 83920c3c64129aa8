"""Accounts: count the uploads, measurements and descriptions of a site's data over all experiments.

A coordinator can rename an experiment, take another seed, or ask another program of the site. The account is therefore
kept for the data: a path and a fingerprint of its files identify a book, and data that were moved, or that grew, keep
their book. It is one file next to the folders of a site's programs, which share it under a lock; an answer is counted
before it is sent, even if it is lost afterwards.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from ...utils.checked_json import read_checked, write_checked
from ...utils.errors import UsageError

FILE = "account.json"
Spending = Literal["uploads", "evaluations", "descriptions"]
ENDS = 2**16
"""Bytes at the beginning and at the end of a file that its fingerprint covers, with its size."""


@dataclass
class TrialUse:
    """Use of the data by one method and seed: answers sent, privacy spent, steps contained in uploads.

    ``round``: the last round with an upload.
    ``last``: digest of the last question of each kind that was counted, since the same one again gives the same answer.
    """

    uploads: int = 0
    evaluations: int = 0
    spent: float = 0.0
    steps: int = 0
    round: int = 0
    last: dict[str, str] = field(default_factory=dict)


@dataclass
class Book:
    """Record of everything sent from the data at ``paths``, whose files had ``fingerprints``.

    ``descriptions``: digests of all different descriptions that were sent. ``trials``: by experiment, method and seed.
    ``agreed``: who agreed to what, by the digest of the whole question.
    """

    paths: list[str] = field(default_factory=list)
    fingerprints: list[str] = field(default_factory=list)
    descriptions: list[str] = field(default_factory=list)
    trials: dict[str, TrialUse] = field(default_factory=dict)
    agreed: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Book:
        """Return the book that was stored as ``stored``."""
        return Book(**{**stored, "trials": {name: TrialUse(**each) for name, each in stored["trials"].items()}})

    def store(self) -> dict[str, Any]:
        """Return the book as JSON values."""
        return {**vars(self), "trials": {name: vars(each) for name, each in self.trials.items()}}

    def trial(self, name: str) -> TrialUse:
        """Return what ``name`` took so far."""
        return self.trials.get(name, TrialUse())

    def count(self, what: Spending, *, without: str | None = None) -> int:
        """Count ``what`` over all trials except ``without``."""
        if what == "descriptions":
            return len(self.descriptions)
        return sum(getattr(each, what) for name, each in self.trials.items() if name != without)

    def sum_spent(self, *, without: str | None = None) -> float:
        """Return the privacy spent by all uploads (:func:`.review.compute_spent`) except in trial ``without``."""
        return math.fsum(each.spent for name, each in self.trials.items() if name != without)

    def absorb(self, other: Book) -> None:
        """Add what ``other`` holds: the data turned out to be the same."""
        for own, theirs in ((self.paths, other.paths), (self.fingerprints, other.fingerprints),
                            (self.descriptions, other.descriptions)):  # fmt: skip
            own += [each for each in theirs if each not in own]
        self.agreed |= other.agreed
        for name, each in other.trials.items():
            mine = self.trials.setdefault(name, TrialUse())
            mine.uploads, mine.evaluations = mine.uploads + each.uploads, mine.evaluations + each.evaluations
            mine.spent, mine.steps = mine.spent + each.spent, max(mine.steps, each.steps)
            mine.round = max(mine.round, each.round)
            mine.last |= each.last


class Account:
    """The account in file ``path``, of the data at ``place`` whose files have ``fingerprint``."""

    def __init__(self, path: Path, place: str, fingerprint: str) -> None:
        self.path, self.place, self.fingerprint = path, place, fingerprint

    @property
    def book(self) -> Book:
        """The current book of the data."""
        return self._find(read_books(self.path)[0])[0]

    def check(self) -> None:
        """Raise :class:`UsageError` if the account is damaged or cannot be written."""
        self.change(lambda _: None)

    def change(self, change: Callable[[Book], None]) -> None:
        """Apply ``change`` to the data's book and write it, unless it raises; other programs wait meanwhile."""
        with self._locked():
            books, unsigned = read_books(self.path)
            book, others = self._find(books)
            change(book)
            self._write([*others, book], unsigned)

    def count_unsigned(self) -> int:
        """Count a question that nobody signed; return how many there were."""
        with self._locked():
            books, unsigned = read_books(self.path)
            self._write(books, unsigned + 1)
        return unsigned + 1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{self.path}.lock").acquire()
        except OSError as error:
            raise UsageError(
                f"{self.path}, which counts what the data were used for, cannot be written ({error.strerror}): name "
                "another file (--account)"
            ) from error
        with lock:
            yield

    def _find(self, books: Iterable[Book]) -> tuple[Book, list[Book]]:
        """Return the data's book, merged from all their books, and the other books."""
        book, others = Book(paths=[self.place], fingerprints=[self.fingerprint]), []
        for each in books:
            if self.place in each.paths or self.fingerprint in each.fingerprints:
                book.absorb(each)
            else:
                others.append(each)
        return book, others

    def _write(self, books: Iterable[Book], unsigned: int) -> None:
        write_checked(self.path, {"books": [book.store() for book in books], "unsigned": unsigned})


def read_books(path: Path) -> tuple[list[Book], int]:
    """Return the books in the account's file ``path``, and how many questions came unsigned.

    Raises :class:`UsageError` if the file is damaged: without it nobody knows what was sent before.
    """
    if not path.exists():
        return [], 0
    found = read_checked(path, "remove it, if no limit of a policy depends on what this site sent before")
    try:
        return [Book.of(book) for book in found["books"]], int(found["unsigned"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is of another version of fedshift: move it away, and note what it counted") from error


def name_data(data: str, name: str | None) -> tuple[str, str]:
    """Return the place of ``data`` (of client ``name``, if they are called by name), and its files' fingerprint."""
    path = Path(data)
    if not path.exists():
        place = f"{data}/{name}"
        return place, sha256(place.encode()).hexdigest()
    path = path.resolve()
    return str(path), fingerprint_files(path)


def fingerprint_files(path: Path) -> str:
    """Return a digest of the file ``path``, or of all files below it, ignoring their names.

    It covers each file's size, first and last bytes, so that gigabytes of images take only seconds.
    """
    files = [path] if path.is_file() else [Path(at, name) for at, _, names in os.walk(path) for name in names]
    digests = []
    for file in files:
        if not file.is_file():
            continue
        size = file.stat().st_size
        with file.open("rb") as content:
            found = sha256(size.to_bytes(8, "big") + content.read(ENDS))
            content.seek(max(0, size - ENDS))
            found.update(content.read(ENDS))
        digests.append(found.hexdigest())
    return sha256("".join(sorted(digests)).encode()).hexdigest()
