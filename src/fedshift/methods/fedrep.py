"""FedRep: the head stays on the client and is trained first, then the shared body for the rest of the round.

Collins et al. 2021, arXiv:2102.07078, Algorithm 1; its experiments take 10 local epochs for the head and 1 for the
body. By default the steps of a round are divided in that ratio, so that FedRep gets the same budget as every other
method; ``head_epochs`` and ``body_epochs`` are the paper's own.
"""

from dataclasses import dataclass, field, replace
from typing import Self

from typing_extensions import override

from ..core.method import Method, method
from ..core.requirements import Requirements
from ..core.rule import Rule, RuleContext
from ..core.selection import Entry, parse_selection
from ..utils.errors import UsageError


@dataclass(frozen=True)
class HeadThenBody(Rule):
    """Training of the head for ``share`` of the round's steps, then of the body, for one step at least."""

    share: float
    layers: int | str
    head: frozenset[str] = field(default=frozenset(), repr=False)
    body: frozenset[str] = field(default=frozenset(), repr=False)
    requires = Requirements(step_budget=True, trains_everything="FedRep trains first the head and then all else")

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


@method
def fedrep(
    base: Method,
    *,
    layers: int | str = 1,
    head: int = 10,
    body: int = 1,
    head_epochs: int | None = None,
    body_epochs: int | None = None,
) -> Method:
    """Keep the last ``layers`` layers of ``base`` (or a pattern) local; ``head : body`` divides the steps of a round.

    ``head_epochs`` and ``body_epochs``: a round is that many passes for the head and then for the body, instead of the
    experiment's epochs, batches or steps.
    """
    if head < 1 or body < 1:
        raise UsageError(f"head={head} and body={body}: give 1 or more for each")
    if head_epochs is not None or body_epochs is not None:
        if (head, body) != (10, 1):
            raise UsageError(f"head={head} and body={body} divide a round: leave them out with epochs")
        if not head_epochs or not body_epochs or head_epochs < 1 or body_epochs < 1:
            raise UsageError(
                f"head_epochs={head_epochs} and body_epochs={body_epochs}: give 1 or more for each, or neither"
            )
        head, body = head_epochs, body_epochs
        base = base.with_work(epochs=head + body)
    return base.keep_on_client(parse_selection(layers)).with_rule(HeadThenBody(head / (head + body), layers))
