"""Rules: what a method changes inside local training and at the server, beyond averaging.

Every hook is a no-op that a method overrides. Rules chain: a method holds a tuple of them, each sees what the one
before made of a value, and each has memories and entries of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from torch import Tensor

from ..utils.state import State

if TYPE_CHECKING:
    from .plan import Plan
    from .selection import Entry


@dataclass(frozen=True, kw_only=True)
class RuleContext:
    """What a rule may read while a client works.

    ``global_params``: the entries as loaded from the server this round. ``memory``: the rule's own memory on this client.
    ``extra_entries``: the rule's own entries (see :meth:`Rule.extra_entries`). ``server_memory``: the rule's memory on the server, as broadcast.
    ``rest``: the entries beside the trained parameters, as they are now. ``lr``: learning rate of the round. ``steps``:
    local steps done this round, of ``planned_steps`` (0 unless :attr:`Rule.needs_step_budget`). ``key``: int64 scalar from which a step
    draws (keyed streams).
    ``data_loss``: loss on the batch of a model with these entries, inside :meth:`Rule.transform_loss` alone.
    """

    global_params: State
    memory: State = field(default_factory=dict)
    extra_entries: State = field(default_factory=dict)
    server_memory: State = field(default_factory=dict)
    rest: State = field(default_factory=dict)
    lr: float = 0.0
    steps: int = 0
    planned_steps: int = 0
    key: Tensor | None = None
    data_loss: Callable[[State], Tensor] | None = None


class Rule:
    """The rule that changes nothing. Hooks are pure: they return new values and modify none of their arguments.

    ``personalizes``: whether the client would use another model than the one it loads (:meth:`personal_model`). ``lr_scale``:
    learning rate of the rule's own parameters over that of the model's. ``needs_step_budget``: whether it goes by the number of
    steps that the round will have, so that clients with other numbers cannot be stepped together. ``epochs``: passes of
    a round over the client's data that train the rule's own parameters apart from the model's, after its work; None:
    they are trained with the model, on the same batches.
    """

    personalizes: bool = False
    lr_scale: float = 1.0
    needs_step_budget: bool = False
    epochs: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def source_method(self) -> str:
        """The method that brings the rule, as messages name it: its module."""
        return type(self).__module__.rpartition(".")[2]

    def bind(self, entries: tuple[Entry, ...]) -> Self:
        """The rule for a model with these entries."""
        return self

    def check(self, plan: Plan) -> None:
        """Raise :class:`UsageError` where the rule makes no sense on ``plan``: nothing to act on, another optimizer."""

    def client_memory(self, params: State, rest: State) -> State:
        """Memory that every client starts with and keeps to itself, given the model's trained and other entries."""
        return {}

    def server_memory(self, initial: State) -> State:
        """Memory that the server starts with and broadcasts; ``initial``: the trained parameters that clients load."""
        return {}

    def extra_entries(self, params: State, rest: State) -> tuple[State, State]:
        """Entries of the rule's own on every client: parameters that the optimizer trains too, and others."""
        return {}, {}

    def trainable(self, names: frozenset[str]) -> frozenset[str]:
        """Which of the parameters ``names`` the optimizer changes."""
        return names

    def init_local(self, state: State, context: RuleContext) -> State:
        """The entries from which the client's local work starts, given those that it loads and keeps."""
        return state

    def personal_model(self, state: State, context: RuleContext) -> State:
        """The model that the client would use, given what it loads and keeps."""
        return self.init_local(state, context)

    def trainable_at_step(self, names: frozenset[str], context: RuleContext) -> frozenset[str]:
        """Which of the trained parameters ``names`` the coming step changes."""
        return names

    def transform_loss(self, loss: Tensor, params: State, context: RuleContext) -> Tensor:
        """The objective (scalar) that is differentiated, given the loss on the batch."""
        return loss

    def transform_grads(self, grads: State, params: State, context: RuleContext) -> State:
        """The gradients that the optimizer sees."""
        return grads

    def finalize(self, params: State, context: RuleContext) -> tuple[State, State]:
        """After local work: the client's new memory, and what it uploads beside its entries."""
        return context.memory, {}

    def aggregate_memory(self, memory: State, uploads: Sequence[State], shares: Sequence[float]) -> State:
        """The server's new memory from the clients' uploads, in client order.

        ``shares``: each uploading client's share of the weight of all clients that train, by the method's weighting.
        They sum to one where all take part, and to less where some do not.
        """
        return memory

    def notices(self, plan: Plan) -> Iterator[str]:
        """Yield what users should know of the rule on ``plan`` before it runs, a sentence each."""
        yield from ()
