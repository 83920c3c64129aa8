"""FedSR: features are draws from a Gaussian for each sample, which is held small and near one for its class.

Nguyen, Torr and Lim, NeurIPS 2022, "FedSR: A Simple and Effective Domain Generalization Method for Federated Learning".
The classifier is replaced by a linear layer that gives mean and deviation (by softplus) of Z features, their draw z =
mean + deviation * noise, and a linear classifier of z. The loss gains l2 times the mean norm of z, and cmi times the
mean divergence KL(N(c mean, (c deviation)^2), N(r_y, s_y^2)), a bound of the mutual information of features and inputs
given the class (without classes it is that of Alemi et al. 2017, arXiv:1612.00410). Formulas from the authors' public
code (atuannguyen/FedSR), whose L2 term is the norm itself. As there, each client has its own c, r and s, which are
trained with the model, decay as it does, and do not travel. That code predicts by the mean probability over 20 draws;
here a trained model takes the mean features, so that it predicts alike every time.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ..core.contexts import LossContext
from ..core.declarations import Bound, Own, Phase, Reads
from ..core.method import Method, method
from ..core.plan import Plan
from ..core.requirements import Requirements
from ..core.rule import Rule
from ..core.selection import entries, find_classifier
from ..nn.dropout import Keyed, current_key, draw_normal
from ..nn.surgery import replace_modules
from ..utils.errors import UsageError

DRAW = 2**21
"""Number of the draws of the noise under a step's key, beyond any that dropout layers or other rules make."""


def _read_gaussian(given_B2Z: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and deviations, ``[B, Z]`` each."""
    mean_BZ, raw_BZ = given_B2Z.chunk(2, dim=1)
    return mean_BZ, F.softplus(raw_BZ)


def _draw_features(given_B2Z: Tensor, key: Tensor) -> Tensor:
    """Return a draw from each sample's Gaussian, ``[B, Z]``, the same for the same key."""
    mean_BZ, deviation_BZ = _read_gaussian(given_B2Z)
    return mean_BZ + deviation_BZ * draw_normal(key, DRAW, mean_BZ.shape).to(mean_BZ.dtype)


class Sampler(Keyed):
    """Draws features from Gaussians ``[B, 2 Z]`` in training, and returns their means ``[B, Z]`` in evaluation."""

    def forward(self, given_B2Z: Tensor) -> Tensor:
        """Return features ``[B, Z]``."""
        return _draw_features(given_B2Z, current_key()) if self.training else _read_gaussian(given_B2Z)[0]


@dataclass(frozen=True)
class GaussianFeatures:
    """The surgery that has the classifier read ``size`` features drawn from a Gaussian; None: as many as before."""

    size: int | None = None

    def __str__(self) -> str:
        return "Gaussian features before the classifier"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; :class:`UsageError` where it does not end in a linear classifier."""
        last = find_classifier(entries(module), "fedsr")
        size = self.size or last.in_features
        layers = {
            "gaussian": nn.Linear(last.in_features, 2 * size),
            "sampler": Sampler(),
            "classifier": nn.Linear(size, last.out_features),
        }
        made = nn.Sequential(OrderedDict(layers)).to(last.weight)
        return replace_modules(module, lambda _, layer: made if layer is last else None)


@dataclass(frozen=True)
class Representation(Rule):
    """The regularizers of the features: of their norm, by ``l2``, and of what they say beyond the class, by ``cmi``."""

    l2: float
    cmi: float
    features: str = "sampler"
    requires = Requirements(classes="FedSR holds features near a Gaussian for each class")

    @override
    def bind(self, plan: Plan) -> Bound:
        classifier = find_classifier(plan.entries, self.source_method)
        sampler = next(name for name, layer in plan.module.named_modules() if isinstance(layer, Sampler))
        ones_KZ = torch.ones_like(classifier.weight, requires_grad=False)
        own = {"means": torch.zeros_like(ones_KZ), "deviations": ones_KZ, "scale": ones_KZ.new_ones(())}
        return Bound(
            replace(self, features=sampler),
            own=Own(params=own),
            phases=(Phase(decay=True),),
            reads=Reads(features=sampler, draws=True),
        )

    @override
    def loss(self, loss: Tensor, step: LossContext) -> Tensor:
        own, given_B2Z = step.own.params, step.features
        mean_BZ, deviation_BZ = (own["scale"] * part_BZ for part_BZ in _read_gaussian(given_B2Z))
        r_BZ, s_BZ = own["means"][step.y], F.softplus(own["deviations"])[step.y]
        divergence_BZ = s_BZ.log() - deviation_BZ.log() - 0.5
        divergence_BZ = divergence_BZ + (deviation_BZ.square() + (mean_BZ - r_BZ).square()) / (2 * s_BZ.square())
        norm_B = _draw_features(given_B2Z, step.key).norm(dim=1)
        total: Tensor = loss + self.l2 * norm_B.mean() + self.cmi * divergence_BZ.sum(dim=1).mean()
        return total


@method
def fedsr(base: Method, *, l2: float = 0.01, cmi: float = 0.0005, size: int | None = None) -> Method:
    """Give ``base`` Gaussian features, and regularize their norm and what they say beyond the class.

    Args:
        base: FedAvg unless given.
        l2: Strength of the norm of the features.
        cmi: Strength of the conditional mutual information of features and inputs.
        size: Number of features; None: as many as the classifier reads.

    """
    if l2 < 0 or cmi < 0:
        raise UsageError(f"l2={l2:g} and cmi={cmi:g}: give 0 or more for each")
    if size is not None and size < 1:
        raise UsageError(f"size={size}: give 1 or more, or leave it out for as many as the classifier reads")
    return base.with_surgery(GaussianFeatures(size)).with_rule(Representation(l2, cmi))
