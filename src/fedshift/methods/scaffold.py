"""SCAFFOLD: control variates take out of each local step the client's drift from the federation's direction.

Karimireddy et al. 2020, arXiv:1910.06378, Algorithm 1 with option II: a local step follows g - c_i + c; afterwards
c_i+ = c_i - c + (x - y_i) / (K * lr), and the server steps by x + eta_g sum_i w_i (y_i - x) and c + sum_i p_i (c_i+ -
c_i). Algorithm 1 counts clients equally: that is ``weighting="uniform"``, p_i = 1/N for all N clients. Otherwise p_i is
client i's share of all training samples, so that c = sum_i p_i c_i is the gradient of the objective sum_i p_i f_i that
averaging by samples minimizes, whoever takes part. The formula for c_i+ reads the mean gradient off the path, so it
holds for plain SGD. It runs over the entries that the client loaded: an entry kept on the client has no common
direction.
"""

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from ..core.declarations import PlannedEntries, Send
from ..core.method import Method, method
from ..core.requirements import Requirements
from ..core.rule import Rule, RuleContext
from ..core.server_optimizer import Scaled
from ..utils.state import State, pick


class ControlVariates(Rule):
    """Control variates c_i on clients and c on the server; only the change of c_i travels."""

    requires = Requirements(
        unique=True,
        shared_entries="SCAFFOLD corrects the drift of what clients share",
        plain_steps="SCAFFOLD's control variate",
    )

    @override
    def client_memory(self, params: State, rest: State) -> State:
        return {name: torch.zeros_like(tensor) for name, tensor in params.items()}

    @override
    def server_memory(self, initial: State) -> State:
        return {name: torch.zeros_like(tensor) for name, tensor in initial.items()}

    @override
    def transform_grads(self, grads: State, params: State, context: RuleContext) -> State:
        return {
            name: (grad - context.memory[name]).add_(context.server_memory[name])
            if name in context.global_params
            else grad
            for name, grad in grads.items()
        }

    @override
    def sends(self, plan: PlannedEntries) -> Mapping[str, Send]:
        return Send.like(pick(plan.initial, plan.trained & plan.loaded), "update")

    @override
    def finalize(self, params: State, context: RuleContext) -> tuple[State, State]:
        if context.steps * context.lr == 0:  # nothing moved, so the path says nothing
            return context.memory, {
                name: torch.zeros_like(c) for name, c in context.memory.items() if name in context.global_params
            }
        change = {
            name: (context.global_params[name] - param) / (context.steps * context.lr) - context.server_memory[name]
            for name, param in params.items()
            if name in context.global_params
        }
        return {name: c + change[name] if name in change else c for name, c in context.memory.items()}, change

    @override
    def aggregate_memory(self, memory: State, uploads: Sequence[State], shares: Sequence[float]) -> State:
        after = {name: c.double() for name, c in memory.items()}
        for upload, share in zip(uploads, shares, strict=True):
            after = {name: c + share * upload[name].double() for name, c in after.items()}
        return {name: c.to(memory[name].dtype) for name, c in after.items()}


@method
def scaffold(base: Method, *, server_lr: float = 1.0) -> Method:
    """Add control variates to ``base``; needs clients that keep state, and SGD without momentum.

    ``server_lr``: the server's step size eta_g along the mean change of the models; other than 1 it takes the place of
    a server optimizer.
    """
    stepped = base if server_lr == 1 else base.with_server(Scaled(lr=float(server_lr)))
    return stepped.with_rule(ControlVariates())
