"""FedLC: scores are calibrated by the client's class frequencies, so that rare classes keep a margin.

Zhang et al. 2022, arXiv:2209.00189: the loss reads the scores f_i - tau * n_i^(-1/4) for n_i training samples of class
i, at least 1e-12. The paper's softmax leaves out the true class; here it is whole, as in bytedance/FedDecorr.
"""

import torch
from torch import Tensor

from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Network, Rule, State, Step
from ..core.selection import find_classifier


class CalibratedScores(Rule):
    """Lowers scores of classes by margins of strength ``tau``."""

    tau: float
    needs_classes = "FedLC calibrates the scores of classes"

    def bind(self, network: Network) -> Declared:
        classifier = find_classifier(network.entries, self.source_method)
        return Declared(self, memory={"margins": torch.zeros_like(classifier.weight[:, 0])}, targets=True)

    def start(self, client: Client) -> State:
        before_K = client.memory["margins"]
        counts_K = torch.bincount(client.targets, minlength=len(before_K)).to(before_K.dtype)
        return {"margins": self.tau * counts_K.clamp(min=1e-12) ** -0.25}

    def outputs(self, outputs: Tensor, step: Step) -> Tensor:
        return outputs - step.memory["margins"]


@method
def fedlc(base: Method, *, tau: float = 1.0) -> Method:
    """Calibrate the scores of ``base`` by class frequencies, with margins of strength ``tau``."""
    require(tau >= 0, f"tau={tau:g} is negative; it must be 0 (FedAvg) or more")
    return base.with_rule(CalibratedScores(tau))
