"""Bounded weights: limit a client's share of an average, regardless of the size that it reports.

Among three or more clients, weights above the bound are lowered to it by water filling, which preserves the ratios of
the other weights. Two clients are never bounded. Weights within the bound are returned unchanged, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

FEWEST = 3
"""Minimum number of clients for which shares are bounded."""
_ROUNDING = 1 + 1e-9


def bound_shares(weights: Sequence[float], most: float) -> list[float]:
    """Lower ``weights`` (positive) so that none exceeds a fraction ``most`` of their sum (at least ``1 / count``)."""
    if len(weights) < FEWEST:
        return list(weights)
    most = max(most, 1 / len(weights))
    ordered = sorted(weights, reverse=True)
    for lowered, weight in enumerate(ordered):
        level = most * fsum(ordered[lowered:]) / (1 - lowered * most)
        if weight <= level * _ROUNDING:
            return [min(each, level) for each in weights] if lowered else list(weights)
    raise AssertionError("the smallest weight is at most the mean")
