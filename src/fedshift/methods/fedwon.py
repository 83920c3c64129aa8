"""FedWon: no normalization at all; convolutions with scaled weight standardization, gradients clipped adaptively.

Zhuang & Lyu 2024, arXiv:2306.05879 (ICLR 2024), section 3.2, equations 3 and 4, listing 1. Server and clients follow
FedAvg, so clients need no state and there is one global model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..core.method import Method
from ..nn.surgery import RemoveNorm, ScaledStandardization
from .agc import Clipping
from .agc import agc as clipped
from .fedavg import fedavg


def fedwon(
    base: Method | None = None,
    *,
    agc: float | None = 0.64,
    wsconv: bool = True,
    init: Literal["xavier", "keep"] = "xavier",
) -> Method:
    """``base`` (FedAvg) on the network without normalization and with standardized convolutions.

    ``agc``: clipping threshold, 0.64 as for Digits-Five (1.28 for Office-Caltech-10 and DomainNet); None leaves
    clipping out, as the paper does with batches of 4 or less, unless ``base`` brings its own. ``wsconv=False`` removes
    normalization only (the ablation of table 18). ``init="keep"`` keeps the weights of a pretrained model.
    """
    base = base or fedavg()
    name = base.compose_name(fedwon, agc=agc, wsconv=wsconv, init=init)
    if agc is not None and not any(isinstance(rule, Clipping) for rule in base.rules):
        base = clipped(base, clip=agc)
    standardized = (ScaledStandardization(init),) if wsconv else ()
    return replace(base, name=name, surgery=(*base.surgery, RemoveNorm(required=not wsconv), *standardized))
