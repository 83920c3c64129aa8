"""What is asked of ``fedshift theory``, and clients whose inputs differ in their covariance alone.

A client's input is ``x = z r`` with content z ~ N(0, I), the same for all clients, and a symmetric r of its own, its
look. Targets depend on content alone, so that covariances are independent of them, as assumption 4.1 wants.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ..utils.errors import UsageError
from ..utils.random_streams import stream
from .ntk import FederatedInputs, Floats, measure_inputs

_LARGEST = 25_000_000  # a Jacobian of the widest network is four times as many numbers, 0.8 GB


@dataclass(frozen=True, kw_only=True)
class TheorySettings:
    """``heterogeneity`` h: a client's covariance has eigenvalues e^(h u), u uniform in [-1, 1]; 0: all clients alike.

    ``alpha``: standard deviation of v at the start; the larger, the more of the fitting is done by gamma.
    ``draws``: random federations for corollary 4.6. ``monte_carlo``: neurons of the sampled G_inf. Raises
    :class:`UsageError` for what cannot be computed in numbers or memory.
    """

    clients: int = 4
    samples: int = 16
    dimension: int = 10
    width: int = 1024
    heterogeneity: float = 2.0
    alpha: float = 10.0
    seed: int = 0
    steps: int = 200
    draws: int = 1000
    monte_carlo: int = 1_000_000

    def __post_init__(self) -> None:
        least = {"clients": 2, "samples": 2, "dimension": 2, "width": 16, "steps": 1, "draws": 1, "monte_carlo": 2}
        for field in fields(self):
            value = getattr(self, field.name)
            if value < least.get(field.name, 0):
                flag = field.name.replace("_", "-")
                raise UsageError(f"{flag}={value}: must be at least {least.get(field.name, 0)}")
        if not 1e-6 <= self.alpha <= 1e6:
            raise UsageError(f"alpha={self.alpha:g}: must lie between 0.000001 and 1000000")
        if not self.heterogeneity <= 8:
            raise UsageError(
                f"heterogeneity={self.heterogeneity:g}: must lie between 0 and 8, a factor of 9 million in variance"
            )
        if self.clients * self.samples * self.dimension * self.width > _LARGEST:
            raise UsageError(
                f"clients={self.clients}, samples={self.samples}, dimension={self.dimension}, width={self.width}: "
                f"their product must be at most {_LARGEST:,}, for want of memory"
            )


def draw_covariance(size: int, heterogeneity: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """A random covariance and its symmetric root, both [D, D]."""
    basis = np.linalg.qr(rng.normal(size=(size, size)))[0]
    values = np.exp(heterogeneity * rng.uniform(-1, 1, size=size))
    return (basis * values) @ basis.T, (basis * np.sqrt(values)) @ basis.T


def draw_inputs(
    clients: int, count: int, size: int, heterogeneity: float, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """``count`` inputs of each client [N, M, D], their contents z [N, M, D], and the clients' covariances [N, D, D]."""
    content = rng.normal(size=(clients, count, size))
    moments, roots = map(
        np.stack, zip(*(draw_covariance(size, heterogeneity, rng) for _ in range(clients)), strict=True)
    )
    return content @ roots, content, moments


def make_clients(setting: TheorySettings) -> tuple[FederatedInputs, Floats]:
    """The federation of ``setting``, and targets ``cos(2 z.a)`` [P] for a random a of mean square length 1.

    S is what a BatchNorm measures on the samples, so that a network with ``ScaleNorm`` is the theory's.
    """
    rng = stream(setting.seed, "theory data")
    size = setting.dimension
    x, content, _ = draw_inputs(setting.clients, setting.samples, size, setting.heterogeneity, rng)
    return measure_inputs(x), np.cos(2 * content.reshape(-1, size) @ rng.normal(size=size) / np.sqrt(size))
