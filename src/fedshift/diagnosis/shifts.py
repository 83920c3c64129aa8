"""Shifts between sites: how well a classifier predicts the site of held-out patients, compared with chance.

The classifier two-sample test of Lopez-Paz and Oquab 2017 (arXiv:1610.06545): ridge regression on the targets alone
(label skew), or on the features without what targets explain, among rows of similar targets (feature shift). Whole
patients are held out, and permuted between sites within such a stratum; the classifier is trained again each time.
Areas under the ROC curve compare rows of one stratum and fold, so that they are 0.5 on average without a shift.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from ..data.federation import Federation
from ..data.source import Progress
from ..utils.errors import UsageError
from ..utils.random_streams import stream
from .site_features import Floats, Ints, SiteRows, read_rows

MOST_SITES, MOST_IN_PAIRS, MOST_SAMPLES = 20, 10, 6_000
"""Largest number of sites that are tested, of those whose pairs are, and of samples in total; others are not drawn."""
LEVEL, MATTERS, STRONG, UNEQUAL = 0.05, 0.55, 0.71, 2.0
"""Probability of naming a shift where there is none; least area that matters, and of a strong shift; ratio of sizes.

Areas correspond to Cohen's (1988) d of 0.2 and 0.8.
"""
FOLDS, TOGETHER = 5, 100
"""Number of folds, and of permutations in one matrix product."""
SHIFTS, ALL = ("label skew", "feature shift", "quantity skew"), "all"
"""Kinds of shift; value of ``sites`` in the rows for all sites."""


def tell_apart(
    x: Floats, site: Ints, stratum: Ints, rng: np.random.Generator, permutations: int
) -> tuple[int, dict[str, float]]:
    """Test whether rows ``x`` ``[N, D]`` predict their ``site``, from 0, among rows of one ``stratum``.

    Returns:
        The site with the largest area under the ROC curve against the others, and this ``value``, its interval ``low``
        to ``high``, corrected for the number of sites, and ``p`` under permutations; NaN if no stratum has two sites,
        or no rows differ.

    """
    fold = np.empty(len(site), dtype=np.int64)
    fold[np.lexsort((rng.random(len(site)), stratum))] = np.arange(len(site)) % FOLDS
    cells = group_rows(FOLDS * stratum + fold)
    strata = group_rows(stratum)
    x = x - pd.DataFrame(x).groupby(stratum).transform("mean").to_numpy()
    areas = []
    for start in range(0, 1 + permutations, TOGETHER):
        drawn = np.repeat(site[:, None], min(TOGETHER, 1 + permutations - start), axis=1)
        for rows in strata:
            drawn[rows, start == 0 :] = rng.permuted(drawn[rows, start == 0 :], axis=0)
        own = drawn[:, :, None] == np.arange(1 if site.max() == 1 else site.max() + 1)
        areas.append(_compare_ranks(_score(x, own, strata, fold), own, cells))
    area_PC = np.concatenate(areas)
    if np.isnan(area_PC[0]).all() or not x.any():
        return 0, dict.fromkeys(("value", "low", "high", "p"), np.nan)
    strongest, largest = int(np.nanargmax(area_PC[0])), np.nanmax(area_PC[1:], axis=1, initial=0)
    area = float(area_PC[0, strongest])
    low, high = bound_area(area, float(np.nanvar(area_PC[1:, strongest])), LEVEL / area_PC.shape[1])
    p = (1 + np.count_nonzero(largest >= area - 1e-9)) / (1 + permutations)  # Phipson and Smyth 2010: never 0
    return strongest, {"value": area, "low": low, "high": high, "p": float(p)}


def group_rows(keys: Ints) -> list[Ints]:
    """Return the indices of each group of equal keys, in the order of keys."""
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def _score(x: Floats, own_NPC: Any, strata: Sequence[Ints], fold: Ints) -> Floats:
    """Return the scores ``[N, P, C]`` of each row under ridge regression on the codes of the other folds' rows.

    The penalty is the variance of all columns. Codes have mean 0 in a stratum: its sizes tell nothing.
    """
    from sklearn.linear_model import Ridge

    scores, penalty = np.zeros(own_NPC.shape), max(float(x.var(axis=0).sum()), 1e-9)
    for number in np.unique(fold):
        train, test, code_NPC = fold != number, fold == number, own_NPC.astype(np.float64)
        for rows in (each[train[each]] for each in strata if train[each].any()):
            code_NPC[rows] -= code_NPC[rows].mean(axis=0)
        if train.any():
            ridge = Ridge(alpha=penalty, fit_intercept=False).fit(x[train], code_NPC[train].reshape(train.sum(), -1))
            scores[test] = ridge.predict(x[test]).reshape(-1, *own_NPC.shape[1:])
    return scores


def _compare_ranks(scores_NPC: Floats, own_NPC: Any, cells: Sequence[Ints]) -> Floats:
    """Return Mann and Whitney's U per pair of rows in a cell, ``[P, C]``: weighted means over cells; NaN: no pair."""
    from scipy.stats import rankdata

    total, weight = np.zeros(own_NPC.shape[1:]), np.zeros(own_NPC.shape[1:])
    for rows in cells:
        own, count = own_NPC[rows], own_NPC[rows].sum(axis=0)
        ranks = (rankdata(scores_NPC[rows].round(9), axis=0) * own).sum(axis=0)
        total += (ranks - count * (count + 1) / 2) / len(rows)
        weight += count * (len(rows) - count) / len(rows)
    return np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)


def bound_area(area: float, variance: float, level: float = LEVEL) -> tuple[float, float]:
    """Return the interval of an ``area`` whose ``variance`` by chance, around 0.5, the permutations have.

    Hanley and McNeil's variance gives the numbers of rows of two sites that vary as much by chance, and with them the
    interval that solves for the area (Newcombe 2006, Statistics in Medicine 25(4), method 5). It covers the choice of
    training patients, too, unlike an interval for fixed scores.
    """
    from scipy.stats import norm

    size, true = max(1.0, 1 / (6 * variance)) if variance > 0 else 1.0, np.linspace(0, 1, 2001)
    spread = true * (1 - true) * (1 + (size - 1) * ((1 - true) / (2 - true) + true / (1 + true))) / size**2
    inside = true[np.abs(area - true) <= norm.isf(level / 2) * np.sqrt(spread) + 5e-4]
    return float(inside.min()), float(inside.max())


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Shifts between the sites of ``data``.

    ``frame``: a row for each shift of all sites, and of each pair, with columns ``sites``, ``shift``, ``value`` (area
    under the ROC curve of the ``strongest`` site against the others; of quantity skew, the ratio of the largest to the
    smallest number of training samples, which is counted), its interval ``low`` to ``high``, ``p`` (of all sites,
    corrected for two shifts; of pairs, one by one), and ``verdict``: shift, too small, none, cannot tell, or not
    testable. A pair has a shift only where all sites have. ``units``: number of rows, ``patients`` or else samples.
    """

    data: Federation
    frame: pd.DataFrame
    units: int
    patients: bool

    @property
    def named(self) -> tuple[str, ...]:
        """Shifts that the sites have."""
        return tuple(shift for shift in SHIFTS if self.find(shift)["verdict"] == "shift")

    def find(self, shift: str, sites: str = ALL) -> dict[str, Any]:
        """Return the row of ``frame`` for a shift of all sites, or of a pair such as ``north and south``."""
        rows: dict[Any, Any] = self.frame.set_index(["sites", "shift"]).to_dict("index")
        return {"sites": sites, "shift": shift, **rows[sites, shift]}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values; NaN is None."""
        rows = self.frame.astype(object).where(self.frame.notna(), None).to_dict("records")
        return {"federation": self.data.name, "units": self.units, "patients": self.patients, "shifts": rows}


def diagnose(
    data: Federation, *, seed: int = 0, permutations: int = 999, limit: int = 1000, progress: Progress | None = None
) -> Diagnosis:
    """Test the training data of ``data``, of any task, for shifts between sites.

    Args:
        data: Federation with at least two clients.
        seed: Seed of every random draw; the result depends only on the data and the arguments.
        permutations: Permutations in each test, at least 99.
        limit: Maximum number of samples drawn from each client.
        progress: Called with the name of each test before it starts.

    Raises:
        UsageError: There is only one client, an argument is out of range, or
            :meth:`~fedshift.data.federation.Federation.check` refuses the data.

    """
    data.check(allow_single_class=True)
    if len(data.clients) < 2:
        raise UsageError(f"{data.name!r} has only one client, {data.names[0]!r}: a diagnosis compares two or more")
    if permutations < 99 or limit < 1:
        raise UsageError(
            f"permutations={permutations}, limit={limit}: at least 99 are needed, or no p-value can be small, and 1 "
            "sample per client; 999 and 1000 are usual"
        )
    drawn = stream(seed, "diagnose/clients").permutation(len(data.clients))[:MOST_SITES]
    members = [data.clients[number] for number in sorted(drawn)]
    several = range(len(members))
    pairs = list(combinations(several, 2)) if 2 < len(members) <= MOST_IN_PAIRS else []
    rows = read_rows(data, members, seed, min(limit, MOST_SAMPLES // len(members)))
    table: list[dict[str, Any]] = []
    for number, chosen in enumerate([tuple(several), *pairs]):
        sites = [members[site].name for site in chosen]
        if progress is not None:
            progress(f"testing {' and '.join(sites) if number else 'all sites'}", number + 1, 1 + len(pairs))
        own = np.isin(rows.site, chosen)
        place = np.searchsorted(chosen, rows.site[own])
        some = SiteRows(rows.x[own], rows.targets[own], place, rows.stratum[own])
        counts = [len(each.train) for each in (data.clients if not number else [members[site] for site in chosen])]
        named = {row["shift"] for row in table[: len(SHIFTS)] if row["verdict"] == "shift"} if number else None
        table += _test(some, sites, max(counts) / min(counts), seed, permutations, named)
    patients = any(each.train.group is not None for each in members)
    return Diagnosis(data=data, frame=pd.DataFrame(table), units=len(rows.site), patients=patients)


def _test(
    rows: SiteRows, sites: Sequence[str], ratio: float, seed: int, permutations: int, named: Collection[str] | None
) -> Iterator[dict[str, Any]]:
    """Yield a row of the frame for each shift; ``named``: shifts that all sites have; None: ``sites`` are all."""
    label = ALL if named is None else " and ".join(sites)
    for shift, x, stratum in (
        ("label skew", rows.targets, np.zeros_like(rows.stratum)), ("feature shift", rows.x, rows.stratum)
    ):  # fmt: skip
        rng = stream(seed, "diagnose/permutations", shift, label)
        strongest, found = tell_apart(x, rows.site, stratum, rng, permutations)
        if named is None:
            found["p"] = float(np.minimum(1, 2 * found["p"]))
        if np.isnan(found["p"]):
            verdict = "not testable"
        elif found["p"] <= LEVEL and (named is None or shift in named):
            verdict = "shift" if found["value"] >= MATTERS else "too small"
        else:
            verdict = "none" if found["high"] < STRONG else "cannot tell"
        yield {"sites": label, "shift": shift, **found, "strongest": sites[strongest], "verdict": verdict}
    verdict = "shift" if ratio >= UNEQUAL else "none"
    yield {"sites": label, "shift": SHIFTS[2], "value": ratio, "strongest": "", "verdict": verdict}
