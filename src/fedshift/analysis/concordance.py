"""Federated-centralized concordance: whether a federation trains the model that pooled data would have trained.

Nasirigerdeh et al. 2020, arXiv:2011.07006, section 3.1: both start from the same weights and descend the same loss with
the same learning rate; the discordance is the mean squared difference of their losses on the test data, iteration by
iteration (equation 3). Below a threshold, 0.01 in section 4, the two are called concordant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..utils.errors import UsageError

CONCORDANT = 0.01
"""Discordance, in squared nats, below which the paper calls a federated model concordant with the centralized one."""


def discordance(federated: Sequence[float], centralized: Sequence[float]) -> float:
    """Mean over iterations of (federated - centralized test loss)^2; NaN or infinite where a loss is.

    Raises :class:`UsageError` where there is no iteration, or not one loss of each for every iteration.
    """
    if not federated or len(federated) != len(centralized):
        raise UsageError(
            f"{len(federated)} federated and {len(centralized)} centralized losses: give one of each for every "
            "iteration that both evaluated, at least one"
        )
    with np.errstate(invalid="ignore", over="ignore"):  # of losses that are not finite there is no difference
        gap = np.asarray(federated, dtype=float) - np.asarray(centralized, dtype=float)
        return float(np.square(gap).mean())


def is_concordant(delta: float) -> bool:
    """Whether a discordance of ``delta`` is below the paper's threshold."""
    return delta < CONCORDANT
