"""Centralized training: all clients' data in one place, the upper baseline of FedBN's table 12.

A round is one epoch (or group of batches) over the pooled data. With batches K times as large as a client's, for K
clients (FedSMB, arXiv:2011.07006), it takes as many steps as the federation, with as many samples in each.
"""

from dataclasses import replace

from ..core.method import Method, method, require


@method
def centralized(base: Method, *, scaled: bool = True) -> Method:
    """Train ``base`` on the pooled data of all clients; each client's test set is evaluated.

    ``scaled``: use K times the experiment's batch size, and hence the federation's number of steps; otherwise the same
    batch size and K times as many steps.
    """
    require(not base.pooled, f"{base.name} pools all data already; remove one of the two")
    return replace(base, pooled="scaled" if scaled else "same")
