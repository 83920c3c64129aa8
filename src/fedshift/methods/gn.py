"""FedAvg+GN: every BatchNorm layer is replaced by GroupNorm, which has no statistics to share.

Hsieh et al. 2020, arXiv:1910.00189; numbers of groups as in FedWon (arXiv:2306.05879), tables 5 and 6 and appendix A.2.
"""

from ..core.method import Method, modifier, require
from ..nn.surgery import BatchNormToGroupNorm


@modifier
def gn(base: Method, *, groups: int | None = None) -> Method:
    """Replace BatchNorm by GroupNorm in the network of ``base``; ``groups``: number of groups, None: the paper's."""
    require(groups is None or groups >= 1, f"groups={groups}: give 1 (layer normalization) or more")
    return base.with_surgery(BatchNormToGroupNorm(groups))
