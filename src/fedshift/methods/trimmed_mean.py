"""Trimmed mean: exclude the largest and the smallest values of each entry before averaging.

Yin et al. 2018, arXiv:1803.01498, option II. Clients count equally.
"""

from ..core.means import compute_trimmed_mean
from ..core.method import Method, method, require
from ..core.rule import Folded, Rule, Server
from .median import ROBUST


class TrimmedMean(Rule):
    """The mean of each coordinate without its ``trim`` largest and ``trim`` smallest values."""

    trim: int
    aggregates = True
    weighs = False
    needs_entries_only = ROBUST

    def __post_init__(self) -> None:
        require(self.trim >= 1, f"trim={self.trim}: give 1 or more; 0 would be the mean")

    @property
    def min_clients(self) -> int:
        return 2 * self.trim + 1

    def fold(self, server: Server) -> Folded:
        return Folded(entries=compute_trimmed_mean([each.entries for each in server.received], self.trim))


@method
def trimmed_mean(base: Method, *, trim: int = 1) -> Method:
    """Aggregate by the trimmed mean; ``trim``: values excluded at each end, which bounds tolerated faulty clients."""
    return base.with_rule(TrimmedMean(trim))
