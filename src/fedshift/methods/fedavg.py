"""FedAvg: every entry is averaged, including batch normalization and its statistics.

McMahan et al. 2017, arXiv:1602.05629, Algorithm 1. Averaging only ``parameters()`` would leave BatchNorm's statistics
on the clients, which is SiloBN, not FedAvg.
"""

from ..core.method import Method, Weighting, foundation


@foundation
def fedavg(base: Method, *, weighting: Weighting = "auto") -> Method:
    """Average all entries of ``base``, weighting clients by their training samples.

    ``weighting``: by training samples (``samples``), by samples used in the round (``used``), or equally (``uniform``);
    ``auto`` is ``used`` if the local work is a number of batches, as in FedMMB, otherwise ``samples``.
    """
    return base if weighting == "auto" else base.choose(weighting=weighting)
