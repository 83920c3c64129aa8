"""FedAvgM: the server moves with momentum along the clients' mean change.

Hsu et al. 2019, arXiv:1909.06335, section 4.3: v = beta v + delta, w = w + lr v.
"""

from __future__ import annotations

from ..core.method import Method
from ..core.server_optimizer import Momentum
from .fedavg import fedavg


def fedavgm(base: Method | None = None, *, lr: float = 1.0, beta: float = 0.9) -> Method:
    """``base`` (FedAvg) with momentum ``beta`` on the server; ``lr``: the server's learning rate."""
    base = base or fedavg()
    return base.with_server_optimizer(base.compose_name(fedavgm, lr=lr, beta=beta), Momentum(lr=lr, beta=beta))
