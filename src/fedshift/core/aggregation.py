"""Aggregation of the clients' uploads into the server's entries.

McMahan et al. 2017 (arXiv:1602.05629), Algorithm 1: the mean weighted by each client's number of samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

from typing_extensions import override

from ..utils.errors import UsageError
from ..utils.state import State
from .means import weighted_mean
from .requirements import Requirements
from .states import ServerState, Update

if TYPE_CHECKING:
    from .plan import Plan


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
    kinds: tuple[type, ...] = ()
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

    def of(self, rule: type) -> State:
        """Return what the client sent for the method's rule of that type."""
        return self.update.memory[self.kinds.index(rule)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Aggregated:
    """Result of an aggregation.

    Args:
        entries: The server's entries after the round, each in its own dtype.
        kept: What the aggregation keeps on the server: ``server.kept`` in the next round.
        mixes: Weights of the round's uploads by client and entry (:class:`~fedshift.core.mixes.Mixes`), of clients that
            load a mix.

    """

    entries: State
    kept: State = field(default_factory=dict)
    mixes: Mapping[str, State] = field(default_factory=dict)


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


def average(received: Sequence[Received]) -> State:
    """Return the :func:`weighted_mean` of the uploads, by the clients' weights."""
    return weighted_mean([each.entries for each in received], [each.weight for each in received])


class RobustAggregation(Aggregation):
    """An aggregation that tolerates clients whose uploads are arbitrary, if at least ``min_clients`` take part."""

    requires = Requirements(
        entries_only="robust aggregation protects, so that one faulty client could move the rest at will"
    )
