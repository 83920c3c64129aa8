"""FedMMB: a group of mini-batches between two exchanges, taken in turn through a pass over the client's data.

Nasirigerdeh et al. 2020, arXiv:2011.07006, Algorithm 1: the last group of a pass may hold fewer batches, samples are
reshuffled when the pass is done, and a client weighs by the samples it used in this round.
"""

from ..core.method import Method, method


@method
def fedmmb(base: Method, *, batches: int = 5, batch_size: int | None = None) -> Method:
    """Let clients of ``base`` take ``batches`` batches a round.

    ``batch_size``: the experiment's unless given, 0 for all samples.
    """
    size = {} if batch_size is None else {"batch_size": batch_size or None}
    return base.with_work(batches=batches, **size)
