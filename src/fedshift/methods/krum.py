"""Krum: the server takes over the one client whose upload lies nearest to those of most others.

Blanchard et al. 2017, arXiv:1703.02757, section 4: client i scores the sum of its squared distances to its n - f - 2
nearest others, f of n clients being faulty; the smallest score wins. Distances are over trained entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from ..core.aggregation import Aggregated, Received, RobustAggregation
from ..core.means import squared_distances, weighted_mean
from ..core.method import Method, method
from ..core.plan import Plan
from ..core.states import ServerState
from ..utils.errors import UsageError
from ..utils.state import clone


@dataclass(frozen=True)
class Krum(RobustAggregation):
    """The mean of the ``num_selected`` uploads of least score, where ``num_malicious`` clients may be arbitrary.

    ``num_selected=None`` takes n - f - 2 of n clients, as many as a score sums over.
    """

    num_malicious: int
    num_selected: int | None = 1

    def __post_init__(self) -> None:
        if self.num_malicious < 0 or (self.num_selected is not None and self.num_selected < 1):
            raise UsageError(
                f"num_malicious={self.num_malicious} and num_selected={self.num_selected}: give 0 or more, and 1 or "
                "more"
            )

    @property
    @override
    def min_clients(self) -> int:
        return max(2 * self.num_malicious + 3, (self.num_selected or 1) + self.num_malicious + 2)

    @override
    def __call__(self, plan: Plan, server: ServerState, received: Sequence[Received]) -> Aggregated:
        clients, states = len(received), [each.entries for each in received]
        distances = squared_distances(states, plan.trained & plan.sent)
        near = distances.sort(dim=1).values[:, 1 : clients - self.num_malicious - 1]  # without that to itself
        chosen = self.num_selected or clients - self.num_malicious - 2
        best = sorted(near.sum(dim=1).argsort(stable=True)[:chosen].tolist())
        near_most = [states[index] for index in best]
        alone = len(best) == 1
        return Aggregated(entries=clone(near_most[0]) if alone else weighted_mean(near_most, [1 / chosen] * chosen))


@method
def krum(base: Method, *, num_malicious: int = 0) -> Method:
    """Aggregate the uploads of ``base`` by Krum, which takes over one of them.

    ``num_malicious``: clients that may send anything; at least 2 num_malicious + 3 must take part.
    """
    return base.with_aggregation(Krum(num_malicious))
