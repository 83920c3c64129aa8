"""Intervals of a model's metrics, for as many other patients (where none are known: samples) of the same source.

Shares of samples have those of :func:`~fedshift.analysis.clinical.share_interval`. Other metrics have the variance of
the jackknife (:mod:`fedshift.analysis.influence`) and Student's quantile of as many patients as would count equally
(Kish 1965, "Survey Sampling"), on a scale without bounds: logits between 0 and 1, else the logarithm of a positive
number (R2: of 1 - R2). At 0 and 1 the interval is that of as many patients without, or with, a share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import expit, logit, stdtrit

from ..analysis.clinical import share_interval
from ..analysis.influence import find_influence, vary
from ..results.cases import Records
from ..results.schema import METRICS, TOP_K, Row, compute_metric, is_share, rows_to_frame

LEVEL = 0.95
Interval = tuple[float, float]


def add_intervals(
    rows: Sequence[Row], metrics: Sequence[str], found: Mapping[tuple[str, str, str], Records]
) -> Iterator[Row]:
    """Yield ``rows`` with their ``intervals`` by metric and their number of ``patients``, as far as these are known.

    Args:
        rows: Measurements.
        metrics: Metrics to give intervals.
        found: Records of single samples by split, client and model.

    """
    for row in rows:
        records = found.get((row["split"], row["client"], row["model"]))
        if records is None:
            yield row
            continue
        frame, known = rows_to_frame([row]), dict[str, Interval]()
        for metric in metrics:
            interval = find_interval(records, metric, float(compute_metric(frame, metric).iloc[0]))
            known |= {} if interval is None else {metric: interval}
        patients = {"patients": len(np.unique(records["group"]))} if "group" in records else {}
        yield {**row, **patients, "intervals": known}


def find_interval(records: Records, metric: str, value: float, level: float = LEVEL) -> Interval | None:
    """Return the interval of ``metric`` with this ``value``; None if it has none.

    That is so for a user's metric, whose bounds are not known, for a single patient, and where the jackknife is not
    defined.
    """
    samples, group_N = len(next(iter(records.values()))), records.get("group")
    sizes = np.unique(np.arange(samples) if group_N is None else group_N, return_counts=True)[1]
    if len(sizes) < 2 or math.isnan(value) or not (metric in METRICS or is_share(metric)):
        return None
    hit_N = _list_hits(records, metric)
    if hit_N is not None:
        return share_interval(hit_N, group_N, level)
    influence = find_influence(records, metric)
    variance = math.nan if influence is None else vary(influence)
    if math.isnan(variance):
        return None
    if is_share(metric) and not 0 < value < 1:
        return share_interval(np.full(len(sizes), value == 1), None, level)
    half = float(stdtrit(max(1.0, samples**2 / np.square(sizes).sum() - 1), (1 + level) / 2)) * math.sqrt(variance)
    return _transform(metric, value, half)


def _list_hits(records: Records, metric: str) -> Any:
    """Return which samples count for a metric that is a share of them; None for another metric."""
    if metric == "exact_match" and "given" in records:
        return (records["given"] == records["chosen"]).all(axis=1)
    name = "right" if metric == "accuracy" else metric
    return records[name].astype(bool) if name in records and (name == "right" or metric.startswith(TOP_K)) else None


def _transform(metric: str, value: float, half: float) -> Interval | None:
    """Return ``value`` plus and minus ``half`` on the metric's scale without bounds."""
    if is_share(metric):
        low, high = (float(expit(logit(value) + side * half / (value * (1 - value)))) for side in (-1, 1))
        return low, high
    distance = 1 - value if metric == "r2" else value
    if not distance > 0:
        return None
    low, high = (distance * math.exp(side * half / distance) for side in (-1, 1))
    return (1 - high, 1 - low) if metric == "r2" else (low, high)
