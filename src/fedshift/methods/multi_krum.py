"""Multi-Krum: the mean of the several clients whose uploads lie nearest to those of most others.

Blanchard et al. 2017, arXiv:1703.02757, section 5. Scores as in ``krum``; the chosen clients count equally. The paper
leaves their number m open; its guarantee asks for m < n - 2 f - 2. Libraries take n - f - 2 or n - f; the default here
is n - f - 2.
"""

from __future__ import annotations

from ..core.method import Method
from .fedavg import fedavg
from .krum import Krum


def multi_krum(base: Method | None = None, *, num_malicious: int = 0, num_selected: int | None = None) -> Method:
    """``base`` (FedAvg) with the mean of the ``num_selected`` clients of least score, ``num_malicious`` of all being arbitrary.

    Without ``num_selected``, all but faulty + 2 of the clients of a round.
    """
    base = base or fedavg()
    return base.with_aggregation(
        base.compose_name(multi_krum, num_malicious=num_malicious, num_selected=num_selected),
        Krum(num_malicious, num_selected),
    )
