"""Aggregation: how the clients' uploads are folded into the server's entries.

McMahan et al. 2017 (arXiv:1602.05629), Algorithm 1: the mean weighted by each client's number of samples. Sums are
accumulated in float64 in the order given and cast back, so a result does not depend on how the work was scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..base.errors import UsageError
from ..base.state import State, clone

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Uploads:
    """What an aggregation folds: the clients' entries in client order, and what is known about each client's round.

    ``weights``: sum to one. ``steps``: local steps of each client. ``previous``: the server's entries before the round.
    ``trained``: names of the entries that were trained; the others are buffers and frozen parameters. ``loaded``: names
    of those from which clients started.
    """

    states: Sequence[State]
    weights: Sequence[float]
    steps: Sequence[int]
    previous: State
    trained: frozenset[str]
    loaded: frozenset[str]


class Aggregate(Protocol):
    """A function of :class:`Uploads`; one with a method ``check(plan, clients)`` may refuse beforehand."""

    def __call__(self, uploads: Uploads) -> State:
        """The server's entries after the round, each in its own dtype."""


CHUNK = 2**17
"""Values that are folded at a time, so that their sums stay in the processor's cache."""


def weighted_mean(states: Sequence[State], weights: Sequence[float]) -> State:
    """Entry-wise mean of ``states`` under ``weights`` (positive, summing to one), each in its own dtype.

    Summed in float64, float64 entries as deviations from the state of most weight (the first of them), so that the mean
    of equal values is that value, bit for bit, and no state of little weight costs precision. Integer entries
    (BatchNorm's ``num_batches_tracked``) stay integers: their mean is rounded to the nearest.
    """
    heaviest = max(range(len(weights)), key=lambda index: weights[index])
    if all(state is states[0] for state in states):
        return clone(states[0])
    return {name: _mean([state[name] for state in states], weights, heaviest) for name in states[heaviest]}


def _mean(tensors: Sequence[Tensor], weights: Sequence[float], heaviest: int) -> Tensor:
    like = tensors[heaviest]
    if like.dtype == torch.float64:
        drift = torch.zeros_like(like)
        for tensor, weight in zip(tensors, weights, strict=True):
            drift.add_(tensor - like, alpha=weight)
        return like + drift
    if like.numel() <= CHUNK:
        return as_dtype(_sum(tensors, weights), like.dtype)
    mean = torch.empty_like(like, memory_format=torch.contiguous_format)
    chunks = zip(*(torch.split(tensor.reshape(-1), CHUNK) for tensor in (mean, *tensors)), strict=True)
    for into, *parts in chunks:
        into.copy_(as_dtype(_sum(parts, weights), like.dtype))
    return mean


def _sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor, alpha=weight)
    return total


def average(uploads: Uploads) -> State:
    """:func:`weighted_mean` of the uploads: FedAvg's aggregation."""
    return weighted_mean(uploads.states, uploads.weights)


def as_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` (float64) in ``dtype``, rounded to the nearest where that is an integer type."""
    return (values if dtype.is_floating_point else values.round()).to(dtype)


def stacked(states: Sequence[State], name: str) -> Tensor:
    """Entry ``name`` of all clients, float64 ``[clients, ...]``."""
    return torch.stack([state[name].double() for state in states])


def trimmed(uploads: Uploads, trim: int) -> State:
    """Mean of each coordinate without its ``trim`` largest and smallest values; clients count equally."""
    inner = slice(trim, len(uploads.states) - trim)
    return {
        name: as_dtype(stacked(uploads.states, name).sort(dim=0).values[inner].mean(dim=0), first.dtype)
        for name, first in uploads.states[0].items()
    }


def squared_distances(uploads: Uploads) -> Tensor:
    """Squared distance of each two clients over all trained entries, float64 ``[clients, clients]``."""
    total = torch.zeros(len(uploads.states), len(uploads.states), dtype=torch.float64)
    for name in sorted(uploads.trained):
        points = stacked(uploads.states, name).flatten(start_dim=1).cpu()
        total += torch.stack([(points - point).square().sum(dim=1) for point in points])
    return total


class Robust:
    """An aggregation that tolerates clients whose uploads are arbitrary; ``least``: clients that it needs a round."""

    least: int = 1

    def check(self, plan: Plan, clients: int) -> None:
        """Raise :class:`UsageError` where ``clients`` a round are too few."""
        if clients < self.least:
            raise UsageError(
                f"{self!r} needs at least {self.least} clients in a round, but {clients} take part: let more take "
                "part, or tolerate fewer that are faulty"
            )
