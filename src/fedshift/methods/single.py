"""SingleSet: every client trains alone and nothing travels; the lower baseline of FedBN's and FedWon's tables."""

from __future__ import annotations

from dataclasses import replace

from ..base.errors import UsageError
from ..core.method import Method
from ..core.select import Scope, nothing
from .fedavg import fedavg


def single(base: Method | None = None) -> Method:
    """``base`` (FedAvg) with nothing loaded and nothing sent."""
    base = base or fedavg()
    if base.scope != Scope():
        raise UsageError(f"single: {base.name} says what travels, but alone nothing does: leave one of the two out")
    return replace(base, name=base.titled(single), scope=Scope(load=nothing, send=nothing))
