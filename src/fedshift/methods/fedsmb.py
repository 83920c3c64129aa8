"""FedSMB: one mini-batch per round; with equal clients, this equals mini-batch SGD on the union of their data.

Nasirigerdeh et al. 2020, arXiv:2011.07006, Algorithm 1 with one batch per round. With full batches (``batch_size=0``)
it is gradient descent on all data.
"""

from ..core.method import Method, method


@method
def fedsmb(base: Method, *, batch_size: int | None = None) -> Method:
    """Train one batch per round in ``base``.

    ``batch_size``: None: the experiment's; 0: all samples.
    """
    size = {} if batch_size is None else {"batch_size": batch_size or None}
    return base.choose(work={"batches": 1, **size})
