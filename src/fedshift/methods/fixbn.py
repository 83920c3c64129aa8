"""FixBN: plain FedAvg until a switch round, then BatchNorm's statistics are frozen and normalize in training too.

Zhong et al. 2023, arXiv:2303.06530, as FedWon (arXiv:2306.05879) compares with it. From the switch on, training and
testing normalize alike and a local step no longer depends on which samples share its batch.
"""

from dataclasses import replace

from ..core.method import Freeze, Method, method
from ..utils.errors import UsageError


@method
def fixbn(base: Method, *, switch: int | float = 0.5, keep_momentum: bool = False) -> Method:
    """Freeze BatchNorm's statistics of ``base`` after ``switch`` rounds (a float: that share of all rounds).

    ``keep_momentum``: whether the local optimizer keeps its momentum from round to round, which the paper advises.
    """
    if base.freeze:
        raise UsageError(f"{base.name} freezes statistics already; choose one of the two")
    optimizer = {**base.optimizer, "keep": True} if keep_momentum else base.optimizer
    return replace(base, freeze=Freeze(after=switch), optimizer=optimizer)
