"""Centralized training: all clients' data in one place, the baseline of FedBN's table 12.

A round is one pass (or group of batches) over the pooled data with the batch size of the experiment. Over a round of
full passes it sees each sample as often as the federation does, but in one long sequence of steps.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from .fedavg import fedavg


def centralized(base: Method | None = None) -> Method:
    """``base`` (FedAvg) run on the pooled data of all clients, evaluated on each client's test set."""
    base = base or fedavg()
    return replace(base, name=base.titled("centralized"), pooled=True)
