"""FedBN: batch normalization never leaves the client, neither its affine parameters nor its statistics.

Li et al. 2021, arXiv:2102.07623, Algorithm 1. There is no global model: each client combines the averaged layers with
normalization of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..core.method import Method
from ..core.selection import batch_norm, buffers, norm_layers, norm_statistics, parse_selection
from ..utils.errors import unknown_name
from .fedavg import fedavg

KEPT = {
    "all": batch_norm,
    "statistics": norm_statistics,
    "affine": batch_norm & ~buffers,
    "norm_layers": norm_layers,
}


def fedbn(
    base: Method | None = None,
    *,
    keep: Literal["all", "statistics", "affine", "norm_layers"] = "all",
    also: str | None = None,
) -> Method:
    """``base`` (FedAvg) with every BatchNorm layer kept on the client.

    ``keep``: ``all`` of it, its ``statistics`` (that is SiloBN) or its ``affine`` parameters alone, or all
    ``norm_layers``, GroupNorm and LayerNorm too. ``also``: more that is kept, a pattern such as ``"head.*"``.
    """
    if keep not in KEPT:
        raise unknown_name("keep", keep, KEPT)
    base = base or fedavg()
    selection = KEPT[keep] | parse_selection(also) if also else KEPT[keep]
    return replace(
        base, name=base.compose_name(fedbn, keep=keep, also=also), scope=base.scope.keep_on_client(selection)
    )
