"""G_inf of FedBN's theory without sampling: arc-cosine kernels, in closed form or integrated.

For w ~ N(0, A), ``k_A(x, y) = E relu(w.x) relu(w.y)`` is the arc-cosine kernel of degree 1 (Cho and Saul 2009) in the
product ``x' A y``. Equation 7's expectation over v ~ N(0, I), alpha cancels from it, has ``|v|_S |v|_T`` below it, S
and T being the second moments of the two samples' clients:

- S = s^2 I and T = t^2 I, clients that differ in scale alone: only the direction of v matters, on which ``|v|^2``, of
  mean D, does not depend. So ``G_inf = k_I(x, y) / (D s t)``: closed form (:func:`isotropic_limit`).
- Any S and T: with ``1 / (ab)^1/2 = 2/pi int dw / (a e^-w + b e^w)`` and ``1/q = int e^u exp(-q e^u) du``,
  ``G_inf = 2/pi int int e^u det(A)^1/2 k_A(x, y) dw du``, ``A = (I + 2 e^u (e^-w S + e^w T))^-1``: a Gaussian times the
  exponential is a narrower Gaussian (:func:`magnitude_limit`). For one client, S = T, the integral over w is 1.

The integrands are analytic and fall off exponentially, so that the trapezoidal rule in ``u = sinh(z)`` converges faster
than any power of the number of nodes (double-exponential quadrature, Takahasi and Mori 1974).
"""

from __future__ import annotations

import numpy as np

from .ntk import FederatedInputs, Floats, Gram

_REACH = 36.0  # exp(-36) is the rounding of float64
_TOGETHER = 100_000  # kernel values in memory at once


def arc_cosine(product: Floats, square_x: Floats, square_y: Floats) -> tuple[Floats, Floats]:
    """``E 1[w.x > 0] 1[w.y > 0]`` and ``E relu(w.x) relu(w.y)`` for Gaussian w, from x'Ay, x'Ax and y'Ay."""
    scale = np.sqrt(square_x * square_y)
    cosine = np.clip(product / scale, -1, 1)
    apart = np.pi - np.arccos(cosine)
    return apart / (2 * np.pi), scale * (np.sqrt(1 - cosine**2) + apart * cosine) / (2 * np.pi)


def isotropic_limit(samples: FederatedInputs) -> Gram:
    """V_inf and G_inf in closed form where every client's S is a multiple of the identity, for ``gamma = |v| / alpha``.

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
    """G_inf [P, P] for any second moments, by quadrature with ``nodes`` nodes an integral.

    Where the eigenvalues of S lie between e^-4 and e^4, errors are about 1e-12 of the largest entry with 61 nodes, 1e-8
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
    """G_inf between two clients' samples; ``one``: they are one client."""
    mean_s, mean_t = np.trace(s) / len(s), np.trace(t) / len(t)
    line, weight = _rule(nodes)
    mixed, share = (np.zeros(1), np.full(1, np.pi / 2)) if one else (line, weight / (2 * np.cosh(line)))
    part = 1 / (1 + np.exp(-2 * mixed))
    eigen_WD, basis_WDD = np.linalg.eigh((1 - part)[:, None, None] * (s / mean_s) + part[:, None, None] * (t / mean_t))
    x_WAD, y_WBD = x_AD @ basis_WDD, y_BD @ basis_WDD
    result: Floats = np.zeros((len(x_AD), len(y_BD)))
    for points in np.array_split(np.arange(nodes), 1 + len(mixed) * nodes * result.size // _TOGETHER):
        narrow_UWD = 1 / (1 + 2 * np.exp(line[points])[:, None, None] * np.maximum(eigen_WD, 0))
        x_square, y_square = (np.einsum("wpd,uwd->uwp", rows**2, narrow_UWD) for rows in (x_WAD, y_WBD))
        product = (x_WAD * narrow_UWD[:, :, None]) @ y_WBD.transpose(0, 2, 1)
        _, kernel = arc_cosine(product, x_square[..., None], y_square[:, :, None])
        part_UW = share * np.sqrt(narrow_UWD.prod(axis=-1)) * (weight * np.exp(line))[points, None]
        result += np.tensordot(part_UW, kernel, axes=2)
    result *= 2 / (np.pi * np.sqrt(mean_s * mean_t))
    return result


def _rule(nodes: int) -> tuple[Floats, Floats]:
    """Nodes and weights on the whole line, for integrands that fall off exponentially."""
    even, step = np.linspace(-np.arcsinh(_REACH), np.arcsinh(_REACH), nodes, retstep=True)
    return np.sinh(even), step * np.cosh(even)
