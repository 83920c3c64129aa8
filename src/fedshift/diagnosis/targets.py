"""Targets of every task in a diagnosis: how they differ by client, and groups of samples with similar targets.

For classes, ``label_skew`` tests the counts. For other tasks the samples are permuted over clients. The measures are:

* for several labels, the divergence of each label's share of samples, in bits, for the label that differs most;
* for masks, the divergence of the classes' shares of pixels, in bits; images are permuted, since pixels of one image
  are not independent samples;
* for numbers, the largest Kolmogorov-Smirnov distance between a client's targets and the others'.

Features are compared within groups of similar targets: samples with the same combination of labels (if most
combinations are frequent), a tenth of the samples by their numbers, or a tenth of the images by the shares of their
classes. Several numbers or shares are first reduced to their first principal component. Targets also vary within a
group, so the part of the inputs that is linear in the targets (and in their products, for up to three) is removed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from .shift_tests import Evidence, Floats, Ints, compute_divergence, group_rows

GROUPS, FEWEST = 10, 40
"""Maximum number of groups of similar targets, and minimum mean number of samples in each."""
MULTIPLIED = 3
"""Maximum number of targets whose products are removed from features too."""


def target_skew(
    kind: str, y: Floats, client: Ints, clients: int, rng: np.random.Generator, permutations: int
) -> Evidence:
    """Test whether targets ``y`` of :func:`read_targets` differ by client (``client`` ``[N]``)."""
    weights_C = np.bincount(client, minlength=clients) / len(client)
    measure = _distance(y, clients) if kind == "regression" else _bits(kind, y, clients)

    def statistic(each_XC: Floats) -> float:
        return float(each_XC.max() if kind == "regression" else (each_XC @ weights_C).max())

    own_XC = measure(client)
    null_P = np.array([statistic(measure(rng.permutation(client))) for _ in range(permutations)])
    return Evidence.from_permutations(statistic(own_XC), null_P, own_XC.max(axis=0).tolist())


def read_targets(kind: str, y: Tensor, classes: int) -> Floats:
    """Return targets in the form to test: labels or numbers ``[N, outputs]``, or the pixels of each class in masks."""
    if kind != "segmentation":
        return y.reshape(len(y), -1).double().numpy()
    masks_NP = y.flatten(1).numpy().astype(np.int64)
    return np.stack([np.bincount(mask, minlength=256)[:classes] for mask in masks_NP]).astype(float)


def group_targets(kind: str, y: Floats) -> Ints:
    """Return the group of each sample by its targets, int64 ``[N]`` from 0."""
    if kind == "multilabel":
        same, sizes = np.unique(y, axis=0, return_inverse=True, return_counts=True)[1:]
        if sizes[sizes >= FEWEST].sum() >= len(y) / 2:
            return same.reshape(-1)
    score = _order(_scale(kind, y))
    groups = min(GROUPS, max(1, len(y) // FEWEST))
    edges = np.unique(np.quantile(score, np.arange(1, groups) / groups))
    return np.unique(np.searchsorted(edges, score, side="right"), return_inverse=True)[1].reshape(-1)


def remove_targets(kind: str, features: Floats, y: Floats, groups: Ints) -> Floats:
    """Return ``features`` ``[N, D]`` without the part that the numbers ``y`` explain within each group."""
    scaled, rest = _scale(kind, y), features.copy()
    if scaled.shape[1] <= MULTIPLIED:
        first, second = np.triu_indices(scaled.shape[1])
        scaled = np.concatenate([scaled, scaled[:, first] * scaled[:, second]], axis=1)
    for rows in group_rows(groups):
        known = scaled[rows] - scaled[rows].mean(axis=0)
        rest[rows] -= known @ np.linalg.lstsq(known, features[rows] - features[rows].mean(axis=0), rcond=1e-9)[0]
    return rest


def _distance(y_NT: Floats, clients: int) -> Callable[[Ints], Floats]:
    """Return a function that measures each client's distance from the others' distribution, ``[T, clients]``."""
    order_TN = y_NT.T.argsort(axis=1, kind="stable")
    sorted_TN = np.take_along_axis(y_NT.T, order_TN, axis=1)
    last_TN = np.concatenate([sorted_TN[:, 1:] > sorted_TN[:, :-1], np.ones((len(sorted_TN), 1), bool)], axis=1)
    places = [np.flatnonzero(last) for last in last_TN]

    def measure(client: Ints) -> Floats:
        size_C = np.bincount(client, minlength=clients)
        rest_C = len(client) - size_C
        distances = []
        for order, place in zip(order_TN, places, strict=True):
            below_NC = np.equal(client[order][:, None], np.arange(clients)).cumsum(axis=0)[place]
            others_NC = place[:, None] + 1 - below_NC
            distances.append(np.abs(below_NC / np.maximum(size_C, 1) - others_NC / np.maximum(rest_C, 1)).max(axis=0))
        return np.stack(distances)

    return measure


def _bits(kind: str, y: Floats, clients: int) -> Callable[[Ints], Floats]:
    """Return a function that measures the divergence of each client's shares of labels or classes from the pooled."""

    def measure(client: Ints) -> Floats:
        member_CN = np.equal(client, np.arange(clients)[:, None]).astype(float)
        count_CK = member_CN @ y
        if kind == "segmentation":
            return compute_divergence(count_CK[None])
        return compute_divergence(
            np.stack([count_CK, member_CN.sum(axis=1)[:, None] - count_CK], axis=-1).swapaxes(0, 1)
        )

    return measure


def _scale(kind: str, y: Floats) -> Floats:
    """Return numbers scaled to unit variance, or the classes' shares of pixels for masks."""
    if kind == "segmentation":
        scaled: Floats = y / np.maximum(y.sum(axis=1, keepdims=True), 1)
    else:
        deviation = y.std(axis=0)
        scaled = (y - y.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    return scaled


def _order(scaled: Floats) -> Floats:
    """Return the first principal component of each row, ``[N]``."""
    centered = scaled - scaled.mean(axis=0)
    score: Floats = centered @ np.linalg.eigh(centered.T @ centered)[1][:, -1]
    return score
