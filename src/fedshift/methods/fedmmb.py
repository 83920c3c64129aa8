"""FedMMB: a group of mini-batches per round, iterating through epochs over the client's data.

Nasirigerdeh et al. 2020, arXiv:2011.07006, Algorithm 1: the last group of an epoch may have fewer batches, samples are
reshuffled after each epoch, and a client is weighted by the samples that it used in the round.
"""

from ..core.method import Method, method


@method
def fedmmb(base: Method, *, batches: int = 5, batch_size: int | None = None) -> Method:
    """Train ``batches`` batches per round in ``base``.

    ``batch_size``: None: the experiment's; 0: all samples.
    """
    size = {} if batch_size is None else {"batch_size": batch_size or None}
    return base.choose(work={"batches": batches, **size})
