"""SAR: minimize the entropy of certain predictions over normalization, toward a flat minimum.

Niu et al. 2023, arXiv:2302.12400; formulas from the authors' public code, mr-eggplant/SAR, in the offline form of
``tent``. Predictions whose entropy is at least ``margin`` of the highest are excluded. The gradient is taken at the
point ``rho`` farther up, over the predictions that are still certain there; steps are SGD's with momentum 0.9. The last
quarter of normalization layers is not trained. If the moving average of the entropy falls below ``reset`` of the
highest, everything restarts from the average; 0.029 is the authors' 0.2 for a thousand classes. A batch without a
certain prediction changes nothing.
"""

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ...core.plan import Plan
from ...core.selection import norm_statistics
from ...data.samples import Samples
from ...utils.state import State
from ..batch_norm import list_norm_parameters
from ..policy import Count, Rate, policy
from ..policy_requirements import require_entropy, require_normalization, require_torch_statistics
from ..unseen_clients import PolicyContext
from .tent import EntropyMinimizer

LOWER = 0.75
"""Fraction of normalization layers, from the first, that are trained: the authors skip the last of four stages."""


class ReliableMinimizer(EntropyMinimizer):
    """SAR on one batch after another.

    ``margin`` and ``reset`` are fractions of the highest entropy of a prediction, reached when all outputs are equal.
    """

    name = "sar"

    def __init__(
        self, plan: Plan, state: State, entropy: Callable[[Tensor], Tensor], *, lr: float, margin: float, rho: float,
        reset: float,
    ) -> None:  # fmt: skip
        self._margin, self._rho, self._reset = margin, rho, reset
        super().__init__(plan, state, entropy, lr=lr)

    def _begin(self) -> None:
        super()._begin()
        self._average: float | None = None

    def _list_learned(self) -> list[str]:
        learned = list_norm_parameters(self._plan)
        entries = [entry for entry in self._plan.entries if entry.name in learned]
        layers = list(dict.fromkeys(entry.owner for entry in entries))
        lower = layers[: max(1, int(LOWER * len(layers)))]
        return [entry.name for entry in entries if entry.owner in lower]

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self._learned.values(), lr=self._lr, momentum=0.9)

    def step(self, x: Tensor) -> None:
        """Take one step on a batch ``x [B, ...]``; raise ``Diverged`` if the entropy is not finite."""
        outputs = self._compute_outputs(x)
        entropies, highest = self._entropy(outputs), self._entropy(torch.zeros_like(outputs))
        certain = entropies < self._margin * highest
        if not certain.any():
            return
        grads = self._differentiate(entropies[certain])
        climb = self._rho / (torch.stack([grad.norm() for grad in grads]).norm() + 1e-12)
        before = self._learned
        self._learned = {
            name: (tensor + climb * grad).detach().requires_grad_()
            for (name, tensor), grad in zip(before.items(), grads, strict=True)
        }
        entropies = self._entropy(self._compute_outputs(x))
        certain &= entropies < self._margin * highest
        grads = self._differentiate(entropies[certain]) if certain.any() else ()
        self._learned = before
        if not grads:
            return
        self._update(grads)
        value = float(entropies[certain].detach().mean())
        self._average = value if self._average is None else 0.9 * self._average + 0.1 * value
        if self._average < self._reset * float(highest.max()):
            self._begin()


@policy(
    data="inputs", estimates=True, replaces=norm_statistics,
    requires=(require_normalization, require_entropy, require_torch_statistics),
)  # fmt: skip
def sar(
    context: PolicyContext, train: Samples, *, lr: Rate = 1e-3, batch_size: Count = 64,
    margin: Annotated[float, Field(gt=0, le=1)] = 0.4, rho: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05,
    reset: Annotated[float, Field(ge=0, lt=1)] = 0.029,
) -> State:  # fmt: skip
    """Train normalization of the average by the entropy of certain predictions of the new client's inputs."""
    entropy = context.task.entropy
    minimizer = ReliableMinimizer(context.plan, context.average, entropy, lr=lr, margin=margin, rho=rho, reset=reset)
    return minimizer.minimize(train, batch_size=batch_size)
