"""FedAvgM: the server moves with momentum along the clients' mean change.

Hsu et al. 2019, arXiv:1909.06335, section 4.3: v = beta v + delta, w = w + lr v.
"""

import torch

from ..core.method import Method, method, require
from ..core.rule import Declared, Folded, Network, Rule, Server
from ..utils.state import pick


class Momentum(Rule):
    """``v = beta v + delta; x = x + lr v``, equal to ``torch.optim.SGD`` with momentum on the gradient ``-delta``.

    With ``beta`` 0, it scales the aggregated change and keeps no state.
    """

    lr: float
    beta: float = 0.0
    moves = True

    def __post_init__(self) -> None:
        require(0 < self.lr < 1e30, f"server learning rate lr={self.lr:g}: it must be a number above 0")
        require(0 <= self.beta < 1, f"beta={self.beta:g}: it must lie in [0, 1)")

    def bind(self, network: Network) -> Declared:
        common = pick(network.params, network.loaded) if self.beta else {}
        return Declared(self, kept={name: torch.zeros_like(tensor) for name, tensor in common.items()})

    def fold(self, server: Server) -> Folded:
        velocity = server.changes
        if self.beta:
            velocity = {name: self.beta * server.kept[name] + change for name, change in velocity.items()}
        entries = {name: server.before.shared[name] + self.lr * v for name, v in velocity.items()}
        return Folded(entries=entries, kept=velocity if self.beta else {})


@method
def fedavgm(base: Method, *, lr: float = 1.0, beta: float = 0.9) -> Method:
    """Add momentum ``beta`` on the server to ``base``; ``lr``: the server's learning rate."""
    return base.with_rule(Momentum(lr=lr, beta=beta))
