"""FedAvg+GN: every BatchNorm layer is replaced by GroupNorm, which has no statistics to share.

Hsieh et al. 2020, arXiv:1910.00189; numbers of groups as in FedWon (arXiv:2306.05879), tables 5 and 6 and appendix A.2.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from ..nn.surgery import BatchNormToGroupNorm
from ..utils.errors import UsageError
from .fedavg import fedavg


def gn(base: Method | None = None, *, groups: int | None = None) -> Method:
    """``base`` (FedAvg) on the network with GroupNorm; ``groups``: how many, without it those of the paper."""
    if groups is not None and groups < 1:
        raise UsageError(f"gn: groups={groups}: give 1 (layer normalization) or more")
    base = base or fedavg()
    return replace(
        base, name=base.extend_name(gn, groups=groups), surgery=(*base.surgery, BatchNormToGroupNorm(groups))
    )
