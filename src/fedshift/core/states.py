"""States: what clients and the server hold, a client's work in progress, and its upload, as plain values.

An engine may keep them in a dictionary, in another process or on another machine. A method's rules have one memory
each: ``memory[i]`` and ``server_memory[i]`` belong to rule ``i``. While a client works, a rule's own entries lie beside
the model's (:attr:`fedshift.core.plan.Plan.own_names`), so that the optimizer changes them all; between rounds they are
part of the rule's memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.state import State
from .declarations import Apart
from .mixes import Mixes


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientState:
    """State that a client keeps between rounds; none of it leaves the client.

    Args:
        personal: Entries that the client keeps instead of loading them.
        optimizer: State of the local optimizer, where that survives a round.
        memory: One state for each rule, its own entries included.
        steps: Local steps done so far.

    """

    personal: State
    optimizer: State = field(default_factory=dict)
    memory: tuple[State, ...] = ()
    steps: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerState:
    """State of the server: ``shared`` entries and the rules' ``memory`` are broadcast, ``optimizer`` and ``kept`` stay.

    ``round``: rounds done. ``optimizer``: the server optimizer's state. ``kept``: what the aggregation keeps.
    ``mixes``: what :func:`broadcast` sends to some clients in place of ``shared``, where the aggregation makes mixes.
    """

    round: int
    shared: State
    memory: tuple[State, ...] = ()
    optimizer: State = field(default_factory=dict)
    kept: State = field(default_factory=dict)
    mixes: Mixes | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """The whole upload of one client in one round; nothing else ever leaves it.

    ``memory``: one state for each rule. ``weight``: samples used this round. ``steps``: local steps of this round.
    """

    shared: State
    memory: tuple[State, ...] = ()
    weight: float
    steps: int


class Seen(NamedTuple):
    """The part of a client's samples that rules see before local work; empty where none reads it.

    ``targets``: those of all training samples, ``[N, ...]``. ``x [B, ...]`` and ``y [B, ...]``: the round's first
    samples. ``key``: that of its first step.
    """

    targets: Tensor
    x: Tensor
    y: Tensor
    key: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTrainingState:
    """A client's local work in progress.

    Args:
        params: Parameters that are trained, the rules' included; owned by the job, like ``optimizer``.
        rest: Buffers and frozen parameters.
        global_params: Entries as loaded this round.
        optimizer: State of the local optimizer.
        memory: One state for each rule, without its own entries.
        server_memory: One state for each rule, as broadcast.
        round: Rounds done before this one.
        lr: Learning rate of the round.
        start: Steps that the client had done before the round.
        done: Steps that it has done now.
        planned_steps: Steps that the round will have.
        frozen: Whether BatchNorm's statistics are frozen.
        samples: Samples used this round.
        apart: The phase whose passes these are, which train a rule's own parameters alone, and do not count.
        prelude: This is the exchange before round 1, which has no steps.

    """

    params: State
    rest: State
    global_params: State
    optimizer: State
    memory: tuple[State, ...]
    server_memory: tuple[State, ...]
    round: int
    lr: float
    start: int
    done: int
    planned_steps: int
    frozen: bool
    samples: int = 0
    apart: Apart | None = None
    prelude: bool = False
    counter: Tensor | None = None

    @property
    def steps(self) -> Tensor:
        """Steps of the round so far, an int64 scalar."""
        return torch.tensor(self.done - self.start) if self.counter is None else self.counter

    @property
    def state(self) -> State:
        """All entries, the rules' included."""
        return {**self.params, **self.rest}
