"""Geometric median: the point that minimizes the weighted distance to all uploads, robust to faulty clients.

Pillutla et al. 2022 (RFA), arXiv:1912.13445, algorithm 2, the smoothed Weiszfeld iteration: z = sum beta_i w_i / sum
beta_i with beta_i = p_i / max(nu, ||z - w_i||). Here it starts at the upload closest to all others and runs until
convergence, because it converges slowly from the mean if an upload is far away. Distances are over trained entries;
other entries are averaged with the same beta.
"""

import torch

from ..core.means import squared_distances, stack_entry, weighted_mean
from ..core.method import Method, method, require
from ..core.rule import Folded, Rule, Server
from .median import ROBUST

TOLERANCE = 1e-12
"""The iteration has converged if no upload's share changes by more than this."""


class GeometricMedian(Rule):
    """The geometric median by at most ``steps`` iterations; ``nu``: smoothing, relative to their median distance."""

    steps: int
    nu: float
    aggregates = True
    needs_entries_only = ROBUST

    def __post_init__(self) -> None:
        allowed = self.steps >= 1 and self.nu > 0
        require(allowed, f"steps={self.steps}, nu={self.nu:g}: give steps of 1 or more, and nu above 0")

    def fold(self, server: Server) -> Folded:
        states, names = [each.entries for each in server.received], server.network.trained & server.network.sent
        weights = torch.tensor([each.weight for each in server.received], dtype=torch.float64)
        distances = squared_distances(states, names).sqrt()
        center = int((distances @ weights).argmin())
        share = torch.zeros_like(weights)
        share[center] = 1.0
        points = [stack_entry(states, name).reshape(len(states), -1) for name in sorted(names)]
        gram = torch.zeros_like(distances, device=points[0].device)
        for points_KN in points:
            from_center_KN = points_KN - points_KN[center]
            gram += from_center_KN @ from_center_KN.T
        gram = gram.cpu()  # z is a mixture of uploads, so its distances follow
        smallest = self.nu * float(distances.median()) or self.nu
        for _ in range(self.steps):
            pulled = gram @ share
            distance = (share @ pulled - 2 * pulled + gram.diagonal()).clamp(min=0).sqrt()
            after = weights / distance.clamp(min=smallest)
            after = after / after.sum()
            moved, share = float((after - share).abs().max()), after
            if moved < TOLERANCE:
                break
        order = sorted(range(len(share)), key=lambda client: client != center)  # means sum deviations from the first
        return Folded(entries=weighted_mean([states[client] for client in order], share[order].tolist()))


@method
def geometric_median(base: Method, *, steps: int = 10_000, nu: float = 1e-6) -> Method:
    """Aggregate the uploads of ``base`` by their geometric median, weighted by samples."""
    return base.with_rule(GeometricMedian(steps, nu))
