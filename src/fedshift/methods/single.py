"""SingleSet: every client trains alone and nothing travels; the lower baseline of FedBN's and FedWon's tables."""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from ..core.selection import Scope, nothing
from ..utils.errors import UsageError
from .fedavg import fedavg


def single(base: Method | None = None) -> Method:
    """``base`` (FedAvg) with nothing loaded and nothing sent."""
    base = base or fedavg()
    if base.scope != Scope():
        raise UsageError(f"single: {base.name} says what travels, but alone nothing does: leave one of the two out")
    return replace(base, name=base.compose_name(single), scope=Scope(load=nothing, send=nothing))
