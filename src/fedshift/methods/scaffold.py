"""SCAFFOLD: control variates correct local steps for the client's drift from the federation's direction.

Karimireddy et al. 2020, arXiv:1910.06378, Algorithm 1 with option II: a local step follows g - c_i + c; afterwards c_i+
= c_i - c + (x - y_i) / (K * lr), and the server updates x + eta_g sum_i w_i (y_i - x) and c + sum_i p_i (c_i+ - c_i).
Algorithm 1 counts clients equally, which is ``weighting="uniform"``: p_i = 1/N for all N clients. Otherwise p_i is
client i's share of all training samples, so that c = sum_i p_i c_i is the gradient of the objective sum_i p_i f_i that
averaging by samples minimizes, independent of participation. c_i+ is the mean gradient only under plain SGD. An entry
kept on the client has no common direction and no correction.
"""

import torch

from ..core.method import Method, method
from ..core.rule import Client, Declared, Folded, Network, Rule, Send, Server, State, Step
from ..utils.state import pick
from .fedavgm import Momentum


class ControlVariates(Rule):
    """Control variates c_i on clients and c on the server; clients send only the change of c_i."""

    gradient_stage = "step"
    needs_shared = "SCAFFOLD corrects the drift of shared entries"
    needs_plain_steps = "SCAFFOLD's control variate"

    def bind(self, network: Network) -> Declared:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in network.params.items()}
        common = pick(zeros, network.loaded)
        return Declared(self, memory=zeros, server=common, sends=Send.like(common, "update"))

    def gradients(self, grads: State, step: Step) -> State:
        return {
            name: (grad - step.memory[name]).add_(step.server[name]) if name in step.loaded else grad
            for name, grad in grads.items()
        }

    def end(self, client: Client) -> tuple[State, State]:
        path = client.steps * client.lr
        if path == 0:  # no step, no information
            return client.memory, {name: torch.zeros_like(c) for name, c in client.server.items()}
        change = {name: (client.loaded[name] - client.params[name]) / path - c for name, c in client.server.items()}
        return {name: c + change[name] if name in change else c for name, c in client.memory.items()}, change

    def fold(self, server: Server) -> Folded:
        after = {name: c.double() for name, c in server.memory.items()}
        for upload, each in zip(server.uploads, server.received, strict=True):
            after = {name: c + each.share * upload[name].double() for name, c in after.items()}
        return Folded({name: c.to(server.memory[name].dtype) for name, c in after.items()})


@method
def scaffold(base: Method, *, server_lr: float = 1.0) -> Method:
    """Add control variates to ``base``; needs clients that keep state, and SGD without momentum.

    ``server_lr``: the server's step size eta_g along the mean change of the models; a value other than 1 acts as the
    server optimizer.
    """
    stepped = base if server_lr == 1 else base.with_rule(Momentum(lr=server_lr))
    return stepped.with_rule(ControlVariates())
