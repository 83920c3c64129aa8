"""FedAvgM: the server moves with momentum along the clients' mean change.

Hsu et al. 2019, arXiv:1909.06335, section 4.3: v = beta v + delta, w = w + lr v.
"""

from ..core.method import Method, method
from ..core.server_optimizer import Momentum


@method
def fedavgm(base: Method, *, lr: float = 1.0, beta: float = 0.9) -> Method:
    """Add momentum ``beta`` on the server to ``base``; ``lr``: the server's learning rate."""
    return base.with_server(Momentum(lr=lr, beta=beta))
