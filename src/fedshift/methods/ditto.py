"""Ditto: beside the global model, each client trains a personal one that is held near it.

Li et al. 2021, arXiv:2012.04221, Algorithm 1: v = v - lr (grad F(v) + lam (v - w_t)), on the same batches on which the
client trains w for the server, or in ``epochs`` passes apart from it (the algorithm's s steps). The client uses v,
normalization statistics included; w is trained and averaged as without it.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from ..core.contexts import LossContext, RoundContext
from ..core.declarations import Bound, Own, Phase
from ..core.method import Method, method
from ..core.plan import Plan
from ..core.requirements import Requirements
from ..core.rule import Rule
from ..utils.errors import UsageError
from ..utils.state import State


@dataclass(frozen=True)
class PersonalModel(Rule):
    """A personal model, with a proximal term of strength ``lam`` to the loaded one."""

    lam: float
    epochs: int | None = None
    personalizes = "use"
    requires = Requirements(shared_entries="Ditto holds each client's model near the one that clients share")

    @override
    def bind(self, plan: Plan) -> Bound:
        after = (Phase(when="after", epochs=self.epochs),) if self.epochs else ()
        return Bound(self, own=Own(model=plan.initial), phases=after)

    @override
    def loss(self, loss: Tensor, step: LossContext) -> Tensor:
        own, near = step.own.model, [name for name in step.params if name in step.loaded]
        distance = sum((own[name] - step.loaded[name]).square().sum() for name in near)
        return loss + step.loss_at(own) + self.lam / 2 * distance

    @override
    def personalize(self, state: State, client: RoundContext) -> State:
        return {name: client.own.model[name] for name in state}


@method
def ditto(base: Method, *, lam: float = 1.0, epochs: int | None = None) -> Method:
    """Train a personal model beside that of ``base``; ``lam``: how strongly it is held near the global one.

    ``epochs``: passes of a round over the client's data for the personal model; None: it is trained on the batches of
    the global one.
    """
    if epochs is not None and epochs < 1:
        raise UsageError(f"epochs={epochs}: give 1 or more, or leave it out for the batches of the global model")
    if lam < 0:
        raise UsageError(f"lam={lam:g} is negative; it must be 0 (training alone) or more")
    return base.with_rule(PersonalModel(lam, epochs))
