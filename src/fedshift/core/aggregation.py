"""Aggregation of the clients' uploads into the server's entries.

McMahan et al. 2017 (arXiv:1602.05629), Algorithm 1: the mean weighted by each client's number of samples. Sums are
accumulated in float64 in the order given and cast back, so a result does not depend on how the work was scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..utils.state import State, clone, drop_equal
from .requirements import Requirements


@dataclass(frozen=True, kw_only=True, eq=False)
class Uploads:
    """Input of an aggregation: the clients' entries in client order, and facts about each client's round.

    ``weights``: sum to one, by the method's weighting. ``sizes``: training samples that each client has; equal where
    the method weighs clients equally. ``steps``: local steps of each client. ``previous``: the server's entries before
    the round. ``trained``: names of the entries that were trained; the others are buffers and frozen parameters.
    ``loaded``: names of those from which clients started. ``fixed``: names of those that local work could not change.
    ``memory``: what each client's rules uploaded, one state for each rule. ``clients``: the clients' names. ``kept``:
    what the aggregation kept from the round before. ``seed``, ``method`` (its text) and ``round`` (from 0): what an
    aggregation that draws uses to key its streams.
    """

    states: Sequence[State]
    weights: Sequence[float]
    sizes: Sequence[float]
    steps: Sequence[int]
    previous: State
    trained: frozenset[str]
    loaded: frozenset[str]
    fixed: frozenset[str] = frozenset()
    memory: Sequence[tuple[State, ...]] = ()
    clients: Sequence[str] = ()
    kept: State = field(default_factory=dict)
    seed: int = 0
    method: str = ""
    round: int = 0


class Aggregation(Protocol):
    """A function of :class:`Uploads`.

    One with a method ``bind(plan)`` is replaced, before anything starts, by what that returns. One with an attribute
    ``requires`` (:class:`~fedshift.core.requirements.Requirements`) is refused where these are not met. What a method
    ``remember(uploads)`` returns is ``uploads.kept`` in the next round; it stays on the server. One with a method
    ``mix(uploads)`` sends clients mixes of the round's uploads: it returns by client name the weights of the uploads,
    float64 ``[uploads]``, which sum to one, for clients that sat the round out, too. Clients that it does not name load
    the server's entries. One with ``passes_on = False`` makes of all uploads whatever clients load; without that, sites
    are told that others may receive entries as one client sent them.
    """

    def __call__(self, uploads: Uploads) -> State:
        """Return the server's entries after the round, each in its own dtype."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SummedUploads:
    """The uploads of several clients of a round, of which only the weighted sum exists.

    ``mean``: the sum of exactly those entries that the method's scope sends. ``nbytes``: bytes of one client's.
    """

    mean: StreamingMean
    nbytes: int


CHUNK = 2**17
"""Values that are summed at a time, so that the sums stay in the processor's cache."""


class StreamingMean:
    """Entry-wise weighted mean of states that arrive one after another and are not kept.

    Sums are float64, those of float64 entries of deviations from the first state, so that the mean of equal values is
    that value, bit for bit. Integer entries (BatchNorm's ``num_batches_tracked``) stay integers: their mean is rounded
    to the nearest.
    """

    def __init__(self) -> None:
        self._first: State = {}
        self._sums: State = {}
        self._total = 0.0
        self._last: tuple[State, float] | None = None  # not added yet: the same may come again

    def add(self, state: State, weight: float) -> None:
        """Count ``state`` with ``weight`` (positive)."""
        if self._last and self._last[0] is state:
            weight += self._last[1]
        else:
            self._flush()
        self._last = state, weight

    def add_stacked(self, state: State, weights: Sequence[float]) -> None:
        """Count the states stacked in ``state``, each entry ``[K, ...]``, with ``weights`` (K positive numbers)."""
        if all(drop_equal(entry).shape[0] < len(weights) for entry in state.values()):
            self.add({name: entry[0] for name, entry in state.items()}, sum(weights))
            return
        self._flush()
        self._begin({name: entry[0].clone() for name, entry in state.items()})
        self._total += sum(weights)
        weights_K = torch.tensor(weights, dtype=torch.float64)
        for name, total in self._sums.items():
            lanes = drop_equal(state[name])
            own_K = weights_K if len(lanes) == len(weights_K) else weights_K.sum(dim=0, keepdim=True)
            lanes = lanes - self._first[name] if lanes.dtype == torch.float64 else lanes
            flat_KN, into_N = lanes.reshape(len(lanes), -1), total.reshape(-1)
            tiles = torch.split(flat_KN, max(1, CHUNK // len(lanes)), dim=1)
            for into, tile in zip(torch.split(into_N, tiles[0].shape[1]), tiles, strict=True):
                into.addmv_(tile.double().T, own_K.to(tile.device))

    def merge(self, other: StreamingMean) -> None:
        """Count all that ``other`` has counted, which is not used afterwards."""
        self._flush()
        if not self._sums:
            self._first, self._sums, self._total, self._last = other._first, other._sums, other._total, other._last
            return
        other._flush()
        self._total += other._total
        for name, total in self._sums.items():
            total += other._sums[name]
            if self._first[name].dtype == torch.float64:
                total += (other._first[name] - self._first[name]) * other._total

    def result(self) -> State:
        """Return the mean of the added states, at least one, each entry in its own dtype."""
        if self._last and not self._sums:
            return clone(self._last[0])
        self._flush()
        return {name: self._divide(total, self._first[name]) for name, total in self._sums.items()}

    def _begin(self, first: State) -> None:
        """Prepare sums for states like ``first``, which is the first one, unless there are some."""
        if not self._sums:
            exact = {name: entry.dtype == torch.float64 for name, entry in first.items()}
            self._first = {name: entry if exact[name] else entry.new_empty(0) for name, entry in first.items()}
            self._sums = {n: torch.zeros(e.shape, dtype=torch.float64, device=e.device) for n, e in first.items()}

    def _flush(self) -> None:
        if self._last is None:
            return
        (state, weight), self._last = self._last, None
        self._begin(state)
        self._total += weight
        for name, total in self._sums.items():
            entry = state[name] - self._first[name] if state[name].dtype == torch.float64 else state[name]
            for into, part in zip(_chunks(total), _chunks(entry), strict=True):
                into.add_(part, alpha=weight)

    def _divide(self, total: Tensor, like: Tensor) -> Tensor:
        mean = total / self._total
        return like + mean if like.dtype == torch.float64 else cast_to(mean, like.dtype)


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    return (tensor,) if tensor.numel() <= CHUNK else torch.split(tensor.reshape(-1), CHUNK)


def weighted_mean(states: Sequence[State], weights: Sequence[float]) -> State:
    """Return the :class:`StreamingMean` of ``states`` under ``weights``."""
    mean = StreamingMean()
    for state, weight in zip(states, weights, strict=True):
        mean.add(state, weight)
    return mean.result()


def average_uploads(uploads: Uploads) -> State:
    """Return the :func:`weighted_mean` of the uploads: FedAvg's aggregation, which need not keep a round's uploads."""
    return weighted_mean(uploads.states, uploads.weights)


def cast_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` (float64) in ``dtype``, rounded to the nearest where that is an integer type."""
    return (values if dtype.is_floating_point else values.round()).to(dtype)


def stack_entry(states: Sequence[State], name: str) -> Tensor:
    """Return entry ``name`` of all clients, float64 ``[clients, ...]``."""
    return torch.stack([state[name].double() for state in states])


def compute_trimmed_mean(uploads: Uploads, trim: int) -> State:
    """Return the mean of each coordinate without its ``trim`` largest and smallest values; clients count equally."""
    inner = slice(trim, len(uploads.states) - trim)
    return {
        name: cast_to(stack_entry(uploads.states, name).sort(dim=0).values[inner].mean(dim=0), first.dtype)
        for name, first in uploads.states[0].items()
    }


def squared_distances(uploads: Uploads) -> Tensor:
    """Return the squared distance of each two clients over all trained entries, float64 ``[clients, clients]``."""
    total = torch.zeros(len(uploads.states), len(uploads.states), dtype=torch.float64)
    for name in sorted(uploads.trained):
        points = stack_entry(uploads.states, name).flatten(start_dim=1).cpu()
        total += torch.stack([(points - point).square().sum(dim=1) for point in points])
    return total


class RobustAggregation:
    """An aggregation that tolerates clients whose uploads are arbitrary, if at least ``min_clients`` take part."""

    @property
    def min_clients(self) -> int:
        """Clients that must take part in a round."""
        return 1

    @property
    def requires(self) -> Requirements:
        """Needs of a robust aggregation."""
        robust = "robust aggregation protects, so that one faulty client could move the rest at will"
        return Requirements(entries_only=robust, min_clients=self.min_clients)
