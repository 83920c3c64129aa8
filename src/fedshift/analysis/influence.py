"""Influence of each test unit (patient, else sample) on a metric, by leaving it out: the jackknife.

Metrics are functions of counts that add up over samples (:mod:`fedshift.results.schema`), so that the metric without a
unit is that of the counts without it. The variance over test sets of a metric, or of a difference of two metrics on the
same units, is the variance of the influences divided by their number (Tukey 1958, "Bias and confidence in not-quite
large samples", Annals of Mathematical Statistics 29). For areas under ROC curves, the influences are the placements of
DeLong, DeLong and Clarke-Pearson 1988 (Biometrics 44(3)). A unit is a group where groups are known, so that images of
one patient count together (Obuchowski 1997, Biometrics 53(2)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..results.cases import compare_masks
from ..results.schema import METRIC_COUNTS, TOP_K, measure_counts

Floats = NDArray[np.float64]
Records = Mapping[str, NDArray[np.generic]]
FEWEST_OF_CLASS = 5
"""Fewest samples of the rarest class, or events, of a client whose ranks have an interval."""


def find_influence(records: Records, metric: str) -> Floats | None:
    """Return (G - 1) (metric - metric without the unit) of each of G units, ``[G]``; None if records do not define it.

    NaN where the metric is not defined without a unit, or is one of ranks with fewer than :data:`FEWEST_OF_CLASS`
    samples of a class.
    """
    samples = len(next(iter(records.values())))
    unit_N = np.unique(records["group"], return_inverse=True)[1] if "group" in records else np.arange(samples)
    units = int(unit_N.max(initial=-1)) + 1

    def add(value_N: NDArray[np.generic]) -> Floats:
        value_NK = np.asarray(value_N, np.float64).reshape(samples, -1)
        return np.stack([np.bincount(unit_N, column, minlength=units) for column in value_NK.T], axis=1)

    if units < 2 or _lacks_samples(records, metric):
        return np.full(units, math.nan)
    if (value_N := _find_values(records, metric)) is not None:  # the metric is their mean
        total_G, size_G = add(value_N)[:, 0], add(np.ones(samples))[:, 0]
        return np.asarray((units - 1) * (total_G.sum() / samples - (total_G.sum() - total_G) / (samples - size_G)))
    if metric == "auc" and "area" in records:
        return np.asarray(math.sqrt(units * (units - 1)) * add(_correct_areas(records))[:, 0])
    counts = _count_each(records)
    if not {*METRIC_COUNTS.get(metric, ("none",))} <= counts.keys():
        return None
    size_G1, counted = add(np.ones(samples)), {name: add(counts[name]) for name in METRIC_COUNTS[metric]}
    pairs = 2.0 if metric == "c_index" else 1.0  # a pair is counted with both of its patients
    total = {name: count_GK.sum(axis=0) / pairs for name, count_GK in counted.items()}
    whole = measure_counts(metric, {name: total_K[None] for name, total_K in total.items()}, np.full((1, 1), samples))
    others = {name: total[name] - count_GK for name, count_GK in counted.items()}
    return np.asarray((units - 1) * (whole - measure_counts(metric, others, samples - size_G1)))


def _lacks_samples(records: Records, metric: str) -> bool:
    """Return whether a metric of ranks, or a mean over classes, has too few samples of a class or events."""
    if metric == "c_index" and "event" in records:
        return int(records["event"].sum()) < FEWEST_OF_CLASS
    if metric not in ("auc", "balanced_accuracy") or "truth" not in records:
        return False
    return min(np.unique(records["truth"], return_counts=True)[1], default=0) < FEWEST_OF_CLASS


def _correct_areas(records: Records) -> Floats:
    """Return the deviation of the area that each sample causes, as recorded, with DeLong's n - 1 for n of its class."""
    area_N = np.asarray(records["area"], float)
    if "truth" not in records:
        return area_N
    _, place_N, count_K = np.unique(records["truth"], return_inverse=True, return_counts=True)
    return np.asarray(area_N * np.sqrt(count_K / (count_K - 1.0))[place_N])


def _find_values(records: Records, metric: str) -> NDArray[np.generic] | None:
    """Return the value of each sample of which ``metric`` is the mean, if it is one."""
    if metric == "exact_match" and "given" in records:
        return np.asarray((records["given"] == records["chosen"]).all(axis=1))
    return records.get("right" if metric == "accuracy" else metric)


def _count_each(records: Records) -> dict[str, NDArray[np.generic]]:
    """Return the counts of each sample, ``[N, K]``, as in :mod:`fedshift.results.schema`."""
    if "support" in records:  # masks
        return {**records, **compare_masks(records)}
    if "comparable" in records:  # survival
        return dict(records)
    if "error" in records:
        error, target = (np.asarray(records[name], np.float64) for name in ("error", "target"))
        target = target - target.mean(axis=0)
        return {"squared": error**2, "absolute": np.abs(error), "total": target, "square": target**2}
    if "given" in records:  # several labels
        given, chosen = (np.asarray(records[name], bool) for name in ("given", "chosen"))
        return {"hits": given & chosen, "support": given, "predicted": chosen}
    if "right" not in records:
        return {}
    truth, chosen = records["truth"], records.get("chosen", records["truth"])
    classes = np.setdiff1d([truth, chosen], [-1])  # none is chosen where the output is not a number
    support = truth[:, None] == classes
    hits, predicted = support & records["right"][:, None].astype(bool), chosen[:, None] == classes
    return {"hits": hits, "support": support, "predicted": predicted}


def find_bound(metric: str) -> float:
    """Return the largest influence of a unit on a share of samples, for :func:`vary`; 0 for other metrics."""
    return float(metric in ("accuracy", "balanced_accuracy", "exact_match") or metric.startswith(TOP_K))


def vary(influence_G: Floats, mean: float = 0.0, bound: float = 0.0) -> float:
    """Return the variance over test sets of a difference with these influences; NaN for a single unit.

    ``bound``: for shares, the largest influence of a unit. Half a unit more in each of McNemar's four cells then keeps
    an error where few units differ (Agresti and Min 2005, Statistics in Medicine 24(5)), around the difference
    ``mean``.
    """
    units = len(influence_G)
    if units < 2 or not np.isfinite(influence_G).all():
        return math.nan
    spread = float(np.square(influence_G - influence_G.mean()).sum())
    if not bound:
        return spread / (units * (units - 1))
    square, total = spread + units * mean**2 + bound**2, units * mean
    return (square - total**2 / (units + 2)) / (units + 2) ** 2
