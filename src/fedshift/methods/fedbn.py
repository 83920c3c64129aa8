"""FedBN: batch normalization stays on the client, both its affine parameters and its statistics.

Li et al. 2021, arXiv:2102.07623, Algorithm 1. There is no global model: each client combines the averaged layers with
its local normalization.
"""

from typing import Literal

from ..core.method import Method, method
from ..core.selection import batch_norm, buffers, norm_layers, norm_statistics, parse_selection
from ..utils.errors import unknown_name

KEPT = {"all": batch_norm, "statistics": norm_statistics, "affine": batch_norm & ~buffers, "norm_layers": norm_layers}


@method
def fedbn(
    base: Method, *, keep: Literal["all", "statistics", "affine", "norm_layers"] = "all", also: str | None = None
) -> Method:
    """Keep every BatchNorm layer of ``base`` on the client.

    ``keep``: ``all`` of each layer, its ``statistics`` (that is SiloBN), its ``affine`` parameters, or all
    ``norm_layers``, GroupNorm and LayerNorm too. ``also``: pattern of further entries to keep, such as ``"head.*"``.
    """
    if keep not in KEPT:
        raise unknown_name("keep", keep, KEPT)
    return base.keep_on_client(KEPT[keep] | parse_selection(also) if also else KEPT[keep])
