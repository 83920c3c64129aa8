"""Labels: classes that are missing where they are needed, and test data too few to measure by.

The interval of an accuracy is E. B. Wilson's (1927), "Probable inference, the law of succession, and statistical
inference", JASA 22(158): around 50 % of n samples it reaches z / (2 sqrt(n + z^2)) to each side, z = 1.96 for 95 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data.federation import Federation
from .findings import QualityFinding, join_some, list_clients, summarize_rows
from .survey import SplitSurvey

FEW = 30
"""Test samples below which an accuracy is little known."""
_Z = 1.959964

Bools = NDArray[np.bool_]


def judge_labels(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Splits without samples, and labels that are no class."""
    empty = [part for part in surveys if not len(part.labels)]
    if empty:
        yield QualityFinding(
            kind="empty",
            severity="error",
            text=f"No sample: {join_some(part.where for part in empty)}.",
            fix="Give every client samples in each split, or leave the client out.",
            clients=list_clients(empty),
        )
    outside = {part: np.flatnonzero((part.labels < 0) | (part.labels >= data.classes)) for part in surveys}
    outside = {part: rows for part, rows in outside.items() if len(rows)}
    if outside:
        yield summarize_rows(
            outside,
            f"Labels outside 0..{data.classes - 1}",
            kind="label-range",
            severity="error",
            fix="Correct them, or say the number of classes (--classes).",
        )


def judge_classes(data: Federation, surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Classes that are missing everywhere, or at a client."""
    held = {part: part.counts(data.classes) > 0 for part in surveys if len(part.labels)}
    trained = {part.client: has_C for part, has_C in held.items() if part.split == "train"}
    tested = {part: has_C for part, has_C in held.items() if part.split == "test"}
    sets = Counter(part.content for part in tested)
    none_C = np.zeros(data.classes, bool)
    trained_C = np.any([none_C, *trained.values()], axis=0)
    absent_C = ~np.any([none_C, *held.values()], axis=0)
    if absent_C.any():
        yield QualityFinding(
            kind="absent-class",
            severity="note",
            text=f"Nowhere a sample of these classes: {_name_classes(data, absent_C)}.",
            fix="Say the number of classes if there are fewer (--classes).",
            clients=(),
        )
    yield from _summarize_classes(
        data,
        {part.client: has_C & ~trained_C for part, has_C in tested.items()},
        "Test data hold classes on which no client trains",
        kind="unlearned-class",
        severity="warning",
        fix="Bring samples of these classes into training data, or take them out of the test data.",
    )
    yield from _summarize_classes(
        data,
        {
            part.client: has_C & trained_C & ~trained.get(part.client, none_C)
            for part, has_C in tested.items()
            if sets[part.content] == 1
        },
        "A client's own test data hold classes that its training data lack",
        kind="untrained-class",
        severity="warning",
        fix="Divide each client's samples class by class, unless this is how they come.",
    )
    yield from _summarize_classes(
        data,
        {client: has_C for client, has_C in trained.items() if has_C.sum() == 1 < data.classes},
        "Training data hold a single class",
        kind="single-class",
        severity="warning",
        fix="Training refuses such clients: leave them out, or allow them (--allow-single-class).",
    )
    yield from _summarize_classes(
        data,
        {client: trained_C & ~has_C for client, has_C in trained.items()},
        "Training data lack classes that other clients have",
        kind="missing-class",
        severity="note",
        fix="Nothing need be done: classes differ by client. A personal model learns little of what its client lacks.",
    )


def judge_names(data: Federation) -> Iterator[QualityFinding]:
    """Classes whose names differ in blanks and capitals alone."""
    alike: dict[str, list[str]] = {}
    for name in data.class_names:
        alike.setdefault(name.strip().casefold(), []).append(name)
    twice = [" and ".join(map(repr, names)) for names in alike.values() if len(names) > 1]
    if twice:
        yield QualityFinding(
            kind="class-names",
            severity="error",
            text=f"Classes with the same name but for blanks and capitals: {join_some(twice, '; ')}.",
            fix="Write labels alike everywhere: as it is, they are classes apart.",
            clients=(),
        )


def _summarize_classes(
    data: Federation, classes: Mapping[str, Bools], what: str, **fields: Any
) -> Iterator[QualityFinding]:
    """The finding that ``what`` holds for these classes of these clients, if for any."""
    named = {client: _name_classes(data, chosen_C) for client, chosen_C in classes.items() if chosen_C.any()}
    if named:
        several = (f"{client} {which}" for client, which in named.items())
        yield QualityFinding(text=f"{what}: {join_some(several, '; ')}.", clients=tuple(named), **fields)


def judge_test_sizes(surveys: Sequence[SplitSurvey]) -> Iterator[QualityFinding]:
    """Test data so few that an accuracy tells little."""
    small = {part: len(part.labels) for part in surveys if part.split == "test" and 0 < len(part.labels) < FEW}
    if small:
        several = (f"{part.client} {count} (50 % ± {100 * _half_width(count):.0f})" for part, count in small.items())
        yield QualityFinding(
            kind="small-test",
            severity="warning",
            text=f"Fewer than {FEW} test samples, over which an accuracy of 50 % has a 95 % interval as wide as this: "
            f"{join_some(several)}.",
            fix="Hold more samples back for testing, or read these clients' accuracies together, not one by one.",
            clients=list_clients(small),
        )


def _half_width(samples: int) -> float:
    """Half the width of the 95 % interval of an accuracy of one half."""
    return _Z / (2 * math.sqrt(samples + _Z**2))


def _name_classes(data: Federation, chosen_C: Bools) -> str:
    """``cat, dog``; for many classes their number."""
    which = np.flatnonzero(chosen_C)
    if len(which) > 4:
        return f"{len(which)} of {data.classes} classes"
    return ", ".join(data.class_names[number] if data.class_names else str(number) for number in which)
