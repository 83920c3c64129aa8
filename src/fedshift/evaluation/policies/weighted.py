"""Weighted: the clients' personal entries, each weighted by the inverse of its distance to the new client's inputs.

Weights of 1 / distance, and the distance of BatchNorm statistics, are FedAP's (Lu et al. 2022, arXiv:2112.00734;
:mod:`fedshift.evaluation.policies._distance`).
"""

import math

from ...data.samples import Samples
from ...utils.state import State
from ..policy import policy
from ..policy_requirements import (
    require_kept_statistics,
    require_personal_models,
    require_statistics,
    require_torch_statistics,
)
from ..unseen_clients import PolicyContext
from ._distance import measure_distance

SMALLEST = 1e-14
"""Smallest divisor, in place of a smaller distance."""


@policy(
    data="inputs", compares=True,
    requires=(require_personal_models, require_statistics, require_kept_statistics, require_torch_statistics),
)  # fmt: skip
def weighted(context: PolicyContext, train: Samples) -> State:
    """Complete the server's entries by the clients' personal ones, each weighted by the inverse of its distance."""

    def weigh(client: str) -> float:
        distance = measure_distance(context.plan, context.get_model(client), train)
        return 0.0 if math.isnan(distance) else 1 / max(distance, SMALLEST)

    return context.combine(weigh)
