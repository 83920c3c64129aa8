"""Means of the clients' entries, and statistics for robust aggregations.

In: entries of clients, and their weights. Out: means, or bounded weights. Sums are accumulated in float64 in a fixed
order and cast back, so that results do not depend on scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum

import torch
from torch import Tensor

from ..utils.state import State, clone, drop_equal, nbytes, pick

FEWEST_BOUNDED = 3
"""Minimum number of clients for which shares are bounded."""
CHUNK = 2**17
"""Number of values summed at a time on a CPU, so that the sums stay in its cache."""
LARGE_CHUNK = 2**24
"""Number of values summed at a time on another device, where each call costs more than its memory."""


class StreamingMean:
    """Entry-wise weighted mean of a stream of states, which are not stored.

    Sums are float64; float64 entries are summed as deviations from the first state, so that the mean of equal values is
    exact, bit for bit. Integer entries (BatchNorm's ``num_batches_tracked``) stay integers: their mean is rounded to
    the nearest.
    """

    def __init__(self) -> None:
        self._first: State = {}
        self._sums: State = {}
        self._total = 0.0
        self._last: tuple[State, float] | None = None  # not added yet: the next state may be the same

    @property
    def nbytes(self) -> int:
        """Size in bytes of one of the added states."""
        if self._last:
            return nbytes(self._last[0])
        return sum(total.numel() * self._first[name].itemsize for name, total in self._sums.items())

    def add(self, state: State, weight: float) -> None:
        """Count ``state`` with ``weight`` (positive)."""
        if self._last and self._last[0] is state:
            weight += self._last[1]
        else:
            self._flush()
        self._last = state, weight

    def add_stacked(self, state: State, weights: Sequence[float]) -> None:
        """Count the K states stacked in ``state``, each entry ``[K, ...]``, with ``weights`` (K positive numbers)."""
        if all(drop_equal(entry).shape[0] < len(weights) for entry in state.values()):
            self.add({name: entry[0] for name, entry in state.items()}, sum(weights))
            return
        self._flush()
        if not self._sums:  # a view would keep all lanes
            self._begin({name: entry[0].clone() for name, entry in state.items()})
        self._total += sum(weights)
        weights_K = torch.tensor(weights, dtype=torch.float64).to(next(iter(self._sums.values())).device)
        for name, total in self._sums.items():
            lanes = drop_equal(state[name])
            lane_weights = weights_K if len(lanes) == len(weights_K) else weights_K.sum(dim=0, keepdim=True)
            lanes = lanes - self._first[name] if lanes.dtype == torch.float64 else lanes
            flat_KN, into_N = lanes.reshape(len(lanes), -1), total.reshape(-1)
            tiles = torch.split(flat_KN, max(1, _chunk_size(total) // len(lanes)), dim=1)
            for into, tile in zip(torch.split(into_N, tiles[0].shape[1]), tiles, strict=True):
                into.addmv_(tile.double().T, lane_weights)

    def merge(self, other: StreamingMean) -> None:
        """Count all states that ``other`` has counted; ``other`` must not be used afterwards."""
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
        """Return the mean of the added states (at least one), each entry in its original dtype."""
        if self._last and not self._sums:
            return clone(self._last[0])
        self._flush()
        means = {name: (total / self._total, self._first[name]) for name, total in self._sums.items()}
        return {
            name: first + mean if first.dtype == torch.float64 else cast_to(mean, first.dtype)
            for name, (mean, first) in means.items()
        }

    def _begin(self, first: State) -> None:
        """Allocate sums for states like ``first``, and keep its float64 entries."""
        for name, entry in first.items():
            self._first[name] = entry if entry.dtype == torch.float64 else entry.new_empty(0)
            self._sums[name] = torch.zeros(entry.shape, dtype=torch.float64, device=entry.device)

    def _flush(self) -> None:
        if self._last is None:
            return
        (state, weight), self._last = self._last, None
        if not self._sums:
            self._begin(state)
        self._total += weight
        for name, total in self._sums.items():
            entry = state[name] - self._first[name] if state[name].dtype == torch.float64 else state[name]
            for into, part in zip(_chunks(total), _chunks(entry), strict=True):
                into.add_(part, alpha=weight)


def _chunk_size(tensor: Tensor) -> int:
    return CHUNK if tensor.device.type == "cpu" else LARGE_CHUNK


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    size = _chunk_size(tensor)
    return (tensor,) if tensor.numel() <= size else torch.split(tensor.reshape(-1), size)


def weighted_mean(states: Sequence[State], weights: Sequence[float], whole: frozenset[str] = frozenset()) -> State:
    """Return the :class:`StreamingMean` of ``states`` under ``weights``.

    ``whole``: entries without a mean, taken from the state with the largest weight.
    """
    mean, largest = StreamingMean(), states[max(range(len(states)), key=weights.__getitem__)]
    for state, weight in zip(states, weights, strict=True):
        mean.add(pick(state, state.keys() - whole) if whole else state, weight)
    return pick(largest, whole) | mean.result()


def cast_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` (float64) in ``dtype``, rounded to the nearest for integer dtypes."""
    return (values if dtype.is_floating_point else values.round()).to(dtype)


def stack_entry(states: Sequence[State], name: str) -> Tensor:
    """Return entry ``name`` of all clients, float64 ``[clients, ...]``."""
    return torch.stack([state[name].double() for state in states])


def compute_trimmed_mean(states: Sequence[State], trim: int) -> State:
    """Return the mean of each coordinate without its ``trim`` largest and ``trim`` smallest values, unweighted."""
    inner = slice(trim, len(states) - trim)
    return {
        name: cast_to(stack_entry(states, name).sort(dim=0).values[inner].mean(dim=0), first.dtype)
        for name, first in states[0].items()
    }


def squared_distances(states: Sequence[State], names: Iterable[str]) -> Tensor:
    """Return the pairwise squared distances of clients over the entries ``names``, float64 ``[clients, clients]``."""
    points = [stack_entry(states, name).reshape(len(states), -1) for name in sorted(names)]
    total = torch.zeros(len(states), len(states), dtype=torch.float64, device=points[0].device)
    for points_KN in points:
        total += torch.stack([(points_KN - point_N).square().sum(dim=1) for point_N in points_KN])
    return total.cpu()


def bound_shares(weights: Sequence[float], most: float) -> list[float]:
    """Lower ``weights`` (positive) so that none exceeds a fraction ``most`` of their sum (at least ``1 / count``).

    Weights above the bound are lowered to it by water filling, which preserves the ratios of the others. Two clients
    are never bounded, and weights within the bound are returned unchanged, bit for bit.
    """
    if len(weights) < FEWEST_BOUNDED:
        return list(weights)
    most = max(most, 1 / len(weights))
    ordered = sorted(weights, reverse=True)
    for lowered, weight in enumerate(ordered):
        level = most * fsum(ordered[lowered:]) / (1 - lowered * most)
        if weight <= level * (1 + 1e-9):
            return [min(each, level) for each in weights] if lowered else list(weights)
    raise AssertionError("the smallest weight is at most the mean")
