"""Centralized training: all clients' data in one place, the upper baseline of FedBN's table 12.

A round is one pass (or group of batches) over the pooled data. With batches K times as large as a client's, for K
clients (FedSMB, arXiv:2011.07006), it takes as many steps as the federation does and sees as many samples in each.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from ..utils.errors import UsageError
from .fedavg import fedavg


def centralized(base: Method | None = None, *, scaled: bool = True) -> Method:
    """``base`` (FedAvg) on the pooled data of all clients, evaluated on each client's test set.

    ``scaled``: batches of K times the experiment's size, the federation's budget of steps; else of the same size, K
    times as many steps.
    """
    base = base or fedavg()
    if base.pooled:
        raise UsageError(f"centralized: {base.name} pools all data already; leave one of the two out")
    return replace(base, name=base.compose_name(centralized, scaled=scaled), pooled="scaled" if scaled else "same")
