"""Coordinate-wise median of the uploads: no minority of faulty clients moves an entry beyond the others' values.

Yin et al. 2018, arXiv:1803.01498, option I. Clients count equally. The median of an even number is the mean of the
middle two.
"""

from dataclasses import dataclass

from ..core.aggregation import RobustAggregation, Uploads, compute_trimmed_mean
from ..core.method import Method, method
from ..utils.state import State


@dataclass(frozen=True)
class Median(RobustAggregation):
    """The coordinate-wise median."""

    def __call__(self, uploads: Uploads) -> State:
        """Return the server's entries after the round."""
        return compute_trimmed_mean(uploads, (len(uploads.states) - 1) // 2)


@method
def median(base: Method) -> Method:
    """Aggregate the uploads of ``base`` by their coordinate-wise median in place of the mean."""
    return base.with_aggregation(Median())
