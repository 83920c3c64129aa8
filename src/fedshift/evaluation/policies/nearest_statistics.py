"""Nearest statistics: the model of the client whose BatchNorm statistics are nearest to the new client's inputs'.

The distance is FedAP's (Lu et al. 2022, arXiv:2112.00734; :mod:`fedshift.evaluation.policies._distance`).
"""

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


@policy(
    data="inputs", compares=True,
    requires=(require_personal_models, require_statistics, require_kept_statistics, require_torch_statistics),
)  # fmt: skip
def nearest_statistics(context: PolicyContext, train: Samples) -> State:
    """Use the model whose BatchNorm statistics are nearest to the statistics of the new client's inputs."""
    return context.find_nearest(lambda state: measure_distance(context.plan, state, train))
