"""Declarations: what a rule says about itself as data, which others read and check.

Consent at a site, ``fedshift inspect``, policies, the ledger, reports and differential privacy read the same
:class:`Send`; a client that would upload anything else is stopped (:func:`fedshift.core.disclosure.check_upload`).
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Own:
    """State of a rule, at its first values. No name occurs in two of its parts, but for ``server``.

    Args:
        model: Another network's weights and buffers, under the names of the model's: all of them or some. It is trained
            and decays as the model does, and rules that change the gradients of any network see it
            (:attr:`Rule.on_copies`).
        params: Other parameters, which are trained. They do not decay unless a phase says so, and no other rule sees
            them.
        bounds: Least and greatest values of ``params``, to which they are put back after each step.
        buffers: Neither trained nor sent; :meth:`Rule.loss` may write into them.
        memory: Kept by each client from round to round; it never leaves the client.
        server: Kept by the server, which broadcasts it.
        growing: Axes of entries of ``server`` whose lengths change from round to round; all other lengths, and all
            types, stay what they are at the start.

    """

    model: State = field(default_factory=dict)
    params: State = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    memory: State = field(default_factory=dict)
    server: State = field(default_factory=dict)
    growing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def kept(self) -> State:
        """All that a client keeps for the rule, which has one name each."""
        return {**self.model, **self.params, **self.buffers, **self.memory}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """When parameters are trained.

    A rule's own parameters are trained in all of the model's steps unless a phase trains them otherwise.

    Args:
        trains: The rule's own parameters, or entries of the model, which no step outside of such phases changes.
        when: ``during``: in the model's steps, which alone count, for ``steps``, samples and weight. ``before`` and
            ``after``: in passes that train the rule's own parameters alone, and in which its :meth:`Rule.loss` runs,
            there and only there. After those ``before``, the model starts anew from :meth:`Rule.personalize`.
        share: Part of the model's steps, from where to where. In n steps, a boundary between two parts lies at
            ``min(max(1, round(share * n)), n - 1)``, and a single step trains all.
        epochs: Number of passes over the client's data, whose batches are drawn as if the client had no others.
        lr_scale: Learning rate relative to that of the model.
        decay: The optimizer's weight decay acts on :attr:`Own.params`, too.

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
                f"a Phase {self.when} the model's steps trains the model's entries: give trains='own', or when='during'"
            )
        if not 0 <= self.share[0] < self.share[1] <= 1:
            raise UsageError(f"a Phase with share={self.share}: give two numbers in [0, 1], the smaller one first")
        if self.epochs < 1 or not self.lr_scale > 0:
            raise UsageError(
                f"a Phase with epochs={self.epochs} and lr_scale={self.lr_scale:g}: give 1 or more, and a number above "
                "0"
            )

    def covers(self, step: int, steps: int) -> bool:
        """Return whether the phase trains in ``step`` (from 0) of a round of ``steps`` steps of the model."""
        start, end = (round(share * steps) for share in self.share)
        if steps > 1:
            start = min(max(1, start), steps - 1) if self.share[0] > 0 else 0
            end = min(max(1, end), steps - 1) if self.share[1] < 1 else steps
        return steps <= 1 or start <= step < end


Apart = tuple[int, Phase]
"""A phase, after the position of its rule."""


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Declaration of what costs or reveals something to read; a context refuses, by name, what is not declared.

    Args:
        targets: :attr:`LookContext.targets`, those of all of a client's training samples.
        first: Number of different samples of a round, its first ones, on which :meth:`Rule.look` runs the model. A
            client that uses fewer in the round has these.
        features: Layer whose input :meth:`Rule.loss` gets, by its name in the network, or ``"last"`` for the last layer
            with parameters, so that features are what the classifier sees. They come from the pass of the loss.
        draws: :attr:`StepContext.key`, from which a step draws.
        round: :attr:`StepContext.round`, for which no step is recorded.
        entries: :meth:`Rule.fold` gets the entries of each client, and not only their mean.

    """

    targets: bool = False
    first: int = 0
    features: str = ""
    draws: bool = False
    round: bool = False
    entries: bool = False


Reveals = Literal["update", "client", "class", "image"]
"""Kinds of content of an upload, from least to most: the client's update alone, or its data at that grain."""
GRAINS: tuple[Reveals, ...] = get_args(Reveals)


@dataclass(frozen=True, kw_only=True)
class Send:
    """One tensor that every client uploads for a rule, in each round or once before round 1.

    Args:
        shape: Its shape, the same for all clients and rounds; what varies in length is padded.
        dtype: Its type.
        reveals: ``update`` if it follows from the entries that the client loaded, its update and the rule's memory;
            otherwise what it was measured on: all of a client's data (``client``), the samples of one class
            (``class``), or single samples (``image``). A client with one sample reveals that sample at every grain.
        passed_on: The server may send it to other clients as one client sent it, and not only in what it makes of all
            of a round's.

    Raises:
        UsageError: ``reveals`` is not one of these.

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
        """Its size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def like(cls, state: State, reveals: Reveals, *, passed_on: bool = False) -> dict[str, Send]:
        """Return one for each entry of ``state``."""
        return {
            name: cls(shape=tuple(tensor.shape), dtype=tensor.dtype, reveals=reveals, passed_on=passed_on)
            for name, tensor in state.items()
        }


@dataclass(frozen=True, eq=False)
class Bound:
    """A rule resolved against a plan, and all that it declares: ``plan.rules`` holds one for each rule.

    Args:
        rule: The rule, with what it has found in the plan.
        own: Its state.
        phases: When parameters are trained.
        reads: What it reads that must be declared.
        sends: What every client uploads for the rule in each round: exactly the tensors of :meth:`Rule.end`.
        prelude: What every client uploads once, before round 1; nothing: the rule has no exchange there. In it, every
            client that trains takes no step and sends no entries: :meth:`Rule.look` runs, on the samples of a first
            pass, then :meth:`Rule.end`, and at the server :meth:`Rule.fold`. Clients keep nothing of it, and one that
            joins later has no part in it.
        sets: Entries of the server that :meth:`Rule.fold` computes, in place of their aggregate.
        notices: What users should know before the rule runs, one sentence each.

    """

    rule: Rule
    own: Own = field(default_factory=Own, kw_only=True)
    phases: tuple[Phase, ...] = field(default=(), kw_only=True)
    reads: Reads = field(default_factory=Reads, kw_only=True)
    sends: Mapping[str, Send] = field(default_factory=dict, kw_only=True)
    prelude: Mapping[str, Send] = field(default_factory=dict, kw_only=True)
    sets: frozenset[str] = field(default=frozenset(), kw_only=True)
    notices: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def uploads(self) -> tuple[tuple[str, Send], ...]:
        """All that clients upload for the rule, each with its name: before round 1, and in each round."""
        return *self.prelude.items(), *self.sends.items()

    def list_phases(self, when: Literal["before", "during", "after"]) -> tuple[Phase, ...]:
        """Return the phases of ``when``; unless one says otherwise, own parameters are trained during all steps."""
        own = any(phase.trains == "own" for phase in self.phases)
        return tuple(phase for phase in (self.phases if own else (*self.phases, Phase())) if phase.when == when)

    @property
    def is_apart(self) -> bool:
        """Return whether the rule's own parameters, and its loss, have passes of their own."""
        return any(phase.when != "during" for phase in self.phases)
