"""FedBN's toy regression example: two clients whose inputs have standard deviations 1 and 2.5.

Li et al. 2021 (arXiv:2102.07623, figures 1 and 2): content z is drawn from N(0, 1) for both clients, inputs are
``x = deviation * z``, and targets are ``cos(z)`` or ``cos(x)`` with noise. The paper does not give which of the two it
uses, the deviation of the noise, or numbers of samples; figure 1 needs targets that depend on the content, figure 2
targets that depend on the input (``reproduce.toy``). The model ``cosine`` is the paper's, with BatchNorm that divides
by the deviation.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ...tasks.regression import Regression
from ...utils.errors import UsageError, unknown_name
from ...utils.random_streams import stream
from ..federation import ClientData, Federation
from ..samples import Samples
from ._card import make_card

CLIENTS = {"narrow": 1.0, "wide": 2.5}
"""Standard deviation of each client's inputs."""
NOISE = 0.1
"""Standard deviation of the target noise."""

CARD = make_card("cosines")


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
