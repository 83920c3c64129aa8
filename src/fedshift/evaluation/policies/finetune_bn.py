"""A client that joins FedBN: BatchNorm alone is learned on the new client's labeled data.

FedBN (Li et al. 2021, arXiv:2102.07623), appendix G.
"""

from dataclasses import replace

from ...core.selection import batch_norm, everything
from ...data.samples import Samples
from ...utils.state import State, pick
from ..batch_norm import list_batch_norm_parameters, reestimate_statistics
from ..policy import policy, require_batch_norm, require_torch_statistics
from ..unseen_clients import PolicyContext


@policy(
    data="labels", estimates=True, trains=True, replaces=batch_norm,
    requires=(require_batch_norm, require_torch_statistics),
)  # fmt: skip
def finetune_bn(context: PolicyContext, train: Samples) -> State:
    """Learn BatchNorm on the new client's labeled data, with all else unchanged.

    Personal BatchNorm entries start from the clients' initial values, shared ones from the server's. Statistics are
    estimated on its inputs; then weight and bias are trained with the run's batches, optimizer and loss, and the
    statistics are updated as in training. The method's rules do not apply.
    """
    plan = context.plan
    own = frozenset(entry.name for entry in plan.entries if batch_norm(entry))
    start = reestimate_statistics(plan, {**context.average, **pick(plan.initial, own & plan.personal)}, train)
    method = replace(plan.method, rules=(), trains=everything)
    alone = replace(plan, method=method, trained=list_batch_norm_parameters(plan), rules=())
    return {**start, **pick(context.finetune(start, train, alone), own)}
