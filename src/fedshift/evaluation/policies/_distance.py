"""Distance between the BatchNorm statistics of a model and of a client's inputs.

FedAP's (Lu et al. 2022, arXiv:2112.00734; formula from the authors' public code, microsoft/PersonalizedFL): the sum
over layers of the Wasserstein distance between normal distributions with these means and variances, of independent
channels. Each client's own network measures the new client's inputs; FedAP uses one pretrained network for all clients.
"""

import torch

from ...core.plan import Plan, compute_outputs
from ...data.samples import Samples
from ...utils.state import State
from ..batch_norm import Moments, iterate_inputs, list_batch_norms, name_statistics, observe_inputs
from ..metrics import BATCH


@torch.no_grad()
def measure_distance(plan: Plan, state: State, data: Samples) -> float:
    """Return the distance between the BatchNorm statistics of ``state`` and of ``data`` in its network.

    Layers normalize by the statistics of ``state``.
    """
    found = {name: Moments() for name in list_batch_norms(plan)}
    with observe_inputs(plan, {name: [moments] for name, moments in found.items()}, training=False):
        for x in iterate_inputs(plan, data, BATCH, "reestimate"):
            compute_outputs(plan, state, x)
    total = 0.0
    for layer, moments in found.items():
        mean, variance = (state[name].double() for name in name_statistics(layer))
        gap = (mean - moments.mean).square().sum() + (variance.sqrt() - moments.variance.sqrt()).square().sum()
        total += float(gap.sqrt())
    return total
