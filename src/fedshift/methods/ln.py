"""FedAvg+LN: every BatchNorm layer is replaced by layer normalization, which is GroupNorm with one group.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), appendix A.2; compared in its table 1.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from ..nn.surgery import BatchNormToGroupNorm
from .fedavg import fedavg


def ln(base: Method | None = None) -> Method:
    """``base`` (FedAvg) on the network with layer normalization."""
    base = base or fedavg()
    return replace(base, name=base.extend_name(ln), surgery=(*base.surgery, BatchNormToGroupNorm(1)))
