"""Geometric median: the point of least weighted distance to all uploads, which faulty clients cannot drag away.

Pillutla et al. 2022 (RFA), arXiv:1912.13445, algorithm 2, the smoothed Weiszfeld iteration: z = sum beta_i w_i / sum
beta_i with beta_i = p_i / max(nu, ||z - w_i||), here from the upload that lies nearest to all others and until it
rests: from the mean, a few steps would still be far off where an upload is. Distances are over trained entries; the
others are averaged under the same beta.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from ..core.aggregation import Aggregated, Received, RobustAggregation
from ..core.means import squared_distances, stack_entry, weighted_mean
from ..core.method import Method, method
from ..core.plan import Plan
from ..core.states import ServerState
from ..utils.errors import UsageError

TOLERANCE = 1e-12
"""Change of the largest share of an upload below which the iteration rests."""


@dataclass(frozen=True)
class GeometricMedian(RobustAggregation):
    """The geometric median by at most ``steps`` iterations; ``nu``: smoothing, over the median distance of two."""

    steps: int
    nu: float

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.nu > 0:
            raise UsageError(f"steps={self.steps}, nu={self.nu:g}: give 1 or more, and above 0")

    @override
    def __call__(self, plan: Plan, server: ServerState, received: Sequence[Received]) -> Aggregated:
        states, names = [each.entries for each in received], plan.trained & plan.sent
        weights = torch.tensor([each.weight for each in received], dtype=torch.float64)
        away = squared_distances(states, names).sqrt()
        center = int((away @ weights).argmin())
        share = torch.zeros_like(weights)
        share[center] = 1.0
        gram = torch.zeros_like(away)  # of the uploads about the center; z is a mixture of them, so distances follow
        for name in sorted(names):
            points = stack_entry(states, name).reshape(len(states), -1).cpu()
            points = points - points[center]
            gram += points @ points.T
        smallest = self.nu * float(away.median()) or self.nu
        for _ in range(self.steps):
            pulled = gram @ share
            distance = (share @ pulled - 2 * pulled + gram.diagonal()).clamp(min=0).sqrt()
            after = weights / distance.clamp(min=smallest)
            after = after / after.sum()
            moved, share = float((after - share).abs().max()), after
            if moved < TOLERANCE:
                break
        order = sorted(range(len(share)), key=lambda client: client != center)  # sums of deviations from a sane upload
        return Aggregated(entries=weighted_mean([states[client] for client in order], share[order].tolist()))


@method
def geometric_median(base: Method, *, steps: int = 10_000, nu: float = 1e-6) -> Method:
    """Aggregate the uploads of ``base`` by their geometric median; clients weigh by their samples."""
    return base.with_aggregation(GeometricMedian(steps, nu))
