"""Trimmed mean: of each entry, the largest and the smallest values are left out before averaging.

Yin et al. 2018, arXiv:1803.01498, option II. Clients count equally.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from ..core.aggregation import RobustAggregation, Uploads, compute_trimmed_mean
from ..core.method import Method
from ..utils.errors import UsageError
from ..utils.state import State
from .fedavg import fedavg


@dataclass(frozen=True)
class TrimmedMean(RobustAggregation):
    """Leaves out the ``trim`` largest and the ``trim`` smallest values of each coordinate."""

    trim: int

    def __post_init__(self) -> None:
        if self.trim < 1:
            raise UsageError(f"trimmed_mean: trim={self.trim}: give 1 or more; 0 would be the mean")

    @property
    @override
    def min_clients(self) -> int:
        return 2 * self.trim + 1

    def __call__(self, uploads: Uploads) -> State:
        """The server's entries after the round."""
        return compute_trimmed_mean(uploads, self.trim)


def trimmed_mean(base: Method | None = None, *, trim: int = 1) -> Method:
    """``base`` (FedAvg) with the trimmed mean; ``trim``: values left out at each end, the faulty clients it bears."""
    base = base or fedavg()
    return base.with_aggregation(base.compose_name(trimmed_mean, trim=trim), TrimmedMean(trim))
