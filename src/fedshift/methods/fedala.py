"""FedALA: each client learns, weight by weight, how much of the shared model's top layers to take over.

Zhang et al. 2023 (AAAI), arXiv:2212.01197, by public code that follows the authors' (FL-bench). At the start of a
round the client's top layers become v + (w_t - v) * W, v being those that it ended its last round with and W in [0, 1]
of the same shape; the layers below are the shared ones. W starts at one and first takes ``epochs`` passes over the
client's data, on the loss of that model with everything else held still; then the model is trained from there. The
authors learn W on a part of the data and until its loss is steady in the first such round; here each round takes the
same passes over all of it. A client that has never trained takes over everything.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ..core.contexts import ClientContext, EndContext, LossContext, RoundContext
from ..core.declarations import Bound, Own, Phase
from ..core.method import Method, method
from ..core.plan import Plan
from ..core.requirements import Requirements
from ..core.rule import Rule
from ..core.selection import parse_selection
from ..utils.errors import UsageError
from ..utils.state import State, add_prefix, entries_under, pick


@dataclass(frozen=True)
class LocalAggregation(Rule):
    """Weights of the shared model's last ``layers`` layers, trained ``lr_scale`` times as fast as the model."""

    layers: int | str
    lr_scale: float
    epochs: int
    personalizes = "start"
    requires = Requirements(shared_entries="FedALA chooses how much to take over of the shared model")

    @override
    def bind(self, plan: Plan) -> Bound:
        names = parse_selection(self.layers).names(plan.entries)
        if not names & plan.loaded:
            raise UsageError(
                f"{self.requires.shared_entries}, but another part keeps {min(names)!r} on clients: use one of the "
                "two, or other layers"
            )
        top = pick(plan.params, names)
        ones = {name: torch.ones_like(tensor) for name, tensor in top.items()}
        begun = next(iter(plan.params.values())).new_zeros((), dtype=torch.bool)
        memory = {"begun": begun} | add_prefix("last", top)
        own = Own(params=ones, bounds=dict.fromkeys(ones, (0.0, 1.0)), memory=memory)
        return Bound(self, own=own, phases=(Phase(when="before", epochs=self.epochs, lr_scale=self.lr_scale),))

    @override
    def personalize(self, state: State, client: RoundContext) -> State:
        return state | self._mix(client)

    @override
    def loss(self, loss: Tensor, step: LossContext) -> Tensor:
        held = {name: tensor.detach() for name, tensor in step.params.items()}
        return loss + step.loss_at(held | self._mix(step))

    @override
    def end(self, client: EndContext) -> tuple[State, State]:
        last = pick(client.params, client.own.params)
        return {"begun": torch.ones_like(client.memory["begun"])} | add_prefix("last", last), {}

    def _mix(self, client: ClientContext) -> State:
        """Return the client's top layers, between its last ones and the shared ones."""
        mixed, last = {}, entries_under("last", client.memory)
        for name, weight in client.own.params.items():
            if name in client.loaded:
                shared = client.loaded[name]
                own = torch.where(client.memory["begun"], last[name], shared)
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
