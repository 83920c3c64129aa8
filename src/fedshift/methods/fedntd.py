"""FedNTD: clients keep what the server's model knows of the classes that a sample does not have.

Lee et al. 2022, arXiv:2106.03097: the loss includes beta times the mean divergence of softmax(scores / tau) without the
true class from the same of the model at the beginning of the round; as in Lee-Gihun/FedNTD, it is not times tau^2.
"""

import torch
from torch import Tensor

from ..core.method import Method, method, require
from ..core.rule import Rule, Step
from ..utils.errors import UsageError


class NotTrueDistillation(Rule):
    """Distills all scores but the true class's."""

    beta: float
    tau: float
    needs_shared = "FedNTD distills the shared model"
    needs_classes = "FedNTD distills all classes but the true one"

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        if (classes := step.outputs.shape[1]) < 3:
            raise UsageError(f"fedntd needs 3 or more classes, but the model has {classes}: leave fedntd out")
        others_K = torch.arange(classes - 1, device=step.y.device)
        others_BK = others_K + (others_K >= step.y[:, None])
        scores = step.outputs, step.run(step.start, training=False).outputs
        log_p, log_q = ((each.gather(1, others_BK) / self.tau).log_softmax(dim=1) for each in scores)
        return loss + self.beta * (log_q.exp() * (log_q - log_p)).sum(dim=1).mean()


@method
def fedntd(base: Method, *, beta: float = 1.0, tau: float = 1.0) -> Method:
    """Add distillation of strength ``beta`` at temperature ``tau`` to ``base``."""
    require(beta >= 0, f"beta={beta:g} is negative; it must be 0 (FedAvg) or more")
    require(tau > 0, f"tau={tau:g}: give a temperature above 0")
    return base.with_rule(NotTrueDistillation(beta, tau))
