"""How alike two models see: cosine similarity of feature maps, and distances of BatchNorm's running statistics.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879) compares clients' and server's models by the mean cosine similarity of
their feature maps (figure 5) and by BatchNorm's running means and variances (figures 1(b) and 12). A feature map is one
channel of one image: a vector of its pixels. Distances of statistics have no unit, so that layers can be compared.

Suffixes: N images, C channels, P pixels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.floating]
EPSILON = 1e-5
"""What is added to variances, as BatchNorm does: a channel that is always zero has none."""


def cosine(one: Reals, other: Reals) -> NDArray[np.float64]:
    """Cosine similarity of maps ``[N, C, *pixels]``, pair by pair, ``[N, C]``.

    It is 0 where a map is all zero, NaN where one is not finite, and 1 or -1 for maps of a single pixel. Nothing is
    subtracted from the maps.
    """
    one_NCP, other_NCP = (maps.astype(np.float64).reshape(*maps.shape[:2], -1) for maps in (one, other))
    with np.errstate(over="ignore", invalid="ignore"):
        dot_NC = (one_NCP * other_NCP).sum(axis=2)
        length_NC = np.linalg.norm(one_NCP, axis=2) * np.linalg.norm(other_NCP, axis=2)
        similarity_NC: NDArray[np.float64] = np.divide(
            dot_NC, length_NC, out=np.zeros_like(dot_NC), where=length_NC != 0
        )
    return similarity_NC


def mean_distance(mean_C: Reals, variance_C: Reals, other_mean_C: Reals, other_variance_C: Reals) -> float:
    """Mean over channels of ``|m - m'| / sqrt((v + v') / 2 + EPSILON)``: how many standard deviations apart means are.

    By channel it is Cohen's d (1988, "Statistical Power Analysis for the Behavioral Sciences", section 2.2).
    """
    pooled_C = (variance_C.astype(np.float64) + other_variance_C) / 2
    return float((np.abs(mean_C.astype(np.float64) - other_mean_C) / np.sqrt(pooled_C + EPSILON)).mean())


def variance_distance(variance_C: Reals, other_variance_C: Reals) -> float:
    """Mean over channels of ``|log((v + EPSILON) / (v' + EPSILON))|``; a factor of 2 everywhere gives 0.693."""
    one_C, other_C = (np.log(variance.astype(np.float64) + EPSILON) for variance in (variance_C, other_variance_C))
    return float(np.abs(one_C - other_C).mean())
