"""APFL: each client uses a mixture of a personal model and the one that the federation shares.

Deng et al. 2020, arXiv:2003.13461, Algorithm 1: on each batch w takes FedAvg's step and the client's own model v one
on the mixture u = alpha v + (1 - alpha) w, v = v - lr grad_v F(u). Where alpha is learned, it follows <v - w, grad
F(u)>, the slope of F(u) in alpha, and is put back into [0, 1]. Here it takes that step with every batch; the authors'
public code (FedTorch) takes it on the first batch of a round, with a decay of 0.02 alpha, and mixes outputs in place
of parameters. Normalization statistics are those that the mixture has met in training.
"""

from dataclasses import dataclass, field, replace

from torch import Tensor
from typing_extensions import override

from ..core.contexts import LossContext, Owned, RoundContext
from ..core.declarations import Bound, Own
from ..core.method import Method, method
from ..core.plan import Plan
from ..core.requirements import Requirements
from ..core.rule import Rule
from ..utils.errors import UsageError
from ..utils.state import State


@dataclass(frozen=True)
class Mixture(Rule):
    """The client's own model, and its part ``alpha`` of the mixture; ``learned``: alpha is trained, from there on."""

    alpha: float
    learned: bool
    buffers: frozenset[str] = field(default=frozenset(), repr=False)
    personalizes = "use"
    requires = Requirements(shared_entries="APFL mixes each client's model with the one that clients share")

    @override
    def bind(self, plan: Plan) -> Bound:
        bound = replace(self, buffers=frozenset(entry.name for entry in plan.entries if entry.is_buffer))
        if not self.learned:
            return Bound(bound, own=Own(model=plan.initial))
        alpha = {"alpha": next(iter(plan.params.values())).new_full((), self.alpha)}
        return Bound(bound, own=Own(model=plan.initial, params=alpha, bounds={"alpha": (0.0, 1.0)}))

    @override
    def loss(self, loss: Tensor, step: LossContext) -> Tensor:
        shared = {name: tensor.detach() for name, tensor in step.params.items()} | step.buffers
        return loss + step.loss_at(self._mix(shared, step.own))

    @override
    def personalize(self, state: State, client: RoundContext) -> State:
        return self._mix(state, client.own)

    def _mix(self, shared: State, own: Owned) -> State:
        """Return the mixture of ``shared`` and the client's own model, with the statistics of the latter."""
        alpha = own.params["alpha"] if self.learned else self.alpha
        return {
            name: mine if name in self.buffers else shared[name] + alpha * (mine - shared[name])
            for name, mine in own.model.items()
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
