"""Aggregation: how the clients' uploads are folded into the server's entries.

McMahan et al. 2017 (arXiv:1602.05629), Algorithm 1: the mean weighted by each client's number of samples. Sums are
accumulated in float64 in the order given and cast back, so a result does not depend on how the work was scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..base.state import State

Aggregate = Callable[[Sequence[State], Sequence[float]], State]


def weighted_mean(states: Sequence[State], weights: Sequence[float]) -> State:
    """Entry-wise mean of ``states`` under ``weights`` (positive, summing to one), each in its own dtype.

    Integer entries (BatchNorm's ``num_batches_tracked``) stay integers: their mean is rounded to the nearest.
    """
    folded = {}
    for name, first in states[0].items():
        total = torch.zeros_like(first, dtype=torch.complex128 if first.is_complex() else torch.float64)
        for state, weight in zip(states, weights, strict=True):
            total.add_(state[name], alpha=weight)
        folded[name] = (total if first.is_floating_point() or first.is_complex() else total.round_()).to(first.dtype)
    return folded
