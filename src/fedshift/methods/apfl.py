"""APFL: each client uses a mixture of a personal model and the one that the federation shares.

Deng et al. 2020, arXiv:2003.13461, Algorithm 1: on each batch w takes FedAvg's step and the client's own model v one
on the mixture u = alpha v + (1 - alpha) w, v = v - lr grad_v F(u). Where alpha is learned, it follows <v - w, grad
F(u)>, the slope of F(u) in alpha, and is put back into [0, 1]. Here it takes that step with every batch; the authors'
public code (FedTorch) takes it on the first batch of a round, with a decay of 0.02 alpha, and mixes outputs in place
of parameters. Normalization statistics are those that the mixture has met in training.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor
from typing_extensions import override

from ..core.method import Method, method
from ..core.requirements import Requirements
from ..core.rule import Rule, RuleContext
from ..core.selection import Entry
from ..utils.errors import UsageError
from ..utils.state import State, add_prefix, entries_under


@dataclass(frozen=True)
class Mixture(Rule):
    """The client's own model, and its part ``alpha`` of the mixture; ``learned``: alpha is trained, from there on."""

    alpha: float
    learned: bool
    buffers: frozenset[str] = field(default=frozenset(), repr=False)
    personalizes = True
    requires = Requirements(shared_entries="APFL mixes each client's model with the one that clients share")

    @override
    def bind(self, entries: tuple[Entry, ...]) -> Self:
        return replace(self, buffers=frozenset(entry.name for entry in entries if entry.is_buffer))

    @override
    def extra_entries(self, params: State, rest: State) -> tuple[State, State]:
        first = next(iter(params.values()))
        alpha = {"alpha": first.new_full((), self.alpha)} if self.learned else {}
        return add_prefix("own", params) | alpha, add_prefix("own", rest)

    @override
    def find_network(self, params: Iterable[str]) -> Mapping[str, str]:
        return {name: name.removeprefix("own/") for name in params if name.startswith("own/")}

    @override
    def restrict_(self, extra_entries: State) -> None:
        if self.learned:
            extra_entries["alpha"].copy_(extra_entries["alpha"].clamp(0, 1))  # clamp_ has no batching rule

    @override
    def transform_loss(self, loss: Tensor, params: State, context: RuleContext) -> Tensor:
        assert context.data_loss is not None
        shared = {name: tensor.detach() for name, tensor in params.items()} | context.rest
        return loss + context.data_loss(self._mix(shared, context.extra_entries))

    @override
    def personal_model(self, state: State, context: RuleContext) -> State:
        return self._mix(state, context.extra_entries)

    def _mix(self, shared: State, extra: State) -> State:
        """Return the mixture of ``shared`` and the client's own model, with the statistics of the latter."""
        alpha = extra["alpha"] if self.learned else self.alpha
        return {
            name: own if name in self.buffers else shared[name] + alpha * (own - shared[name])
            for name, own in entries_under("own", extra).items()
        }


@method
def apfl(base: Method, *, alpha: float = 0.5, learned: bool = True) -> Method:
    """Add a model of each client's to that of ``base``; the client uses their mixture.

    Args:
        base: FedAvg unless given.
        alpha: Part of the client's own model in the mixture, in [0, 1].
        learned: Each client learns its alpha, which begins at ``alpha``.

    """
    if not 0 <= alpha <= 1:
        raise UsageError(f"alpha={alpha:g}: it must lie in [0, 1], 0 (the shared model) to 1 (the client's own)")
    return base.with_rule(Mixture(float(alpha), learned))
