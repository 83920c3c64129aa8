"""A method with a learning rate, momentum or weight decay of its own, so that each can run at its best in one table.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), table 8: learning rates differ by method and data.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from ..utils.errors import UsageError
from .fedavg import fedavg


def tuned(
    base: Method | None = None,
    *,
    lr: float | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
) -> Method:
    """``base`` (FedAvg) with these settings of the local optimizer in place of the experiment's."""
    given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    changes = {name: float(value) for name, value in given.items() if value is not None}
    base = base or fedavg()
    if again := changes.keys() & base.optimizer.keys():
        raise UsageError(f"tuned: {base.name} sets {min(again)} already; set it once")
    name = base.extend_name(tuned, **changes)
    return replace(base, name=name, optimizer={**base.optimizer, **changes}) if changes else base
