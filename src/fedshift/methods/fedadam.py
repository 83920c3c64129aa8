"""FedAdam: the server divides the clients' mean change, entry by entry, by the root of a mean of recent squares.

Reddi et al. 2021, arXiv:2003.00295, Algorithm 2: v = beta2 v + (1 - beta2) delta^2.
"""

from typing import Literal

import torch

from ..core.method import Method, method, require
from ..core.rule import Declared, Folded, Network, Rule, Server, State
from ..utils.state import pick


class Adaptive(Rule):
    """``m = beta1 m + (1 - beta1) delta; x = x + lr m / (sqrt(v) + tau)``; ``second`` selects the update of v.

    v starts at tau^2; there is no bias correction (Algorithm 2).
    """

    lr: float
    second: Literal["adagrad", "adam", "yogi"]
    beta1: float
    beta2: float
    tau: float
    moves = True

    def __post_init__(self) -> None:
        require(0 < self.lr < 1e30, f"server learning rate lr={self.lr:g}: it must be a number above 0")
        require(0 <= self.beta1 < 1, f"beta1={self.beta1:g}: it must lie in [0, 1)")
        require(0 <= self.beta2 < 1, f"beta2={self.beta2:g}: it must lie in [0, 1)")
        require(self.tau > 0, f"tau={self.tau:g}: it must be above 0, say 1e-3")

    def bind(self, network: Network) -> Declared:
        common = pick(network.params, network.loaded).items()
        mean = {f"mean/{name}": torch.zeros_like(tensor) for name, tensor in common}
        return Declared(self, kept=mean | {f"square/{name}": torch.full_like(x, self.tau**2) for name, x in common})

    def fold(self, server: Server) -> Folded:
        moved, kept = State(), State()
        for name, change in server.changes.items():
            mean = self.beta1 * server.kept[f"mean/{name}"] + (1 - self.beta1) * change
            squared, v = change**2, server.kept[f"square/{name}"]
            if self.second == "adagrad":
                v = v + squared
            elif self.second == "adam":
                v = self.beta2 * v + (1 - self.beta2) * squared
            else:
                v = v - (1 - self.beta2) * squared * torch.sign(v - squared)
            moved[name] = server.before.shared[name] + self.lr * mean / (v.sqrt() + self.tau)
            kept[f"mean/{name}"], kept[f"square/{name}"] = mean, v
        return Folded(entries=moved, kept=kept)


@method
def fedadam(base: Method, *, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Method:
    """Add Adam on the server to ``base``; ``lr``: the server's learning rate, ``tau``: its adaptivity."""
    return base.with_rule(Adaptive(second="adam", lr=lr, beta1=beta1, beta2=beta2, tau=tau))
