"""Declarations: the state, phases, reads and uploads of a rule, as data that other parts read and check.

Consent at a site, ``fedshift inspect``, policies, the ledger, reports and differential privacy all read the same
:class:`Send`, and a client refuses to upload anything else (:func:`fedshift.core.checks.check_upload`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal, get_args

import torch

from ..utils.errors import UsageError
from ..utils.state import State

if TYPE_CHECKING:
    from .rule import Rule


@dataclass(frozen=True, kw_only=True)
class Phase:
    """When parameters are trained.

    Without a phase, a rule's own parameters are trained in all of the model's steps.

    Args:
        trains: ``"own"`` for the rule's own parameters, or names of entries of the model, which are then trained only
            in such phases.
        when: ``during``: in the model's steps; only these count toward steps, samples and weight. ``before`` and
            ``after``: in separate passes that train only the rule's own parameters; :meth:`Rule.loss` then runs only
            in these passes. After a ``before`` phase, the model restarts from :meth:`Rule.personalize`.
        share: Interval of the model's steps, as fractions. In n steps, an inner boundary is at
            ``min(max(1, round(share * n)), n - 1)``, and a single step trains all parameters.
        epochs: Number of epochs of a separate pass, whose batches are drawn independently of the model's.
        lr_scale: Learning rate relative to the model's.
        decay: Whether weight decay applies to :attr:`Declared.params`.

    """

    trains: Literal["own"] | frozenset[str] = "own"
    when: Literal["before", "during", "after"] = "during"
    share: tuple[float, float] = (0.0, 1.0)
    epochs: int = 1
    lr_scale: float = 1.0
    decay: bool = False

    def __post_init__(self) -> None:
        if self.when not in ("before", "during", "after"):
            raise UsageError(f"a Phase with when={self.when!r}: give 'before', 'during' or 'after'")
        if self.when != "during" and self.trains != "own":
            raise UsageError(
                f"a Phase with when={self.when!r} trains the model's entries: give trains='own', or when='during'"
            )
        if not 0 <= self.share[0] < self.share[1] <= 1:
            raise UsageError(f"a Phase with share={self.share}: give two numbers in [0, 1], the smaller one first")
        if self.epochs < 1 or not self.lr_scale > 0:
            raise UsageError(
                f"a Phase with epochs={self.epochs} and lr_scale={self.lr_scale:g}: give epochs of 1 or more, and an "
                "lr_scale above 0"
            )

    def covers(self, step: int, steps: int) -> bool:
        """Return whether the phase includes ``step`` (from 0) of a round with ``steps`` steps of the model."""
        start, end = (round(share * steps) for share in self.share)
        if steps > 1:
            start = min(max(1, start), steps - 1) if self.share[0] > 0 else 0
            end = min(max(1, end), steps - 1) if self.share[1] < 1 else steps
        return steps <= 1 or start <= step < end


RulePhase = tuple[int, Phase]
"""The position of a rule, and one of its phases."""


Reveals = Literal["update", "client", "class", "image"]
"""Information in an upload, from least to most: only the client's update, or its data at this granularity."""
GRAINS: tuple[Reveals, ...] = get_args(Reveals)


@dataclass(frozen=True, kw_only=True)
class Send:
    """One tensor that every client uploads for a rule, in each round or once before round 1.

    Args:
        shape: The shape, equal for all clients and rounds; content of variable length is padded.
        dtype: The dtype.
        reveals: ``update`` if the tensor follows from the loaded entries, the client's update and the rule's memory;
            otherwise the data that it was measured on: all of a client's data (``client``), the samples of one class
            (``class``), or single samples (``image``). A client with one sample reveals that sample at every
            granularity.
        passed_on: Whether the server may forward the tensor to other clients unaggregated.

    Raises:
        UsageError: ``reveals`` is not one of :data:`GRAINS`.

    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    reveals: Reveals
    passed_on: bool = False

    def __post_init__(self) -> None:
        if self.reveals not in GRAINS:
            raise UsageError(f"a Send with reveals={self.reveals!r}: give one of {', '.join(map(repr, GRAINS))}")

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def like(cls, state: State, reveals: Reveals, *, passed_on: bool = False) -> dict[str, Send]:
        """Return a :class:`Send` for each entry of ``state``."""
        return {
            name: cls(shape=tuple(tensor.shape), dtype=tensor.dtype, reveals=reveals, passed_on=passed_on)
            for name, tensor in state.items()
        }


@dataclass(frozen=True, eq=False)
class Declared:
    """A rule resolved against a network, and all that it keeps, trains, reads and sends.

    Names of entries are unique across ``model``, ``params``, ``buffers`` and ``memory``. A read that costs or reveals
    something is refused unless it is declared.

    Args:
        rule: The rule, configured for the network.
        memory: State that each client keeps from round to round and never sends.
        server: State that the server keeps and broadcasts.
        growing: Axes of entries in ``server`` whose lengths may change between rounds; all other lengths and all dtypes
            are fixed.
        model: Weights and buffers of another network, under some or all of the model's names. They are trained and
            decayed like the model, and rules with :attr:`Rule.on_copies` transform their gradients.
        params: Other trained parameters. Without weight decay unless a phase enables it; other rules do not see them.
        limits: Minimum and maximum of ``params``, which are clamped after each step.
        buffers: Entries that are neither trained nor sent; :meth:`Rule.loss` may write into them.
        phases: When parameters are trained.
        sends: Uploads of every client for the rule in each round: exactly the tensors of :meth:`Rule.end`.
        prelude: Uploads of every client before round 1; empty: the rule takes no part in that exchange. In it, clients
            take no steps and send no entries of the model: :meth:`Rule.start` runs on the samples of a first epoch,
            then :meth:`Rule.end`, and :meth:`Rule.fold` on the server. Clients keep no memory of it, and clients that
            join later do not take part.
        sets: Entries of the server that :meth:`Rule.fold` computes, replacing their aggregate.
        targets: Whether :meth:`Rule.start` reads the targets of all training samples of a client.
        samples_before_work: Number of distinct samples, the first of the round, on which :meth:`Rule.start` runs the
            model. A client that uses fewer in the round provides those.
        features: Name of the layer whose input :meth:`Rule.loss` receives, or ``"last"`` for the last layer with
            parameters, so that features are the classifier's input. They come from the pass of the loss.
        draws: Whether the rule reads ``step.key`` for random draws.
        entries: Whether :meth:`Rule.fold` receives the entries of each client, and not only their mean.
        notices: Sentences that users should read before the rule runs.

    """

    rule: Rule
    memory: State = field(default_factory=dict, kw_only=True)
    server: State = field(default_factory=dict, kw_only=True)
    growing: Mapping[str, tuple[int, ...]] = field(default_factory=dict, kw_only=True)
    model: State = field(default_factory=dict, kw_only=True)
    params: State = field(default_factory=dict, kw_only=True)
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict, kw_only=True)
    buffers: State = field(default_factory=dict, kw_only=True)
    phases: tuple[Phase, ...] = field(default=(), kw_only=True)
    sends: Mapping[str, Send] = field(default_factory=dict, kw_only=True)
    prelude: Mapping[str, Send] = field(default_factory=dict, kw_only=True)
    sets: frozenset[str] = field(default=frozenset(), kw_only=True)
    targets: bool = field(default=False, kw_only=True)
    samples_before_work: int = field(default=0, kw_only=True)
    features: str = field(default="", kw_only=True)
    draws: bool = field(default=False, kw_only=True)
    entries: bool = field(default=False, kw_only=True)
    notices: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def on_client(self) -> State:
        """All entries that a client keeps for the rule."""
        return {**self.model, **self.params, **self.buffers, **self.memory}

    @property
    def uploads(self) -> tuple[tuple[str, Send], ...]:
        """All uploads for the rule, with their names: before round 1, and in each round."""
        return *self.prelude.items(), *self.sends.items()

    def list_phases(self, when: Literal["before", "during", "after"]) -> tuple[Phase, ...]:
        """Return the phases at ``when``; by default, own parameters are trained during all steps of the model."""
        own = any(phase.trains == "own" for phase in self.phases)
        return tuple(phase for phase in (self.phases if own else (*self.phases, Phase())) if phase.when == when)

    @property
    def has_separate_passes(self) -> bool:
        """Return whether the rule's own parameters are trained in separate passes, where its loss runs."""
        return any(phase.when != "during" for phase in self.phases)
