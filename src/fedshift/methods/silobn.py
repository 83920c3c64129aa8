"""SiloBN: batch normalization's affine parameters are averaged, its statistics stay on the client.

Andreux et al. 2020, arXiv:2008.07424.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.method import Method
from ..core.selection import norm_statistics
from .fedavg import fedavg


def silobn(base: Method | None = None) -> Method:
    """``base`` (FedAvg) with the running statistics of every BatchNorm layer kept on the client."""
    base = base or fedavg()
    return replace(base, name=base.compose_name(silobn), scope=base.scope.keep_on_client(norm_statistics))
