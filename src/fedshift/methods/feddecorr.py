"""FedDecorr: a penalty on correlations of features keeps them from collapsing into few dimensions.

Shi et al. 2023, arXiv:2210.00226: the loss includes beta times the mean of the squared correlations of a batch's
features, inputs of the last layer. As in bytedance/FedDecorr, it is times (B - 1)^2 / B for B samples.
"""

from torch import Tensor

from ..core.method import Method, method, require
from ..core.rule import Declared, Network, Rule, Step


class Decorrelation(Rule):
    """Penalizes correlations with strength ``beta``."""

    beta: float

    def bind(self, network: Network) -> Declared:
        return Declared(self, features="last")

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        z_BD = step.features.flatten(1)
        size, width = z_BD.shape
        if min(size, width) < 2:
            return loss  # nothing to correlate
        z_BD = (z_BD - z_BD.mean(dim=0)) / (z_BD.var(dim=0) + 1e-8).sqrt()
        total = (z_BD.T @ z_BD).triu(diagonal=1).square().sum()
        return loss + self.beta * total / (size * width * (width - 1) / 2)


@method
def feddecorr(base: Method, *, beta: float = 0.1) -> Method:
    """Add a penalty of strength ``beta`` on correlations of features to ``base``."""
    require(beta >= 0, f"beta={beta:g} is negative; it must be 0 (FedAvg) or more")
    return base.with_rule(Decorrelation(beta))
