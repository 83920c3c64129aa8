"""FedRep: the head stays on the client and is trained first, then the shared body for the rest of the round.

Collins et al. 2021, arXiv:2102.07078, Algorithm 1; its experiments take 10 local epochs for the head and 1 for the
body. Here the steps of a round are divided in that ratio, so that FedRep gets the same budget as every other method.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from typing_extensions import override

from ..base.errors import UsageError
from ..core.method import Method
from ..core.rule import Local, Rule
from ..core.select import Entry, written
from .fedavg import fedavg


@dataclass(frozen=True)
class HeadThenBody(Rule):
    """Trains the head for ``share`` of the round's steps, then the body, for one step at least."""

    share: float
    layers: int | str
    head: frozenset[str] = field(default=frozenset(), repr=False)
    body: frozenset[str] = field(default=frozenset(), repr=False)
    paced = True

    @override
    def bind(self, entries: tuple[Entry, ...]) -> Self:
        head = written(self.layers).names(entries)
        return replace(self, head=head, body=frozenset(entry.name for entry in entries) - head)

    @override
    def active(self, names: frozenset[str], local: Local) -> frozenset[str]:
        if local.planned < 2:  # a single step trains both
            return names
        first = min(max(1, round(self.share * local.planned)), local.planned - 1)
        return names - (self.body if local.steps < first else self.head)


def fedrep(base: Method | None = None, *, layers: int | str = 1, head: int = 10, body: int = 1) -> Method:
    """``base`` (FedAvg) with the last ``layers`` layers (or a pattern) local; ``head : body`` divides a round."""
    if head < 1 or body < 1:
        raise UsageError(f"fedrep: head={head} and body={body}: give 1 or more for each")
    base = base or fedavg()
    kept = written(layers)
    return replace(
        base,
        name=base.titled(fedrep, layers=layers, head=head, body=body),
        scope=base.scope.without(kept),
        rules=(*base.rules, HeadThenBody(head / (head + body), layers)),
    )
