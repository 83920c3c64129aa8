"""G_inf and G*_inf of one federation, by integration and by sampling, and their eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..utils.random_streams import stream
from .arc_cosine import magnitude_limit
from .ntk import FederatedInputs, Floats, block_diagonal, monte_carlo
from .settings import TheorySettings


@dataclass(frozen=True, kw_only=True, eq=False)
class InfiniteWidthLimits:
    """``full`` is G_inf [P, P] and ``local`` G*_inf, by integration; ``own`` [N] is lambda_min of each client's block.

    Against sampling: ``difference``, the Frobenius norm of the difference relative to that of G_inf; ``worst``, the
    largest difference in standard errors of its entry; ``spread``, the root mean square of those, near 1 where sampling
    is all that differs.
    """

    full: Floats
    local: Floats
    own: Floats
    difference: float
    worst: float
    spread: float

    @property
    def least(self) -> tuple[float, float]:
        """lambda_min of G_inf and of G*_inf: mu_0 and mu_0* of theorem 4.4 and corollary 4.5."""
        return float(np.linalg.eigvalsh(self.full)[0]), float(np.linalg.eigvalsh(self.local)[0])

    @property
    def most(self) -> tuple[float, float]:
        """lambda_max of G_inf and of G*_inf."""
        return float(np.linalg.eigvalsh(self.full)[-1]), float(np.linalg.eigvalsh(self.local)[-1])


def compute_limits(setting: TheorySettings, samples: FederatedInputs) -> InfiniteWidthLimits:
    """The two matrices of ``samples``, compared with ``setting.monte_carlo`` sampled neurons."""
    full = magnitude_limit(samples)
    sampled, error = monte_carlo(samples, setting.monte_carlo, stream(setting.seed, "theory neurons"))
    scores = np.divide(sampled - full, error, out=np.zeros_like(full), where=error > 0)
    parts = (full[np.ix_(rows, rows)] for rows in np.equal.outer(np.arange(setting.clients), samples.client))
    return InfiniteWidthLimits(
        full=full,
        local=block_diagonal(samples, full),
        own=np.array([np.linalg.eigvalsh(part)[0] for part in parts]),
        difference=float(np.linalg.norm(sampled - full) / np.linalg.norm(full)),
        worst=float(np.abs(scores).max()),
        spread=float(np.sqrt(np.mean(scores**2))),
    )
