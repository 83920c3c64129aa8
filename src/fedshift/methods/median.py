"""Coordinate-wise median of the uploads: a minority of faulty clients cannot move an entry beyond the others' values.

Yin et al. 2018, arXiv:1803.01498, option I. Clients count equally. The median of an even number is the mean of the
middle two.
"""

from ..core.means import compute_trimmed_mean
from ..core.method import Method, method
from ..core.rule import Folded, Rule, Server

ROBUST = "robust aggregation protects, and one faulty client could corrupt the rest"


class Median(Rule):
    """The coordinate-wise median."""

    aggregates = True
    weighs = False
    needs_entries_only = ROBUST

    def fold(self, server: Server) -> Folded:
        trim = (len(server.received) - 1) // 2
        return Folded(entries=compute_trimmed_mean([each.entries for each in server.received], trim))


@method
def median(base: Method) -> Method:
    """Aggregate the uploads of ``base`` by their coordinate-wise median instead of the mean."""
    return base.with_rule(Median())
