"""Numerical checks of FedBN's theory: settings, limits, corollary 4.6, lemma 4.3, training, and the toy example.

Li et al. 2021, arXiv:2102.07623, section 4 and figures 1 and 2. A client's input is ``x = z r`` with content z ~ N(0,
I), the same for all clients, and a symmetric r that differs by client: its appearance. Targets depend on content only,
so covariances are independent of them, as assumption 4.1 requires.

Corollary 4.6. G* is the diagonal blocks of G, so lambda_min(G*) >= lambda_min(G). The same question can be asked of
all of ``Lambda = V / alpha^2 + G``, which the corollary leaves out:

- ``V / alpha^2 + G*`` can have the smaller lambda_min, where V is weak in a direction in which blocks of G add up.
- N G* - G is positive semidefinite, because ``|a_1 + ... + a_N|^2 <= N (|a_1|^2 + ... + |a_N|^2)``. FedBN as Algorithm
  1 runs it has N G* in place of G* (:func:`~fedshift.theory.ntk.descent_step`): each eigenvalue of its Lambda, in order
  of size, is at least FedAvg's.

Lemma 4.3. A sample's row of G belongs to the function relu(v.x) / |v|_S of v, and G is singular where such functions
are linearly dependent. A relu has its kink where v.x = 0, so functions with kinks in different places are independent:
that is the lemma. Parallel inputs share the kink, and the result then depends on which clients hold them.

The toy example is f_w(x) = cos(w x) on two clients with content z ~ N(0, 1) and inputs x = deviation * z; BatchNorm,
simplified, divides x by its standard deviation on the client. The paper does not say whether labels depend on content
or on the input, and each of its figures needs one of the two:

- figure 1, ``y = cos(w z) + noise``: the clients' losses have their minima at different w, and at the same w once x is
  normalized, so averaging w does no harm;
- figure 2, ``y = cos(w x) + noise`` with the model cos(w gamma x / deviation): after normalization the best gamma is
  each client's own deviation, and an averaged gamma fits neither client.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ..data.datasets.cosines import CLIENTS, cosines
from ..utils.errors import UsageError
from ..utils.random_streams import stream
from .ntk import (
    FederatedInputs,
    Floats,
    Network,
    block_diagonal,
    descend,
    gram_matrices,
    guaranteed_residual,
    init_network,
    isotropic_limit,
    linear_prediction,
    magnitude_limit,
    measure_inputs,
    monte_carlo,
    smallest_eigenvalue,
)

METHODS = ("fedavg", "fedbn, joint", "fedbn")
"""FedBN as equations 8 and 9 have it, every parameter descending the loss of all, and as Algorithm 1 runs it."""

DEVIATIONS = tuple(CLIENTS.values())
"""Standard deviations of x on the two clients of the toy example."""
TRUE = 1.0
"""True w of its labels."""
ROUNDING = 1e-12
"""Of eigenvalues about 1."""

_COUNT = 500  # samples of a client of the toy example
_LARGEST = 25_000_000  # a Jacobian of the widest network is four times as many numbers, 0.8 GB
_NEURONS, _NODES = 256, 25  # of the corollary's networks and integrals
_SIZE = 4  # dimensions of the lemma's inputs
_LEAST = {"clients": 2, "samples": 2, "dimension": 2, "width": 16, "steps": 1, "draws": 1, "monte_carlo": 2}


@dataclass(frozen=True, kw_only=True)
class TheorySettings:
    """Settings of ``fedshift theory``.

    ``heterogeneity`` h: a client's covariance has eigenvalues e^(h u), u uniform in [-1, 1]; with 0 all clients are
    alike. ``alpha``: initial standard deviation of v; the larger, the more of the fit is done by gamma. ``draws``:
    random federations for corollary 4.6. ``monte_carlo``: neurons of the sampled G_inf.

    Raises:
        UsageError: a value is out of its numerical range, or the computation would not fit in memory.

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
        for field in fields(self):
            value, least = getattr(self, field.name), _LEAST.get(field.name, 0)
            if value < least:
                raise UsageError(f"{field.name.replace('_', '-')}={value}: must be at least {least}")
        if not 1e-6 <= self.alpha <= 1e6:
            raise UsageError(f"alpha={self.alpha:g}: must be between 0.000001 and 1000000")
        if not self.heterogeneity <= 8:
            raise UsageError(
                f"heterogeneity={self.heterogeneity:g}: must be between 0 and 8, a factor of 9 million in variance"
            )
        if self.clients * self.samples * self.dimension * self.width > _LARGEST:
            raise UsageError(
                f"clients={self.clients}, samples={self.samples}, dimension={self.dimension}, width={self.width}: "
                f"their product must be at most {_LARGEST:,}, which bounds the memory"
            )


def draw_covariance(size: int, heterogeneity: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw a random covariance and its symmetric root, both [D, D]."""
    basis = np.linalg.qr(rng.normal(size=(size, size)))[0]
    values = np.exp(heterogeneity * rng.uniform(-1, 1, size=size))
    return (basis * values) @ basis.T, (basis * np.sqrt(values)) @ basis.T


def draw_inputs(
    clients: int, count: int, size: int, heterogeneity: float, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """Draw ``count`` inputs of each client [N, M, D], their contents z [N, M, D], and the covariances [N, D, D]."""
    content = rng.normal(size=(clients, count, size))
    drawn = zip(*(draw_covariance(size, heterogeneity, rng) for _ in range(clients)), strict=True)
    moments, roots = map(np.stack, drawn)
    return content @ roots, content, moments


def make_clients(setting: TheorySettings) -> tuple[FederatedInputs, Floats]:
    """Make the federation of ``setting``, and targets ``cos(2 z.a)`` [P] for a random a of mean square length 1.

    S is the statistic that a BatchNorm measures on the samples, so a network with ``ScaleNorm`` is the theory's.
    """
    rng = stream(setting.seed, "theory data")
    size = setting.dimension
    x, content, _ = draw_inputs(setting.clients, setting.samples, size, setting.heterogeneity, rng)
    return measure_inputs(x), np.cos(2 * content.reshape(-1, size) @ rng.normal(size=size) / np.sqrt(size))


def _smallest_eigenvalues(samples: FederatedInputs, full: Floats) -> dict[str, float]:
    """Return lambda_min of G (``full``) and of G* (``local``)."""
    return {"full": smallest_eigenvalue(full), "local": smallest_eigenvalue(block_diagonal(samples, full))}


@dataclass(frozen=True, kw_only=True, eq=False)
class InfiniteWidthLimits:
    """Limits of one federation: G_inf [P, P] (``full``) and G*_inf (``local``), by integration.

    ``own`` [N]: lambda_min of each client's block. ``least`` and ``most``: lambda_min and lambda_max of G_inf and of
    G*_inf; ``least`` are mu_0 and mu_0* of theorem 4.4 and corollary 4.5. Compared with sampling: ``difference``, the
    Frobenius norm of the difference relative to G_inf's; ``worst``, the largest difference in standard errors of
    its entry; ``spread``, their root mean square, near 1 where sampling is the only difference.
    """

    full: Floats
    local: Floats
    own: Floats
    least: tuple[float, float]
    most: tuple[float, float]
    difference: float
    worst: float
    spread: float


def compute_limits(setting: TheorySettings, samples: FederatedInputs) -> InfiniteWidthLimits:
    """Compute the two matrices of ``samples`` and compare G_inf with ``setting.monte_carlo`` sampled neurons."""
    full = magnitude_limit(samples)
    local = block_diagonal(samples, full)
    sampled, error = monte_carlo(samples, setting.monte_carlo, stream(setting.seed, "theory neurons"))
    scores = np.divide(sampled - full, error, out=np.zeros_like(full), where=error > 0)
    blocks = (full[np.ix_(rows, rows)] for rows in np.equal.outer(np.arange(setting.clients), samples.client))
    values, local_values = np.linalg.eigvalsh(full), np.linalg.eigvalsh(local)
    return InfiniteWidthLimits(
        full=full,
        local=local,
        own=np.array([smallest_eigenvalue(block) for block in blocks]),
        least=(float(values[0]), float(local_values[0])),
        most=(float(values[-1]), float(local_values[-1])),
        difference=float(np.linalg.norm(sampled - full) / np.linalg.norm(full)),
        worst=float(np.abs(scores).max()),
        spread=float(np.sqrt(np.mean(scores**2))),
    )


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
        """Count the federations in which FedBN's value is smaller by more than rounding."""
        return int(np.sum(pairs[:, 1] < pairs[:, 0] - ROUNDING))


def try_corollary(setting: TheorySettings) -> CorollaryCheck:
    """Check corollary 4.6 on ``setting.draws`` random federations.

    Each has 2 to 4 clients with 2 to 4 samples in 3 to 6 dimensions, and a heterogeneity uniform between 0 and twice
    ``setting.heterogeneity``, at most 8.
    """
    rows = []
    for number in range(setting.draws):
        rng = stream(setting.seed, "theory corollary", number)
        clients, count, size = int(rng.integers(2, 5)), int(rng.integers(2, 5)), int(rng.integers(3, 7))
        x, _, moments = draw_inputs(clients, count, size, min(2 * setting.heterogeneity, 8.0) * rng.uniform(), rng)
        owner = np.repeat(np.arange(clients), count)
        samples = FederatedInputs(x=x.reshape(-1, size), client=owner, covariance=moments)
        limit = _smallest_eigenvalues(samples, magnitude_limit(samples, _NODES))
        start = gram_matrices(samples, init_network(_NEURONS, size, rng))
        local = block_diagonal(samples, start.magnitude)
        whole, joint, run = (
            smallest_eigenvalue(start.direction + magnitude) for magnitude in (start.magnitude, local, clients * local)
        )
        rows.append(((limit["full"], limit["local"]), (whole, joint), (whole, run)))
    table = np.array(rows)
    return CorollaryCheck(magnitude=table[:, 0], joint=table[:, 1], run=table[:, 2])


@dataclass(frozen=True, kw_only=True)
class LemmaCase:
    """Inputs of one kind: whether lemma 4.3 ``assumes`` it; lambda_min of G_inf (``full``), of G*_inf (``local``)."""

    name: str
    assumes: bool
    full: float
    local: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ClosingAngle:
    """lambda_min while an input of one client turns toward one of another, ``angle`` radians apart.

    ``full`` and ``local`` for clients whose covariances are proportional; ``different`` is G_inf's where they are not.
    """

    angle: Floats
    full: Floats
    local: Floats
    different: Floats


def make_cases(seed: int) -> tuple[LemmaCase, ...]:
    """Compute the cases of lemma 4.3: two clients in four dimensions, with inputs parallel in one way or another."""
    rng = stream(seed, "theory lemma")
    first, second, scaled, shaped = _draw_lemma_inputs(rng)
    x = first[:1]
    pairs = rng.normal(size=(_SIZE + 1, _SIZE))
    rows = (
        ("no two inputs parallel", True, first, second, shaped),
        ("x and 2x on one client", False, np.concatenate([first, 2 * x]), second, shaped),
        ("x and 2x on two clients, S proportional", False, first, np.concatenate([second, 2 * x]), scaled),
        ("x and 2x on two clients, S of other shape", False, first, np.concatenate([second, 2 * x]), shaped),
        ("x and -x on one client", False, np.concatenate([first, -x]), second, shaped),
        (f"{_SIZE + 1} pairs x and -x on one client", False, np.concatenate([pairs, -pairs]), second, shaped),
    )
    return tuple(
        LemmaCase(name=name, assumes=assumes, **_smallest_eigenvalues(samples, magnitude_limit(samples)))
        for name, assumes, one, two, moments in rows
        for samples in [_make_samples(one, two, moments)]
    )


def close_angle(seed: int, angles: int = 25) -> ClosingAngle:
    """Compute lambda_min for angles from a right angle down to a thousandth of a radian."""
    rng = stream(seed, "theory closing")
    first, second, scaled, shaped = _draw_lemma_inputs(rng)
    x = first[0] / np.linalg.norm(first[0])
    aside = rng.normal(size=_SIZE)
    aside -= (aside @ x) * x
    aside /= np.linalg.norm(aside)
    angle = np.geomspace(np.pi / 2, 1e-3, angles)
    turned = [np.concatenate([second, [np.cos(at) * x + np.sin(at) * aside]]) for at in angle]
    same = [_make_samples(first, rows, scaled) for rows in turned]
    other = [_make_samples(first, rows, shaped) for rows in turned]
    proportional = [_smallest_eigenvalues(samples, isotropic_limit(samples).magnitude) for samples in same]
    return ClosingAngle(
        angle=angle,
        full=np.array([pair["full"] for pair in proportional]),
        local=np.array([pair["local"] for pair in proportional]),
        different=np.array([smallest_eigenvalue(magnitude_limit(samples)) for samples in other]),
    )


def _draw_lemma_inputs(rng: np.random.Generator) -> tuple[Floats, Floats, Floats, Floats]:
    """Draw two clients' three inputs, and their covariances: proportional ones and ones of different shapes."""
    first, second = rng.normal(size=(2, 3, _SIZE))
    shaped = np.stack([draw_covariance(_SIZE, 2.0, rng)[0] for _ in range(2)])
    return first, second, np.stack([np.eye(_SIZE), 4 * np.eye(_SIZE)]), shaped


def _make_samples(first: Floats, second: Floats, moments: Floats) -> FederatedInputs:
    client = np.repeat([0, 1], [len(first), len(second)])
    return FederatedInputs(x=np.concatenate([first, second]), client=client, covariance=moments)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingCourse:
    """One method's squared residual before each step, as a share of the initial one, [steps + 1].

    ``least``: lambda_min of Lambda at the start. ``guarantee``: theorem 4.4's or corollary 4.5's bound.
    """

    method: str
    least: float
    measured: Floats
    predicted: Floats
    guarantee: Floats

    def steps_to(self, share: float) -> tuple[int | None, int | None]:
        """Return the steps until ``share`` remains, measured and predicted; None where there were too few."""
        measured, predicted = self.measured <= share, self.predicted <= share
        return (
            int(np.argmax(measured)) if measured.any() else None,
            int(np.argmax(predicted)) if predicted.any() else None,
        )


@dataclass(frozen=True, kw_only=True)
class WidthComparison:
    """A network of ``neurons``: distance of G from G_inf (Frobenius, relative), lambda_min of G and of G*.

    ``error`` by method: largest distance of the measured residual from the predicted one, relative to the initial
    residual.
    """

    neurons: int
    distance: float
    full: float
    local: float
    error: dict[str, float]


def compare_training(
    setting: TheorySettings, samples: FederatedInputs, targets: Floats, limits: InfiniteWidthLimits
) -> tuple[tuple[WidthComparison, ...], tuple[TrainingCourse, ...]]:
    """Compare gradient descent with the prediction of the initial Gram matrices, for FedAvg and FedBN.

    Networks have a sixteenth, a quarter, all and four times ``setting.width`` neurons; courses are those at the width.
    All methods have the same start and, at each width, one rate: 1 over the largest eigenvalue of any of their Lambdas.
    """
    bounds = dict(zip(METHODS, (limits.least[0], limits.least[1], limits.least[1]), strict=True))
    widths, courses = [], []
    for neurons in (setting.width // 16, setting.width // 4, setting.width, 4 * setting.width):
        starts = {method: _init_method(setting, samples, method, neurons) for method in METHODS}
        rate = 1 / max(float(np.linalg.eigvalsh(evolution)[-1]) for _, _, evolution in starts.values())
        error = {}
        for method, (network, weight, evolution) in starts.items():
            measured = descend(samples, network, targets, rate=rate, steps=setting.steps, weight=weight)
            predicted = linear_prediction(evolution, measured[0], rate=rate, steps=setting.steps)
            apart = np.linalg.norm(measured - predicted, axis=1)
            error[method] = float(apart.max() / np.linalg.norm(measured[0]))
            if neurons == setting.width:
                courses.append(
                    TrainingCourse(
                        method=method,
                        least=smallest_eigenvalue(evolution),
                        measured=_residual_share(measured),
                        predicted=_residual_share(predicted),
                        guarantee=guaranteed_residual(bounds[method], rate=rate, steps=setting.steps),
                    )
                )
        magnitude = gram_matrices(samples, starts["fedavg"][0], alpha=setting.alpha).magnitude
        distance = float(np.linalg.norm(magnitude - limits.full) / np.linalg.norm(limits.full))
        least = _smallest_eigenvalues(samples, magnitude)
        widths.append(WidthComparison(neurons=neurons, distance=distance, error=error, **least))
    return tuple(widths), tuple(courses)


def _init_method(
    setting: TheorySettings, samples: FederatedInputs, method: str, neurons: int
) -> tuple[Network, float, Floats]:
    """Return the initial network, the weight of gamma's step, and Lambda."""
    rng, clients = stream(setting.seed, "theory start", neurons), 0 if method == "fedavg" else setting.clients
    network = init_network(neurons, setting.dimension, rng, alpha=setting.alpha, clients=clients)
    weight = float(setting.clients) if method == "fedbn" else 1.0
    return network, weight, gram_matrices(samples, network, alpha=setting.alpha).evolution(setting.alpha, weight=weight)


def _residual_share(residuals: Floats) -> Floats:
    squares = np.square(residuals).sum(axis=1)
    shares: Floats = squares / squares[0]
    return shares


@dataclass(frozen=True, kw_only=True, eq=False)
class ToyExample:
    """Mean squared errors of both clients on a grid of ``w`` [W] and ``gamma`` [G].

    ``raw`` and ``normalized`` [2, W] are figure 1's, ``surfaces`` [2, G, W] are figure 2's.
    """

    w: Floats
    gamma: Floats
    raw: Floats
    normalized: Floats
    surfaces: Floats

    def best_frequencies(self, losses: Floats) -> tuple[Floats, float, Floats]:
        """Return each client's best w, their mean, and each client's loss there, of ``raw`` or ``normalized``."""
        best = self.w[losses.argmin(axis=1)]
        mean = float(best.mean())
        return best, mean, np.array([np.interp(mean, self.w, row) for row in losses])

    def best_scales(self) -> tuple[Floats, float, Floats, Floats]:
        """Return, at the true w, each client's best gamma, their mean, and the losses with either."""
        along = self.surfaces[:, :, np.abs(self.w - TRUE).argmin()]
        best = self.gamma[along.argmin(axis=1)]
        mean = float(best.mean())
        return best, mean, along.min(axis=1), np.array([np.interp(mean, self.gamma, row) for row in along])


def compute_toy(seed: int, points: int = 301) -> ToyExample:
    """Compute the losses on a grid of w from 0 to 3 and gamma from 0 to 4."""
    w, gamma = np.linspace(0, 3, points), np.linspace(0, 4, points)
    products = np.linspace(0, w[-1] * gamma[-1], 4 * points)  # the loss depends only on w gamma
    raw, normalized, surfaces = [], [], []
    by_content, by_input = (cosines(samples=_COUNT, labels=labels, seed=seed) for labels in ("content", "input"))
    for content, other in zip(by_content.clients, by_input.clients, strict=True):
        x = content.train.x[:, 0].double().numpy()
        white = x / x.std()
        raw.append(_compute_losses(w, x, content.train.y[:, 0].numpy()))
        normalized.append(_compute_losses(w, white, content.train.y[:, 0].numpy()))
        along = _compute_losses(products, white, other.train.y[:, 0].numpy())
        surfaces.append(np.interp(np.outer(gamma, w), products, along))
    return ToyExample(w=w, gamma=gamma, raw=np.stack(raw), normalized=np.stack(normalized), surfaces=np.stack(surfaces))


def _compute_losses(w: Floats, x: Floats, y: Floats) -> Floats:
    result: Floats = np.square(np.cos(np.outer(w, x)) - y).mean(axis=1)
    return result


@dataclass(frozen=True, kw_only=True, eq=False)
class TheoryResults:
    """All results of the command, in the order in which it prints them."""

    setting: TheorySettings
    limits: InfiniteWidthLimits
    corollary: CorollaryCheck
    cases: tuple[LemmaCase, ...]
    closing: ClosingAngle
    widths: tuple[WidthComparison, ...]
    courses: tuple[TrainingCourse, ...]
    toy: ToyExample


def check_theory(setting: TheorySettings) -> TheoryResults:
    """Run every check; the result depends only on ``setting``, which includes the seed."""
    samples, targets = make_clients(setting)
    found = compute_limits(setting, samples)
    widths, courses = compare_training(setting, samples, targets, found)
    return TheoryResults(
        setting=setting,
        limits=found,
        corollary=try_corollary(setting),
        cases=make_cases(setting.seed),
        closing=close_angle(setting.seed),
        widths=widths,
        courses=courses,
        toy=compute_toy(setting.seed),
    )
