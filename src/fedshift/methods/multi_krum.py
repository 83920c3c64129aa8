"""Multi-Krum: the mean of the several clients whose uploads lie nearest to those of most others.

Blanchard et al. 2017, arXiv:1703.02757, section 5. Scores as in ``krum``; the chosen clients count equally. The paper
leaves their number m open; its guarantee asks for m < n - 2 f - 2. Libraries take n - f - 2 or n - f; the default here
is n - f - 2.
"""

from ..core.method import Method, method
from .krum import Krum


@method
def multi_krum(base: Method, *, num_malicious: int = 0, num_selected: int | None = None) -> Method:
    """Aggregate by the mean of the ``num_selected`` uploads with the lowest score.

    ``num_malicious``: clients that may send anything. Without ``num_selected``, all but num_malicious + 2 of a round's
    clients are taken.
    """
    return base.with_aggregation(Krum(num_malicious, num_selected))
