"""Declarations: what a rule says about itself as data, which others read and check.

Consent at a site, ``fedshift inspect``, policies, the ledger, reports and differential privacy read the same
:class:`Send`; a client that would upload anything else is stopped (:func:`fedshift.core.disclosure.check_upload`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol, get_args

import torch

from ..utils.errors import UsageError
from ..utils.state import State

Reveals = Literal["update", "client", "class", "image"]
"""Kinds of content of an upload, from least to most: the client's update alone, or its data at that grain."""
GRAINS: tuple[Reveals, ...] = get_args(Reveals)


class PlannedEntries(Protocol):
    """The part of a plan that a rule may read when it declares its sends.

    ``initial``: the model's entries at their first values. ``loaded``, ``sent`` and ``trained``: names of those that
    clients load, send and train.
    """

    @property
    def initial(self) -> State: ...  # noqa: D102
    @property
    def loaded(self) -> frozenset[str]: ...  # noqa: D102
    @property
    def sent(self) -> frozenset[str]: ...  # noqa: D102
    @property
    def trained(self) -> frozenset[str]: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Send:
    """One tensor that every client uploads for a rule in each round.

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
