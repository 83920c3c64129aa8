"""FedRep: the head stays on the client and is trained first, then the shared body for the rest of the round.

Collins et al. 2021, arXiv:2102.07078, Algorithm 1; its experiments take 10 local epochs for the head and 1 for the
body. By default the steps of a round are divided in that ratio, so that FedRep gets the same budget as every other
method; ``head_epochs`` and ``body_epochs`` are the paper's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from typing_extensions import override

from ..core.method import Method
from ..core.requirements import Requirements
from ..core.rule import Rule, RuleContext
from ..core.selection import Entry, parse_selection
from ..utils.errors import UsageError
from .fedavg import fedavg


@dataclass(frozen=True)
class HeadThenBody(Rule):
    """Trains the head for ``share`` of the round's steps, then the body, for one step at least."""

    share: float
    layers: int | str
    head: frozenset[str] = field(default=frozenset(), repr=False)
    body: frozenset[str] = field(default=frozenset(), repr=False)
    requires = Requirements(step_budget=True)

    @override
    def bind(self, entries: tuple[Entry, ...]) -> Self:
        head = parse_selection(self.layers).names(entries)
        return replace(self, head=head, body=frozenset(entry.name for entry in entries) - head)

    @override
    def trainable_at_step(self, names: frozenset[str], context: RuleContext) -> frozenset[str]:
        if context.planned_steps < 2:  # a single step trains both
            return names
        first = min(max(1, round(self.share * context.planned_steps)), context.planned_steps - 1)
        return names - (self.body if context.steps < first else self.head)


def fedrep(
    base: Method | None = None,
    *,
    layers: int | str = 1,
    head: int = 10,
    body: int = 1,
    head_epochs: int | None = None,
    body_epochs: int | None = None,
) -> Method:
    """``base`` (FedAvg) with the last ``layers`` layers (or a pattern) local; ``head : body`` divides a round.

    ``head_epochs`` and ``body_epochs``: a round is that many passes for the head and then for the body, instead of the
    experiment's epochs or batches.
    """
    if head < 1 or body < 1:
        raise UsageError(f"fedrep: head={head} and body={body}: give 1 or more for each")
    base = base or fedavg()
    name = base.compose_name(
        fedrep, layers=layers, head=head, body=body, head_epochs=head_epochs, body_epochs=body_epochs
    )
    if head_epochs is not None or body_epochs is not None:
        if (head, body) != (10, 1):
            raise UsageError(f"fedrep: head={head} and body={body} divide a round: leave them out with epochs")
        if not head_epochs or not body_epochs or head_epochs < 1 or body_epochs < 1:
            raise UsageError(
                f"fedrep: head_epochs={head_epochs} and body_epochs={body_epochs}: give 1 or more for each, or neither"
            )
        head, body = head_epochs, body_epochs
        base = base.with_work(name, epochs=head + body, batches=None)
    kept = parse_selection(layers)
    return replace(
        base,
        name=name,
        scope=base.scope.keep_on_client(kept),
        rules=(*base.rules, HeadThenBody(head / (head + body), layers)),
    )
