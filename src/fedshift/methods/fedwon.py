"""FedWon: no normalization, but convolutions with scaled weight standardization and adaptive gradient clipping.

Zhuang & Lyu 2024, arXiv:2306.05879 (ICLR 2024), section 3.2, equations 3 and 4, listing 1. Server and clients follow
FedAvg, so that clients need no state and there is one global model.
"""

from typing import Literal

from ..core.method import Method, method
from ..nn.surgery import RemoveNorm, ScaledStandardization
from .agc import Clipping
from .agc import agc as clipped


@method
def fedwon(
    base: Method, *, agc: float | None = 0.64, wsconv: bool = True, init: Literal["xavier", "keep"] = "xavier",
    gain: float = 1.0,
) -> Method:  # fmt: skip
    """Remove normalization from the network of ``base`` and standardize its convolutions.

    Args:
        agc: Clipping threshold, 0.64 for Digits-Five (1.28 for Office-Caltech-10 and DomainNet); None disables
            clipping, as in the paper for batches of 4 or less. If ``base`` already clips, its clipping is kept.
        wsconv: Whether to standardize convolutions; False only removes normalization (the ablation of table 18).
        init: ``"keep"`` keeps the weights of a pretrained model.
        gain: Initial value of each channel's trained gain: 1 in listing 1; 1.71 preserves the variance of a signal
            through ReLUs (Brock et al. 2021, arXiv:2101.08692, section 3).

    """
    if agc is not None and not any(isinstance(rule, Clipping) for rule in base.rules):
        base = clipped(base, clip=agc)
    standardized = (ScaledStandardization(init, gain),) if wsconv else ()
    return base.with_surgery(RemoveNorm(required=not wsconv), *standardized)
