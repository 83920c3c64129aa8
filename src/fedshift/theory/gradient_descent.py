"""Gradient descent on the network against what its Gram matrices at the start predict, for FedAvg and FedBN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..utils.random_streams import stream
from .convergence import descend, guaranteed_residual, linear_prediction
from .infinite_width import InfiniteWidthLimits
from .ntk import FederatedInputs, Floats, Network, block_diagonal, gram_matrices, init_network, smallest_eigenvalue
from .settings import TheorySettings

METHODS = ("fedavg", "fedbn, joint", "fedbn")
"""FedBN as equations 8 and 9 have it, every parameter descending the loss of all, and as Algorithm 1 runs it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingCourse:
    """One method's squared residual before each step, as a share of that at the start, [steps + 1].

    ``least``: lambda_min of Lambda at the start. ``guarantee``: theorem 4.4's or corollary 4.5's bound.
    """

    method: str
    least: float
    measured: Floats
    predicted: Floats
    guarantee: Floats

    def steps_to(self, share: float) -> tuple[int | None, int | None]:
        """Steps after which ``share`` is left, measured and predicted; None where that takes more than there were."""
        return _first_step(self.measured <= share), _first_step(self.predicted <= share)


@dataclass(frozen=True, kw_only=True)
class WidthComparison:
    """A network of ``neurons``: how far G is from G_inf (Frobenius, relative), lambda_min of G and of G*.

    ``error`` by method: largest distance of the measured residual from the predicted, relative to the residual at the
    start.
    """

    neurons: int
    distance: float
    full: float
    local: float
    error: dict[str, float]


def compare_training(
    setting: TheorySettings, samples: FederatedInputs, targets: Floats, limits: InfiniteWidthLimits
) -> tuple[tuple[WidthComparison, ...], tuple[TrainingCourse, ...]]:
    """Networks of a sixteenth, a quarter, the whole of and four times ``setting.width``, and the courses at that width.

    All methods have the same start and, at each width, one rate: 1 over the largest eigenvalue of any of their Lambdas.
    """
    bounds = dict(zip(METHODS, (limits.least[0], limits.least[1], limits.least[1]), strict=True))
    made, courses = [], []
    for neurons in (setting.width // 16, setting.width // 4, setting.width, 4 * setting.width):
        starts = {method: _init_network(setting, samples, method, neurons) for method in METHODS}
        rate = 1 / max(float(np.linalg.eigvalsh(evolution)[-1]) for _, _, evolution in starts.values())
        error = {}
        for method, (network, weight, evolution) in starts.items():
            measured = descend(samples, network, targets, rate=rate, steps=setting.steps, weight=weight)
            predicted = linear_prediction(evolution, measured[0], rate=rate, steps=setting.steps)
            apart = np.linalg.norm(measured - predicted, axis=1)
            error[method] = float(apart.max() / np.linalg.norm(measured[0]))
            if neurons == setting.width:
                guarantee = guaranteed_residual(bounds[method], rate=rate, steps=setting.steps)
                shares = {
                    "measured": _residual_share(measured),
                    "predicted": _residual_share(predicted),
                    "guarantee": guarantee,
                }
                courses.append(TrainingCourse(method=method, least=smallest_eigenvalue(evolution), **shares))
        magnitude = gram_matrices(samples, starts["fedavg"][0], alpha=setting.alpha).magnitude
        made.append(
            WidthComparison(
                neurons=neurons,
                distance=float(np.linalg.norm(magnitude - limits.full) / np.linalg.norm(limits.full)),
                full=smallest_eigenvalue(magnitude),
                local=smallest_eigenvalue(block_diagonal(samples, magnitude)),
                error=error,
            )
        )
    return tuple(made), tuple(courses)


def _init_network(
    setting: TheorySettings, samples: FederatedInputs, method: str, neurons: int
) -> tuple[Network, float, Floats]:
    """The network at its start, the weight of gamma's step, and Lambda."""
    rng, clients = stream(setting.seed, "theory start", neurons), 0 if method == "fedavg" else setting.clients
    network = init_network(neurons, setting.dimension, rng, alpha=setting.alpha, clients=clients)
    weight = float(setting.clients) if method == "fedbn" else 1.0
    return network, weight, gram_matrices(samples, network, alpha=setting.alpha).evolution(setting.alpha, weight=weight)


def _residual_share(residuals: Floats) -> Floats:
    squares = np.square(residuals).sum(axis=1)
    shares: Floats = squares / squares[0]
    return shares


def _first_step(reached: NDArray[np.bool_]) -> int | None:
    return int(np.argmax(reached)) if reached.any() else None
