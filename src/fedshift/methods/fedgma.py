"""FedGMA: the server scales down the mean change of weights on whose direction clients disagree.

Tenison et al. 2023 ("Gradient Masked Averaging for Federated Learning"), arXiv:2201.11986. The agreement on a weight
is A = |sum_k sign(d_k)| / K, d_k being client k's change and K the number of participants. The mean change is applied
if A >= threshold, and scaled by A otherwise. With ``soft=False`` it is dropped otherwise: the AND-mask of Tenison et
al. 2021, arXiv:2104.10322. The formulas follow public code for the paper (declearn's ``GradientMaskedAveraging``); the
mean is weighted, and the agreement counts clients equally. Entries that clients do not train or do not load are
averaged.
"""

import torch

from ..core.means import cast_to, stack_entry
from ..core.method import Method, method, require
from ..core.rule import Folded, Rule, Server


class MaskedMean(Rule):
    """The mean of the uploads, with changes scaled down or dropped if the agreement is below ``threshold``."""

    threshold: float
    soft: bool
    aggregates = True
    passes_on = False

    def fold(self, server: Server) -> Folded:
        entries, states = server.entries, [each.entries for each in server.received]
        for name in sorted(server.network.trained & server.network.loaded):
            before, mean = server.before.shared[name].double(), entries[name].double()
            agreement = (stack_entry(states, name) - before).sign().mean(dim=0).abs()
            rest = before + agreement * (mean - before) if self.soft else before
            entries[name] = cast_to(torch.where(agreement >= self.threshold, mean, rest), entries[name].dtype)
        return Folded(entries=entries)


@method
def fedgma(base: Method, *, threshold: float = 0.4, soft: bool = True) -> Method:
    """Mask the mean change of ``base`` by the clients' agreement.

    ``threshold``: minimum agreement for applying a change in full, in [0, 1]; 0 is FedAvg. ``soft``: whether other
    changes are multiplied by their agreement; False drops them.
    """
    require(0 <= threshold <= 1, f"threshold={threshold:g}: it must lie in [0, 1], like the agreement of clients")
    return base.with_rule(MaskedMean(threshold, soft))
