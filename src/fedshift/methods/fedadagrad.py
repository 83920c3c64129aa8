"""FedAdagrad: the server divides the clients' mean change, entry by entry, by the root of the sum of squared changes.

Reddi et al. 2021, arXiv:2003.00295, Algorithm 2: v = v + delta^2.
"""

from ..core.method import Method, method
from .fedadam import Adaptive


@method
def fedadagrad(base: Method, *, lr: float = 0.01, beta1: float = 0.0, tau: float = 1e-3) -> Method:
    """Add Adagrad on the server to ``base``; ``lr``: the server's learning rate, ``tau``: its adaptivity."""
    return base.with_rule(Adaptive(second="adagrad", lr=lr, beta1=beta1, beta2=0.0, tau=tau))
