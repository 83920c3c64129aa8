"""Kinds of faults in data that training would hide, and findings of them: what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...utils.words import join_some
from .survey import SplitSurvey

Severity = Literal["error", "warning", "note"]
EXAMPLES = 3
"""Number of examples that a finding shows."""
FIXES: Mapping[Severity, Mapping[str, str]] = {
    "error": {
        "left-out": "Repair, convert or remove them: no result includes files that are skipped.",
        "not-finite": "Fill them in from the client's own training data, or remove them.",
        "unread": "A run would end when it reads this file.",
        "leakage": "Remove them from the training data, or split by the source of samples (person, device, document) "
        "before making variants of them: otherwise test accuracy is too high.",
        "groups": "Move all samples of a group (patient, lesion, series) to one side, or remove its training samples: "
        "results on test data are too good if the model was trained on the same patients.",
        "conflict": "Correct the labels, or remove these samples.",
        "class-names": "Spell labels the same way everywhere: different spellings are different classes.",
    },
    "warning": {
        "blank": "Check whether their files are broken, and remove them if so.",
        "ranges": "Check whether all use the same scale: black may be 0 in some and -1 in others.",
        "leakage-validation": "Remove them from the training data: otherwise validation rewards memorizing.",
        "groups-validation": "Move all samples of a group to one side: otherwise validation favors known groups.",
        "group-column": "Name it (--groups COLUMN), so that each group stays on one side and the column is not a "
        "feature, or leave it out (--ignore-columns COLUMN).",
        "row-number": "Leave them out (--ignore-columns COLUMN): a place in a file predicts nothing for new samples. "
        "If rows were sorted by the target, it makes results too good.",
        "leak": "Leave a column out (--ignore-columns COLUMN) that is not known when a prediction is made: it may be "
        "the outcome itself, a code of it, or a number of rows sorted by class. Results are too good with it.",
        "repeats": "Keep one of each, unless they are meant to have more weight.",
        "shared": "Give each sample to one client, unless clients are meant to overlap.",
        "constant": "Remove them: they carry no information.",
        "constant-at-client": "Check whether this client measures them; if not, remove them or treat them as missing.",
        "large": "Scale each feature to mean 0 and standard deviation 1 on the client's own training data.",
        "units": "Check whether they use the same unit, and scale by the client's own training data.",
        "apart": "Give all in one unit and on one scale, or scale by each client's own training data.",
        "far": "Correct the value, or leave the cell empty if it is a code for a missing value: it moves the mean and "
        "the scale of all others.",
        "target-units": "Check whether all clients use one unit: clients share one scale of targets.",
        "constant-target": "Check whether this client measures it; nothing can be learned from it there.",
        "numbering": "Check whether all clients number classes from the same one.",
        "swapped-masks": "Look at these clients' masks (`fedshift data show` draws them): if classes are swapped, as "
        "in inverted masks, number them as the others do.",
        "category-names": "Spell them the same way everywhere: different spellings are different features.",
        "unlearned-class": "Add samples of these classes to training data, or remove them from the test data.",
        "untrained-class": "Split each client's samples within each class, unless this is how they arise.",
        "small-test": "Reserve more samples for testing, or read these clients' accuracies together, not one by one.",
    },
    "note": {
        "common-set": "No action is needed if several clients are meant to be measured on one set; it does not count "
        "as a copy.",
        "empty-mask": "No action is needed if there is nothing to segment; otherwise correct the masks.",
        "absent-class": "Give the number of classes if there are fewer (--classes).",
        "missing-class": "No action is needed: clients may have different classes. A personal model learns little "
        "about missing ones.",
        "no-verdict": "Give these sites more test data (--test-fraction), or judge methods by the mean over all sites.",
    },
}
"""Fix of each kind of fault, by its usual severity.

An ``error`` makes training fail or its results misleading, a ``warning`` distorts the results, and a ``note`` is only a
difference between clients.
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault: ``text`` is a sentence on what is wrong and where, and ``fix`` on what to do about it.

    ``kind`` is a key in :data:`FIXES`; ``clients`` are all affected clients; ``samples`` is the number of affected
    samples (0 if the fault does not concern samples); ``examples`` name the places of a few samples, with equal
    samples in one tuple.
    """

    kind: str
    severity: Severity
    text: str
    fix: str
    clients: tuple[str, ...]
    samples: int = 0
    examples: tuple[tuple[str, ...], ...] = ()


def find_fix(kind: str) -> tuple[Severity, str]:
    """Return the usual severity and the fix of a kind of fault."""
    return next((severity, fixes[kind]) for severity, fixes in FIXES.items() if kind in fixes)


def make_finding(
    kind: str, text: str, clients: Iterable[SplitSurvey | str] = (), *, severity: Severity | None = None, **more: Any
) -> Finding:
    """Return a finding with the severity and the fix of its kind; ``clients`` may be splits and contain duplicates."""
    usual, fix = find_fix(kind)
    names = (each if isinstance(each, str) else each.client for each in clients)
    fields = {"fix": fix, "severity": severity or usual, "clients": tuple(dict.fromkeys(names)), **more}
    return Finding(kind=kind, text=text, **fields)


def list_places(
    kind: str, what: str, places: Mapping[Any, str], separator: str = ", ", **more: Any
) -> Iterator[Finding]:
    """Yield a finding that lists these splits or clients with their texts; nothing if there are none."""
    if places:
        yield make_finding(kind, f"{what}: {join_some(places.values(), separator)}.", places, **more)


def list_rows(kind: str, what: str, rows: Mapping[SplitSurvey, Sequence[int] | NDArray[np.int64]]) -> Iterator[Finding]:
    """Yield a finding that counts these rows of each split, the first row as an example; nothing without rows."""
    rows = {part: some for part, some in rows.items() if len(some)}
    examples = tuple((part.locate(int(some[0])),) for part, some in rows.items())
    shares = {part: part.share(len(some)) for part, some in rows.items()}
    yield from list_places(kind, what, shares, samples=sum(map(len, rows.values())), examples=examples[:EXAMPLES])
