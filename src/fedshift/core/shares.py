"""Bounded weights: no client has more than a given share of an average, whatever it says of its size.

Among three clients or more, a weight above the share is lowered to it (water filling: the weights of the others keep
their ratios). Of two clients one always decides. Weights within the bound are returned as they are, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

FEWEST = 3
"""Number of clients from which on shares are bounded."""
_ROUNDING = 1 + 1e-9


def bound_shares(weights: Sequence[float], most: float) -> list[float]:
    """Return ``weights`` (positive), of which none is more than ``most`` of their sum, or than all have if equal."""
    if len(weights) < FEWEST:
        return list(weights)
    most = max(most, 1 / len(weights))
    ordered = sorted(weights, reverse=True)
    for lowered, weight in enumerate(ordered):
        level = most * fsum(ordered[lowered:]) / (1 - lowered * most)
        if weight <= level * _ROUNDING:
            return [min(each, level) for each in weights] if lowered else list(weights)
    raise AssertionError("the smallest of some weights is at most their mean")
