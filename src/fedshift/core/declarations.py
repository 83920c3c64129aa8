"""Declarations: the state, phases, reads and uploads of a rule, as data that other parts read and check.

Consent at a site, ``fedshift inspect``, policies, the ledger, reports and differential privacy all read the same
:class:`Send`, and a client refuses to upload anything else (:func:`fedshift.core.checks.check_upload`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import torch

from ..utils.errors import UsageError
from ..utils.state import State


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
    """One tensor that every client uploads for a rule in each round.

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
