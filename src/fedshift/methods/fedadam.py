"""FedAdam: the server divides the clients' mean change, entry by entry, by the root of a mean of recent squares.

Reddi et al. 2021, arXiv:2003.00295, Algorithm 2: v = beta2 v + (1 - beta2) delta^2.
"""

from __future__ import annotations

from ..core.method import Method
from ..core.server_optimizer import Adaptive
from .fedavg import fedavg


def fedadam(
    base: Method | None = None, *, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> Method:
    """``base`` (FedAvg) with Adam on the server; ``lr``: the server's learning rate, ``tau``: its adaptivity."""
    base = base or fedavg()
    name = base.compose_name(fedadam, lr=lr, beta1=beta1, beta2=beta2, tau=tau)
    return base.with_server_optimizer(name, Adaptive(second="adam", lr=lr, beta1=beta1, beta2=beta2, tau=tau))
