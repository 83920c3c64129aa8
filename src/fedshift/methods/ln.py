"""FedAvg+LN: every BatchNorm layer is replaced by layer normalization, which is GroupNorm with one group.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), appendix A.2; compared in its table 1.
"""

from ..core.method import Method, modifier
from ..nn.surgery import BatchNormToGroupNorm


@modifier
def ln(base: Method) -> Method:
    """Replace BatchNorm by layer normalization in the network of ``base``."""
    return base.with_surgery(BatchNormToGroupNorm(1))
