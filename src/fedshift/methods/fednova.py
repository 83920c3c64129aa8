"""FedNova: each client's change is divided by its number of local steps, so that more steps weigh no more.

Wang et al. 2020, arXiv:2007.07481, equation 6 for plain SGD: w + tau sum_i p_i (w_i - w) / tau_i, where client i took
tau_i local steps and tau = sum_i p_i tau_i. Entries that clients do not train, or do not load, are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.errors import UsageError
from ..base.state import State
from ..core.aggregate import Uploads, as_dtype, average, stacked
from ..core.method import Method
from ..core.plan import Plan
from .fedavg import fedavg
from .fedprox import Proximal


@dataclass(frozen=True)
class Normalized:
    """The aggregation of FedNova."""

    def __call__(self, uploads: Uploads) -> State:
        """The server's entries after the round."""
        folded = average(uploads)
        tau = sum(weight * steps for weight, steps in zip(uploads.weights, uploads.steps, strict=True))
        for name in sorted(uploads.trained & uploads.loaded):
            before = uploads.previous[name].double()
            pairs = zip(uploads.weights, uploads.steps, stacked(uploads.states, name), strict=True)
            folded[name] = as_dtype(
                before + tau * sum(weight / steps * (after - before) for weight, steps, after in pairs),
                uploads.previous[name].dtype,
            )
        return folded

    def check(self, plan: Plan, clients: int) -> None:
        """Refuse local work that is not plain steps of all parameters, or where there is nothing to normalize."""
        plan.require_plain_path("FedNova's normalization by the number of steps")
        if any(isinstance(rule, Proximal) for rule in plan.method.rules):
            raise UsageError(
                f"method {plan.method.name!r}: FedNova's normalization by the number of steps does not hold under "
                "FedProx, whose later steps undo earlier ones: leave one of the two out"
            )
        if plan.method.work.get("batches") == 1:
            raise UsageError(
                f"method {plan.method.name!r}: FedNova makes up for different numbers of local steps, but every client "
                "takes one: leave it out"
            )


def fednova(base: Method | None = None) -> Method:
    """``base`` (FedAvg) with normalized averaging; needs SGD without momentum."""
    base = base or fedavg()
    return base.folding(base.titled(fednova), Normalized())
