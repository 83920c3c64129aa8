"""SingleSet: every client trains alone and nothing travels; the lower baseline of FedBN's and FedWon's tables."""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from ..core.select import Scope, nothing
from .fedavg import fedavg


def single(base: Method | None = None) -> Method:
    """``base`` (FedAvg) with nothing loaded and nothing sent."""
    base = base or fedavg()
    return replace(base, name=base.titled("single"), scope=Scope(load=nothing, send=nothing))
