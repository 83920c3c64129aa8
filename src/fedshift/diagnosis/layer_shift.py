"""How far apart the statistics lie that BatchNorm would keep for each client, layer by layer.

FedBN (Li et al. 2021, arXiv:2102.07623, section 3) takes feature shift for a difference in these statistics. Early
layers see appearance (brightness, contrast, texture), late layers what the network makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .shift_tests import Evidence, Floats, Ints, permutation_p_value

_TOGETHER = 64  # permutations in one matrix product
_EPSILON = 1e-5  # what BatchNorm adds to a variance


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Mean and mean square of what comes into one layer, of each sample and channel, ``[N, channels]``."""

    layer: str
    mean: NDArray[np.floating]
    square: NDArray[np.floating]


def layer_shift(
    moments: Moments, strata: Ints, client: Ints, clients: int, rng: np.random.Generator, permutations: int
) -> Evidence:
    """Symmetric Kullback-Leibler divergence between a client's Gaussian and the pooled one, in nats.

    It is the mean of both directions, over channels and clients. The null permutes clients within strata, so ``chance``
    holds what label skew alone makes of it.
    """
    both_ND = np.concatenate([moments.mean, moments.square], axis=1).astype(np.float64)
    pooled_D = both_ND.mean(axis=0)
    groups = [np.flatnonzero(strata == stratum) for stratum in np.unique(strata)]
    size_C = np.maximum(np.bincount(client, minlength=clients), 1)

    def divergence(codes_PN: Ints) -> Floats:
        """Divergence of each client under each assignment of clients, ``[P, C]``."""
        members = np.equal(codes_PN[:, None, :], np.arange(clients)[None, :, None]).reshape(-1, both_ND.shape[0])
        means = (members @ both_ND).reshape(len(codes_PN), clients, -1) / size_C[None, :, None]
        over_channels: Floats = _jeffreys(means, pooled_D).mean(axis=2)
        return over_channels

    own_C = divergence(client[None])[0]
    null = []
    for start in range(0, permutations, _TOGETHER):
        drawn = np.tile(client, (min(_TOGETHER, permutations - start), 1))
        for rows in groups:
            drawn[:, rows] = rng.permuted(drawn[:, rows], axis=1)
        null.append(divergence(drawn).mean(axis=1))
    null_P = np.concatenate(null)
    statistic = float(own_C.mean())
    return Evidence(
        statistic=statistic,
        chance=float(null_P.mean()),
        p=permutation_p_value(statistic, null_P),
        clients=tuple(own_C.tolist()),
    )


def _jeffreys(moments: Floats, pooled: Floats) -> Floats:
    """Mean of KL(a|b) and KL(b|a) of Gaussians given by mean and mean square, the halves of the last axis."""
    (m, q), (m0, q0) = np.split(moments, 2, axis=-1), np.split(pooled, 2, axis=-1)
    v, v0 = (np.maximum(square - mean**2, 0) + _EPSILON for mean, square in ((m, q), (m0, q0)))
    result: Floats = (v / v0 + v0 / v + (m - m0) ** 2 * (1 / v + 1 / v0) - 2) / 4
    return result
