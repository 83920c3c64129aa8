"""FedLC: scores are calibrated by the client's class frequencies, so that rare classes keep a margin.

Zhang et al. 2022, arXiv:2209.00189: the loss is that of the scores f_i - tau * n_i^(-1/4), where a client has n_i
training samples of class i, so that class y needs the margin tau * (n_y^(-1/4) - n_i^(-1/4)) over class i. The paper's
softmax leaves the true class out of its denominator; here it is whole, as in other implementations (one is in
bytedance/FedDecorr). A class without samples on a client counts as 1e-12 samples, so that scores are finite.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.method import Method, method
from ..core.rule import Client, Declared, Network, Rule, Step
from ..core.selection import find_classifier
from ..utils.errors import require
from ..utils.state import State


@dataclass(frozen=True)
class CalibratedScores(Rule):
    """Lowers the score of a class of n samples by ``tau * n ** -0.25`` in the training loss."""

    tau: float
    needs_classes = "FedLC calibrates the scores of classes"

    def bind(self, network: Network) -> Declared:
        classifier = find_classifier(network.entries, self.source_method)
        margins_K = next(iter(network.params.values())).new_zeros(classifier.out_features)
        return Declared(self, memory={"margins": margins_K}, targets=True)

    def start(self, client: Client) -> State:
        margins_K = client.memory["margins"]
        counts_K = torch.bincount(client.targets, minlength=len(margins_K)).to(margins_K.dtype)
        return {"margins": self.tau * counts_K.clamp(min=1e-12) ** -0.25}

    def outputs(self, outputs: Tensor, step: Step) -> Tensor:
        return outputs - step.memory["margins"]


@method
def fedlc(base: Method, *, tau: float = 1.0) -> Method:
    """Calibrate the scores of ``base`` by class frequencies, with margins of strength ``tau``."""
    require(tau >= 0, f"tau={tau:g} is negative; it must be 0 (FedAvg) or more")
    return base.with_rule(CalibratedScores(tau))
