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
from .states import ServerState, Update

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Received:
    """One client's contribution to a round, as the server received it; sequences are sorted by client name.

    Args:
        client: The client's name.
        update: The client's upload.
        weight: The client's weight among the round's participants, by the method's weighting; weights sum to one.
        size: Number of training samples; 1 where clients count equally.
        share: The client's fraction of the sizes of all clients that train. Shares sum to less than one if some clients
            did not take part in the round.
        kinds: Types of the method's rules, in order.
        withheld: Whether :attr:`entries` is refused, because only the sum over clients is needed.

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
        """The entries of the model that the client sent; a rule needs ``entries=True``."""
        if self.withheld:
            raise UsageError(
                "a rule's fold() reads the entries of single clients, without declaring it: return "
                "Declared(self, entries=True) from its bind()"
            )
        return self.update.shared

    def of(self, rule: type) -> State:
        """Return what the client sent for the method's rule of type ``rule``."""
        return self.update.memory[self.kinds.index(rule)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Aggregated:
    """Result of an aggregation.

    Args:
        entries: The server's entries after the round, each in its original dtype.
        kept: State that the aggregation keeps on the server: ``server.kept`` in the next round.
        mixes: Weights of the round's uploads by client and entry (:class:`~fedshift.core.mixes.Mixes`), for clients
            that load a mix.

    """

    entries: State
    kept: State = field(default_factory=dict)
    mixes: Mapping[str, State] = field(default_factory=dict)


AggregationFunction: TypeAlias = "Callable[[Plan, ServerState, Sequence[Received]], Aggregated | State]"
"""A plain function that replaces an :class:`Aggregation`; it may return only the entries."""


class Aggregation(ABC):
    """Combines a round's uploads into the server's entries; a function of the plan, the server and the uploads.

    :meth:`fedshift.core.method.Method.with_aggregation` converts a plain function.

    Attributes:
        needs_shared, needs_several_steps, needs_plain_steps, allows_momentum, needs_entries_only: As of
            :class:`~fedshift.core.rule.Rule`.
        sums: Whether the result is the weighted mean of the uploads, so that the server stores their sum instead of
            them.
        weighs: Whether the result depends on the clients' weights by the method's weighting.
        keeps: Whether state about clients stays on the server between rounds (``Aggregated.kept``).
        mixes: Whether clients load mixes of the round's uploads (``Aggregated.mixes``).
        passes_on: Whether clients may receive entries exactly as another client sent them; sites are informed of it.

    """

    needs_shared: ClassVar[str] = ""
    needs_several_steps: ClassVar[str] = ""
    needs_plain_steps: ClassVar[str] = ""
    allows_momentum: ClassVar[bool] = False
    needs_entries_only: ClassVar[str] = ""
    sums: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    keeps: ClassVar[bool] = False
    mixes: ClassVar[bool] = False
    passes_on: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def min_clients(self) -> int:
        """Minimum number of clients in a round."""
        return 1

    def bind(self, plan: Plan) -> Self:
        """Return the aggregation for ``plan``; raise :class:`UsageError` to refuse it."""
        return self

    @abstractmethod
    def __call__(self, plan: Plan, server: ServerState, received: Sequence[Received]) -> Aggregated:
        """Return the server's state after the round. Pure.

        ``server``: the state before the round. ``received``: contributions of the participants, at least one.
        """


@dataclass(frozen=True)
class Mean(Aggregation):
    """The weighted mean of the uploads (FedAvg), computed without storing them."""

    sums = True
    passes_on = False

    @override
    def __call__(self, plan: Plan, server: ServerState, received: Sequence[Received]) -> Aggregated:
        return Aggregated(entries=average(received))


@dataclass(frozen=True, repr=False)
class FunctionAggregation(Aggregation):
    """An aggregation that calls a plain function."""

    function: AggregationFunction

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    @override
    def __call__(self, plan: Plan, server: ServerState, received: Sequence[Received]) -> Aggregated:
        result = self.function(plan, server, received)
        return result if isinstance(result, Aggregated) else Aggregated(entries=result)


def average(received: Sequence[Received]) -> State:
    """Return the :func:`weighted_mean` of the uploads, with the clients' weights."""
    return weighted_mean([each.entries for each in received], [each.weight for each in received])


class RobustAggregation(Aggregation):
    """An aggregation that tolerates clients whose uploads are arbitrary, if at least ``min_clients`` take part."""

    needs_entries_only = "robust aggregation protects, and one faulty client could corrupt the rest"
