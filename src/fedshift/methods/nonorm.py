"""FedAvg without normalization: all normalization layers are removed without a replacement.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), figure 3 and table 12 ("FedAvg w/o BN").
"""

from ..core.method import Method, modifier
from ..nn.surgery import RemoveNorm


@modifier
def nonorm(base: Method) -> Method:
    """Remove normalization from the network of ``base``; add biases to layers that relied on its bias."""
    return base.with_surgery(RemoveNorm())
