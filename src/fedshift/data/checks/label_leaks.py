"""Columns of a table that alone determine the target: the outcome itself, a code of it, or numbers of sorted rows.

A column that is known only with the outcome makes every result too good (Kaufman et al. 2012, "Leakage in data mining",
ACM TKDD 6(4)). One that orders the samples of two classes almost without error is at least suspicious: the area under
its ROC curve (Hanley and McNeil 1982, doi:10.1148/radiology.143.1.7063747) hardly reaches 0.99 otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...tasks import Classification, Regression, Survival
from ...utils.words import join_some
from ..columns import feature_slices
from ..federation import Federation
from ..usual_values import LEAST
from .findings import Finding, make_finding
from .number_faults import list_targets

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WRONG = 0.02
"""Share of the samples outside of the most frequent class that a column that determines the class may get wrong."""
MOST_ROWS = 20_000
"""Maximum number of a client's rows to look at, evenly spaced."""
AREA, RANKS = 0.99, 0.999
"""Least area under the ROC curve of two classes, and least rank correlation with a number, of such a column."""


def judge_leaks(data: Federation) -> Iterator[Finding]:
    """Find columns of a table that alone determine the class, or a numeric target, at every client that has several."""
    if not data.columns or data.inputs or not isinstance(data.task, Classification | Regression | Survival):
        return
    classified = isinstance(data.task, Classification)
    told: dict[str, list[Any]] = {column.name: [] for column in data.columns}
    for client in data.clients:
        splits = client.splits.values()
        y = np.concatenate([split.y.cpu().numpy() for split in splits])
        some = slice(None, None, -(-len(y) // MOST_ROWS))
        x = np.concatenate([split.copy_rows(slice(None)).cpu().numpy() for split in splits])[some]
        targets = [] if classified else [(name, each[some]) for name, each in list_targets(data, client)]
        for column, features in feature_slices(data.columns):
            ordered = column.categories is None
            values = x[:, features.start] if ordered else x[:, features].argmax(axis=1)
            if not classified:
                told[column.name].append({name: _correlate(values, each) for name, each in targets if ordered})
            elif (y[some] != y[0]).any():
                told[column.name].append(_tally_classes(values, y[some], ordered=ordered))
    describe = _describe_classes if classified else _describe_ranks
    found = [f"{name!r} ({text})" for name, facts in told.items() if (text := describe(facts))]
    if found:
        yield make_finding("leak", f"Columns that alone all but determine the target: {join_some(found)}.", data.names)


def _describe_classes(clients: Sequence[Floats]) -> str:
    """Return how well a column separates the classes, in words; empty if not almost perfectly."""
    wrong, others, areas = np.sum(clients, axis=0) if clients else np.zeros(3)
    if others < LEAST:
        return ""
    if wrong <= WRONG * others:
        return f"it misses the classes of {wrong:,.0f} samples" if wrong else "it gives the class of each sample"
    area = max(areas / others, 1 - areas / others)
    return f"area under the ROC curve {area:.4f}" if area >= AREA else ""


def _describe_ranks(clients: Sequence[Mapping[str, float]]) -> str:
    """Return a column's rank correlation with numeric targets, if it is almost 1 or -1 at every client."""
    least = {name: min(each[name] for each in clients) for name in clients[0]}
    return ", ".join(f"rank correlation with {name!r} of {r:.4f}" for name, r in least.items() if r >= RANKS)


def _tally_classes(values: Floats, y: Ints, *, ordered: bool) -> Floats:
    """Count samples whose class does not follow from their value, and those outside of the most frequent class.

    The third number is the area under the ROC curve of two classes, times the second number.

    Samples of one value should have one class. With ``ordered`` values, each class should also be an interval; else a
    value that occurs once means nothing.
    """
    _, group = np.unique(values, return_inverse=True)
    classes, label = np.unique(y, return_inverse=True)
    pairs, counts = np.unique(group * len(classes) + label, return_counts=True)
    first = np.flatnonzero(np.diff(pairs // len(classes), prepend=-1))
    most, sizes = np.maximum.reduceat(counts, first), np.add.reduceat(counts, first)
    wrong, others = float((sizes - most).sum()), int(len(y) - np.bincount(label).max())
    if not ordered:
        return np.array([wrong + (sizes == 1).sum(), others, others / 2])
    usual = (pairs % len(classes))[np.lexsort((-counts, pairs // len(classes)))][first]
    wrong += max(0, int(np.count_nonzero(np.diff(usual))) - len(classes) + 1) / 2
    area, count = 0.5, int(label.sum())
    if len(classes) == 2:
        ranks = float(pd.Series(values).rank()[label == 1].sum())
        area = (ranks - count * (count + 1) / 2) / (count * (len(label) - count))
    return np.array([wrong, others, area * others])


def _correlate(values: Floats, y: Floats) -> float:
    """Return the magnitude of the rank correlation; 0 with few different values."""
    varied = len(np.unique(values)) >= LEAST and len(np.unique(y)) >= LEAST
    return abs(float(np.corrcoef(pd.Series(values).rank(), pd.Series(y).rank())[0, 1])) if varied else 0.0
