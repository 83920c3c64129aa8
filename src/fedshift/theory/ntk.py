"""FedBN's theory at finite width: its two-layer network, and the Gram matrices that govern how fast it is fitted.

Li et al. 2021, arXiv:2102.07623, section 4 and appendix B. The network is equation 1,
``f(x) = m^-1/2 sum_k c_k relu(gamma_k v_k.x / |v_k|_S)`` with ``|v|_S = sqrt(v' S v)`` and S the second moments of the
inputs of the client that has x. FedAvg has one gamma for all clients, FedBN one for each. Under gradient descent on
``1/2 sum_p (f_p - y_p)^2`` the predictions move as ``df/dt = -(V / alpha^2 + G) (f - y)``, V and G by equations 6 and 7
for FedAvg, 8 and 9 for FedBN; they are the squares of the Jacobians to v and to gamma, and are computed as such.

Suffixes of arrays: P samples of all clients, N clients, D inputs, K neurons (the paper's m).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..utils.errors import UsageError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_TOGETHER = 2000


@dataclass(frozen=True, kw_only=True, eq=False)
class FederatedInputs:
    """Inputs ``x`` [P, D] of all clients, each sample's ``client`` [P] in 0..N-1, and each client's S [N, D, D]."""

    x: Floats
    client: Ints
    covariance: Floats

    def __post_init__(self) -> None:
        count, size = self.x.shape
        if self.client.shape != (count,) or self.covariance.shape[1:] != (size, size):
            raise UsageError(
                f"inputs {self.x.shape}, clients {self.client.shape}, covariances {self.covariance.shape}: they must "
                "be [P, D], [P] and [N, D, D]"
            )
        if count and not 0 <= self.client.min() <= self.client.max() < len(self.covariance):
            raise UsageError(f"clients are numbered 0 to {len(self.covariance) - 1}, one for each covariance")

    @property
    def together(self) -> NDArray[np.bool_]:
        """Which pairs of samples lie on one client: the blocks on the diagonal of equation 9."""
        same: NDArray[np.bool_] = np.equal.outer(self.client, self.client)
        return same


def measure_inputs(x_NMD: Floats) -> FederatedInputs:
    """Samples of N clients with S as a BatchNorm over all of a client's samples measures it: the mean of x x'."""
    clients, count, size = x_NMD.shape
    second = np.einsum("nmd,nme->nde", x_NMD, x_NMD) / count
    return FederatedInputs(x=x_NMD.reshape(-1, size), client=np.repeat(np.arange(clients), count), covariance=second)


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """``v`` [K, D], signs ``c`` [K] and ``gamma``: [K] as FedAvg has it, or [N, K] as FedBN."""

    v: Floats
    gamma: Floats
    c: Floats

    @property
    def has_local_gamma(self) -> bool:
        """Whether each client has a gamma of its own."""
        return self.gamma.ndim == 2

    def gamma_of(self, samples: FederatedInputs) -> Floats:
        """The gamma that each sample meets."""
        return (
            self.gamma[samples.client]
            if self.has_local_gamma
            else np.broadcast_to(self.gamma, (len(samples.x), len(self.c)))
        )


def init_network(width: int, size: int, rng: np.random.Generator, *, alpha: float = 1.0, clients: int = 0) -> Network:
    """The paper's start: ``v_k ~ N(0, alpha^2 I)``, random signs, ``gamma_k = |v_k| / alpha`` on each of ``clients``.

    Without ``clients`` the network is FedAvg's, with one gamma; for one state of ``rng`` both are the same function.
    """
    v = rng.normal(scale=alpha, size=(width, size))
    gamma = np.linalg.norm(v, axis=1) / alpha
    c = rng.choice([-1.0, 1.0], size=width)
    return Network(v=v, gamma=np.tile(gamma, (clients, 1)) if clients else gamma, c=c)


def normalize_preactivations(samples: FederatedInputs, v_KD: Floats) -> tuple[Floats, Floats]:
    """``v.x / |v|_S`` and ``|v|_S`` of every sample and neuron, both [P, K]."""
    norm_NK = np.sqrt(((v_KD @ samples.covariance) * v_KD).sum(axis=-1))
    norm = norm_NK[samples.client]
    return samples.x @ v_KD.T / norm, norm


def compute_outputs(samples: FederatedInputs, network: Network) -> Floats:
    """f(x) of every sample [P], equation 1."""
    scaled, _ = normalize_preactivations(samples, network.v)
    result: Floats = np.maximum(network.gamma_of(samples) * scaled, 0) @ network.c / np.sqrt(len(network.c))
    return result


@dataclass(frozen=True, kw_only=True, eq=False)
class Slopes:
    """What derivatives are made of, each [P, K]: ``scaled`` is v.x / |v|_S, ``norm`` is |v|_S (appendix B.1).

    ``by_scaled`` and ``by_gamma``: derivatives of the output to ``scaled`` and to the gamma that the sample meets.
    """

    scaled: Floats
    norm: Floats
    by_scaled: Floats
    by_gamma: Floats


def compute_slopes(samples: FederatedInputs, network: Network) -> Slopes:
    """The derivatives of every output, to be put together by :func:`compute_jacobians` or by a step of gradient descent."""
    scaled, norm = normalize_preactivations(samples, network.v)
    gamma = network.gamma_of(samples)
    slope = (gamma * scaled > 0) * (network.c / np.sqrt(len(network.c)))
    return Slopes(scaled=scaled, norm=norm, by_scaled=slope * gamma, by_gamma=slope * scaled)


def compute_jacobians(samples: FederatedInputs, network: Network) -> tuple[Floats, Floats]:
    """Derivatives of every output to v, [P, K, D], and to the gamma that the sample meets, [P, K] (appendix B.1)."""
    at = compute_slopes(samples, network)
    moved = (network.v @ samples.covariance)[samples.client] / at.norm[..., None]
    aside = samples.x[:, None, :] - at.scaled[..., None] * moved  # the part of x that changes v.x / |v|_S
    return (at.by_scaled / at.norm)[..., None] * aside, at.by_gamma


@dataclass(frozen=True, kw_only=True, eq=False)
class Gram:
    """``direction`` is V and ``magnitude`` is G, [P, P]; of a network that FedBN trains they are V* and G*."""

    direction: Floats
    magnitude: Floats

    def evolution(self, alpha: float, *, weight: float = 1.0) -> Floats:
        """Lambda = V / alpha^2 + G; ``weight`` multiplies G (see :func:`~fedshift.theory.convergence.descend`)."""
        return self.direction / alpha**2 + weight * self.magnitude


def gram_matrices(samples: FederatedInputs, network: Network, *, alpha: float = 1.0) -> Gram:
    """V and G at finite width, equations 6 and 7; of a network with local gamma V* and G*, equations 8 and 9."""
    by_v, by_gamma = compute_jacobians(samples, network)
    flat = by_v.reshape(len(by_v), -1)
    magnitude = by_gamma @ by_gamma.T
    if network.has_local_gamma:
        magnitude = np.where(samples.together, magnitude, 0.0)
    return Gram(direction=alpha**2 * (flat @ flat.T), magnitude=magnitude)


def block_diagonal(samples: FederatedInputs, full_PP: Floats) -> Floats:
    """What FedBN leaves of G: the blocks of pairs on one client (equation 9; appendix B.3 for the expectation)."""
    return np.where(samples.together, full_PP, 0.0)


def monte_carlo(samples: FederatedInputs, draws: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """G_inf as the mean over ``draws`` neurons, and the standard error of each of its entries, both [P, P]."""
    if draws < 2:
        raise UsageError(f"draws={draws}: a standard error needs at least 2")
    count, size = samples.x.shape
    total, squares = np.zeros((2, count, count))
    for start in range(0, draws, _TOGETHER):
        drawn = min(_TOGETHER, draws - start)
        feature_PK = np.maximum(normalize_preactivations(samples, rng.normal(size=(drawn, size)))[0], 0)
        total += feature_PK @ feature_PK.T
        np.square(feature_PK, out=feature_PK)
        squares += feature_PK @ feature_PK.T
    mean = total / draws
    return mean, np.sqrt(np.maximum(squares / draws - mean**2, 0) / (draws - 1))


def smallest_eigenvalue(symmetric_PP: Floats) -> float:
    """lambda_min of a symmetric matrix."""
    return float(np.linalg.eigvalsh(symmetric_PP)[0])
