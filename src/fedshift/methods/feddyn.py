"""FedDyn: a dynamic regularizer of each client's loss aligns the local optima with the federation's.

Acar et al. 2021, arXiv:2111.04263, Algorithm 1, following the authors' public code. A local step follows the gradient
of F_k(w) - <h_k, w> + alpha / 2 |w - w_t|^2; afterwards h_k = h_k - alpha (w_k - w_t). The server keeps h = sum_k p_k
h_k and moves to mean(w_k) - h / alpha. The algorithm counts clients equally, which is ``weighting="uniform"``: p_k =
1/N for all N clients. Otherwise p_k is client k's weight in the average of uploads, so that at a fixed point h is zero
and so is the gradient of sum_k p_k F_k, which averaging by samples minimizes; the authors divide alpha by N p_k
instead. A client that does not take part keeps h_k and its contribution to h. All of this applies to the entries that
the client loads.
"""

from dataclasses import dataclass, field

import torch
from typing_extensions import override

from ..core.method import Method, method
from ..core.plan import Plan
from ..core.requirements import Requirements
from ..core.rule import Client, Declared, Rule, Step
from ..core.server_optimizer import ServerOptimizer
from ..utils.errors import UsageError, require
from ..utils.state import State, add_prefix, entries_under


@dataclass(frozen=True)
class GradientMemory(Rule):
    """The client's part: h_k, which converges to the gradient of its loss, and the dynamic regularizer."""

    alpha: float
    gradient_stage = "objective"
    requires = Requirements(shared_entries="FedDyn regularizes shared entries")

    @override
    def bind(self, network: Plan) -> Declared:  # type: ignore[override]
        if not network.method.aggregate.sums:
            other = network.method.name_source(network.method.aggregate)
            raise UsageError(
                f"FedDyn's server accumulates the mean of the clients' changes, but {other} does not average: remove "
                "one of the two"
            )
        return Declared(self, memory={name: torch.zeros_like(tensor) for name, tensor in network.params.items()})

    @override
    def gradients(self, grads: State, step: Step) -> State:
        return {
            name: (step.params[name] - step.loaded[name]).mul_(self.alpha).sub_(step.memory[name]).add_(grad)
            if name in step.loaded
            else grad
            for name, grad in grads.items()
        }

    @override
    def end(self, client: Client) -> tuple[State, State]:
        memory = {
            name: h - self.alpha * (client.params[name] - client.loaded[name]) if name in client.loaded else h
            for name, h in client.memory.items()
        }
        return memory, {}


@dataclass(frozen=True, kw_only=True)
class ServerMemory(ServerOptimizer):
    """The server's part: ``h = h - alpha share delta; x = x + delta - h / alpha``."""

    lr: float = field(default=1.0, repr=False)
    alpha: float

    @override
    def init(self, params: State) -> State:
        return {f"memory/{name}": torch.zeros_like(tensor) for name, tensor in params.items()}

    @override
    def step(self, params: State, delta: State, state: State, share: float) -> tuple[State, State]:
        memory = entries_under("memory", state)
        after = {name: memory[name] - self.alpha * share * change for name, change in delta.items()}
        moved = {name: param + delta[name] - after[name] / self.alpha for name, param in params.items()}
        return moved, add_prefix("memory", after)


@method
def feddyn(base: Method, *, alpha: float = 0.01) -> Method:
    """Regularize the loss of ``base`` dynamically with strength ``alpha``; needs clients that keep state."""
    require(alpha > 0, f"alpha={alpha:g}: it must be above 0, say 0.01")
    return base.with_server(ServerMemory(alpha=float(alpha))).with_rule(GradientMemory(float(alpha)))
