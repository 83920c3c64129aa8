"""Kinds of shift and their tests: results, the rule for naming a shift, and the tests of labels, sizes and layers.

Kairouz et al. 2021 (arXiv:1912.04977, section 3.1) distinguish label skew (P(y) differs), feature shift (P(x|y)),
concept shift (P(y|x)) and quantity skew. The tests of features and of concepts are in ``feature_shift`` and
``concept_shift``. FedBN (Li et al. 2021, arXiv:2102.07623, section 3) defines feature shift by the statistics that
BatchNorm would keep for each client. Early layers see appearance (brightness, contrast, texture), late layers the
network's own features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = Literal["label skew", "target skew", "feature shift", "quantity skew", "concept shift"]
Strength = Literal["negligible", "weak", "moderate", "strong"]

LEVEL = 0.05
"""Probability of naming any of the shifts when there is none (Holm 1979)."""

SIZES: Mapping[Kind, tuple[float, float, float]] = {
    "label skew": (0.01, 0.1, 0.3),
    "target skew": (0.08, 0.2, 0.31),
    "feature shift": (0.55, 0.64, 0.71),
    "quantity skew": (0.1, 0.25, 0.5),
    "concept shift": (0.05, 0.15, 0.3),
}
"""Thresholds of a weak, moderate and strong effect; a smaller one is never named, however significant it is.

Labels: bits above chance (ten classes divided by a Dirichlet of 5 and of 1 give about 0.1 and 0.35). Numeric targets:
distance of distribution functions above chance; features: AUC; both at Cohen's (1988) small, medium and large d of 0.2,
0.5 and 0.8. Quantity: Gini coefficient. Concepts: probability.
"""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Result of one test: the statistic, its mean under the null, the p-value, and the statistic of each client.

    ``p`` is one-sided, (1 + draws at least as large) / (1 + draws), and so never 0 (Phipson and Smyth 2010). If the
    test is impossible, ``statistic`` and ``p`` are None and ``untestable_because`` gives the reason.
    """

    statistic: float | None = None
    chance: float | None = None
    p: float | None = None
    clients: tuple[float | None, ...] = ()
    untestable_because: str = ""

    @classmethod
    def from_permutations(
        cls, statistic: float, null_P: NDArray[np.floating], clients: Sequence[float | None]
    ) -> Evidence:
        """Return the evidence from ``statistic`` and its values ``[P]`` under permutations."""
        p = permutation_p_value(statistic, null_P)
        return cls(statistic=statistic, chance=float(null_P.mean()), p=p, clients=tuple(clients))


@dataclass(frozen=True, kw_only=True)
class ShiftFinding:
    """Finding for one kind of shift: it is named if the corrected p is at most 0.05 and the effect at least weak."""

    kind: Kind
    evidence: Evidence
    corrected: float | None
    strength: Strength
    named: bool


def assess(evidence: Mapping[Kind, Evidence]) -> tuple[ShiftFinding, ...]:
    """Return the findings in the order of ``evidence``, with p-values corrected for the number of tests."""
    corrected = holm_correction([math.nan if each.p is None else each.p for each in evidence.values()])
    findings = []
    for (kind, each), value in zip(evidence.items(), corrected, strict=True):
        p = None if math.isnan(value) else value
        strength = classify_strength(kind, each)
        named = p is not None and p <= LEVEL and strength != "negligible"
        findings.append(ShiftFinding(kind=kind, evidence=each, corrected=p, strength=strength, named=named))
    return tuple(findings)


def classify_strength(kind: Kind, evidence: Evidence) -> Strength:
    """Classify the size of the effect by the thresholds of :data:`SIZES`."""
    effect = evidence.statistic or 0.0
    if kind in ("label skew", "target skew"):
        effect -= evidence.chance or 0.0
    words: tuple[Strength, ...] = ("negligible", "weak", "moderate", "strong")
    return words[sum(effect >= bound for bound in SIZES[kind])]


def permutation_p_value(observed: float, null: NDArray[np.floating]) -> float:
    """Return the p-value of ``observed`` among draws ``null`` ``[P]``; differences by rounding count as equality."""
    return float((1 + (null >= observed - 1e-9 * abs(observed)).sum()) / (1 + len(null)))


def label_skew(counts: ArrayLike, rng: np.random.Generator, permutations: int) -> Evidence:
    """Test for label skew with the Jensen-Shannon divergence of label distributions, in bits, weighted by client size.

    ``counts``: samples of each client and class, ``[clients, classes]``. The statistic is the mean divergence of a
    client's shares from the pooled shares, which equals the mutual information of client and label. The null permutes
    labels over clients of fixed size, that is, it draws tables with the same margins.
    """
    from scipy.stats import random_table  # half a second, for which each run would wait

    table_CK = np.asarray(counts, dtype=np.int64)
    table_CK = table_CK[:, table_CK.sum(axis=0) > 0]
    if table_CK.shape[1] < 2:
        return Evidence(untestable_because="all samples have the same label")
    sizes_C = table_CK.sum(axis=1)
    weights_C = sizes_C / sizes_C.sum()
    tables_PCK = random_table(sizes_C, table_CK.sum(axis=0), seed=rng).rvs(permutations)
    own_C = compute_divergence(table_CK[None])[0]
    return Evidence.from_permutations(
        float(own_C @ weights_C), compute_divergence(tables_PCK) @ weights_C, own_C.tolist()
    )


def compute_divergence(tables_PCK: NDArray[np.number]) -> Floats:
    """Return the Kullback-Leibler divergence of each client's shares from the pooled shares, in bits, ``[P, C]``."""
    shares = tables_PCK / tables_PCK.sum(axis=2, keepdims=True)
    pooled = tables_PCK.sum(axis=1, keepdims=True) / tables_PCK.sum(axis=(1, 2), keepdims=True)
    ratio = np.divide(shares, pooled, out=np.ones_like(shares), where=shares > 0)
    divergence: Floats = (shares * np.log2(ratio)).sum(axis=2)
    return divergence


def gini(sizes: ArrayLike) -> Floats:
    """Return the Gini coefficient over the last axis: mean difference of two sizes over twice the mean size."""
    ordered = np.sort(np.asarray(sizes, dtype=np.float64), axis=-1)
    count = ordered.shape[-1]
    coefficient: Floats = ordered @ (2.0 * np.arange(1, count + 1) - count - 1) / (count * ordered.sum(axis=-1))
    return coefficient


def quantity_skew(sizes: Sequence[int], rng: np.random.Generator, permutations: int) -> Evidence:
    """Test for quantity skew with the Gini coefficient of the clients' sizes.

    The null assigns every sample to a random client. ``Evidence.clients`` are the sizes divided by the mean size.
    """
    null_P = gini(rng.multinomial(sum(sizes), np.full(len(sizes), 1 / len(sizes)), size=permutations))
    return Evidence.from_permutations(float(gini(sizes)), null_P, [size * len(sizes) / sum(sizes) for size in sizes])


TOGETHER = 64
"""Number of permutations in one matrix product."""
_EPSILON = 1e-5  # what BatchNorm adds to a variance


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Mean and mean square of the input of one layer, by sample and channel, ``[N, channels]``."""

    layer: str
    mean: NDArray[np.floating]
    square: NDArray[np.floating]


def layer_shift(
    moments: Moments, strata: Ints, client: Ints, clients: int, rng: np.random.Generator, permutations: int
) -> Evidence:
    """Measure the symmetric Kullback-Leibler divergence between a client's Gaussian and the pooled one, in nats.

    The symmetric divergence is the mean of both directions; the statistic is its mean over channels and clients. The
    null permutes clients within strata, so ``chance`` includes the effect of label skew.
    """
    both_ND = np.concatenate([moments.mean, moments.square], axis=1).astype(np.float64)
    pooled_D = both_ND.mean(axis=0)
    groups = group_rows(strata)
    size_C = np.maximum(np.bincount(client, minlength=clients), 1)

    def divergence(codes_PN: Ints) -> Floats:
        """Return the divergence of each client under each assignment of clients, ``[P, C]``."""
        members = np.equal(codes_PN[:, None, :], np.arange(clients)[None, :, None]).reshape(-1, both_ND.shape[0])
        means = (members @ both_ND).reshape(len(codes_PN), clients, -1) / size_C[None, :, None]
        over_channels: Floats = _jeffreys(means, pooled_D).mean(axis=2)
        return over_channels

    own_C = divergence(client[None])[0]
    null = []
    for start in range(0, permutations, TOGETHER):
        drawn = np.tile(client, (min(TOGETHER, permutations - start), 1))
        for rows in groups:
            drawn[:, rows] = rng.permuted(drawn[:, rows], axis=1)
        null.append(divergence(drawn).mean(axis=1))
    return Evidence.from_permutations(float(own_C.mean()), np.concatenate(null), own_C.tolist())


def group_rows(keys: Ints) -> list[Ints]:
    """Return the indices of each group of equal keys, in the order of keys."""
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def _jeffreys(moments: Floats, pooled: Floats) -> Floats:
    """Return the mean of KL(a|b) and KL(b|a) of Gaussians; the last axis holds the means, then the mean squares."""
    (m, q), (m0, q0) = np.split(moments, 2, axis=-1), np.split(pooled, 2, axis=-1)
    v, v0 = (np.maximum(square - mean**2, 0) + _EPSILON for mean, square in ((m, q), (m0, q0)))
    result: Floats = (v / v0 + v0 / v + (m - m0) ** 2 * (1 / v + 1 / v0) - 2) / 4
    return result


def holm_correction(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, so that the chance of any false one below a level is that level."""
    tested = sorted((value, index) for index, value in enumerate(values) if not math.isnan(value))
    corrected, least = [math.nan] * len(values), 0.0
    for rank, (value, index) in enumerate(tested):
        corrected[index] = least = max(least, min(1.0, (len(tested) - rank) * value))
    return corrected
