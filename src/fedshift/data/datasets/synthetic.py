"""FedBN's synthetic data (Li et al. 2021, arXiv:2102.07623): two Gaussian classes, and cosines for regression.

Gaussians (appendix F, figure 9): in ten dimensions, label 0 is drawn from N(-1, S) and label 1 from N(1, S), where S is
either the identity S_1, or S_2, which also has off-diagonal entries. Client ``diagonal`` draws only from S_1, client
``mixed`` from both in equal parts. The paper does not give the entries of S_2 or the numbers of samples. Here
``(S_2)_ij = correlation ** |i - j|``, which is positive definite for any correlation in (-1, 1) (the autocovariance of
an AR(1) process, and the identity for 0). With the default, -1/2, the classes can be distinguished almost without
error, as the paper reports for both methods.

Cosines (figures 1 and 2): content z is drawn from N(0, 1) for both clients, inputs are ``x = deviation * z``, and
targets are ``cos(z)`` or ``cos(x)`` with noise. The paper does not give which of the two it uses, the deviation of the
noise, or numbers of samples; figure 1 needs targets that depend on the content, figure 2 targets that depend on the
input (``reproduce.toy``). The model ``cosine`` is the paper's, with BatchNorm that divides by the deviation.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...tasks.regression import Regression
from ...utils.errors import UsageError, unknown_name
from ...utils.random_streams import stream
from ..federation import ClientData, Federation
from ..samples import Samples
from ._card import make_card

_DIMENSIONS = 10

GAUSSIANS = make_card("gaussians")


def gaussians(
    root: Path | None = None,  # noqa: ARG001 - as every benchmark
    *,
    samples: int = 200,
    test_samples: int = 1000,
    correlation: float = -0.5,
    seed: int = 0,
) -> Federation:
    """Draw clients ``diagonal`` and ``mixed``, float32 ``[N, 10]``, with as many samples of class 0 as of class 1.

    ``samples`` and ``test_samples`` are per client and must be multiples of 4. Raises :class:`UsageError` for other
    numbers, and for a ``correlation`` outside -1..1.
    """
    for name, count in (("samples", samples), ("test_samples", test_samples)):
        if count < 4 or count % 4:
            raise UsageError(f"{name}={count}: give a multiple of 4, for two classes of two covariances")
    if not -1 < correlation < 1:
        raise UsageError(f"correlation={correlation:g}: must lie between -1 and 1")
    steps = np.abs(np.subtract.outer(np.arange(_DIMENSIONS), np.arange(_DIMENSIONS)))
    diagonal, full = np.eye(_DIMENSIONS), np.float64(correlation) ** steps
    covariances = {"diagonal": (diagonal, diagonal), "mixed": (diagonal, full)}
    clients = []
    for client, pair in covariances.items():
        train, test = (
            _draw_split(pair, count, stream(seed, "gaussians", client, part))
            for part, count in (("train", samples), ("test", test_samples))
        )
        clients.append(ClientData(name=client, train=train, test=test))
    note = f"two Gaussian classes in {_DIMENSIONS} dimensions, correlation {correlation:g} in half of client 'mixed'"
    return Federation(name="gaussians", clients=tuple(clients), classes=2, note=note)


def _draw_split(covariances: tuple[NDArray[np.float64], ...], count: int, rng: np.random.Generator) -> Samples:
    """Draw a quarter of ``count`` for each covariance and class, shuffled."""
    parts = [
        rng.multivariate_normal(np.full(_DIMENSIONS, 2.0 * label - 1), covariance, count // 4, method="cholesky")
        for covariance in covariances
        for label in (0, 1)
    ]
    y = np.tile(np.repeat([0, 1], count // 4), 2)
    order = rng.permutation(count)
    return Samples(x=torch.from_numpy(np.concatenate(parts)[order].astype(np.float32)), y=torch.from_numpy(y[order]))


CLIENTS = {"narrow": 1.0, "wide": 2.5}
"""Standard deviation of each client's inputs."""
NOISE = 0.1
"""Standard deviation of the target noise."""

COSINES = make_card("cosines")


def cosines(
    root: Path | None = None,  # noqa: ARG001 - as every benchmark
    *,
    samples: int = 500,
    test_samples: int = 500,
    labels: str = "content",
    seed: int = 0,
) -> Federation:
    """Draw clients ``narrow`` and ``wide``, float32 ``[N, 1]``, with targets float64 ``[N, 1]``.

    ``samples`` and ``test_samples`` are per client; ``labels``: targets depend on ``content`` or ``input``.
    Targets are not standardized. Raises :class:`UsageError` for other values.
    """
    if min(samples, test_samples) < 1:
        raise UsageError(f"samples={samples}, test_samples={test_samples}: give at least 1 of each")
    if labels not in ("content", "input"):
        raise unknown_name("labels", labels, ("content", "input"))

    def draw(purpose: str, client: int, count: int, deviation: float) -> Samples:
        rng = stream(seed, purpose, client)
        z, noise = rng.normal(size=count), rng.normal(scale=NOISE, size=count)
        y = np.cos(z if labels == "content" else deviation * z) + noise
        x = (deviation * z).astype(np.float32)
        return Samples(x=torch.from_numpy(x[:, None]), y=torch.from_numpy(y[:, None]))

    clients = tuple(
        ClientData(
            name=name,
            train=draw("theory toy", number, samples, deviation),
            test=draw("theory toy, test", number, test_samples, deviation),
        )
        for number, (name, deviation) in enumerate(CLIENTS.items())
    )
    note = f"inputs of deviations {' and '.join(f'{each:g}' for each in CLIENTS.values())}, cosines of the {labels}"
    return Federation(name="cosines", clients=clients, classes=1, note=note, task=Regression(standardize=False))
