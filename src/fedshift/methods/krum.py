"""Krum: the server selects the upload closest to most others.

Blanchard et al. 2017, arXiv:1703.02757, section 4: the score of client i is the sum of its squared distances to its
n - f - 2 nearest neighbors, for f faulty clients among n; the smallest score is selected. Distances are over trained
entries.
"""

from ..core.means import squared_distances, weighted_mean
from ..core.method import Method, method
from ..core.rule import Folded, Rule, Server
from ..utils.errors import UsageError
from .median import ROBUST


class Krum(Rule):
    """The mean of the ``num_selected`` uploads with the lowest score, tolerating ``num_malicious`` arbitrary clients.

    ``num_selected=None`` selects n - f - 2 of n clients, the number of neighbors in a score.
    """

    num_malicious: int
    num_selected: int | None = 1
    aggregates = True
    weighs = False
    needs_entries_only = ROBUST

    def __post_init__(self) -> None:
        if self.num_malicious < 0 or (self.num_selected is not None and self.num_selected < 1):
            raise UsageError(
                f"num_malicious={self.num_malicious} and num_selected={self.num_selected}: give num_malicious of 0 or "
                "more, and num_selected of 1 or more"
            )

    @property
    def min_clients(self) -> int:
        return max(2 * self.num_malicious + 3, (self.num_selected or 1) + self.num_malicious + 2)

    def fold(self, server: Server) -> Folded:
        clients, states = len(server.received), [each.entries for each in server.received]
        distances = squared_distances(states, server.network.trained & server.network.sent)
        near = distances.sort(dim=1).values[:, 1 : clients - self.num_malicious - 1]  # without the client itself
        count = self.num_selected or clients - self.num_malicious - 2
        best = sorted(near.sum(dim=1).argsort(stable=True)[:count].tolist())
        return Folded(entries=weighted_mean([states[index] for index in best], [1 / count] * count))


@method
def krum(base: Method, *, num_malicious: int = 0) -> Method:
    """Aggregate the uploads of ``base`` by Krum, which selects one of them.

    ``num_malicious``: number of clients that may send arbitrary uploads; at least 2 num_malicious + 3 clients must take
    part.
    """
    return base.with_rule(Krum(num_malicious))
