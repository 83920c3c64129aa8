"""APFL: each client uses a mixture of a personal model and the shared model.

Deng et al. 2020, arXiv:2003.13461, Algorithm 1: on each batch, w takes FedAvg's step and the personal model v a step on
the mixture u = alpha v + (1 - alpha) w, v = v - lr grad_v F(u). A learned alpha follows <v - w, grad F(u)>, the
derivative of F(u) with respect to alpha, and is clamped to [0, 1]. Here alpha takes a step with every batch.
Normalization statistics are updated by the mixture in training.
"""

from torch import Tensor

from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Network, Rule, State, Step, View


class Mixture(Rule):
    """A personal model, and its weight ``alpha`` in the mixture; ``learned``: whether alpha is trained."""

    alpha: float
    learned: bool
    personalizes = "use"
    needs_shared = "APFL mixes each client's model with the shared model"

    def bind(self, network: Network) -> Declared:
        alpha = {"alpha": next(iter(network.params.values())).new_full((), self.alpha)} if self.learned else {}
        return Declared(self, model=network.initial, params=alpha, limits=dict.fromkeys(alpha, (0.0, 1.0)))

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        shared = {name: tensor.detach() for name, tensor in step.params.items()} | step.buffers
        return loss + step.loss_at(self._mix(shared, step))

    def personalize(self, state: State, client: Client) -> State:
        return self._mix(state, client)

    def _mix(self, shared: State, client: View) -> State:
        """Return the mixture of ``shared`` and the personal model, with the statistics of the latter."""
        personal, alpha = client.own.model, client.own.params["alpha"] if self.learned else self.alpha
        mixed = {name: shared[name] + alpha * (personal[name] - shared[name]) for name in client.params}
        return personal | mixed


@method
def apfl(base: Method, *, alpha: float = 0.5, learned: bool = True) -> Method:
    """Add a personal model to ``base``; each client uses the mixture of both.

    ``alpha``: weight of the personal model in the mixture, in [0, 1]. ``learned``: whether each client learns its
    weight, starting at ``alpha``.
    """
    require(0 <= alpha <= 1, f"alpha={alpha:g}: it must lie in [0, 1], 0 (the shared model) to 1 (the personal model)")
    return base.with_rule(Mixture(alpha, learned))
