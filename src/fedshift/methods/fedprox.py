"""FedProx: a proximal term keeps local models near the server's model.

Li et al. 2020, arXiv:1812.06127, equation 2: the local loss includes (mu / 2) * ||w - w_t||^2, whose gradient
mu * (w - w_t) is added here in closed form. It applies to the entries that the client loads: an entry kept on the
client has no w_t.
"""

from ..core.method import Method, method, require
from ..core.rule import Rule, State, Step


class Proximal(Rule):
    """Adds the gradient ``mu * (w - w_t)`` of the proximal term."""

    mu: float
    gradient_stage = "objective"
    needs_shared = "FedProx keeps parameters near the server's"
    needs_several_steps = "FedProx has no effect on a single local step, which starts at the server's parameters"

    def gradients(self, grads: State, step: Step) -> State:
        return {
            name: (step.params[name] - step.loaded[name]).mul_(self.mu).add_(grad) if name in step.loaded else grad
            for name, grad in grads.items()
        }


@method
def fedprox(base: Method, *, mu: float = 0.01) -> Method:
    """Add a proximal term of strength ``mu`` to ``base``; FedBN's experiments use 0.01, on ABIDE 0.2."""
    require(mu >= 0, f"mu={mu:g} is negative; it must be 0 (FedAvg) or more")
    return base.with_rule(Proximal(mu))
