"""Krum: the server takes over the one client whose upload lies nearest to those of most others.

Blanchard et al. 2017, arXiv:1703.02757, section 4: client i scores the sum of its squared distances to its n - f - 2
nearest others, f of n clients being faulty; the smallest score wins. Distances are over trained entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.errors import UsageError
from ..base.state import State, clone
from ..core.aggregate import Robust, Uploads, squared_distances, weighted_mean
from ..core.method import Method
from .fedavg import fedavg


@dataclass(frozen=True)
class Krum(Robust):
    """The mean of the ``chosen`` uploads of least score, where ``faulty`` clients may be arbitrary.

    ``chosen=None`` takes n - f - 2 of n clients, as many as a score sums over.
    """

    faulty: int
    chosen: int | None = 1

    def __post_init__(self) -> None:
        if self.faulty < 0 or (self.chosen is not None and self.chosen < 1):
            raise UsageError(f"krum: faulty={self.faulty} and chosen={self.chosen}: give 0 or more, and 1 or more")
        object.__setattr__(self, "least", max(2 * self.faulty + 3, (self.chosen or 1) + self.faulty + 2))

    def __call__(self, uploads: Uploads) -> State:
        """The server's entries after the round."""
        clients = len(uploads.states)
        near = squared_distances(uploads).sort(dim=1).values[:, 1 : clients - self.faulty - 1]  # the first is itself
        chosen = self.chosen or clients - self.faulty - 2
        best = sorted(near.sum(dim=1).argsort(stable=True)[:chosen].tolist())
        states = [uploads.states[index] for index in best]
        return clone(states[0]) if len(states) == 1 else weighted_mean(states, [1 / len(states)] * len(states))


def krum(base: Method | None = None, *, faulty: int = 0) -> Method:
    """``base`` (FedAvg) with Krum; ``faulty``: clients that may send anything; at least 2 faulty + 3 must take part."""
    base = base or fedavg()
    return base.folding(base.titled(krum, faulty=faulty), Krum(faulty))
