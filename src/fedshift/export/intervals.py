"""Intervals of a model's metrics, for other patients (where none are known: samples) of the same source, as many.

The variance is that of the jackknife (:mod:`fedshift.analysis.influence`), with Student's quantile of as many patients
as would count equally (Kish 1965, "Survey Sampling": the squared sum of their sizes over the sum of squares).

- A share p has Wilson's interval (1927, J. Am. Stat. Assoc. 22(158)) of p (1 - p) / variance independent samples, and
  of as many as there are patients at 0 and 1. The variance over patients is that over independent samples times 1 +
  (m - 1) r, with m samples of a patient and their correlation r (Donner and Klar 2000). Where few patients have errors,
  r is not known well: it counts as if :data:`ADDED` more had them, as Agresti and Coull 1998 (The American Statistician
  52(2)) add two errors.
- A positive number, such as an error, has Student's interval of its logarithm; R2, of that of 1 - R2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ..analysis.influence import find_influence, vary
from ..results.cases import Records
from ..results.schema import METRICS, TOP_K, Row, compute_metric, is_share, rows_to_frame

LEVEL = 0.95
ADDED = 2.0
FREE = 1e9
"""Degrees of freedom of a variance without uncertainty."""


def add_intervals(
    rows: Sequence[Row], metrics: Sequence[str], found: Mapping[tuple[str, str, str], Records]
) -> Iterator[Row]:
    """Yield ``rows`` with their ``intervals`` by metric and the number of ``patients``, as far as ``found`` shows them.

    ``found``: records of single samples, by split, client and model. Other rows are unchanged.
    """
    for row in rows:
        records = found.get((row["split"], row["client"], row["model"]))
        if records is None:
            yield row
            continue
        frame, facts = rows_to_frame([row]), dict[str, Any]()
        values = {metric: float(compute_metric(frame, metric).iloc[0]) for metric in metrics}
        intervals = {metric: find_interval(records, metric, value) for metric, value in values.items()}
        if "group" in records:
            facts["patients"] = len(np.unique(records["group"]))
        yield {**row, **facts, "intervals": {metric: each for metric, each in intervals.items() if each}}


def find_interval(records: Records, metric: str, value: float, level: float = LEVEL) -> tuple[float, float] | None:
    """Return the interval of ``metric`` with this ``value``; None if it has none.

    That is so for a user's metric, whose bounds are not known, and where the jackknife is not defined, as with samples
    of one patient.
    """
    samples = len(next(iter(records.values())))
    sizes = np.unique(records.get("group", np.arange(samples)), return_counts=True)[1]
    if len(sizes) < 2 or math.isnan(value) or not (metric in METRICS or is_share(metric)):
        return None
    units = float(samples**2 / np.square(sizes).sum())
    alone = {name: x for name, x in records.items() if name != "group"}
    influences = [find_influence(each, metric) for each in (records, alone)]
    variance, independent = (math.nan if each is None else vary(each) for each in influences)
    if math.isnan(variance + independent):
        return None
    counted = metric in ("accuracy", "exact_match") or metric.startswith(TOP_K)
    freedom = math.inf if counted and units == samples else units - 1
    quantile = float(stdtrit(min(freedom, FREE), (1 + level) / 2))
    if is_share(metric):
        binomial = value * (1 - value) / samples if counted else independent
        return _find_wilson(value, _count_independent(value, variance, binomial, samples, units), quantile)
    distance, half = (1 - value if metric == "r2" else value), quantile * math.sqrt(variance)
    if not distance > 0:
        return None
    low, high = (distance * math.exp(side * half / distance) for side in (-1, 1))
    return (1 - high, 1 - low) if metric == "r2" else (low, high)


def _count_independent(value: float, variance: float, independent: float, samples: int, units: float) -> float:
    """Return how many independent samples would leave a share as uncertain as these of so many equal ``units``."""
    if not 0 < value < 1 or not variance > 0:
        return units
    alone = value * (1 - value) / independent
    if units == samples:
        return alone
    more = samples / units - 1
    correlation = min(1.0, max(0.0, (variance / independent - 1) / more))
    correlation = min(1.0, correlation * (1 + ADDED / (units * min(value, 1 - value))))
    return alone / (1 + more * correlation)


def _find_wilson(share: float, samples: float, quantile: float) -> tuple[float, float]:
    spread = quantile**2 / samples
    middle, half = share + spread / 2, math.sqrt(spread * (share * (1 - share) + spread / 4))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))
