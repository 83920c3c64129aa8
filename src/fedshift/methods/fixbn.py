"""FixBN: plain FedAvg until a switch round, then BatchNorm's statistics are frozen and normalize in training too.

Zhong et al. 2023, arXiv:2303.06530, as FedWon (arXiv:2306.05879) compares with it. From the switch on, training and
testing normalize alike and a local step no longer depends on which samples share its batch.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Freeze, Method
from ..utils.errors import UsageError
from .fedavg import fedavg


def fixbn(base: Method | None = None, *, switch: int | float = 0.5, keep_momentum: bool = False) -> Method:
    """``base`` (FedAvg) with BatchNorm's statistics frozen after ``switch`` rounds (a float: that share of all rounds).

    ``keep_momentum``: whether the local optimizer keeps its momentum from round to round, which the paper advises.
    """
    base = base or fedavg()
    if base.freeze:
        raise UsageError(f"fixbn: {base.name} freezes statistics already; choose one of the two")
    return replace(
        base,
        name=base.compose_name(fixbn, switch=switch, keep_momentum=keep_momentum),
        freeze=Freeze(after=switch),
        optimizer={**base.optimizer, "keep": True} if keep_momentum else base.optimizer,
    )
