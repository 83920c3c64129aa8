"""FedBN's toy example (arXiv:2102.07623, figures 1 and 2): f_w(x) = cos(w x) on two clients with x of two sizes.

Both clients have contents z ~ N(0, 1) and inputs x = deviation * z; BatchNorm, simplified, divides x by its standard
deviation on the client. The paper leaves open whether labels come from content or from the input, and each of its
figures needs one of them:

- figure 1, ``y = cos(w z) + noise``: the clients' losses have their minima at different w, and at one w once x is
  normalized, so that averaging w does no harm;
- figure 2, ``y = cos(w x) + noise`` with the model cos(w gamma x / deviation): after normalization gamma has to be each
  client's own deviation, and an averaged gamma fits none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..utils.random_streams import stream
from .ntk import Floats

DEVIATIONS = (1.0, 2.5)
"""Standard deviation of x on the two clients."""
TRUE = 1.0
"""The w of the labels."""
_NOISE, _COUNT = 0.1, 500


@dataclass(frozen=True, kw_only=True, eq=False)
class ToyExample:
    """Mean squared errors on a grid of ``w`` [W] and ``gamma`` [G], of both clients.

    ``raw`` and ``normalized`` [2, W] are figure 1's, ``surfaces`` [2, G, W] are figure 2's.
    """

    w: Floats
    gamma: Floats
    raw: Floats
    normalized: Floats
    surfaces: Floats

    def best_frequencies(self, losses: Floats) -> tuple[Floats, float, Floats]:
        """The w that is best on each client, their mean, and each client's loss there, of ``raw`` or ``normalized``."""
        best = self.w[losses.argmin(axis=1)]
        mean = float(best.mean())
        return best, mean, np.array([np.interp(mean, self.w, row) for row in losses])

    def best_scales(self) -> tuple[Floats, float, Floats, Floats]:
        """At the true w: each client's best gamma, their mean, and the losses with the own and with the mean."""
        along = self.surfaces[:, :, np.abs(self.w - TRUE).argmin()]
        best = self.gamma[along.argmin(axis=1)]
        mean = float(best.mean())
        return best, mean, along.min(axis=1), np.array([np.interp(mean, self.gamma, row) for row in along])


def compute_toy(seed: int, points: int = 301) -> ToyExample:
    """Losses on a grid of w from 0 to 3 and gamma from 0 to 4."""
    w, gamma = np.linspace(0, 3, points), np.linspace(0, 4, points)
    products = np.linspace(0, w[-1] * gamma[-1], 4 * points)  # the loss depends on w gamma alone
    raw, normalized, surfaces = [], [], []
    for client, deviation in enumerate(DEVIATIONS):
        rng = stream(seed, "theory toy", client)
        z, noise = rng.normal(size=_COUNT), rng.normal(scale=_NOISE, size=_COUNT)
        x = deviation * z
        white = x / x.std()
        raw.append(_compute_losses(w, x, np.cos(TRUE * z) + noise))
        normalized.append(_compute_losses(w, white, np.cos(TRUE * z) + noise))
        along = _compute_losses(products, white, np.cos(TRUE * x) + noise)
        surfaces.append(np.interp(np.outer(gamma, w), products, along))
    return ToyExample(w=w, gamma=gamma, raw=np.stack(raw), normalized=np.stack(normalized), surfaces=np.stack(surfaces))


def _compute_losses(w: Floats, x: Floats, y: Floats) -> Floats:
    result: Floats = np.square(np.cos(np.outer(w, x)) - y).mean(axis=1)
    return result
