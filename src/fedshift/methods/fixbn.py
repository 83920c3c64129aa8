"""FixBN: FedAvg until a switch round, then training also normalizes by BatchNorm's frozen statistics.

Zhong et al. 2023, arXiv:2303.06530, in the version that FedWon (arXiv:2306.05879) compares with. After the switch,
training and testing normalize identically, and a sample's gradient no longer depends on the other samples in its batch.
"""

from dataclasses import replace

from ..core.method import Method, method, require


@method
def fixbn(base: Method, *, switch: int | float = 0.5, keep_momentum: bool = False) -> Method:
    """Freeze BatchNorm's statistics of ``base`` after ``switch`` rounds (a float: a fraction of all rounds).

    ``keep_momentum``: whether the local optimizer keeps its momentum between rounds, as the paper recommends.
    """
    require(base.freeze is None, f"{base.name} freezes statistics already; choose one of the two")
    optimizer = {**base.optimizer, "keep": True} if keep_momentum else base.optimizer
    return replace(base, freeze=switch, optimizer=optimizer)
