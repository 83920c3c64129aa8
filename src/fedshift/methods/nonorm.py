"""FedAvg without normalization: all its layers are removed and nothing takes their place.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), figure 3 and table 12 ("FedAvg w/o BN").
"""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from ..nn.surgery import RemoveNorm
from .fedavg import fedavg


def nonorm(base: Method | None = None) -> Method:
    """``base`` (FedAvg) on the network without normalization; layers that had left their bias to it get one."""
    base = base or fedavg()
    return replace(base, name=base.extend_name(nonorm), surgery=(*base.surgery, RemoveNorm()))
