"""Rules: what a method changes inside local training and at the server, beyond averaging.

Every hook is a no-op that a method overrides. Rules chain: a method holds a tuple of them, each sees what the one
before made of a value, and each has memories of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..base.state import State


@dataclass(frozen=True, kw_only=True)
class Local:
    """What a rule may read while a client works.

    ``anchor``: the entries as loaded from the server this round. ``memory``: the rule's own memory on this client.
    ``server``: the rule's memory on the server, as broadcast. ``lr``: learning rate of the round. ``steps``: local
    steps done this round.
    """

    anchor: State
    memory: State = field(default_factory=dict)
    server: State = field(default_factory=dict)
    lr: float = 0.0
    steps: int = 0


class Rule:
    """The rule that changes nothing. Hooks are pure: they return new values and modify none of their arguments."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def client_memory(self, initial: State) -> State:
        """Memory that every client starts with and keeps to itself; ``initial``: the model's trained parameters."""
        return {}

    def server_memory(self, initial: State) -> State:
        """Memory that the server starts with and broadcasts; ``initial``: the trained parameters that clients load."""
        return {}

    def trainable(self, names: frozenset[str]) -> frozenset[str]:
        """Which of the parameters ``names`` the optimizer changes."""
        return names

    def resolve(self, params: State, local: Local) -> State:
        """The parameters that the forward pass uses, given those that are trained."""
        return params

    def loss(self, loss: Tensor, params: State, local: Local) -> Tensor:
        """The objective (scalar) that is differentiated, given the loss on the batch."""
        return loss

    def grads(self, grads: State, params: State, local: Local) -> State:
        """The gradients that the optimizer sees."""
        return grads

    def finish(self, params: State, local: Local) -> tuple[State, State]:
        """After local work: the client's new memory, and what it uploads beside its entries."""
        return local.memory, {}

    def fold(self, memory: State, uploads: Sequence[State], weights: Sequence[float], population: int) -> State:
        """The server's new memory from the clients' uploads (in client order, weights that sum to one)."""
        return memory
