"""A method with its own learning rate, momentum or weight decay, so that each can run at its best in one table.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), table 8: learning rates differ by method and data.
"""

from dataclasses import replace

from ..core.method import Method, modifier
from ..utils.errors import UsageError


@modifier
def tuned(
    base: Method, *, lr: float | None = None, momentum: float | None = None, weight_decay: float | None = None
) -> Method:
    """Give ``base`` these settings of the local optimizer in place of the experiment's."""
    given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    changes = {name: float(value) for name, value in given.items() if value is not None}
    if again := changes.keys() & base.optimizer.keys():
        raise UsageError(f"{base.name} sets {min(again)} already; set it once")
    return replace(base, optimizer={**base.optimizer, **changes}) if changes else base
