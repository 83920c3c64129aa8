"""FedPer: the last layers stay on the client, the layers below are averaged.

Arivazhagan et al. 2019, arXiv:1912.00818, Algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from ..core.selection import parse_selection
from .fedavg import fedavg


def fedper(base: Method | None = None, *, layers: int | str = 1) -> Method:
    """``base`` (FedAvg) with the last ``layers`` layers kept on the client, or those of a pattern such as ``"head.*"``.

    The last layers are those that the model registers last.
    """
    base = base or fedavg()
    kept = parse_selection(layers)
    return replace(base, name=base.compose_name(fedper, layers=layers), scope=base.scope.keep_on_client(kept))
