"""Concept shift: other clients' labels of similar inputs differ.

Every sample is compared with its neighbors: the share of its own client's neighbors that have its label, minus the
share of the other clients' neighbors in the same ball. Both are in the same region, so without concept shift the gap is
0 on average, however few the neighbors. Four effects that are not concept shift are removed first:

* Label skew: other clients' neighbors are weighted to the client's own class shares, pi_c(y) / pi_c'(y) (Saerens et al.
  2002, "Adjusting the Outputs of a Classifier to New a Priori Probabilities", equation 4).
* Feature shift that a local normalization would undo: if there is evidence of feature shift, each client's inputs are
  brought to the pooled mean and total variance, over classes as predicted from inputs, in equal shares.
* Inputs that do not overlap: a client is not judged if a classifier nearly always distinguishes it from the others, or
  if its samples have few samples of others around them, because a difference in labels could then be a difference in
  appearance.
* Appearance that moves samples of one class to the region of another, as a negative does with bright and dark scenes. A
  classifier whose area under the curve is A shows that clients' inputs differ in at most a share 2 A - 1 of samples:
  the curve of the best classifier is concave, so twice the area between it and the diagonal is at least their greatest
  distance, which is the total variation. If all of these samples lay among other labels, the others' agreement would
  fall by that share of the client's agreement with itself. Only the part of the gap beyond that counts. Matching
  neighbors by propensity cannot replace this: inverted photographs that a classifier takes for upright ones disagree
  with their neighbors just as much.

The null redraws every label from the labels of its neighbors at all clients, weighted as above: a local bootstrap
(Paparoditis and Politis 2000).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .shift_tests import Evidence, Floats, Ints

if TYPE_CHECKING:
    from scipy import sparse

SEPARABLE = 0.9
"""A client whose AUC against the others is at least this counts as not overlapping with them."""

NEIGHBORS = 10
"""Neighbors from the sample's own client that define the ball; at least half as many others are expected in it."""

FEWEST, SHARE, STRATUM = 20, 0.1, 8
"""Minimum number, and share, of a client's samples with others around them; minimum samples of a class to align by."""

_DENSITY = 0.25  # minimum number of others in the ball, as a multiple of that expected for clients with equal inputs
_TOGETHER = 512  # rows of the distance matrix computed at a time


def predict_by_neighbors(x: Floats, y: Ints, neighbors: int = 15) -> Ints:
    """Predict the class of each sample, ``[N]``, by a vote of the ``neighbors`` nearest other samples of any client."""
    votes = np.zeros((len(x), int(y.max()) + 1), dtype=int)
    for rows, distance in _distances(x, np.arange(len(x))):
        nearest = np.argpartition(distance, min(neighbors, len(x) - 1) - 1, axis=1)[:, :neighbors]
        np.add.at(votes, (rows[:, None], y[nearest]), 1)
    winners: Ints = votes.argmax(axis=1)
    return winners


def concept_shift(
    x: Floats,
    y: Ints,
    strata: Ints,
    client: Ints,
    separation: Sequence[float | None],
    align: bool,
    rng: np.random.Generator,
    permutations: int,
) -> Evidence:
    """Test whether labels ``y`` ``[N]`` of similar inputs ``x`` ``[N, D]`` differ by client (``client`` ``[N]``).

    ``strata``: classes from :func:`predict_by_neighbors`; ``separation``: AUC of each client's inputs against the
    others' within these; ``align``: whether to remove a feature shift that a local normalization would undo. The
    statistic is the largest gap of a client beyond what its inputs explain, in probability; clients that cannot be
    judged have None.
    """
    clients = len(separation)
    alike = [
        c for c, auc in enumerate(separation)
        if auc is not None and auc < SEPARABLE and (client == c).sum() >= FEWEST
    ]  # fmt: skip
    nobody = Evidence(clients=(None,) * clients, untestable_because="no two clients have inputs that overlap enough")
    if len(alike) < 2:
        return nobody
    kept = np.isin(client, alike)
    x, y, strata, client = x[kept], y[kept], strata[kept], client[kept]
    prior_CK = np.full((clients, int(y.max()) + 1), 0.5)
    np.add.at(prior_CK, (client, y), 1)
    prior_CK /= prior_CK.sum(axis=1, keepdims=True)
    own, others, expected = _find_neighborhoods(_align(x, strata, client) if align else x, client)

    def shares(labels: Ints) -> tuple[Floats, Floats]:
        """Count the labels of both kinds of neighbors, others' weighted to the client's class shares, each [N, K]."""
        hot = np.eye(prior_CK.shape[1])[labels]
        return own @ hot, (others @ (hot / prior_CK[client])) * prior_CK[client]

    def gap(labels: Ints, mine: Floats, theirs: Floats) -> Floats:
        """Return the share of the client's neighbors that have a sample's label minus the share of others', [N]."""
        rows = np.arange(len(labels))
        total_mine, total_theirs = (np.maximum(part.sum(axis=1), 1e-9) for part in (mine, theirs))
        difference: Floats = mine[rows, labels] / total_mine - theirs[rows, labels] / total_theirs
        return difference

    mine, theirs = shares(y)
    overlaps = (theirs.sum(axis=1) >= _DENSITY * expected) & (np.diff(others.indptr) >= 3)
    members = [overlaps & (client == c) for c in alike]
    judged = [
        (c, rows) for c, rows in zip(alike, members, strict=True)
        if rows.sum() >= max(FEWEST, SHARE * (client == c).sum())
    ]  # fmt: skip
    if not judged:
        return nobody
    observed = gap(y, mine, theirs)
    agreement = mine[np.arange(len(y)), y] / np.maximum(mine.sum(axis=1), 1e-9)
    gaps = {
        c: float(observed[rows].mean() - bound_variation(separation[c]) * agreement[rows].mean()) for c, rows in judged
    }  # fmt: skip
    mixed = np.cumsum(mine + theirs * overlaps[:, None], axis=1)
    null = np.empty(permutations)
    for draw in range(permutations):
        labels = (rng.random((len(y), 1)) * mixed[:, -1:] >= mixed[:, :-1]).sum(axis=1)
        redrawn = gap(labels, *shares(labels))
        null[draw] = max(redrawn[rows].mean() for _, rows in judged)
    return Evidence.from_permutations(max(gaps.values()), null, [gaps.get(c) for c in range(clients)])


def bound_variation(auc: float | None) -> float:
    """Return the largest total variation between inputs that ``auc`` allows, as a share of samples."""
    return max(0.0, 2 * (auc or 0.5) - 1)


def _align(x: Floats, strata: Ints, client: Ints) -> Floats:
    """Bring each client's inputs to the pooled mean and variance over its strata, weighted by their pooled shares."""
    share_S = np.bincount(strata) / len(strata)
    result = x.copy()
    for c in np.unique(client):
        own = client == c
        seen = np.flatnonzero(np.bincount(strata[own], minlength=len(share_S)) >= STRATUM)
        if len(seen):
            mean, variance = _mixture_moments(x[own], strata[own], share_S, seen)
            pooled_mean, pooled_variance = _mixture_moments(x, strata, share_S, seen)
            result[own] = (x[own] - mean) * math.sqrt(pooled_variance / max(variance, 1e-12)) + pooled_mean
    return result


def _mixture_moments(x: Floats, strata: Ints, share_S: Floats, seen: Ints) -> tuple[Floats, float]:
    """Return the mean ``[D]`` and total variance of a mixture of the strata ``seen`` in shares ``share_S``."""
    weights = share_S[seen] / share_S[seen].sum()
    mean: Floats = weights @ np.stack([x[strata == s].mean(axis=0) for s in seen])
    variances = [((x[strata == s] - mean) ** 2).sum(axis=1).mean() for s in seen]
    return mean, float(weights @ variances)


def _find_neighborhoods(x: Floats, client: Ints) -> tuple[sparse.csr_array, sparse.csr_array, Floats]:
    """Find the client's and others' samples in the ball around each sample, ``[N, N]``, and the expected others."""
    from scipy import sparse

    size_C = np.bincount(client)
    inside: tuple[list[Ints], list[Ints]] = ([], [])
    expected = np.empty(len(x))
    for c in np.unique(client):
        own, others = client == c, len(x) - size_C[c]
        neighbors = min(max(NEIGHBORS, math.ceil(NEIGHBORS / 2 * size_C[c] / others)), size_C[c] // 4)
        expected[own] = neighbors * others / size_C[c]
        for rows, squared in _distances(x, np.flatnonzero(own)):
            radius = np.partition(squared[:, own], neighbors - 1, axis=1)[:, neighbors - 1 : neighbors]
            row, column = np.nonzero(squared <= radius * (1 + 1e-9))
            inside[0].append(rows[row])
            inside[1].append(column)
    row, column = np.concatenate(inside[0]), np.concatenate(inside[1])
    same = client[row] == client[column]
    own_pairs, other_pairs = (
        sparse.csr_array((np.ones(chosen.sum()), (row[chosen], column[chosen])), shape=(len(x), len(x)))
        for chosen in (same, ~same)
    )
    return own_pairs, other_pairs, expected


def _distances(x: Floats, rows: Ints) -> Iterator[tuple[Ints, Floats]]:
    """Yield ``rows`` in batches with their squared distances to all samples; infinite from a sample to itself."""
    norms = (x**2).sum(axis=1)
    for start in range(0, len(rows), _TOGETHER):
        some = rows[start : start + _TOGETHER]
        squared = np.maximum(norms[some, None] + norms - 2 * x[some] @ x.T, 0)
        squared[np.arange(len(some)), some] = np.inf
        yield some, squared
