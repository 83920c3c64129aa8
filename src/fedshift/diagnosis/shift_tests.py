"""Which shift a federation has: what a test returns, how labels and sizes are tested, and when a shift is named.

Kairouz et al. 2021 (arXiv:1912.04977, section 3.1) tell label skew (P(y) differs), feature shift (P(x|y)), concept
shift (P(y|x)) and quantity skew apart. The tests of features and concepts have files of their own beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from ..analysis.statistics import holm_correction

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = Literal["label skew", "feature shift", "quantity skew", "concept shift"]
Strength = Literal["negligible", "weak", "moderate", "strong"]

LEVEL = 0.05
"""Chance of naming any shift where there is none, over all four together (Holm 1979)."""

SIZES: Mapping[Kind, tuple[float, float, float]] = {
    "label skew": (0.01, 0.1, 0.3),
    "feature shift": (0.55, 0.64, 0.71),
    "quantity skew": (0.1, 0.25, 0.5),
    "concept shift": (0.05, 0.15, 0.3),
}
"""From where on an effect is weak, moderate and strong; a smaller one is never named, however many samples prove it.

Bits above chance for labels (ten classes shared out by a Dirichlet of 5 and of 1 give about 0.1 and 0.35); AUC for
features, at Cohen's (1988) small, medium and large d of 0.2, 0.5 and 0.8; Gini; probability for concepts.
"""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One test: the statistic, its mean under the null, the p-value, and the statistic of each client.

    ``p`` is one-sided, (1 + draws at least as large) / (1 + draws), and so never 0 (Phipson and Smyth 2010). Where
    nothing can be tested ``statistic`` and ``p`` are None and ``untestable_because`` says the reason.
    """

    statistic: float | None = None
    chance: float | None = None
    p: float | None = None
    clients: tuple[float | None, ...] = ()
    untestable_because: str = ""


@dataclass(frozen=True, kw_only=True)
class ShiftFinding:
    """What was found of one kind of shift: named if its corrected p is at most 0.05 and its effect at least weak."""

    kind: Kind
    evidence: Evidence
    corrected: float | None
    strength: Strength
    named: bool


def assess(evidence: Mapping[Kind, Evidence]) -> tuple[ShiftFinding, ...]:
    """Findings in the order of ``evidence``, p-values corrected for the number of tests."""
    corrected = holm_correction([math.nan if each.p is None else each.p for each in evidence.values()])
    found = []
    for (kind, each), value in zip(evidence.items(), corrected, strict=True):
        p = None if math.isnan(value) else value
        strength = classify_strength(kind, each)
        named = p is not None and p <= LEVEL and strength != "negligible"
        found.append(ShiftFinding(kind=kind, evidence=each, corrected=p, strength=strength, named=named))
    return tuple(found)


def classify_strength(kind: Kind, evidence: Evidence) -> Strength:
    """The effect in a word; see :data:`SIZES`."""
    effect = evidence.statistic or 0.0
    if kind == "label skew":
        effect -= evidence.chance or 0.0
    words: tuple[Strength, ...] = ("negligible", "weak", "moderate", "strong")
    return words[sum(effect >= bound for bound in SIZES[kind])]


def permutation_p_value(observed: float, null: NDArray[np.floating]) -> float:
    """The p-value of ``observed`` among draws ``null`` ``[P]``; sums that differ by rounding count as equal."""
    return float((1 + (null >= observed - 1e-9 * abs(observed)).sum()) / (1 + len(null)))


def label_skew(counts: ArrayLike, rng: np.random.Generator, permutations: int) -> Evidence:
    """Jensen-Shannon divergence of the clients' label distributions, in bits, clients weighted by size.

    ``counts``: samples of each client and class, ``[clients, classes]``. It is the mean divergence of a client's shares
    from the pooled shares, and the mutual information of client and label. The null permutes labels over clients with
    all sizes kept, that is, draws tables of the same margins.
    """
    table_CK = np.asarray(counts, dtype=np.int64)
    table_CK = table_CK[:, table_CK.sum(axis=0) > 0]
    if table_CK.shape[1] < 2:
        return Evidence(untestable_because="all samples have the same label")
    sizes_C = table_CK.sum(axis=1)
    weights_C = sizes_C / sizes_C.sum()
    tables_PCK = stats.random_table(sizes_C, table_CK.sum(axis=0), seed=rng).rvs(permutations)
    own_C = _divergence(table_CK[None])[0]
    null_P = _divergence(tables_PCK) @ weights_C
    statistic = float(own_C @ weights_C)
    return Evidence(
        statistic=statistic,
        chance=float(null_P.mean()),
        p=permutation_p_value(statistic, null_P),
        clients=tuple(own_C.tolist()),
    )


def _divergence(tables_PCK: NDArray[np.number]) -> Floats:
    """Kullback-Leibler divergence of each client's class shares from the pooled shares, in bits, ``[P, C]``."""
    shares = tables_PCK / tables_PCK.sum(axis=2, keepdims=True)
    pooled = tables_PCK.sum(axis=1, keepdims=True) / tables_PCK.sum(axis=(1, 2), keepdims=True)
    ratio = np.divide(shares, pooled, out=np.ones_like(shares), where=shares > 0)
    divergence: Floats = (shares * np.log2(ratio)).sum(axis=2)
    return divergence


def gini(sizes: ArrayLike) -> Floats:
    """Gini coefficient over the last axis: the mean difference of two clients' sizes over twice the mean size."""
    ordered = np.sort(np.asarray(sizes, dtype=np.float64), axis=-1)
    count = ordered.shape[-1]
    coefficient: Floats = ordered @ (2.0 * np.arange(1, count + 1) - count - 1) / (count * ordered.sum(axis=-1))
    return coefficient


def quantity_skew(sizes: Sequence[int], rng: np.random.Generator, permutations: int) -> Evidence:
    """Gini coefficient of the clients' sizes; the null gives every sample to one of the clients at random.

    ``clients`` are sizes over the mean size.
    """
    observed = float(gini(sizes))
    null_P = gini(rng.multinomial(sum(sizes), np.full(len(sizes), 1 / len(sizes)), size=permutations))
    return Evidence(
        statistic=observed,
        chance=float(null_P.mean()),
        p=permutation_p_value(observed, null_P),
        clients=tuple(size * len(sizes) / sum(sizes) for size in sizes),
    )
