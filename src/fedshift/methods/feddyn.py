"""FedDyn: a dynamic regularizer of each client's loss aligns the local optima with the federation's.

Acar et al. 2021, arXiv:2111.04263, Algorithm 1, following the authors' public code. A local step follows the gradient
of F_k(w) - <h_k, w> + alpha / 2 |w - w_t|^2; afterwards h_k = h_k - alpha (w_k - w_t). The server keeps h = sum_k p_k
h_k and moves to mean(w_k) - h / alpha. The algorithm counts clients equally, which is ``weighting="uniform"``: p_k =
1/N for all N clients. Otherwise p_k is client k's weight in the average of uploads, so that at a fixed point h is zero
and so is the gradient of sum_k p_k F_k, which averaging by samples minimizes; the authors divide alpha by N p_k
instead. A client that sits out keeps h_k, and its part of h. All of this is of the entries that the client loads.
"""

import torch

from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Folded, Network, Rule, Server, State, Step
from ..utils.state import pick


class GradientMemory(Rule):
    """The dynamic regularizer: h_k on clients, which converges to the gradient of the loss, and h on the server."""

    alpha: float
    gradient_stage = "objective"
    moves = True
    needs_shared = "FedDyn regularizes shared entries"
    needs_mean = "FedDyn's server accumulates the mean of the clients' changes"

    def bind(self, network: Network) -> Declared:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in network.params.items()}
        return Declared(self, memory=zeros, kept=pick(zeros, network.loaded))

    def gradients(self, grads: State, step: Step) -> State:
        return {
            name: (step.params[name] - step.loaded[name]).mul_(self.alpha).sub_(step.memory[name]).add_(grad)
            if name in step.loaded
            else grad
            for name, grad in grads.items()
        }

    def end(self, client: Client) -> tuple[State, State]:
        memory = {
            name: h - self.alpha * (client.params[name] - client.loaded[name]) if name in client.loaded else h
            for name, h in client.memory.items()
        }
        return memory, {}

    def fold(self, server: Server) -> Folded:
        share, changes, before = sum(each.share for each in server.received), server.changes, server.before.shared
        kept = {name: h - self.alpha * share * changes[name] for name, h in server.kept.items()}
        moved = {name: before[name] + changes[name] - h / self.alpha for name, h in kept.items()}
        return Folded(entries=moved, kept=kept)


@method
def feddyn(base: Method, *, alpha: float = 0.01) -> Method:
    """Regularize the loss of ``base`` dynamically with strength ``alpha``; needs clients that keep state."""
    require(alpha > 0, f"alpha={alpha:g}: it must be above 0, say 0.01")
    return base.with_rule(GradientMemory(alpha))
