"""Geometric median: the point of least weighted distance to all uploads, which faulty clients cannot drag away.

Pillutla et al. 2022 (RFA), arXiv:1912.13445, algorithm 2, the smoothed Weiszfeld iteration: z = sum beta_i w_i / sum
beta_i with beta_i = p_i / max(nu, ||z - w_i||). Distances are over trained entries; the others are averaged under the
same beta.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..base.errors import UsageError
from ..base.state import State
from ..core.aggregate import Robust, Uploads, flat, weighted_mean
from ..core.method import Method
from .fedavg import fedavg


@dataclass(frozen=True)
class GeometricMedian(Robust):
    """``steps`` iterations from the weighted mean, with smoothing ``nu`` (a length)."""

    steps: int
    nu: float

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.nu > 0:
            raise UsageError(f"geometric_median: steps={self.steps}, nu={self.nu:g}: give 1 or more, and above 0")

    def __call__(self, uploads: Uploads) -> State:
        """The server's entries after the round."""
        points = torch.stack([flat(state, uploads.trained) for state in uploads.states])
        weights = torch.tensor(uploads.weights, dtype=torch.float64, device=points.device)
        share = weights
        for _ in range(self.steps):
            distance = (points - share @ points).square().sum(dim=1).sqrt()
            share = weights / distance.clamp(min=self.nu)
            share = share / share.sum()
        return weighted_mean(uploads.states, share.tolist())


def geometric_median(base: Method | None = None, *, steps: int = 32, nu: float = 1e-6) -> Method:
    """``base`` (FedAvg) with the geometric median in place of the mean; clients weigh by their samples."""
    base = base or fedavg()
    return base.folding(base.titled(geometric_median, steps=steps, nu=nu), GeometricMedian(steps, nu))
