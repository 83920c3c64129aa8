"""Checks FedBN's theory numerically: Gram matrices, corollary 4.6, lemma 4.3, predicted and measured training.

python examples/theory.py [--clients 4] [--samples 16] [--heterogeneity 2] [--alpha 10] [--picture theory.png]

A client's covariance has eigenvalues e^(h u), u uniform in [-1, 1], h --heterogeneity. --alpha is the initial standard
deviation of v: the larger, the more of the fit is done by gamma.

Li et al. 2021, arXiv:2102.07623, section 4 and appendix B. The network is equation 1, ``f(x) = m^-1/2 sum_k c_k
relu(gamma_k v_k.x / |v_k|_S)`` with ``|v|_S = sqrt(v' S v)`` and S the second moments of the inputs of the client that
has x. FedAvg has one gamma for all clients, FedBN one for each. Under gradient descent on ``1/2 sum_p (f_p - y_p)^2``
predictions move as ``df/dt = -Lambda (f - y)``, ``Lambda = V / alpha^2 + G``: equations 6 and 7 for FedAvg, 8 and 9 for
FedBN (V* and G*), computed as the squares of the Jacobians by v and gamma. Suffixes of arrays: P samples of all
clients, N clients, D inputs, K neurons (the paper's m).

G_inf, the expectation of G for v ~ N(0, I) (alpha cancels), needs no sampling. For w ~ N(0, A), ``k_A(x, y) =
E relu(w.x) relu(w.y)`` is the arc-cosine kernel of degree 1 (Cho and Saul 2009) in the product ``x' A y``. Equation 7
has ``|v|_S |v|_T`` in its denominator, S and T the second moments of the two samples' clients:

- S = s^2 I and T = t^2 I (clients that differ in scale only): the integrand depends only on the direction of v, which
  is independent of ``|v|^2`` with mean D, so ``G_inf = k_I(x, y) / (D s t)`` (isotropic_limit).
- Any S and T: with ``1 / (ab)^1/2 = 2/pi int dw / (a e^-w + b e^w)`` and ``1/q = int e^u exp(-q e^u) du``, ``G_inf =
  2/pi int int e^u det(A)^1/2 k_A(x, y) dw du``, ``A = (I + 2 e^u (e^-w S + e^w T))^-1``, because a Gaussian times the
  exponential is a narrower Gaussian (magnitude_limit). For one client, S = T, the integral over w is 1. The integrands
  are analytic and decay exponentially, so the trapezoidal rule in ``u = sinh(z)`` converges faster than any power of
  the number of nodes (double-exponential quadrature, Takahasi and Mori 1974).

Corollary 4.6: G* is the diagonal blocks of G, so lambda_min(G*) >= lambda_min(G). Of all of Lambda it is not true:
V / alpha^2 + G* has the smaller lambda_min where V is weak in a direction in which blocks of G add up. But FedBN as
Algorithm 1 runs it has N G* for G*, and N G* - G is positive semidefinite, because ``|a_1 + ... + a_N|^2 <=
N (|a_1|^2 + ... + |a_N|^2)``: each eigenvalue of its Lambda, in order of size, is at least FedAvg's.

Lemma 4.3: a sample's row of G belongs to the function relu(v.x) / |v|_S of v, and G is singular where such functions
are linearly dependent. Functions whose kinks, v.x = 0, differ are independent: the lemma. Parallel inputs share the
kink, and the result then depends on which clients hold them.

Training: with E = 1 and full batches, a round of FedAvg is a step of gradient descent (section 4.3). Clients that
minimize the mean square of their residuals with learning rate ``lr`` make steps of ``rate = 2 lr / P``.
"""

import argparse
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from fedshift.reproduce.toy import GAMMA, W, compare_with_mean, compute_toy
from fedshift.utils.random_streams import stream

Floats = NDArray[np.float64]
METHODS = ("fedavg", "fedbn, joint", "fedbn")
"""FedBN as equations 8 and 9 have it, every parameter descending the loss of all, and as Algorithm 1 runs it."""
ROUNDING = 1e-12  # of eigenvalues about 1
ANGLES = np.geomspace(np.pi / 2, 1e-3, 25)


class FederatedInputs(NamedTuple):
    """Inputs ``x`` [P, D] of all clients, each sample's ``client`` [P] in 0..N-1, and each client's S [N, D, D]."""

    x: Floats
    client: NDArray[np.int64]
    moments: Floats


class Network(NamedTuple):
    """``v`` [K, D], ``gamma`` (FedAvg [K], FedBN [N, K]) and signs ``c`` [K]."""

    v: Floats
    gamma: Floats
    c: Floats


def draw_inputs(
    clients: int, count: int, size: int, heterogeneity: float, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """Draw ``count`` inputs of each client [N, M, D], their contents z [N, M, D], and the covariances [N, D, D].

    An input is ``x = z r`` with content z ~ N(0, I), alike for all clients, and a symmetric r that differs by client.
    """
    content = rng.normal(size=(clients, count, size))
    moments, roots = map(np.stack, zip(*(_draw_moments(size, heterogeneity, rng) for _ in range(clients)), strict=True))
    return content @ roots, content, moments


def _draw_moments(size: int, heterogeneity: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw a random covariance and its symmetric root, both [D, D]."""
    basis = np.linalg.qr(rng.normal(size=(size, size)))[0]
    values = np.exp(heterogeneity * rng.uniform(-1, 1, size=size))
    return (basis * values) @ basis.T, (basis * np.sqrt(values)) @ basis.T


def measure_inputs(x_NMD: Floats) -> FederatedInputs:
    """Return the samples of N clients with S as a BatchNorm over a client's samples measures it: the mean of x x'."""
    clients, count, size = x_NMD.shape
    moments = np.einsum("nmd,nme->nde", x_NMD, x_NMD) / count
    return FederatedInputs(x_NMD.reshape(-1, size), np.repeat(np.arange(clients), count), moments)


def make_federation(args: argparse.Namespace) -> tuple[FederatedInputs, Floats]:
    """Draw the clients of ``args``, and targets ``cos(2 z.a)`` [P] for a random a of mean square length 1.

    Targets depend on content only, so covariances are independent of them, as assumption 4.1 requires.
    """
    rng = stream(args.seed, "theory data")
    x, content, _ = draw_inputs(args.clients, args.samples, args.dimension, args.heterogeneity, rng)
    direction = rng.normal(size=args.dimension) / np.sqrt(args.dimension)
    return measure_inputs(x), np.cos(2 * content.reshape(-1, args.dimension) @ direction)


def init_network(width: int, size: int, rng: np.random.Generator, alpha: float = 1.0) -> Network:
    """Draw FedAvg's network as the paper does: ``v_k ~ N(0, alpha^2 I)``, random signs, ``gamma_k = |v_k| / alpha``."""
    v = rng.normal(scale=alpha, size=(width, size))
    return Network(v, np.linalg.norm(v, axis=1) / alpha, rng.choice([-1.0, 1.0], size=width))


def normalize(inputs: FederatedInputs, v_KD: Floats) -> tuple[Floats, Floats]:
    """Return ``v.x / |v|_S`` and ``|v|_S`` of every sample and neuron, both [P, K]."""
    norm = np.sqrt(((v_KD @ inputs.moments) * v_KD).sum(axis=-1))[inputs.client]
    return inputs.x @ v_KD.T / norm, norm


def _select_gamma(inputs: FederatedInputs, network: Network) -> Floats:
    """Return the gamma of each sample's client, [P, K]; FedAvg's [K] as it is."""
    return network.gamma if network.gamma.ndim == 1 else network.gamma[inputs.client]


def compute_outputs(inputs: FederatedInputs, network: Network) -> Floats:
    """Return f(x) of every sample [P], equation 1."""
    hidden = np.maximum(_select_gamma(inputs, network) * normalize(inputs, network.v)[0], 0)
    return hidden @ network.c / np.sqrt(len(network.c))


def compute_slopes(inputs: FederatedInputs, network: Network) -> tuple[Floats, Floats, Floats, Floats]:
    """Return v.x / |v|_S, |v|_S, and the derivatives of f by v.x / |v|_S and by the sample's gamma, each [P, K]."""
    scaled, norm = normalize(inputs, network.v)
    gamma = _select_gamma(inputs, network)
    slope = (gamma * scaled > 0) * (network.c / np.sqrt(len(network.c)))
    return scaled, norm, slope * gamma, slope * scaled


def compute_jacobians(inputs: FederatedInputs, network: Network) -> tuple[Floats, Floats]:
    """Compute the derivatives of every output by v, [P, K, D], and by the sample's gamma, [P, K] (appendix B.1)."""
    scaled, norm, by_scaled, by_gamma = compute_slopes(inputs, network)
    moved = (network.v @ inputs.moments)[inputs.client] / norm[..., None]
    aside = inputs.x[:, None, :] - scaled[..., None] * moved  # the component of x that changes v.x / |v|_S
    return (by_scaled / norm)[..., None] * aside, by_gamma


def gram_matrices(inputs: FederatedInputs, network: Network) -> tuple[Floats, Floats]:
    """Compute V / alpha^2 and G [P, P] (equations 6 and 7), or V* / alpha^2 and G* of FedBN's network (8 and 9)."""
    by_v, by_gamma = compute_jacobians(inputs, network)
    flat, magnitude = by_v.reshape(len(by_v), -1), by_gamma @ by_gamma.T
    return flat @ flat.T, magnitude if network.gamma.ndim == 1 else keep_blocks(inputs, magnitude)


def keep_blocks(inputs: FederatedInputs, full_PP: Floats) -> Floats:
    """Return FedBN's G* of G: the blocks of pairs on one client (equation 9; appendix B.3 for the expectation)."""
    return np.where(np.equal.outer(inputs.client, inputs.client), full_PP, 0.0)


def smallest_eigenvalue(symmetric: Floats) -> float:
    """Return lambda_min of a symmetric matrix."""
    return float(np.linalg.eigvalsh(symmetric)[0])


def smallest_eigenvalues(inputs: FederatedInputs, full: Floats) -> tuple[float, float]:
    """Return lambda_min of G, which is ``full``, and of its G*."""
    return smallest_eigenvalue(full), smallest_eigenvalue(keep_blocks(inputs, full))


def arc_cosine(product: Floats, square_x: Floats, square_y: Floats) -> tuple[Floats, Floats]:
    """Return ``E 1[w.x > 0] 1[w.y > 0]`` and ``E relu(w.x) relu(w.y)`` for Gaussian w, from x'Ay, x'Ax and y'Ay."""
    scale = np.sqrt(square_x * square_y)
    cosine = np.clip(product / scale, -1, 1)
    rest = np.pi - np.arccos(cosine)
    return rest / (2 * np.pi), scale * (np.sqrt(1 - cosine**2) + rest * cosine) / (2 * np.pi)


def isotropic_limit(inputs: FederatedInputs) -> tuple[Floats, Floats]:
    """Return V_inf and G_inf [P, P] in closed form, where every S is a multiple of the identity.

    V_inf is FedBN's too, at the start, where all clients have the same gamma. Raises ValueError for any other S.
    """
    size = inputs.x.shape[1]
    square_N = np.trace(inputs.moments, axis1=1, axis2=2) / size
    if not np.allclose(inputs.moments, square_N[:, None, None] * np.eye(size), rtol=1e-12, atol=0):
        raise ValueError("the closed form holds where each client's covariance is a multiple of the identity")
    white = inputs.x / np.sqrt(square_N)[inputs.client][:, None]
    product, square = white @ white.T, np.square(white).sum(axis=1)
    both, magnitude = arc_cosine(product, square[:, None], square)
    return product * both - magnitude / size, magnitude / size


def magnitude_limit(inputs: FederatedInputs, nodes: int = 61) -> Floats:
    """Integrate G_inf [P, P] for any second moments, with ``nodes`` nodes per integral.

    For eigenvalues of S between e^-4 and e^4, errors are about 1e-12 of the largest entry with 61 nodes, 1e-8
    with 41 and 1e-5 with 25.
    """
    limit = np.empty((len(inputs.x), len(inputs.x)))
    rows = [np.flatnonzero(inputs.client == client) for client in range(len(inputs.moments))]
    for first in range(len(rows)):
        for second in range(first, len(rows)):
            pairs = np.ix_(rows[first], rows[second])
            limit[pairs] = _integrate(inputs, first, second, nodes)
            limit[pairs[1].T, pairs[0].T] = limit[pairs].T
    return limit


def _integrate(inputs: FederatedInputs, first: int, second: int, nodes: int) -> Floats:
    """Integrate G_inf between the samples of two clients, or of a single one. Suffixes: nodes W of w, U of u."""
    x, y = (inputs.x[inputs.client == client] for client in (first, second))
    mean_s, mean_t = (np.trace(inputs.moments[client]) / x.shape[1] for client in (first, second))
    even, step = np.linspace(-np.arcsinh(36), np.arcsinh(36), nodes, retstep=True)  # e^-36 is the rounding of float64
    line, weight = np.sinh(even), step * np.cosh(even)
    mixed, share = (line, weight / (2 * np.cosh(line))) if first != second else (np.zeros(1), np.full(1, np.pi / 2))
    mix = (1 / (1 + np.exp(-2 * mixed)))[:, None, None]
    moments = (1 - mix) * (inputs.moments[first] / mean_s) + mix * (inputs.moments[second] / mean_t)
    eigen_WD, basis_WDD = np.linalg.eigh(moments)
    x_WPD, y_WPD = x @ basis_WDD, y @ basis_WDD
    total: Floats = np.zeros((len(x), len(y)))
    for points in np.array_split(np.arange(nodes), 1 + len(mixed) * nodes * total.size // 100_000):  # bounds the memory
        narrow_UWD = 1 / (1 + 2 * np.exp(line[points])[:, None, None] * np.maximum(eigen_WD, 0))
        x_square, y_square = (np.einsum("wpd,uwd->uwp", rows**2, narrow_UWD) for rows in (x_WPD, y_WPD))
        product = (x_WPD * narrow_UWD[:, :, None]) @ y_WPD.transpose(0, 2, 1)
        _, kernel = arc_cosine(product, x_square[..., None], y_square[:, :, None])
        weight_UW = share * np.sqrt(narrow_UWD.prod(axis=-1)) * (weight * np.exp(line))[points, None]
        total += np.tensordot(weight_UW, kernel, axes=2)
    return total * (2 / (np.pi * np.sqrt(mean_s * mean_t)))


def try_corollary(draws: int, heterogeneity: float, seed: int) -> Floats:
    """Return FedAvg's and FedBN's lambda_min in random federations, [draws, 3, 2].

    The three: of G_inf and G*_inf; of Lambda of a network of 256 neurons at its start, alpha = 1, by equations 6 to 9;
    the same with N G* for G*. Each federation has 2 to 4 clients with 2 to 4 samples in 3 to 6 dimensions, and a
    heterogeneity uniform between 0 and twice ``heterogeneity``, at most 8.
    """
    rows = []
    for number in range(draws):
        rng = stream(seed, "theory corollary", number)
        clients, count, size = int(rng.integers(2, 5)), int(rng.integers(2, 5)), int(rng.integers(3, 7))
        x, _, moments = draw_inputs(clients, count, size, min(2 * heterogeneity, 8.0) * rng.uniform(), rng)
        inputs = FederatedInputs(x.reshape(-1, size), np.repeat(np.arange(clients), count), moments)
        limit = smallest_eigenvalues(inputs, magnitude_limit(inputs, nodes=25))
        direction, full = gram_matrices(inputs, init_network(256, size, rng))
        local = keep_blocks(inputs, full)
        whole, joint, run = (smallest_eigenvalue(direction + magnitude) for magnitude in (full, local, clients * local))
        rows.append((limit, (whole, joint), (whole, run)))
    return np.array(rows)


def _draw_lemma_inputs(rng: np.random.Generator) -> tuple[Floats, Floats, Floats, Floats]:
    """Draw two clients' three inputs in four dimensions, and covariances: proportional ones and ones of other shape."""
    first, second = rng.normal(size=(2, 3, 4))
    shaped = np.stack([_draw_moments(4, 2.0, rng)[0] for _ in range(2)])
    return first, second, np.stack([np.eye(4), 4 * np.eye(4)]), shaped


def _join_clients(first: Floats, second: Floats, moments: Floats) -> FederatedInputs:
    return FederatedInputs(np.concatenate([first, second]), np.repeat([0, 1], [len(first), len(second)]), moments)


def try_lemma(seed: int) -> dict[str, tuple[float, float]]:
    """Return lambda_min of G_inf and G*_inf for inputs of two clients that are parallel in one way or another."""
    rng = stream(seed, "theory lemma")
    first, second, scaled, shaped = _draw_lemma_inputs(rng)
    x, pairs = first[:1], rng.normal(size=(5, 4))
    cases = {
        "no two inputs parallel": (first, second, shaped),
        "x and 2x on one client": (np.concatenate([first, 2 * x]), second, shaped),
        "x and 2x on two clients, S proportional": (first, np.concatenate([second, 2 * x]), scaled),
        "x and 2x on two clients, S of other shape": (first, np.concatenate([second, 2 * x]), shaped),
        "x and -x on one client": (np.concatenate([first, -x]), second, shaped),
        "5 pairs x and -x on one client": (np.concatenate([pairs, -pairs]), second, shaped),
    }
    federations = {name: _join_clients(*case) for name, case in cases.items()}
    return {name: smallest_eigenvalues(inputs, magnitude_limit(inputs)) for name, inputs in federations.items()}


def close_angle(seed: int, angles: Floats) -> Floats:
    """Turn an input of one client to ``angles`` [A] from another client's (radians); return lambda_min [A, 3].

    The three: of G_inf and of G*_inf where the clients' covariances are proportional; of G_inf where they are not.
    """
    rng = stream(seed, "theory closing")
    first, second, scaled, shaped = _draw_lemma_inputs(rng)
    x = first[0] / np.linalg.norm(first[0])
    aside = rng.normal(size=4)
    aside -= (aside @ x) * x
    aside /= np.linalg.norm(aside)
    rows = []
    for angle in angles:
        turned = np.concatenate([second, [np.cos(angle) * x + np.sin(angle) * aside]])
        alike = _join_clients(first, turned, scaled)
        different = smallest_eigenvalue(magnitude_limit(_join_clients(first, turned, shaped)))
        rows.append((*smallest_eigenvalues(alike, isotropic_limit(alike)[1]), different))
    return np.array(rows)


def descent_step(
    inputs: FederatedInputs, network: Network, residual: Floats, rate: float, weight: float = 1.0
) -> Network:
    """Return the network after one step of gradient descent on v and gamma from ``residual`` [P]; c is fixed.

    ``weight`` multiplies the step of gamma. With 1 all parameters descend the loss of all samples, as in equations 8
    and 9. For FedBN's Algorithm 1 on N clients it is N: a gamma that is not averaged takes the whole step of its
    client, whereas v takes the mean of N steps.
    """
    scaled, norm, by_scaled, slope_gamma = compute_slopes(inputs, network)
    member_NP = np.equal.outer(np.arange(len(inputs.moments)), inputs.client).astype(np.float64)
    pull_PK = residual[:, None] * by_scaled / norm
    along_NK = member_NP @ (pull_PK * scaled / norm)
    by_v = pull_PK.T @ inputs.x - np.einsum("nk,nkd->kd", along_NK, network.v @ inputs.moments)
    by_gamma = residual[:, None] * slope_gamma
    summed = by_gamma.sum(axis=0) if network.gamma.ndim == 1 else member_NP @ by_gamma
    return network._replace(v=network.v - rate * by_v, gamma=network.gamma - rate * weight * summed)


def descend(
    inputs: FederatedInputs, network: Network, targets: Floats, rate: float, steps: int, weight: float = 1.0
) -> Floats:
    """Train the network; return residuals f - y before each of ``steps`` steps and after the last, [steps + 1, P]."""
    residuals = [compute_outputs(inputs, network) - targets]
    for _ in range(steps):
        network = descent_step(inputs, network, residuals[-1], rate, weight)
        residuals.append(compute_outputs(inputs, network) - targets)
    return np.stack(residuals)


def predict_residuals(evolution: Floats, residual: Floats, rate: float, steps: int) -> Floats:
    """Predict the residuals of descend for a constant Lambda, ``evolution`` [P, P]: [steps + 1, P].

    Residuals follow ``r <- (I - rate Lambda) r``: the component along an eigenvector decays by its eigenvalue.
    """
    values, vectors = np.linalg.eigh(evolution)
    decay = (1 - rate * values) ** np.arange(steps + 1)[:, None]
    return decay * (vectors.T @ residual) @ vectors.T


class Course(NamedTuple):
    """One method's training: G and Lambda at the start [P, P], rate, and residuals [steps + 1, P]."""

    magnitude: Floats
    evolution: Floats
    rate: float
    measured: Floats
    predicted: Floats


def share_of_start(residuals: Floats) -> Floats:
    """Return the squared residual before each step as a share of the initial one, [steps + 1]."""
    squares = np.square(residuals).sum(axis=1)
    return squares / squares[0]


def largest_gap(course: Course) -> float:
    """Return the largest distance of measured residuals from predicted ones, relative to the initial residual."""
    gaps = np.linalg.norm(course.measured - course.predicted, axis=1)
    return float(gaps.max() / np.linalg.norm(course.measured[0]))


def train_methods(inputs: FederatedInputs, targets: Floats, network: Network, steps: int) -> dict[str, Course]:
    """Train all methods from ``network`` at one rate: 1 over the largest eigenvalue of any of their Lambdas."""
    clients = len(inputs.moments)
    local = network._replace(gamma=np.tile(network.gamma, (clients, 1)))
    starts = dict(zip(METHODS, ((network, 1), (local, 1), (local, clients)), strict=True))
    grams = {method: gram_matrices(inputs, start) for method, (start, _) in starts.items()}
    evolutions = {method: direction + starts[method][1] * magnitude for method, (direction, magnitude) in grams.items()}
    rate = 1 / max(float(np.linalg.eigvalsh(evolution)[-1]) for evolution in evolutions.values())
    courses = {}
    for method, (start, weight) in starts.items():
        measured = descend(inputs, start, targets, rate, steps, weight)
        predicted = predict_residuals(evolutions[method], measured[0], rate, steps)
        courses[method] = Course(grams[method][1], evolutions[method], rate, measured, predicted)
    return courses


def count_steps(shares: Floats, least: float) -> str:
    """Return the steps until ``least`` remains; "-" where there were too few."""
    return str(np.argmax(shares <= least)) if (shares <= least).any() else "-"


def format_eigenvalue(value: float) -> str:
    """Return ``value`` with five places, a small one as a power of ten, a rounding error as 0."""
    return "0" if abs(value) < ROUNDING else f"{value:.5f}" if value >= 1e-4 else f"{value:.1e}"


def print_table(title: str, *rows: tuple[str, ...]) -> None:
    """Print aligned ``rows``, the first of them the header."""
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print(name.ljust(widths[0]), *aligned, sep="  ")


def print_limits(full: Floats, local: Floats) -> None:
    """Print the spectra of G_inf (``full``) and G*_inf (``local``)."""
    rows = [("matrix", "lambda_min", "lambda_max", "max / min")]
    for name, matrix in (("G_inf, FedAvg", full), ("G*_inf, FedBN", local)):
        least, *_, most = np.linalg.eigvalsh(matrix)
        ratio = f"{most / least:.0f}" if least > ROUNDING else "-"
        rows.append((name, format_eigenvalue(least), f"{most:.3f}", ratio))
    print_table("Expected Gram matrices", *rows)


def print_corollary(pairs: Floats) -> None:
    """Print in how many federations FedBN's lambda_min is smaller by more than rounding, and the ratios."""
    rows = [("matrix", "FedBN smaller", "FedBN / FedAvg, least", "median")]
    for number, name in enumerate(("G_inf (the corollary)", "V + G*, all on one loss", "V + N G*, Algorithm 1")):
        full, local = pairs[:, number].T
        ratio = local / full
        rows.append((name, str(np.sum(local < full - ROUNDING)), f"{ratio.min():.4f}", f"{np.median(ratio):.3f}"))
    print_table(f"Corollary 4.6: lambda_min in {len(pairs):,} random federations", *rows)


def print_courses(courses: dict[str, Course], leasts: tuple[float, float]) -> None:
    """Print remaining shares and steps to a share, and if the bound by G_inf's and G*_inf's ``leasts`` is kept."""
    steps = len(courses["fedbn"].measured) - 1
    rows = [("method", "lambda_min", "after 10", f"after {steps}", "to 0.1", "to 0.01", "to 0.001", "bound")]
    for (method, course), least in zip(courses.items(), (*leasts, leasts[1]), strict=True):
        measured, predicted = share_of_start(course.measured), share_of_start(course.predicted)
        left = (f"{measured[step]:.4f} ({predicted[step]:.4f})" for step in (10, steps))
        counts = (f"{count_steps(measured, share)} ({count_steps(predicted, share)})" for share in (0.1, 0.01, 0.001))
        kept = np.all(measured <= (1 - course.rate * least / 2) ** np.arange(steps + 1) * (1 + ROUNDING))
        cells = format_eigenvalue(smallest_eigenvalue(course.evolution)), *left, *counts, "kept" if kept else "broken"
        rows.append((method, *cells))
    print_table(
        "Share of the squared residual, and steps to a share: measured (predicted from Lambda at the start)", *rows
    )


def print_widths(inputs: FederatedInputs, full: Floats, trained: dict[int, dict[str, Course]]) -> None:
    """Print the distance of G from ``full``, its limit, and of residuals from their prediction, by network."""
    rows = [("neurons", "G from its limit", "lambda_min G", "G*", *METHODS)]
    for neurons, courses in trained.items():
        magnitude = courses["fedavg"].magnitude
        distance = np.linalg.norm(magnitude - full) / np.linalg.norm(full)
        least = map(format_eigenvalue, smallest_eigenvalues(inputs, magnitude))
        rows.append(
            (str(neurons), f"{distance:.4f}", *least, *(f"{largest_gap(course):.1e}" for course in courses.values()))
        )
    print_table("Networks at their start against the limit; largest gap of the residual from its prediction", *rows)


def print_toy(seed: int) -> None:
    """Print the toy example of figures 1 and 2, whose pictures ``fedshift reproduce`` draws."""
    toy = compute_toy(seed)
    print("\nToy example: best values of the clients, and the clients' losses at the mean of these")
    for name, grid, losses in (("w", W, toy.raw), ("w, normalized", W, toy.normalized), ("gamma", GAMMA, toy.scales)):
        (one, two), _, (left, right) = compare_with_mean(grid, losses)
        least = " and ".join(f"{loss:.3f}" for loss in losses.min(axis=1))
        print(f"{name}: {one:.2f} and {two:.2f}; losses {least} there, {left:.3f} and {right:.3f} at the mean")


def draw(path: str, corollary: Floats, closing: Floats, courses: dict[str, Course]) -> None:
    """Draw corollary 4.6, an input that turns toward another client's, and training; save as ``path``."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    left.loglog(*corollary[:, 0].T, ".", markersize=2, label=f"{len(corollary):,} random federations")
    left.axline((0.01, 0.01), (0.1, 0.1), color="black", linewidth=0.8, label="equal")
    left.set(xlabel="lambda_min of G_inf (FedAvg)", ylabel="lambda_min of G*_inf (FedBN)")
    for values, name in zip(closing.T, ("FedAvg, S proportional", "FedBN", "FedAvg, S of other shape"), strict=True):
        middle.loglog(ANGLES, values, label=name)
    middle.set(xlabel="angle to another client's input (radians)", ylabel="lambda_min")
    for method, course in courses.items():
        (line,) = right.semilogy(share_of_start(course.predicted), linewidth=1, label=f"{method}, predicted")
        right.semilogy(share_of_start(course.measured), "o", markersize=3, markevery=25, color=line.get_color())
    right.set(xlabel="step (marks: measured)", ylabel="squared residual, share of the start")
    for axes in (left, middle, right):
        axes.legend(fontsize="small")
    figure.savefig(path)
    plt.close(figure)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line; end with an error where one is out of range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture")
    limits = {
        "clients": (4, 2, np.inf), "samples": (16, 2, np.inf), "dimension": (10, 2, np.inf), "seed": (0, 0, np.inf),
        "width": (1024, 16, np.inf), "steps": (200, 10, np.inf), "draws": (1000, 1, np.inf),
        "heterogeneity": (2.0, 0, 8), "alpha": (10.0, 1e-6, 1e6),
    }  # fmt: skip
    for name, (default, _, _) in limits.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    for name, (_, least, most) in limits.items():
        if not least <= getattr(args, name) <= most:
            parser.error(f"--{name} {getattr(args, name)}: must be from {least:g} to {most:g}")
    return args


def main() -> None:
    """Run every check and print it."""
    args = parse_options()
    inputs, targets = make_federation(args)
    full = magnitude_limit(inputs)
    print_limits(full, keep_blocks(inputs, full))
    corollary = try_corollary(args.draws, args.heterogeneity, args.seed)
    print_corollary(corollary)
    cases = [(name, *map(format_eigenvalue, leasts)) for name, leasts in try_lemma(args.seed).items()]
    print_table("Lemma 4.3, which assumes the first row: lambda_min", ("inputs", "G_inf", "G*_inf"), *cases)
    trained = {}
    for neurons in (args.width // 16, args.width // 4, args.width, 4 * args.width):
        start = init_network(neurons, args.dimension, stream(args.seed, "theory start", neurons), args.alpha)
        trained[neurons] = train_methods(inputs, targets, start, args.steps)
    print_widths(inputs, full, trained)
    print_courses(trained[args.width], smallest_eigenvalues(inputs, full))
    print_toy(args.seed)
    if args.picture:
        draw(args.picture, corollary, close_angle(args.seed, ANGLES), trained[args.width])


if __name__ == "__main__":
    main()
