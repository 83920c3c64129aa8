"""FedAvg without normalization: all its layers are removed and nothing takes their place.

FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), figure 3 and table 12 ("FedAvg w/o BN").
"""

from ..core.method import Method, modifier
from ..nn.surgery import RemoveNorm


@modifier
def nonorm(base: Method) -> Method:
    """Remove normalization from the network of ``base``; layers that had left their bias to it get one."""
    return base.with_surgery(RemoveNorm())
