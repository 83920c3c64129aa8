"""Re-estimation: the average, with BatchNorm statistics of the new client's inputs.

FedBN (Li et al. 2021, arXiv:2102.07623), appendix G.
"""

from ...core.selection import norm_statistics
from ...data.samples import Samples
from ...utils.state import State
from ..batch_norm import reestimate_statistics
from ..policy import policy, require_statistics, require_torch_statistics
from ..unseen_clients import PolicyContext


@policy(
    data="inputs", estimates=True, replaces=norm_statistics, requires=(require_statistics, require_torch_statistics)
)
def reestimate(context: PolicyContext, train: Samples) -> State:
    """Use the average, with BatchNorm statistics of the new client's inputs."""
    return reestimate_statistics(context.plan, context.average, train)
