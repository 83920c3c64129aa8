"""Mixed statistics: alpha * stored + (1 - alpha) * estimated on the new client's inputs, for means and variances.

Schneider et al. 2020, arXiv:2006.16971; formula from their public code, ``BayesianBatchNorm`` of bethgelab/robustness,
whose ``prior`` is alpha. You et al. 2021 call a fixed alpha alpha-BN (arXiv:2110.04065; only the abstract was
available). The public code of ATP (Bao et al. 2023, arXiv:2310.18816) uses a ``prior`` of 16 for this baseline.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.network import compute_outputs
from ...core.rule import Hook
from ...data.samples import Samples
from ...utils.state import State, clone
from ..batch_norm import Moments, iterate_inputs, list_batch_norms, name_statistics, observe_inputs
from ..metrics import BATCH
from ..policy import policy, require_statistics, require_torch_statistics
from ..unseen_clients import PolicyContext


@policy(data="inputs", estimates=True, requires=(require_statistics, require_torch_statistics))
@torch.no_grad()
def mixed(
    context: PolicyContext, train: Samples, *, alpha: Annotated[float | None, Field(ge=0, le=1)] = None,
    prior: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 16.0,
) -> State:  # fmt: skip
    """Use the average, with its BatchNorm statistics mixed with statistics of the new client's inputs.

    Each layer normalizes a batch of 250 samples by the mix with the statistics of this batch (variances unbiased, as in
    the authors' code), so that later layers get the inputs they will get in use; the result mixes in the statistics of
    all samples. With too few samples to train the model, the average is returned.

    Args:
        context: What is known of the run.
        train: The new client's training data.
        alpha: Weight of the stored statistics; None: prior / (prior + n) for n inputs, the paper's N / (N + n).
        prior: N, the number of inputs that the stored statistics count as.

    """
    plan, state = context.plan, context.average
    layers, mixture = list_batch_norms(plan), dict(state)
    if len(train) < plan.smallest_batch or not layers:
        return mixture
    share = prior / (prior + len(train)) if alpha is None else alpha
    found = {name: Moments() for name in layers}

    def mix(layer: str, moments: Moments) -> State:
        return {
            name: (share * state[name].double() + (1 - share) * measured).to(state[name])
            for name, measured in zip(name_statistics(layer), (moments.mean, moments.variance), strict=True)
        }

    def normalizer(layer: str) -> Hook:
        def normalize(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            moments = Moments()
            moments(module, given)
            module._buffers["running_mean"], module._buffers["running_var"] = mix(layer, moments).values()

        return normalize

    with observe_inputs(plan, {name: [moments, normalizer(name)] for name, moments in found.items()}, training=False):
        for x in iterate_inputs(plan, train, BATCH, "reestimate"):
            compute_outputs(plan, clone(state), x)  # hooks write into it
    for layer, moments in found.items():
        mixture |= mix(layer, moments) if moments.count else {}
    return mixture
