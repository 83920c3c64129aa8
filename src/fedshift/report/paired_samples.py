"""Values of a metric on single test samples, side by side for all trials, and the variance of a macro difference.

Records are from the reported round (:mod:`fedshift.results.cases`). A difference of two methods is paired if both have
records for every seed and client that counts; it is not paired if a site keeps its records or a trial has not ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..analysis.sampling import (
    SampleValues,
    SampleVariance,
    class_values,
    difference_variance,
    mean_values,
    ratio_values,
)
from ..results.cases import CONSTANT, Records
from ..results.schema import DISTANCES, RunSummary
from .tables import find_reported_rounds

Trial = tuple[str, int]
"""Method and seed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedSamples:
    """Values of a metric on all clients' test samples.

    ``values``: of each trial, by the index of the client in ``clients``. ``groups``: for each client the first client
    with the same test samples, by index.
    """

    clients: tuple[str, ...]
    groups: NDArray[np.int64]
    values: Mapping[Trial, Mapping[int, SampleValues]]

    def find_variance(
        self, one: str, other: str, both_CS: NDArray[Any], seeds: tuple[int, ...]
    ) -> SampleVariance | None:
        """Return the variance of the macro difference ``one - other`` over test samples; None without records.

        ``both_CS``: whether a client counts with each of ``seeds``.
        """
        used = np.flatnonzero(both_CS.any(axis=0))
        coefficient_CS = both_CS[:, used] / np.maximum(1, both_CS[:, used].sum(axis=0)) / max(1, len(used))
        sums, most = dict[int, NDArray[np.float64]](), dict[int, float]()
        first: dict[int, SampleValues] = {}
        for place, s in enumerate(used):
            ours, theirs = (self.values.get((name, seeds[s]), {}) for name in (one, other))
            for client in np.flatnonzero(both_CS[:, s]).tolist():
                if client not in ours or client not in theirs:
                    return None
                group, weight = int(self.groups[client]), float(coefficient_CS[client, place])
                known = first.setdefault(group, ours[client])
                if not (_match(known, ours[client]) and _match(known, theirs[client])):
                    return None
                gap_N = weight * (ours[client].x - theirs[client].x)
                sums[group] = sums[group] + gap_N if group in sums else gap_N
                most[group] = most.get(group, 0.0) + weight
        if not first:
            return None
        offset = np.cumsum([0, *(len(each.weight) for each in first.values())])
        strata = [each.stratum + start for each, start in zip(first.values(), offset, strict=False)]
        bounds = [np.full(len(each.weight), most[group]) for group, each in first.items()]
        bounded = all(each.bounded for each in first.values())
        return difference_variance(
            np.concatenate([sums[group] for group in first]),
            np.concatenate(strata),
            np.concatenate([each.weight for each in first.values()]),
            np.concatenate(bounds) if bounded else None,
            _number_groups(list(first.values())),
        )


def _number_groups(values: Sequence[SampleValues]) -> NDArray[np.int64] | None:
    """Return the groups of all samples, numbered from 0, of which two test sets share none; None without groups."""
    if all(each.group is None for each in values):
        return None
    own = [np.arange(len(each.x)) if each.group is None else each.group for each in values]
    offset = np.cumsum([0, *(int(each.max(initial=-1)) + 1 for each in own)])
    return np.concatenate([each + start for each, start in zip(own, offset, strict=False)])


def _match(one: SampleValues, other: SampleValues) -> bool:
    """Return whether both are values on the same samples, as far as their classes tell."""
    return one.stratum is other.stratum or np.array_equal(one.stratum, other.stratum)


def collect_samples(summary: RunSummary, metric: str, model: str) -> PairedSamples:
    """Return the values of ``metric`` of ``model`` on each test sample, of the trials that have records."""
    clients = tuple(map(str, summary.clients))
    index = {name: place for place, name in enumerate(clients)}
    values: dict[Trial, dict[int, SampleValues]] = {}
    reported = find_reported_rounds(summary)
    for (method, seed), number in zip(reported.index.tolist(), reported.tolist(), strict=True):
        cases = summary.read_cases(method, seed)
        if cases is None or cases.round != number:
            continue
        known: dict[int, SampleValues | None] = {}
        values[method, seed] = {}
        for (client, of), records in cases.records.items():
            if of == model and client in index:
                if id(records) not in known:
                    known[id(records)] = sample_values(records, metric)
                if (sampled := known[id(records)]) is not None:
                    values[method, seed][index[client]] = sampled
    owners = [index[str(summary.same_test.get(name, name))] for name in clients]
    return PairedSamples(clients=clients, groups=np.array(owners, np.int64), values=values)


def sample_values(records: Records, metric: str) -> SampleValues | None:
    """Return the values of ``metric`` on each sample, or None if the records do not define them."""
    found = _find_values(records, metric)
    if found is None or "group" not in records:
        return found
    return replace(found, group=records["group"].astype(np.int64))


def _find_values(records: Records, metric: str) -> SampleValues | None:
    names = records.keys()
    if metric in names:
        return mean_values(records[metric], bounded=records[metric].dtype == bool)
    if metric == "auc" and "area" in names:
        return _area_values(records)
    if "right" in names and metric == "f1":
        classes_K = np.unique([records["truth"], records["chosen"]])
        given_NK, chosen_NK = (records[name][:, None] == classes_K for name in ("truth", "chosen"))
        return ratio_values(2.0 * (given_NK & chosen_NK), given_NK + chosen_NK.astype(float))
    if "right" in names and metric in ("accuracy", "balanced_accuracy"):
        right_N = records["right"]
        if metric == "accuracy":
            return mean_values(right_N, bounded=True)
        return class_values(right_N, records["truth"], mean=True)
    if "error" in names:
        return _error_values(records["error"].astype(float), records["target"].astype(float), metric)
    if "given" in names and metric == "exact_match":
        return mean_values((records["given"] == records["chosen"]).all(axis=1), bounded=True)
    if "given" in names and metric == "f1":
        given_NK, chosen_NK = records["given"].astype(float), records["chosen"].astype(float)
        return ratio_values(2 * given_NK * chosen_NK, given_NK + chosen_NK)
    if "comparable" in names and metric == "c_index":
        concordant_N1, comparable_N1 = (records[name].astype(float)[:, None] for name in ("concordant", "comparable"))
        # each pair is counted with both of its patients, so that a patient's part in the ratio is twice its share
        return replace(ratio_values(concordant_N1, comparable_N1, 2.0), fewest=int(records["event"].sum()))
    if metric in DISTANCES:
        above, below = DISTANCES[metric]
        return ratio_values(records[above], records[below]) if above in names else None
    if "support" in names:
        hits_NK, support_NK, predicted_NK = (records[name].astype(float) for name in ("hits", "support", "predicted"))
        return _pixel_values(hits_NK, support_NK, predicted_NK, metric)
    return None


def _area_values(records: Records) -> SampleValues | None:
    area_N = records["area"].astype(float)
    if np.isnan(area_N).any():
        return None
    if "truth" not in records:
        return mean_values(len(area_N) * area_N)
    classes, place_N, count_K = np.unique(records["truth"], return_inverse=True, return_counts=True)
    return class_values(count_K[place_N] * area_N, classes[place_N], mean=False)


def _error_values(error_NT: NDArray[np.float64], target_NT: NDArray[np.float64], metric: str) -> SampleValues | None:
    square_NT = np.square(error_NT)
    if metric == "mae":
        return mean_values(np.abs(error_NT).mean(axis=1))
    if metric == "rmse":  # d sqrt(m) = dm / (2 sqrt(m))
        mean_T = square_NT.mean(axis=0)
        root_T = np.sqrt(np.where(mean_T > 0, mean_T, 1))
        return mean_values(((square_NT - mean_T) / (2 * root_T)).mean(axis=1))
    if metric == "r2":
        spread_NT = np.square(target_NT - target_NT.mean(axis=0))
        varies_T = spread_NT.sum(axis=0) > CONSTANT * np.square(target_NT).sum(axis=0)
        return ratio_values(square_NT[:, varies_T], spread_NT[:, varies_T], -1.0)
    return None


def _pixel_values(
    hits_NK: NDArray[np.float64], support_NK: NDArray[np.float64], predicted_NK: NDArray[np.float64], metric: str
) -> SampleValues | None:
    if metric == "accuracy":
        return ratio_values(hits_NK.sum(axis=1, keepdims=True), support_NK.sum(axis=1, keepdims=True))
    if metric == "balanced_accuracy":
        return ratio_values(hits_NK, support_NK)
    first = 1 if hits_NK.shape[1] > 1 else 0  # the background
    both_NK, hits_NK = (support_NK + predicted_NK)[:, first:], hits_NK[:, first:]
    if metric == "dice":
        return ratio_values(2 * hits_NK, both_NK)
    return ratio_values(hits_NK, both_NK - hits_NK) if metric == "iou" else None
