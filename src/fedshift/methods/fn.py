"""FN: features are normalized to a fixed length before the classifier, which helps like LayerNorm under label skew.

Zhang, Beitollahi, Bie and Chen 2024 (TMLR), arXiv:2308.09565, by its abstract and the authors' public code
(huawei-noah/Federated-Learning, Layer_Normalization). A vector z of D features becomes sqrt(D) z / |z|, so that their
mean square is 1, as in that code's ResNet. In a network of ReLUs and linear layers without bias, scaling the outputs of
every layer equals scaling the last layer's. A client with few classes can then not lower its loss by ever longer
features in one direction, which forget the classes that it lacks.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.method import Method, modifier
from ..core.selection import entries, find_classifier
from ..nn.surgery import replace_modules
from ..utils.errors import UsageError


class FeatureScaling(nn.Module):
    """Scales features ``[..., D]`` to the length sqrt(D); zero features are unchanged."""

    def forward(self, z: Tensor) -> Tensor:
        """Return features of the same shape."""
        unit: Tensor = F.normalize(z, dim=-1)
        return unit * sqrt(z.shape[-1])


@dataclass(frozen=True)
class ScaleFeatures:
    """The surgery that puts a FeatureScaling before the classifier, after all other surgery."""

    stage: ClassVar[int] = 2

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; :class:`UsageError` where it does not end in a linear classifier."""
        if any(isinstance(layer, FeatureScaling) for layer in module.modules()):
            raise UsageError("features are scaled twice: remove one of the two")
        last = find_classifier(entries(module), "fn")
        made = nn.Sequential(OrderedDict(scaling=FeatureScaling(), classifier=last))
        return replace_modules(module, lambda _, layer: made if layer is last else None)


@modifier
def fn(base: Method) -> Method:
    """Scale the features that the classifier of ``base`` reads to one length."""
    return base.with_surgery(ScaleFeatures())
