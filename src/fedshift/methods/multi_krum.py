"""Multi-Krum: the mean of several uploads that are closest to most others.

Blanchard et al. 2017, arXiv:1703.02757, section 5. Scores are defined in ``krum``; the selected clients count equally.
The paper does not fix their number m; its guarantee requires m < n - 2 f - 2. Libraries use n - f - 2 or n - f; the
default here is n - f - 2.
"""

from ..core.method import Method, method
from .krum import Krum


@method
def multi_krum(base: Method, *, num_malicious: int = 0, num_selected: int | None = None) -> Method:
    """Aggregate by the mean of the ``num_selected`` uploads with the lowest score.

    ``num_malicious``: number of clients that may send arbitrary uploads. ``num_selected=None`` selects all except
    num_malicious + 2 of a round's clients.
    """
    return base.with_rule(Krum(num_malicious, num_selected))
