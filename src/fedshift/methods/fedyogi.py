"""FedYogi: the server divides the clients' mean change, entry by entry, by the root of slowly moving squares.

Reddi et al. 2021, arXiv:2003.00295, Algorithm 2: v = v - (1 - beta2) delta^2 sign(v - delta^2).
"""

from ..core.method import Method, method
from .fedadam import Adaptive


@method
def fedyogi(base: Method, *, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Method:
    """Add Yogi on the server to ``base``; ``lr``: the server's learning rate, ``tau``: its adaptivity."""
    return base.with_rule(Adaptive(second="yogi", lr=lr, beta1=beta1, beta2=beta2, tau=tau))
