"""Feature shift: a classifier can predict which client a sample comes from among samples of one class.

The classifier two-sample test of Lopez-Paz and Oquab 2017 (arXiv:1610.06545), here for many clients at once and within
strata (classes), so that label skew gives no signal. The classifier is ridge regression onto client codes in two folds.
Since it is a matrix product, it can be trained again for every permutation. Permuting only held-out scores would be
invalid: the scores of one fold come from the labels of the other, the two agree by chance, and false alarms would
double.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from .shift_tests import TOGETHER, Evidence, Floats, Ints, group_rows, permutation_p_value

FEWEST = 8
"""Minimum number of a client's samples in a stratum to compare it there; two clients need as many."""


@dataclass(frozen=True, kw_only=True)
class TwoSample:
    """Result of the two-sample test: ``evidence`` with the AUC of each client against all others, and ``pairs``.

    ``pairs[i][j]`` is the AUC of client i against j: the probability that the classifier ranks a held-out sample of
    client i above one of client j in the same stratum. It is 0.5 if the classifier cannot distinguish the clients, 1 if
    it always can, and None if they have no stratum in common.
    """

    evidence: Evidence
    pairs: tuple[tuple[float | None, ...], ...] = ()


def feature_shift(
    x: Floats,
    strata: Ints,
    client: Ints,
    clients: int,
    rng: np.random.Generator,
    permutations: int,
    stratum: str = "class",
) -> TwoSample:
    """Test whether samples ``x`` ``[N, D]`` of one stratum differ by client.

    ``strata`` and ``client``: ``[N]``, from 0; ``stratum``: what a stratum is called in messages.

    The statistic is the largest AUC of a client against all others. The p-value is that of the mean difference in
    held-out score between a client's samples and the others', under permutations of clients within strata.
    """
    kept = _find_comparable(strata, client, clients)
    if not kept.any():
        return TwoSample(
            evidence=Evidence(untestable_because=f"no {stratum} has {FEWEST} samples in each of two clients")
        )
    x, strata, client = x[kept], strata[kept], client[kept]
    fold = _split_in_halves(strata * clients + client, rng)
    cells = group_rows(2 * strata + fold)
    ridge = _Ridge(x, strata, fold, cells)
    coded = _encode_clients(client, clients, cells)
    scores = ridge.score_other_fold(coded)
    null: list[NDArray[np.floating]] = []
    for start in range(0, permutations, TOGETHER):
        shuffled = (_shuffle(client, cells, rng) for _ in range(min(TOGETHER, permutations - start)))
        drawn = np.concatenate([_encode_clients(each, clients, cells) for each in shuffled], axis=1)
        null.append((drawn * ridge.score_other_fold(drawn)).sum(axis=0).reshape(-1, clients).sum(axis=1))
    aucs = [_auc(scores[:, own], client == own, cells) for own in range(clients)]
    evidence = Evidence(
        statistic=max(auc for auc in aucs if auc is not None),
        chance=0.5,
        p=permutation_p_value(float((coded * scores).sum()), np.concatenate(null)),
        clients=tuple(aucs),
    )
    return TwoSample(evidence=evidence, pairs=_pairwise_auc(scores, strata, fold, client, clients))


def _find_comparable(strata: Ints, client: Ints, clients: int) -> NDArray[np.bool_]:
    """Return a mask of the samples in whose stratum their client and another one have :data:`FEWEST` samples each."""
    counts_SC = np.zeros((int(strata.max()) + 1, clients), dtype=int)
    np.add.at(counts_SC, (strata, client), 1)
    enough_SC = counts_SC >= FEWEST
    enough_SC &= enough_SC.sum(axis=1, keepdims=True) >= 2
    kept: NDArray[np.bool_] = enough_SC[strata, client]
    return kept


class _Ridge:
    """Regression of client codes on ``x`` in two folds, with weights shared by all strata plus weights per stratum.

    The penalty is D on features of unit variance, so that n samples shrink weights by about n / (n + D).
    """

    def __init__(self, x: Floats, strata: Ints, fold: Ints, cells: Sequence[Ints]) -> None:
        centered = x.astype(np.float32)
        for rows in cells:
            centered[rows] -= centered[rows].mean(axis=0)
        scale = centered.std(axis=0)
        self.x = np.divide(centered, scale, out=np.zeros_like(centered), where=scale > 1e-6 * scale.max())
        self.folds = []
        for number in (0, 1):
            train, test = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
            own = [(train[strata[train] == stratum], test[strata[test] == stratum]) for stratum in np.unique(strata)]
            solvers = [self._solver(rows) for rows, _ in own]
            self.folds.append((train, test, self._solver(train), list(zip(own, solvers, strict=True))))

    def _solver(self, rows: Ints) -> NDArray[np.float32]:
        x = self.x[rows].astype(np.float64)
        inverse: NDArray[np.float32] = np.linalg.inv(x.T @ x + x.shape[1] * np.eye(x.shape[1])).astype(np.float32)
        return inverse

    def score_other_fold(self, codes: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scores ``[N, C]`` of every sample under the weights of the other fold."""
        scores = np.empty_like(codes)
        for train, test, solver, strata in self.folds:
            shared = solver @ (self.x[train].T @ codes[train])
            scores[test] = self.x[test] @ shared
            for (rows, held), own in strata:
                rest = codes[rows] - self.x[rows] @ shared
                scores[held] += self.x[held] @ (own @ (self.x[rows].T @ rest))
        return scores


def _encode_clients(client: Ints, clients: int, cells: Sequence[Ints]) -> NDArray[np.float32]:
    """Return one column per client, with mean 0 in each cell, on a scale independent of the client's size."""
    size_C = np.bincount(client, minlength=clients)
    codes: NDArray[np.float32] = np.eye(clients, dtype=np.float32)[client]
    codes *= (len(client) / np.maximum(size_C, 1)).astype(np.float32)
    for rows in cells:
        codes[rows] -= codes[rows].mean(axis=0)
    return codes


def _split_in_halves(keys: Ints, rng: np.random.Generator) -> Ints:
    """Assign each sample to fold 0 or 1; both have about equal size within each key."""
    fold = np.empty_like(keys)
    for rows in group_rows(keys):
        fold[rng.permutation(rows)] = (np.arange(len(rows)) + rng.integers(2)) % 2
    return fold


def _shuffle(client: Ints, cells: Sequence[Ints], rng: np.random.Generator) -> Ints:
    shuffled = client.copy()
    for rows in cells:
        shuffled[rows] = client[rng.permutation(rows)]
    return shuffled


def _auc(score: NDArray[np.floating], own: NDArray[np.bool_], cells: Sequence[Ints]) -> float | None:
    """Return Mann and Whitney's U per pair, averaged over cells with the harmonic mean of both sizes as weight."""
    from scipy.stats import rankdata  # half a second, for which each run would wait

    total = weight = 0.0
    for rows in cells:
        mine = own[rows]
        ours, theirs = int(mine.sum()), int((~mine).sum())
        if ours and theirs:
            above = rankdata(score[rows])[mine].sum() - ours * (ours + 1) / 2
            total += above / (ours + theirs)
            weight += ours * theirs / (ours + theirs)
    return float(total / weight) if weight else None


def _pairwise_auc(
    scores: NDArray[np.floating], strata: Ints, fold: Ints, client: Ints, clients: int
) -> tuple[tuple[float | None, ...], ...]:
    matrix: list[list[float | None]] = [[None] * clients for _ in range(clients)]
    for i, j in combinations(range(clients), 2):
        rows = np.flatnonzero((client == i) | (client == j))
        if len(rows):
            lead, cells = scores[rows, i] - scores[rows, j], group_rows(2 * strata[rows] + fold[rows])
            matrix[i][j] = matrix[j][i] = _auc(lead, client[rows] == i, cells)
    return tuple(map(tuple, matrix))
