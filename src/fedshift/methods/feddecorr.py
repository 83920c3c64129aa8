"""FedDecorr: a penalty on correlations of features keeps them from collapsing into few dimensions.

Shi, Liang, Zhang, Tan and Bai 2023, arXiv:2210.00226: the loss includes beta times the mean of the squared entries of
the correlation matrix of a batch's features, which are the inputs of the network's last layer. As in the authors' code
(bytedance/FedDecorr), the mean leaves out the diagonal, which is 1, and is multiplied by (B - 1)^2 / B for a batch of B
samples. A batch of one sample has no correlations.
"""

from dataclasses import dataclass

from torch import Tensor

from ..core.method import Method, method
from ..core.rule import Declared, Network, Rule, Step
from ..utils.errors import require


@dataclass(frozen=True)
class Decorrelation(Rule):
    """Adds ``beta`` times the mean squared product of two standardized features, over the size of the batch."""

    beta: float

    def bind(self, network: Network) -> Declared:
        return Declared(self, features="last")

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        z_BD = step.features.flatten(1)
        if min(z_BD.shape) < 2:
            return loss
        z_BD = (z_BD - z_BD.mean(dim=0)) / (z_BD.var(dim=0) + 1e-8).sqrt()
        size, width = z_BD.shape
        total = (z_BD.T @ z_BD).triu(diagonal=1).square().sum()
        return loss + self.beta * total / (size * width * (width - 1) / 2)


@method
def feddecorr(base: Method, *, beta: float = 0.1) -> Method:
    """Add a penalty of strength ``beta`` on correlations of features to ``base``."""
    require(beta >= 0, f"beta={beta:g} is negative; it must be 0 (FedAvg) or more")
    return base.with_rule(Decorrelation(beta))
