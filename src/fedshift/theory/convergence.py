"""Gradient descent on FedBN's two-layer network, and what its Gram matrices say of it beforehand.

Li et al. 2021, arXiv:2102.07623, section 4.3: with E = 1 and full batches, one round of FedAvg is one step of gradient
descent on the loss of all samples. While the parameters stay near their start, as they do in a wide network, residuals
``r = f - y`` follow ``r <- (I - rate Lambda) r``: what of them lies along an eigenvector decays by its eigenvalue.

``rate`` belongs to the paper's loss ``1/2 sum_p r_p^2``. Federated clients that minimize the mean square of their own
residuals with learning rate ``lr`` make the same steps with ``rate = 2 lr / P``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .ntk import FederatedInputs, Floats, Network, compute_outputs, compute_slopes


def descent_step(
    samples: FederatedInputs, network: Network, residual: Floats, rate: float, *, weight: float = 1.0
) -> Network:
    """The network after one step of gradient descent on v and gamma from ``residual`` [P]; c stays.

    ``weight`` multiplies the step of gamma. With 1 all parameters descend the loss of all samples, as equations 8 and 9
    have it. Where FedBN's Algorithm 1 runs on N clients it is N: a gamma that is not averaged takes the whole step of
    its client, whereas v takes the mean of N steps.
    """
    at = compute_slopes(samples, network)
    member_NP = np.equal.outer(np.arange(len(samples.covariance)), samples.client).astype(np.float64)
    pull_PK = residual[:, None] * at.by_scaled / at.norm
    along_NK = member_NP @ (pull_PK * at.scaled / at.norm)
    moved_NKD = network.v @ samples.covariance
    by_v = pull_PK.T @ samples.x - np.einsum("nk,nkd->kd", along_NK, moved_NKD)
    by_gamma = residual[:, None] * at.by_gamma
    summed = member_NP @ by_gamma if network.has_local_gamma else by_gamma.sum(axis=0)
    return replace(network, v=network.v - rate * by_v, gamma=network.gamma - rate * weight * summed)


def descend(
    samples: FederatedInputs, network: Network, targets: Floats, *, rate: float, steps: int, weight: float = 1.0
) -> Floats:
    """Residuals f - y of the trained network before each of ``steps`` steps and after the last, [steps + 1, P]."""
    residuals = []
    for _ in range(steps):
        residuals.append(compute_outputs(samples, network) - targets)
        network = descent_step(samples, network, residuals[-1], rate, weight=weight)
    return np.stack([*residuals, compute_outputs(samples, network) - targets])


def linear_prediction(evolution: Floats, residual: Floats, *, rate: float, steps: int) -> Floats:
    """What :func:`descend` would give if Lambda, ``evolution`` [P, P], stayed as it is: [steps + 1, P]."""
    values, vectors = np.linalg.eigh(evolution)
    decay = (1 - rate * values) ** np.arange(steps + 1)[:, None]
    result: Floats = decay * (vectors.T @ residual) @ vectors.T
    return result


def guaranteed_residual(least: float, *, rate: float, steps: int) -> Floats:
    """Theorem 4.4 and corollary 4.5: the share of the squared residual that may be left, ``(1 - rate least / 2)^t``.

    ``least`` is lambda_min of G_inf for FedAvg and of G*_inf for FedBN.
    """
    shares: Floats = np.float64(1 - rate * least / 2) ** np.arange(steps + 1)
    return shares
