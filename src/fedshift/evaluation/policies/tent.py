"""Tent: minimize the entropy of predictions over weight and bias of normalization layers.

Wang et al. 2021, arXiv:2006.10726, in its offline form: one pass over the new client's inputs with ``steps`` steps of
Adam on each batch, with BatchNorm normalizing by the batch; then BatchNorm statistics are estimated on all inputs.
Other layers normalize as usual. Adam, ``lr`` and one step come from the authors' public code for CIFAR-10-C
(DequanWang/tent), where a batch has 200 inputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...core.network import compute_outputs
from ...core.plan import Plan
from ...core.selection import norm_statistics
from ...data.samples import Samples
from ...engines.engine import Diverged
from ...utils.state import State, clone
from ..batch_norm import iterate_inputs, list_norm_parameters, observe_inputs, reestimate_statistics
from ..policy import Count, Rate, policy, require_entropy, require_normalization, require_torch_statistics
from ..unseen_clients import PolicyContext


class EntropyMinimizer:
    """Tent on one batch after another: ``state`` is the model so far, except BatchNorm statistics.

    ``entropy``: entropy of each prediction of a batch's outputs (``Task.entropy``).
    """

    def __init__(self, plan: Plan, state: State, entropy: Callable[[Tensor], Tensor], *, lr: float) -> None:
        self._plan, self._entropy, self._initial, self._scratch = plan, entropy, state, clone(state)
        self._learned = {name: state[name].clone().requires_grad_() for name in sorted(list_norm_parameters(plan))}
        self._optimizer = torch.optim.Adam(self._learned.values(), lr=lr)

    @property
    def state(self) -> State:
        """The model so far; the tensors are copies."""
        return {**self._initial, **{name: tensor.detach().clone() for name, tensor in self._learned.items()}}

    def step(self, x: Tensor) -> None:
        """Take one step on a batch ``x [B, ...]``; raise ``Diverged`` if the entropy is not finite."""
        with observe_inputs(self._plan, {}, training=True), torch.enable_grad():
            mean = self._entropy(compute_outputs(self._plan, {**self._scratch, **self._learned}, x)).mean()
        grads = torch.autograd.grad(mean, tuple(self._learned.values()), materialize_grads=True)
        if not all(bool(tensor.isfinite().all()) for tensor in (mean, *grads)):
            raise Diverged("tent diverged: the entropy of predictions or its gradient is not finite; try a smaller lr")
        for tensor, grad in zip(self._learned.values(), grads, strict=True):
            tensor.grad = grad
        self._optimizer.step()


@policy(
    data="inputs", estimates=True, replaces=norm_statistics,
    requires=(require_normalization, require_entropy, require_torch_statistics),
)  # fmt: skip
def tent(context: PolicyContext, train: Samples, *, steps: Count = 1, lr: Rate = 1e-3, batch_size: Count = 64) -> State:
    """Train normalization of the average by the entropy of predictions of the new client's inputs.

    With too few samples to train the model, the average is returned. Raises ``Diverged`` if the entropy is not finite.
    """
    minimizer = EntropyMinimizer(context.plan, context.average, context.task.entropy, lr=lr)
    if len(train) < context.plan.smallest_batch:
        return minimizer.state
    for x in iterate_inputs(context.plan, train, batch_size, "tent"):
        for _ in range(steps):
            minimizer.step(x)
    return reestimate_statistics(context.plan, minimizer.state, train)
