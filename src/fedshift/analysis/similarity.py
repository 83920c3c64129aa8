"""Similarity of two models: by their test losses, their feature maps and their BatchNorm statistics.

Discordance (Nasirigerdeh et al. 2020, arXiv:2011.07006, section 3.1): two models start from the same weights and
minimize the same loss with the same learning rate, one federated, one on pooled data; the discordance is the mean
squared difference of their losses on the test data, iteration by iteration (equation 3).

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879) compares clients' and server's models by the mean cosine similarity of
their feature maps (figure 5) and by BatchNorm's running means and variances (figures 1(b) and 12). A feature map is one
channel of one image: a vector of its pixels. Distances of statistics have no unit, so that layers can be compared.

Suffixes: N images, C channels, P pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..utils.errors import UsageError

Reals = NDArray[np.floating]
EPSILON = 1e-5
"""Constant added to variances, as in BatchNorm, since a channel that is always zero has none."""
CONCORDANT = 0.01
"""Discordance, in squared nats, below which FedMMB calls a federated model concordant with the centralized one."""


def compute_discordance(federated: Sequence[float], centralized: Sequence[float]) -> float:
    """Return the mean over iterations of (federated - centralized test loss)^2; NaN or infinite if a loss is.

    Raises :class:`UsageError` if there is no iteration, or the two lists differ in length.
    """
    if not federated or len(federated) != len(centralized):
        raise UsageError(
            f"{len(federated)} federated and {len(centralized)} centralized losses: give one of each for every "
            "iteration that both evaluated, at least one"
        )
    with np.errstate(invalid="ignore", over="ignore"):  # infinite losses
        gap = np.asarray(federated, dtype=float) - np.asarray(centralized, dtype=float)
        return float(np.square(gap).mean())


def cosine(one: Reals, other: Reals) -> NDArray[np.float64]:
    """Return the cosine similarity of maps ``[N, C, *pixels]``, pair by pair, ``[N, C]``.

    It is 0 if a map is all zero, NaN if one is not finite, and 1 or -1 for maps of a single pixel. The maps are not
    centered.
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
    """Return the mean over channels of ``|m - m'| / sqrt((v + v') / 2 + EPSILON)``, in pooled standard deviations.

    By channel it is Cohen's d (1988, "Statistical Power Analysis for the Behavioral Sciences", section 2.2).
    """
    pooled_C = (variance_C.astype(np.float64) + other_variance_C) / 2
    return float((np.abs(mean_C.astype(np.float64) - other_mean_C) / np.sqrt(pooled_C + EPSILON)).mean())


def variance_distance(variance_C: Reals, other_variance_C: Reals) -> float:
    """Return the mean over channels of ``|log((v + EPSILON) / (v' + EPSILON))|``; 0.693 for a factor of 2."""
    one_C, other_C = (np.log(variance.astype(np.float64) + EPSILON) for variance in (variance_C, other_variance_C))
    return float(np.abs(one_C - other_C).mean())
