"""PartialFed-Fix: a client does not load a given set of layers, but sends all of them.

Sun et al. 2021 (NeurIPS 34, "PartialFed"), compared in table 17 of FedWon (arXiv:2306.05879). Unlike FedBN's, its
server holds a whole model, the mean of what clients send.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from ..core.selection import Scope, parse_selection
from .fedavg import fedavg


def partialfed_fix(base: Method | None = None, *, layers: int | str = 1) -> Method:
    """``base`` (FedAvg) in which clients load all but the last ``layers`` layers, or but those of a pattern.

    ``layers="batch_norm"`` gives each client the model that FedBN gives it.
    """
    base = base or fedavg()
    kept = parse_selection(layers)
    scope = Scope(load=base.scope.load & ~kept, send=base.scope.send)
    return replace(base, name=base.compose_name(partialfed_fix, layers=layers), scope=scope)
