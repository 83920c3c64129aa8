"""Corollary 4.6 on random federations, and the same question of all of Lambda, which the corollary leaves out.

G* is the diagonal blocks of G, so lambda_min(G*) >= lambda_min(G). Two facts about ``Lambda = V / alpha^2 + G``:

- ``V / alpha^2 + G*`` can have the smaller lambda_min, where V is weak in a direction in which blocks of G add up.
- N G* - G is positive semidefinite, because ``|a_1 + ... + a_N|^2 <= N (|a_1|^2 + ... + |a_N|^2)``. FedBN as
  Algorithm 1 runs it has N G* in place of G* (``theory/convergence.py``): each eigenvalue of its Lambda, in order of
  size, is at least FedAvg's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..utils.random_streams import stream
from .arc_cosine import magnitude_limit
from .ntk import FederatedInputs, Floats, block_diagonal, gram_matrices, init_network, smallest_eigenvalue
from .settings import TheorySettings, draw_inputs

_NEURONS = 256
_NODES = 25
_ROUNDING = 1e-12  # of eigenvalues about 1


@dataclass(frozen=True, kw_only=True, eq=False)
class CorollaryCheck:
    """lambda_min of FedAvg's and of FedBN's matrix in each federation, [draws, 2].

    ``magnitude``: of G_inf and G*_inf. ``joint``: of Lambda of a network at its start, alpha = 1, by equations 6 to 9.
    ``run``: the same with N G* for G*, Algorithm 1.
    """

    magnitude: Floats
    joint: Floats
    run: Floats

    @staticmethod
    def count_violations(pairs: Floats) -> int:
        """Federations in which FedBN's is the smaller by more than rounding."""
        return int(np.sum(pairs[:, 1] < pairs[:, 0] - _ROUNDING))


def try_corollary(setting: TheorySettings) -> CorollaryCheck:
    """``setting.draws`` federations of 2 to 4 clients of 2 to 4 samples in 3 to 6 dimensions, all at random.

    Their heterogeneity is uniform between 0 and twice ``setting.heterogeneity``, at most 8.
    """
    rows = []
    for number in range(setting.draws):
        rng = stream(setting.seed, "theory corollary", number)
        clients, count, size = int(rng.integers(2, 5)), int(rng.integers(2, 5)), int(rng.integers(3, 7))
        x, _, moments = draw_inputs(clients, count, size, min(2 * setting.heterogeneity, 8.0) * rng.uniform(), rng)
        owner = np.repeat(np.arange(clients), count)
        samples = FederatedInputs(x=x.reshape(-1, size), client=owner, covariance=moments)
        full = magnitude_limit(samples, _NODES)
        at_start = gram_matrices(samples, init_network(_NEURONS, size, rng))
        local = block_diagonal(samples, at_start.magnitude)
        pair = smallest_eigenvalue(full), smallest_eigenvalue(block_diagonal(samples, full))
        whole = smallest_eigenvalue(at_start.direction + at_start.magnitude)
        joint, run = (
            smallest_eigenvalue(at_start.direction + local),
            smallest_eigenvalue(at_start.direction + clients * local),
        )
        rows.append((pair, (whole, joint), (whole, run)))
    table = np.array(rows)
    return CorollaryCheck(magnitude=table[:, 0], joint=table[:, 1], run=table[:, 2])
