"""Coordinate-wise median of the uploads: no minority of faulty clients moves an entry beyond the others' values.

Yin et al. 2018, arXiv:1803.01498, option I. Clients count equally. The median of an even number is the mean of the
middle two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.aggregation import RobustAggregation, Uploads, compute_trimmed_mean
from ..core.method import Method
from ..utils.state import State
from .fedavg import fedavg


@dataclass(frozen=True)
class Median(RobustAggregation):
    """The aggregation."""

    def __call__(self, uploads: Uploads) -> State:
        """The server's entries after the round."""
        return compute_trimmed_mean(uploads, (len(uploads.states) - 1) // 2)


def median(base: Method | None = None) -> Method:
    """``base`` (FedAvg) with the coordinate-wise median in place of the mean."""
    base = base or fedavg()
    return base.with_aggregation(base.compose_name(median), Median())
