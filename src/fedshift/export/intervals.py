"""Intervals of a model's metrics, for as many other patients (where none are known: samples) of the same source.

:func:`~fedshift.analysis.clinical.share_interval` gives the interval of a share of samples. Other metrics have the
jackknife's variance (:mod:`fedshift.analysis.influence`) and Student's quantile for as many patients as would count
equally (Kish 1965, "Survey Sampling"). Between 0 and 1, they have Wilson's interval for that variance
(:func:`~fedshift.analysis.clinical.limit_share`); errors have Student's interval of their logarithm, and R2 that of 1 -
R2. In simulations with 10 to 20 patients, 94 % of intervals or more contain accuracy, F1 and Dice, and 90 to 95 % the
root mean squared error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ..analysis.clinical import count_equal, limit_share, share_interval
from ..analysis.influence import find_influence, vary
from ..results.cases import Records
from ..results.schema import METRICS, TOP_K, Row, compute_metric, is_share, rows_to_frame

LEVEL = 0.95
Interval = tuple[float, float]


def add_intervals(
    rows: Sequence[Row], metrics: Sequence[str], found: Mapping[tuple[str, str, str], Records]
) -> Iterator[Row]:
    """Yield ``rows`` with ``intervals`` by metric and the number of ``patients``, where single samples are known.

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
    if influence is None or math.isnan(variance := vary(influence)):
        return None
    patients = count_equal(sizes.astype(float))
    freedom = max(1.0, patients - 1)
    if is_share(metric):
        share_G = np.clip(value + influence, 0, 1)
        rare = count_equal(share_G if value < 0.5 else 1 - share_G)
        limits = limit_share(value, variance, freedom, patients, rare, level)
        return limits["low"], limits["high"]
    distance = 1 - value if metric == "r2" else value
    if not distance > 0:
        return None
    half = float(stdtrit(freedom, (1 + level) / 2)) * math.sqrt(variance) / distance
    low, high = distance * math.exp(-half), distance * math.exp(half)
    return (1 - high, 1 - low) if metric == "r2" else (low, high)


def _list_hits(records: Records, metric: str) -> Any:
    """Return which samples count for a metric that is a share of them; None for another metric."""
    if metric == "exact_match" and "given" in records:
        return (records["given"] == records["chosen"]).all(axis=1)
    name = "right" if metric == "accuracy" else metric
    return records[name].astype(bool) if name in records and (name == "right" or metric.startswith(TOP_K)) else None
