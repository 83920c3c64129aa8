"""The two-layer network of FedBN's theory, its Gram matrices at finite and infinite width, and gradient descent on it.

Li et al. 2021, arXiv:2102.07623, section 4 and appendix B. The network is equation 1,
``f(x) = m^-1/2 sum_k c_k relu(gamma_k v_k.x / |v_k|_S)`` with ``|v|_S = sqrt(v' S v)`` and S the second moments of the
inputs of the client that has x. FedAvg has one gamma for all clients, FedBN one for each. Under gradient descent on
``1/2 sum_p (f_p - y_p)^2`` the predictions move as ``df/dt = -(V / alpha^2 + G) (f - y)``, V and G by equations 6 and 7
for FedAvg, 8 and 9 for FedBN. They are computed as the squares of the Jacobians with respect to v and gamma.

Suffixes of arrays: P samples of all clients, N clients, D inputs, K neurons (the paper's m).

G_inf needs no sampling. For w ~ N(0, A), ``k_A(x, y) = E relu(w.x) relu(w.y)`` is the arc-cosine kernel of degree 1
(Cho and Saul 2009) in the product ``x' A y``. The integrand of equation 7 has ``|v|_S |v|_T`` in its denominator, where
S and T are the second moments of the two samples' clients, v ~ N(0, I), and alpha cancels:

- S = s^2 I and T = t^2 I (clients that differ in scale only): the integrand depends only on the direction of v, which
  is independent of ``|v|^2`` with mean D, so ``G_inf = k_I(x, y) / (D s t)`` in closed form (:func:`isotropic_limit`).
- Any S and T: with ``1 / (ab)^1/2 = 2/pi int dw / (a e^-w + b e^w)`` and ``1/q = int e^u exp(-q e^u) du``, ``G_inf =
  2/pi int int e^u det(A)^1/2 k_A(x, y) dw du``, ``A = (I + 2 e^u (e^-w S + e^w T))^-1``, because a Gaussian times the
  exponential is a narrower Gaussian (:func:`magnitude_limit`). For one client, S = T, the integral over w is 1.

The integrands are analytic and decay exponentially, so the trapezoidal rule in ``u = sinh(z)`` converges faster than
any power of the number of nodes (double-exponential quadrature, Takahasi and Mori 1974).

With E = 1 and full batches, one round of FedAvg is one step of gradient descent on the loss of all samples (section
4.3). While the parameters stay near their initial values, as they do in a wide network, the residuals ``r = f - y``
follow ``r <- (I - rate Lambda) r``: the component along an eigenvector decays by its eigenvalue. ``rate`` belongs to
the paper's loss ``1/2 sum_p r_p^2``. Federated clients that minimize the mean square of their own residuals with
learning rate ``lr`` make the same steps with ``rate = 2 lr / P``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..utils.errors import UsageError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_DRAWN_TOGETHER = 2000  # neurons of the sampled G_inf in memory at once
_REACH = 36.0  # exp(-36) is the rounding of float64
_VALUES_TOGETHER = 100_000  # kernel values in memory at once


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
        """Mask of the pairs of samples on one client: the blocks on the diagonal of equation 9."""
        same: NDArray[np.bool_] = np.equal.outer(self.client, self.client)
        return same


def measure_inputs(x_NMD: Floats) -> FederatedInputs:
    """Return the samples of N clients with S as a BatchNorm over a client's samples measures it: the mean of x x'."""
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
        """Return whether gamma differs by client."""
        return self.gamma.ndim == 2

    def gamma_of(self, samples: FederatedInputs) -> Floats:
        """Return the gamma that applies to each sample, [P, K]."""
        if self.has_local_gamma:
            return self.gamma[samples.client]
        return np.broadcast_to(self.gamma, (len(samples.x), len(self.c)))


def init_network(width: int, size: int, rng: np.random.Generator, *, alpha: float = 1.0, clients: int = 0) -> Network:
    """Initialize as the paper does: ``v_k ~ N(0, alpha^2 I)``, random signs, ``gamma_k = |v_k| / alpha`` by client.

    Without ``clients`` the network is FedAvg's, with one gamma; for one state of ``rng`` both are the same function.
    """
    v = rng.normal(scale=alpha, size=(width, size))
    gamma = np.linalg.norm(v, axis=1) / alpha
    c = rng.choice([-1.0, 1.0], size=width)
    return Network(v=v, gamma=np.tile(gamma, (clients, 1)) if clients else gamma, c=c)


def normalize_preactivations(samples: FederatedInputs, v_KD: Floats) -> tuple[Floats, Floats]:
    """Return ``v.x / |v|_S`` and ``|v|_S`` of every sample and neuron, both [P, K]."""
    norm_NK = np.sqrt(((v_KD @ samples.covariance) * v_KD).sum(axis=-1))
    norm = norm_NK[samples.client]
    return samples.x @ v_KD.T / norm, norm


def compute_outputs(samples: FederatedInputs, network: Network) -> Floats:
    """Return f(x) of every sample [P], equation 1."""
    scaled, _ = normalize_preactivations(samples, network.v)
    result: Floats = np.maximum(network.gamma_of(samples) * scaled, 0) @ network.c / np.sqrt(len(network.c))
    return result


def compute_slopes(samples: FederatedInputs, network: Network) -> tuple[Floats, Floats, Floats, Floats]:
    """Compute the factors of every derivative, each [P, K] (appendix B.1).

    Returns:
        v.x / |v|_S and |v|_S, and the derivatives of the output by v.x / |v|_S and by the sample's gamma.

    """
    scaled, norm = normalize_preactivations(samples, network.v)
    gamma = network.gamma_of(samples)
    slope = (gamma * scaled > 0) * (network.c / np.sqrt(len(network.c)))
    return scaled, norm, slope * gamma, slope * scaled


def compute_jacobians(samples: FederatedInputs, network: Network) -> tuple[Floats, Floats]:
    """Compute the derivatives of every output by v, [P, K, D], and by the sample's gamma, [P, K] (appendix B.1)."""
    scaled, norm, by_scaled, by_gamma = compute_slopes(samples, network)
    moved = (network.v @ samples.covariance)[samples.client] / norm[..., None]
    aside = samples.x[:, None, :] - scaled[..., None] * moved  # the part of x that changes v.x / |v|_S
    return (by_scaled / norm)[..., None] * aside, by_gamma


@dataclass(frozen=True, kw_only=True, eq=False)
class Gram:
    """Gram matrices [P, P]: ``direction`` is V, ``magnitude`` is G; of a network that FedBN trains, V* and G*."""

    direction: Floats
    magnitude: Floats

    def evolution(self, alpha: float, *, weight: float = 1.0) -> Floats:
        """Return Lambda = V / alpha^2 + G; ``weight`` multiplies G (see :func:`descent_step`)."""
        return self.direction / alpha**2 + weight * self.magnitude


def gram_matrices(samples: FederatedInputs, network: Network, *, alpha: float = 1.0) -> Gram:
    """Compute V and G at finite width, equations 6 and 7; with local gamma V* and G*, equations 8 and 9."""
    by_v, by_gamma = compute_jacobians(samples, network)
    flat = by_v.reshape(len(by_v), -1)
    magnitude = by_gamma @ by_gamma.T
    local = block_diagonal(samples, magnitude) if network.has_local_gamma else magnitude
    return Gram(direction=alpha**2 * (flat @ flat.T), magnitude=local)


def block_diagonal(samples: FederatedInputs, full_PP: Floats) -> Floats:
    """Return FedBN's part of G: the blocks of pairs on one client (equation 9; appendix B.3 for the expectation)."""
    return np.where(samples.together, full_PP, 0.0)


def monte_carlo(samples: FederatedInputs, draws: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Estimate G_inf as the mean over ``draws`` neurons, with the standard error of each entry, both [P, P]."""
    if draws < 2:
        raise UsageError(f"draws={draws}: a standard error needs at least 2")
    count, size = samples.x.shape
    total, squares = np.zeros((2, count, count))
    for start in range(0, draws, _DRAWN_TOGETHER):
        drawn = min(_DRAWN_TOGETHER, draws - start)
        feature_PK = np.maximum(normalize_preactivations(samples, rng.normal(size=(drawn, size)))[0], 0)
        total += feature_PK @ feature_PK.T
        np.square(feature_PK, out=feature_PK)
        squares += feature_PK @ feature_PK.T
    mean = total / draws
    return mean, np.sqrt(np.maximum(squares / draws - mean**2, 0) / (draws - 1))


def smallest_eigenvalue(symmetric_PP: Floats) -> float:
    """Return lambda_min of a symmetric matrix."""
    return float(np.linalg.eigvalsh(symmetric_PP)[0])


def arc_cosine(product: Floats, square_x: Floats, square_y: Floats) -> tuple[Floats, Floats]:
    """Return ``E 1[w.x > 0] 1[w.y > 0]`` and ``E relu(w.x) relu(w.y)`` for Gaussian w, from x'Ay, x'Ax and y'Ay."""
    scale = np.sqrt(square_x * square_y)
    cosine = np.clip(product / scale, -1, 1)
    apart = np.pi - np.arccos(cosine)
    return apart / (2 * np.pi), scale * (np.sqrt(1 - cosine**2) + apart * cosine) / (2 * np.pi)


def isotropic_limit(samples: FederatedInputs) -> Gram:
    """Return V_inf and G_inf in closed form for ``gamma = |v| / alpha``, if every S is a multiple of the identity.

    V_inf is FedBN's too, at the start, where all clients have the same gamma. Raises ValueError for any other S.
    """
    size = samples.x.shape[1]
    square_N = np.trace(samples.covariance, axis1=1, axis2=2) / size
    if not np.allclose(samples.covariance, square_N[:, None, None] * np.eye(size), rtol=1e-12, atol=0):
        raise ValueError("the closed form holds where each client's covariance is a multiple of the identity")
    white = samples.x / np.sqrt(square_N)[samples.client][:, None]
    product, square = white @ white.T, np.square(white).sum(axis=1)
    both, magnitude = arc_cosine(product, square[:, None], square)
    return Gram(direction=product * both - magnitude / size, magnitude=magnitude / size)


def magnitude_limit(samples: FederatedInputs, nodes: int = 61) -> Floats:
    """Integrate G_inf [P, P] for any second moments, with ``nodes`` nodes per integral.

    For eigenvalues of S between e^-4 and e^4, errors are about 1e-12 of the largest entry with 61 nodes, 1e-8
    with 41 and 1e-5 with 25.
    """
    result = np.empty((len(samples.x), len(samples.x)))
    rows = [np.flatnonzero(samples.client == client) for client in range(len(samples.covariance))]
    for first, own in enumerate(rows):
        for second in range(first, len(rows)):
            moments = samples.covariance[first], samples.covariance[second]
            block = _block(samples.x[own], samples.x[rows[second]], *moments, nodes, one=first == second)
            result[np.ix_(own, rows[second])] = block
            result[np.ix_(rows[second], own)] = block.T
    return result


def _block(x_AD: Floats, y_BD: Floats, s: Floats, t: Floats, nodes: int, *, one: bool) -> Floats:
    """Integrate G_inf between the samples of two clients, or of a single one (``one``)."""
    mean_s, mean_t = np.trace(s) / len(s), np.trace(t) / len(t)
    line, weight = _rule(nodes)
    mixed, share = (np.zeros(1), np.full(1, np.pi / 2)) if one else (line, weight / (2 * np.cosh(line)))
    part = 1 / (1 + np.exp(-2 * mixed))
    eigen_WD, basis_WDD = np.linalg.eigh((1 - part)[:, None, None] * (s / mean_s) + part[:, None, None] * (t / mean_t))
    x_WAD, y_WBD = x_AD @ basis_WDD, y_BD @ basis_WDD
    result: Floats = np.zeros((len(x_AD), len(y_BD)))
    for points in np.array_split(np.arange(nodes), 1 + len(mixed) * nodes * result.size // _VALUES_TOGETHER):
        narrow_UWD = 1 / (1 + 2 * np.exp(line[points])[:, None, None] * np.maximum(eigen_WD, 0))
        x_square, y_square = (np.einsum("wpd,uwd->uwp", rows**2, narrow_UWD) for rows in (x_WAD, y_WBD))
        product = (x_WAD * narrow_UWD[:, :, None]) @ y_WBD.transpose(0, 2, 1)
        _, kernel = arc_cosine(product, x_square[..., None], y_square[:, :, None])
        part_UW = share * np.sqrt(narrow_UWD.prod(axis=-1)) * (weight * np.exp(line))[points, None]
        result += np.tensordot(part_UW, kernel, axes=2)
    result *= 2 / (np.pi * np.sqrt(mean_s * mean_t))
    return result


def _rule(nodes: int) -> tuple[Floats, Floats]:
    """Return nodes and weights on the whole line, for integrands that decay exponentially."""
    even, step = np.linspace(-np.arcsinh(_REACH), np.arcsinh(_REACH), nodes, retstep=True)
    return np.sinh(even), step * np.cosh(even)


def descent_step(
    samples: FederatedInputs, network: Network, residual: Floats, rate: float, *, weight: float = 1.0
) -> Network:
    """Return the network after one step of gradient descent on v and gamma from ``residual`` [P]; c is fixed.

    ``weight`` multiplies the step of gamma. With 1 all parameters descend the loss of all samples, as in equations 8
    and 9. For FedBN's Algorithm 1 on N clients it is N: a gamma that is not averaged takes the whole step of its
    client, whereas v takes the mean of N steps.
    """
    scaled, norm, by_scaled, slope_gamma = compute_slopes(samples, network)
    member_NP = np.equal.outer(np.arange(len(samples.covariance)), samples.client).astype(np.float64)
    pull_PK = residual[:, None] * by_scaled / norm
    along_NK = member_NP @ (pull_PK * scaled / norm)
    moved_NKD = network.v @ samples.covariance
    by_v = pull_PK.T @ samples.x - np.einsum("nk,nkd->kd", along_NK, moved_NKD)
    by_gamma = residual[:, None] * slope_gamma
    summed = member_NP @ by_gamma if network.has_local_gamma else by_gamma.sum(axis=0)
    return replace(network, v=network.v - rate * by_v, gamma=network.gamma - rate * weight * summed)


def descend(
    samples: FederatedInputs, network: Network, targets: Floats, *, rate: float, steps: int, weight: float = 1.0
) -> Floats:
    """Train the network; return residuals f - y before each of ``steps`` steps and after the last, [steps + 1, P]."""
    residuals = []
    for _ in range(steps):
        residuals.append(compute_outputs(samples, network) - targets)
        network = descent_step(samples, network, residuals[-1], rate, weight=weight)
    return np.stack([*residuals, compute_outputs(samples, network) - targets])


def linear_prediction(evolution: Floats, residual: Floats, *, rate: float, steps: int) -> Floats:
    """Predict the residuals of :func:`descend` for a constant Lambda, ``evolution`` [P, P]: [steps + 1, P]."""
    values, vectors = np.linalg.eigh(evolution)
    decay = (1 - rate * values) ** np.arange(steps + 1)[:, None]
    result: Floats = decay * (vectors.T @ residual) @ vectors.T
    return result


def guaranteed_residual(least: float, *, rate: float, steps: int) -> Floats:
    """Bound the remaining share of the squared residual by ``(1 - rate least / 2)^t`` (theorem 4.4, corollary 4.5).

    ``least`` is lambda_min of G_inf for FedAvg and of G*_inf for FedBN.
    """
    shares: Floats = np.float64(1 - rate * least / 2) ** np.arange(steps + 1)
    return shares
