"""What the check has to say: one finding for each kind of fault, which names the clients and the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .survey import SplitSurvey

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

EXAMPLES = 3
"""Places that a finding shows."""


@dataclass(frozen=True, kw_only=True)
class SampleLocation:
    """Where a sample stands, ``row`` counted from 0, and its label."""

    client: str
    split: str
    row: int
    label: int


@dataclass(frozen=True, kw_only=True)
class QualityFinding:
    """One fault: ``text`` says in a sentence what and where, ``fix`` what to do.

    ``severity``: with an ``error``, training fails or its numbers mislead; a ``warning`` skews them; a ``note`` is how
    clients differ. ``kind`` is the fault's name for programs; ``clients`` are all whom it concerns; ``samples`` is how
    many samples (0 where it is not about samples); ``examples`` are a few places, those of equal samples together.
    """

    kind: str
    severity: Severity
    text: str
    fix: str
    clients: tuple[str, ...]
    samples: int = 0
    examples: tuple[tuple[SampleLocation, ...], ...] = ()


def locate_sample(part: SplitSurvey, row: int) -> SampleLocation:
    """Where row ``row`` of ``part`` stands."""
    return SampleLocation(client=part.client, split=part.split, row=row, label=int(part.labels[row]))


def summarize_rows(
    rows: Mapping[SplitSurvey, Sequence[int] | NDArray[np.int64]], what: str, **fields: Any
) -> QualityFinding:
    """The finding that ``what`` holds for these rows of these parts, the first of each an example."""
    return QualityFinding(
        text=f"{what}: {join_some(part.share(len(some)) for part, some in rows.items())}.",
        clients=list_clients(rows),
        samples=sum(map(len, rows.values())),
        examples=tuple((locate_sample(part, int(some[0])),) for part, some in rows.items())[:EXAMPLES],
        **fields,
    )


def list_clients(parts: Iterable[SplitSurvey]) -> tuple[str, ...]:
    """Their clients, each once."""
    return tuple(dict.fromkeys(part.client for part in parts))


def join_some(items: Iterable[str], separator: str = ", ", shown: int = 5) -> str:
    """``a, b, c and 2 more``."""
    items = list(items)
    return separator.join(items[:shown]) + (f" and {len(items) - shown:,} more" if len(items) > shown else "")


def format_numbers(chosen_F: NDArray[np.bool_], noun: str) -> str:
    """``columns 3, 7 (2 of 60)``."""
    which = join_some(map(str, np.flatnonzero(chosen_F)))
    return f"{noun} {which} ({int(chosen_F.sum()):,} of {len(chosen_F):,})"
