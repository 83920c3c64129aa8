"""FedAvg: every entry is averaged, batch normalization with its statistics included.

McMahan et al. 2017, arXiv:1602.05629, Algorithm 1. Averaging only ``parameters()`` would leave BatchNorm's statistics
on the clients, which is SiloBN, not FedAvg.
"""

from __future__ import annotations

from typing import Literal

from ..core.method import Method


def fedavg(*, weighting: Literal["samples", "uniform"] = "samples") -> Method:
    """Average all entries, clients weighing by the samples they used (``uniform``: equally)."""
    return Method(name="fedavg" if weighting == "samples" else f"fedavg({weighting})", weighting=weighting)
