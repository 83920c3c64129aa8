"""FedSR: features are sampled from a Gaussian per sample, regularized to be small and close to a Gaussian per class.

Nguyen, Torr and Lim, NeurIPS 2022, "FedSR: A Simple and Effective Domain Generalization Method for Federated Learning".
The classifier is replaced by a linear layer that computes the mean and deviation (by softplus) of Z features, a sample
z = mean + deviation * noise, and a linear classifier of z. The loss includes l2 times the mean norm of z, and cmi times
the mean divergence KL(N(c mean, (c deviation)^2), N(r_y, s_y^2)), a bound on the mutual information of features and
inputs conditioned on the class (without classes, the bound of Alemi et al. 2017, arXiv:1612.00410). As in the authors'
code (atuannguyen/FedSR), the L2 term is the norm, not its square, and each client has its own c, r and s, which are
trained and decayed with the model and never sent. That code predicts by the mean probability over 20 samples; here
evaluation uses the mean features.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.method import Method, method, require
from ..core.rule import Declared, Network, Phase, Rule, Step
from ..core.selection import entries, find_classifier
from ..nn.dropout import Keyed, draw_normal, take_draws
from ..nn.surgery import replace_modules


class Sampler(Keyed):
    """Samples features from Gaussians ``[B, 2 Z]`` in training, and returns their means ``[B, Z]`` in evaluation.

    ``drawn`` passes on the means, deviations and features, ``[B, 3 Z]``, for the rule to read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Identity()

    def forward(self, raw_B2Z: Tensor) -> Tensor:
        """Return the features ``[B, Z]``."""
        mean_BZ, raw_BZ = raw_B2Z.chunk(2, dim=1)
        z_BZ, deviation_BZ = mean_BZ, F.softplus(raw_BZ)
        if self.training:
            z_BZ = mean_BZ + deviation_BZ * draw_normal(*take_draws(self, 2), mean_BZ.shape).to(mean_BZ.dtype)
        drawn_B3Z: Tensor = self.drawn(torch.cat([mean_BZ, deviation_BZ, z_BZ], dim=1))
        return drawn_B3Z.chunk(3, dim=1)[2]


@dataclass(frozen=True)
class GaussianFeatures:
    """Surgery that inserts ``size`` features sampled from a Gaussian before the classifier; None: as many as before."""

    size: int | None = None

    def __str__(self) -> str:
        return "Gaussian features before the classifier"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; raise :class:`UsageError` unless it ends in a linear classifier."""
        last = find_classifier(entries(module), "fedsr")
        size = self.size or last.in_features
        layers = {
            "gaussian": nn.Linear(last.in_features, 2 * size),
            "sampler": Sampler(),
            "classifier": nn.Linear(size, last.out_features),
        }
        head = nn.Sequential(OrderedDict(layers)).to(last.weight)
        return replace_modules(module, lambda _, layer: head if layer is last else None)


class Representation(Rule):
    """Regularizes the norm of features by ``l2``, and their information beyond the class by ``cmi``."""

    l2: float
    cmi: float
    needs_classes = "FedSR keeps features near a Gaussian for each class"

    def bind(self, network: Network) -> Declared:
        classifier = find_classifier(network.entries, self.source_method)
        sampler = next(name for name, layer in network.module.named_modules() if isinstance(layer, Sampler))
        ones_KZ = torch.ones_like(classifier.weight)
        own = {"means": torch.zeros_like(ones_KZ), "deviations": ones_KZ, "scale": ones_KZ.new_ones(())}
        return Declared(self, params=own, phases=(Phase(decay=True),), features=f"{sampler}.drawn")

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        own = step.own.params
        *gaussian, z_BZ = step.features.chunk(3, dim=1)
        mean_BZ, deviation_BZ = (own["scale"] * values_BZ for values_BZ in gaussian)
        r_BZ, s_BZ = own["means"][step.y], F.softplus(own["deviations"])[step.y]
        divergence_BZ = s_BZ.log() - deviation_BZ.log() - 0.5
        divergence_BZ = divergence_BZ + (deviation_BZ.square() + (mean_BZ - r_BZ).square()) / (2 * s_BZ.square())
        total: Tensor = loss + self.l2 * z_BZ.norm(dim=1).mean() + self.cmi * divergence_BZ.sum(dim=1).mean()
        return total


@method
def fedsr(base: Method, *, l2: float = 0.01, cmi: float = 0.0005, size: int | None = None) -> Method:
    """Use Gaussian features in ``base``, and regularize their norm and their information beyond the class.

    ``l2`` and ``cmi``: strengths of the two. ``size``: number of features; None: as many as the classifier's inputs.
    """
    require(l2 >= 0 and cmi >= 0, f"l2={l2:g} and cmi={cmi:g}: give 0 or more for each")
    more = size is None or size >= 1
    require(more, f"size={size}: give 1 or more, or leave it out for the number of the classifier's inputs")
    return base.with_surgery(GaussianFeatures(size)).with_rule(Representation(l2, cmi))
