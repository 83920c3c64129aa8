"""The state of clients, of the server and of local work in progress, and the upload of a client, as plain values.

An engine may keep them in a dictionary, in another process or on another machine. Each rule of a method has a memory:
``memory[i]`` and ``server_memory[i]`` belong to rule ``i``. During local work, a rule's own entries are stored with the
model's (:attr:`fedshift.core.rule.Declared.names`), so that the optimizer updates all of them; between rounds they are
part of the rule's memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.state import State
from .declarations import RulePhase
from .mixes import Mixes


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientState:
    """State that a client keeps between rounds and never sends.

    Args:
        personal: Entries that the client keeps instead of loading them.
        optimizer: State of the local optimizer, if kept between rounds.
        memory: One state per rule, including the rule's own entries.
        steps: Number of local steps done so far.

    """

    personal: State
    optimizer: State = field(default_factory=dict)
    memory: tuple[State, ...] = ()
    steps: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerState:
    """State of the server: ``shared`` entries and the rules' ``memory`` are broadcast, ``kept`` stays.

    ``round``: number of rounds done. ``memory`` and ``kept``: one state per rule. ``mixes``: mixes of uploads that
    :func:`broadcast` sends to some clients instead of ``shared``.
    """

    round: int
    shared: State
    memory: tuple[State, ...] = ()
    kept: tuple[State, ...] = ()
    mixes: Mixes | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """The complete upload of one client in one round; a client sends nothing else.

    ``memory``: one state per rule. ``weight``: number of samples used in the round. ``steps``: number of local steps in
    the round.
    """

    shared: State
    memory: tuple[State, ...] = ()
    weight: float
    steps: int


class SamplesBeforeWork(NamedTuple):
    """The samples that rules see before local work; empty if no rule reads them.

    ``targets``: targets of all training samples, ``[N, ...]``. ``x [B, ...]`` and ``y [B, ...]``: the round's first
    samples. ``key``: key of the round's first step.
    """

    targets: Tensor
    x: Tensor
    y: Tensor
    key: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTrainingState:
    """A client's local work in progress.

    Args:
        params: Trained parameters, including the rules'; owned by the job, like ``optimizer``.
        rest: Buffers and frozen parameters.
        global_params: Entries as loaded in this round.
        personal: The client's kept entries from before local work, for rules.
        optimizer: State of the local optimizer.
        memory: One state per rule, without the rule's own entries.
        server_memory: One state per rule, as broadcast.
        round: Number of rounds done before this one.
        lr: Learning rate of the round.
        start: Number of steps that the client had done before the round.
        done: Number of steps that the client has done so far.
        planned_steps: Number of steps planned for the round.
        frozen: Whether BatchNorm's statistics are frozen.
        samples: Number of samples used in this round.
        separate_phase: The current phase before or after the model's steps, which trains only a rule's own parameters
            and does not count toward steps and samples; None: the model's steps.
        counter: Number of steps taken in the round as a tensor, for recorded steps; None: computed.

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
    personal: State = field(default_factory=dict)
    samples: int = 0
    separate_phase: RulePhase | None = None
    counter: Tensor | None = None

    @property
    def steps(self) -> Tensor:
        """Number of steps taken in the round, an int64 scalar."""
        return torch.tensor(self.done - self.start) if self.counter is None else self.counter

    @property
    def state(self) -> State:
        """All entries, including the rules'."""
        return {**self.params, **self.rest}
