"""Coordinate-wise median of the uploads: a minority of faulty clients cannot move an entry beyond the others' values.

Yin et al. 2018, arXiv:1803.01498, option I. Clients count equally. The median of an even number is the mean of the
middle two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from ..core.aggregation import Aggregated, Received, RobustAggregation
from ..core.means import compute_trimmed_mean
from ..core.method import Method, method
from ..core.network import Network
from ..core.states import ServerState


@dataclass(frozen=True)
class Median(RobustAggregation):
    """The coordinate-wise median."""

    weighs = False

    @override
    def __call__(self, network: Network, server: ServerState, received: Sequence[Received]) -> Aggregated:
        trim = (len(received) - 1) // 2
        return Aggregated(entries=compute_trimmed_mean([each.entries for each in received], trim))


@method
def median(base: Method) -> Method:
    """Aggregate the uploads of ``base`` by their coordinate-wise median instead of the mean."""
    return base.with_aggregation(Median())
