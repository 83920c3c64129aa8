"""Values of a metric on single test samples, side by side for all trials, and the variance of a macro difference.

Records are those of the reported round (:mod:`fedshift.results.cases`). A difference of two methods is paired if both
have them for every seed and client that counts; where a site keeps them or a trial has not ended, it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..analysis.sampling import SampleValues, SampleVariance, difference_variance
from ..results.cases import sample_values
from ..results.schema import RunSummary
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
        )


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
                if (found := known[id(records)]) is not None:
                    values[method, seed][index[client]] = found
    owners = [index[str(summary.same_test.get(name, name))] for name in clients]
    return PairedSamples(clients=clients, groups=np.array(owners, np.int64), values=values)
