"""FedALA: each client learns, weight by weight, how much of the shared model's top layers to take over.

Zhang et al. 2023 (AAAI), arXiv:2212.01197, by public code that follows the authors' (FL-bench). At the start of a
round the client's top layers become v + (w_t - v) * W, v being those that it ended its last round with and W in [0, 1]
of the same shape; the layers below are the shared ones. W starts at one and first takes ``epochs`` passes over the
client's data, on the loss of that model with everything else held still; then the model is trained from there. The
authors learn W on a part of the data and until its loss is steady in the first such round; here each round takes the
same passes over all of it. A client that has never trained takes over everything.
"""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from ..core.method import Method, method
from ..core.requirements import Requirements
from ..core.rule import Rule, RuleContext
from ..core.selection import Entry, parse_selection
from ..utils.errors import UsageError
from ..utils.state import State, add_prefix, clone, entries_under


@dataclass(frozen=True)
class LocalAggregation(Rule):
    """Weights of the shared model's last ``layers`` layers, trained ``lr_scale`` times as fast as the model."""

    layers: int | str
    lr_scale: float
    epochs: int
    names: frozenset[str] = field(default=frozenset(), repr=False)
    leads = True
    personalizes = True

    @property
    @override
    def requires(self) -> Requirements:  # type: ignore[override]
        return Requirements(
            shared_entries="FedALA chooses how much to take over of the shared model",
            some_loaded=self.names,
        )

    @override
    def bind(self, entries: tuple[Entry, ...]) -> Self:
        return replace(self, names=parse_selection(self.layers).names(entries))

    @override
    def extra_entries(self, params: State, rest: State) -> tuple[State, State]:
        return {name: torch.ones_like(tensor) for name, tensor in params.items() if name in self.names}, {}

    @override
    def client_memory(self, params: State, rest: State) -> State:
        begun = {"begun": torch.zeros((), dtype=torch.bool, device=next(iter(params.values())).device)}
        return begun | add_prefix("last", {name: tensor for name, tensor in params.items() if name in self.names})

    @override
    def restrict_(self, extra_entries: State) -> None:
        for weight in extra_entries.values():
            weight.copy_(weight.clamp(0, 1))  # clamp_ has no batching rule

    @override
    def init_local(self, state: State, context: RuleContext) -> State:
        return state | self._mix(context)

    @override
    def transform_loss(self, loss: Tensor, params: State, context: RuleContext) -> Tensor:
        assert context.data_loss is not None
        held = {name: tensor.detach() for name, tensor in params.items()}
        return loss + context.data_loss({**clone(context.rest), **held, **self._mix(context)})

    @override
    def finalize(self, params: State, context: RuleContext) -> tuple[State, State]:
        last = {name: tensor for name, tensor in params.items() if name in self.names}
        return {"begun": torch.ones_like(context.memory["begun"])} | add_prefix("last", last), {}

    def _mix(self, context: RuleContext) -> State:
        """Return the client's top layers, between its last ones and the shared ones."""
        mixed, last = {}, entries_under("last", context.memory)
        for name, weight in context.extra_entries.items():
            if name in context.global_params:
                shared = context.global_params[name]
                own = torch.where(context.memory["begun"], last[name], shared)
                mixed[name] = own + (shared - own) * weight
        return mixed


@method
def fedala(base: Method, *, layers: int | str = 1, rate: float = 10.0, epochs: int = 1) -> Method:
    """Let clients of ``base`` learn how much of the shared model to take over.

    Args:
        base: FedAvg unless given.
        layers: The top layers: that many last ones, or a pattern such as ``"head.*"``.
        rate: How much faster the weights learn than the model.
        epochs: Passes over the client's data that train the weights at the start of a round.

    """
    if not rate > 0 or epochs < 1:
        raise UsageError(f"rate={rate:g} and epochs={epochs}: give a number above 0, and 1 or more")
    return base.with_rule(LocalAggregation(layers, float(rate), epochs))
