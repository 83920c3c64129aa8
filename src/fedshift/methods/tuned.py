"""Override the learning rate, momentum or weight decay of a method, so that each runs with its best settings.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), table 8: learning rates differ by method and data.
"""

from dataclasses import replace

from ..core.method import Method, modifier
from ..utils.errors import UsageError


@modifier
def tuned(
    base: Method, *, lr: float | None = None, momentum: float | None = None, weight_decay: float | None = None
) -> Method:
    """Override the experiment's settings of the local optimizer for ``base``."""
    settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    changes = {name: float(value) for name, value in settings.items() if value is not None}
    if again := changes.keys() & base.optimizer.keys():
        raise UsageError(f"{base.name} sets {min(again)} already; set it once")
    return replace(base, optimizer={**base.optimizer, **changes}) if changes else base
