"""FedBN: batch normalization never leaves the client, neither its affine parameters nor its statistics.

Li et al. 2021, arXiv:2102.07623, Algorithm 1. There is no global model: each client combines the averaged layers with
normalization of its own.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from ..core.select import batch_norm
from .fedavg import fedavg


def fedbn(base: Method | None = None) -> Method:
    """``base`` (FedAvg) with every BatchNorm layer kept on the client."""
    base = base or fedavg()
    return replace(base, name=base.titled("fedbn"), scope=base.scope.without(batch_norm))
