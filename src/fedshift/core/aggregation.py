"""Aggregation of the clients' uploads into the server's entries.

McMahan et al. 2017 (arXiv:1602.05629), Algorithm 1: the mean weighted by each client's number of samples. Sums are
accumulated in float64 in the order given and cast back, so a result does not depend on how the work was scheduled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from ..utils.errors import UsageError
from ..utils.state import State, clone, drop_equal, entries_under, join_states, split_state
from .requirements import Requirements

if TYPE_CHECKING:
    from .kernel import ServerState, Update
    from .plan import Plan
    from .rule import Rule


@dataclass(frozen=True, kw_only=True, eq=False)
class Received:
    """One client's round as the server has it; a sequence of these is in the order of the clients' names.

    Args:
        client: Its name.
        update: Its upload.
        weight: Its weight among those that took part, by the method's weighting; they sum to one.
        size: Its training samples; 1 where clients count equally.
        share: Its part of the sizes of all clients that train; less than one in all where some sat the round out.
        kinds: Types of the method's rules, in order.
        withheld: Its entries are not shown, since only their sum is needed.

    """

    client: str
    update: Update
    weight: float
    size: float
    share: float
    kinds: tuple[type[Rule], ...] = ()
    withheld: bool = False

    @property
    def entries(self) -> State:
        """The entries of the model that the client sent; a rule needs ``Reads(entries=True)``."""
        if self.withheld:
            raise UsageError(
                "a rule's fold() reads the entries of single clients, which it does not declare: return "
                "Bound(self, reads=Reads(entries=True)) from its bind()"
            )
        return self.update.shared

    def of(self, rule: type[Rule]) -> State:
        """Return what the client sent for the method's rule of that type."""
        return self.update.memory[self.kinds.index(rule)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Aggregated:
    """Result of an aggregation.

    Args:
        entries: The server's entries after the round, each in its own dtype.
        kept: What the aggregation keeps on the server: ``server.kept`` in the next round.
        mixes: Weights of the round's uploads by client and entry (:class:`Mixes`), of clients that load a mix.

    """

    entries: State
    kept: State = field(default_factory=dict)
    mixes: Mapping[str, State] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixes:
    """Mixes of a round's uploads, one for each client that ``weights`` names; all others load the server's entries.

    The server keeps the uploads of one round and a client's weights, not a model for each client: a mix is made when it
    is sent.

    Args:
        uploads: The entries that clients load, in the order of the clients that took part.
        weights: By client and entry, ``""`` for all entries that are not named: float64 ``[uploads]``, or
            ``[uploads, *entry.shape]`` for a weight of each value. They sum to one over the uploads. An entry without
            weights is the server's.

    """

    uploads: tuple[State, ...]
    weights: Mapping[str, State]

    def mix(self, client: str) -> State:
        """Return the entries that ``client`` loads in place of the server's."""
        rows, mixed = self.weights.get(client, {}), {}
        for name in self.uploads[0] if rows else ():
            row = rows.get(name, rows.get(""))
            if row is None:
                continue
            values = [upload[name] for upload in self.uploads]
            if row.ndim == 1:
                mixed[name] = weighted_mean([{name: value} for value in values], row.tolist())[name]
            else:
                first = values[0].double()
                parts = (w * (value.double() - first) for w, value in zip(row.to(first.device), values, strict=True))
                mixed[name] = cast_to(first + sum(parts), values[0].dtype)
        return mixed

    def check(self, what: str) -> None:
        """Raise :class:`UsageError`, beginning with ``what``, where weights do not fit the uploads."""
        count = len(self.uploads)
        for client, rows in self.weights.items():
            for name, row in rows.items():
                where = f"{what} mixes entry {name!r} of client {client!r}"
                if name and name not in self.uploads[0]:
                    raise UsageError(f"{where}, which clients do not load: name entries that they do, or '' for all")
                whole = (count, *self.uploads[0][name].shape) if name else (count,)
                if row.shape not in ((count,), whole):
                    raise UsageError(f"{where} by weights of shape {tuple(row.shape)}: give {(count,)} or {whole}")
                if not torch.allclose(row.double().sum(dim=0), row.new_ones((), dtype=torch.float64), atol=1e-6):
                    raise UsageError(f"{where} by weights that do not sum to one over the {count} uploads: divide them")

    def flatten(self) -> State:
        """Return all tensors in one state."""
        numbers = (f"uploads/{number}" for number in range(len(self.uploads)))
        weights = join_states((f"weights/{client}" for client in self.weights), self.weights.values())
        return weights | join_states(numbers, self.uploads)

    @staticmethod
    def unflatten(state: State) -> Mixes | None:
        """Return the inverse of :meth:`flatten`; None for no tensors."""
        weights: dict[str, State] = {}
        for name, row in entries_under("weights", state).items():
            client, _, entry = name.rpartition("/")
            weights.setdefault(client, {})[entry] = row
        count = max((len(row) for rows in weights.values() for row in rows.values()), default=0)
        uploads = split_state([f"uploads/{number}" for number in range(count)], state)
        return Mixes(uploads=uploads, weights=weights) if weights else None


AggregationFunction: TypeAlias = "Callable[[Plan, ServerState, Sequence[Received]], Aggregated | State]"
"""A plain function in an :class:`Aggregation`'s place: it may return the entries alone."""


class Aggregation(ABC):
    """Combines a round's uploads into the server's entries; a function of plan, server and what was received.

    :meth:`fedshift.core.method.Method.with_aggregation` makes one of a plain function.

    Attributes:
        requires: What the rest of the method must be like; checked before anything starts.
        sums: The entries are the uploads' weighted mean, so that the server holds a sum in place of uploads.
        keeps: Something about clients stays on the server between rounds (``Aggregated.kept``).
        mixes: Clients load mixes of the round's uploads (``Aggregated.mixes``).
        passes_on: Others may receive entries as one client sent them, of which sites are told.

    """

    requires: Requirements = Requirements()
    sums: ClassVar[bool] = False
    keeps: ClassVar[bool] = False
    mixes: ClassVar[bool] = False
    passes_on: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def min_clients(self) -> int:
        """Clients that must take part in a round."""
        return 1

    @property
    def source_method(self) -> str:
        """Name of the method that brings the aggregation, used in messages: its module."""
        return type(self).__module__.rpartition(".")[2]

    def bind(self, plan: Plan) -> Self:
        """Return the aggregation for ``plan``; :class:`UsageError` to refuse it."""
        return self

    @abstractmethod
    def __call__(self, plan: Plan, server: ServerState, received: Sequence[Received]) -> Aggregated:
        """Return what the server holds after the round. Pure.

        ``server``: as it was before the round; ``received``: of the clients that took part, at least one.
        """


@dataclass(frozen=True)
class Mean(Aggregation):
    """The mean of the uploads: FedAvg's aggregation, which need not keep a round's uploads."""

    sums = True
    passes_on = False

    @override
    def __call__(self, plan: Plan, server: ServerState, received: Sequence[Received]) -> Aggregated:
        return Aggregated(entries=average(received))


@dataclass(frozen=True, repr=False)
class FunctionAggregation(Aggregation):
    """An aggregation by a plain function."""

    function: AggregationFunction

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    @property
    @override
    def source_method(self) -> str:
        return repr(self)

    @override
    def __call__(self, plan: Plan, server: ServerState, received: Sequence[Received]) -> Aggregated:
        made = self.function(plan, server, received)
        return made if isinstance(made, Aggregated) else Aggregated(entries=made)


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


def average(received: Sequence[Received]) -> State:
    """Return the :func:`weighted_mean` of the uploads, by the clients' weights."""
    return weighted_mean([each.entries for each in received], [each.weight for each in received])


def cast_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` (float64) in ``dtype``, rounded to the nearest where that is an integer type."""
    return (values if dtype.is_floating_point else values.round()).to(dtype)


def stack_entry(states: Sequence[State], name: str) -> Tensor:
    """Return entry ``name`` of all clients, float64 ``[clients, ...]``."""
    return torch.stack([state[name].double() for state in states])


def compute_trimmed_mean(states: Sequence[State], trim: int) -> State:
    """Return the mean of each coordinate without its ``trim`` largest and smallest values; clients count equally."""
    inner = slice(trim, len(states) - trim)
    return {
        name: cast_to(stack_entry(states, name).sort(dim=0).values[inner].mean(dim=0), first.dtype)
        for name, first in states[0].items()
    }


def squared_distances(states: Sequence[State], names: Iterable[str]) -> Tensor:
    """Return the squared distance of each two clients over the entries ``names``, float64 ``[clients, clients]``."""
    total = torch.zeros(len(states), len(states), dtype=torch.float64)
    for name in sorted(names):
        points = stack_entry(states, name).flatten(start_dim=1).cpu()
        total += torch.stack([(points - point).square().sum(dim=1) for point in points])
    return total


class RobustAggregation(Aggregation):
    """An aggregation that tolerates clients whose uploads are arbitrary, if at least ``min_clients`` take part."""

    requires = Requirements(
        entries_only="robust aggregation protects, so that one faulty client could move the rest at will"
    )
