"""gPerXAN: a local BatchNorm is mixed with a shared InstanceNorm, and features must fit the shared classifier.

Le, Ho, Do, Le-Phuoc and Wong 2024 (CVPR), arXiv:2403.15605, by its abstract and the authors' public code
(lhkhiem28/gPerXAN). Each BatchNorm of feature maps becomes b BN(x) + i IN(x), where (b, i) is the softmax of two scores
that are trained and start equal. InstanceNorm removes a client's style, BatchNorm keeps information about classes. BN
and its score stay on the client, as does BatchNorm of vectors; all other entries are averaged. With the features z of a
batch, the loss L includes lam times the loss of the loaded classifier, which is held constant: L(W z) + lam L(W_loaded
z).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.method import Method, method, require
from ..core.rule import Declared, Network, Rule, Step
from ..core.selection import batch_norm, name_classifier, name_matches, of_type
from ..nn.recognition import Function
from ..nn.surgery import BATCH_NORM, replace_layers
from ..utils.errors import UsageError

MAPS: dict[type[_BatchNorm], type[nn.InstanceNorm2d | nn.InstanceNorm3d]] = {
    nn.BatchNorm2d: nn.InstanceNorm2d, nn.SyncBatchNorm: nn.InstanceNorm2d, nn.BatchNorm3d: nn.InstanceNorm3d,
}  # fmt: skip
"""BatchNorm layers of feature maps, with the corresponding InstanceNorm layers."""


class AssembledNorm(nn.Module):
    """A weighted sum of two normalizations of feature maps ``[B, C, ...]``, by batch and by sample."""

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        kind = next(kind for kind in MAPS if isinstance(layer, kind))
        self.batch = kind(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        self.batch._parameters.update(layer._parameters)
        self.batch._buffers.update(layer._buffers)
        self.instance = MAPS[kind](layer.num_features, layer.eps, affine=True)
        like = next((tensor for tensor in (layer.weight, layer.running_mean) if tensor is not None), None)
        self.batch_score, self.instance_score = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        if like is not None:
            self.to(like)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``."""
        share = torch.stack((self.batch_score, self.instance_score)).softmax(dim=0)
        made: Tensor = share[0] * self.batch(x) + share[1] * self.instance(x)
        return made


local_norm = replace(batch_norm | (of_type(AssembledNorm) & name_matches("*batch_score")), text="batch_norm and score")
"""Every BatchNorm, and how much of an AssembledNorm it is."""


@dataclass(frozen=True)
class Assemble:
    """Surgery that adds an InstanceNorm to every BatchNorm of feature maps."""

    replaced: ClassVar[tuple[Function, ...]] = BATCH_NORM

    def __str__(self) -> str:
        return "BatchNorm and InstanceNorm side by side"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; :class:`UsageError` where it has no BatchNorm of feature maps."""
        if not any(isinstance(layer, tuple(MAPS)) for layer in module.modules()):
            raise UsageError("gperxan adds InstanceNorm to BatchNorm of feature maps, but the model has none")
        return replace_layers(module, tuple(MAPS), "an added InstanceNorm", AssembledNorm)


class Guidance(Rule):
    """The loss of the loaded classifier on the client's features, of strength ``lam``; ``head``: its entries."""

    lam: float
    head: frozenset[str] = field(default=frozenset(), repr=False)
    needs_shared = "gPerXAN guides features by the classifier that clients share"

    def bind(self, network: Network) -> Declared:
        names = name_classifier(network.entries, self.source_method)
        if not network.loaded.issuperset(names):
            raise network.refuse_kept(self.needs_shared, names)
        return Declared(replace(self, head=names), features="last")

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        loaded = {name.rpartition(".")[2]: step.loaded[name] for name in self.head}
        guided = F.linear(step.features, loaded["weight"], loaded.get("bias"))
        return loss + self.lam * step.criterion(guided, step.y)


@method
def gperxan(base: Method, *, lam: float = 0.5) -> Method:
    """Add a shared InstanceNorm to the BatchNorm of ``base``, which stays on clients, and guide their features.

    ``lam``: strength of the loss of the classifier that clients loaded; 0: none.
    """
    require(0 <= lam < float("inf"), f"lam={lam:g}: give a finite strength, 0 (no guidance) or more")
    changed = base.with_surgery(Assemble()).keep_on_client(local_norm)
    return changed.with_rule(Guidance(lam)) if lam else changed
