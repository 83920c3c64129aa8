"""FN: features get one length before the classifier, which is what layer normalization adds where labels are skewed.

Zhang, Beitollahi, Bie and Chen 2024 (TMLR), arXiv:2308.09565, by its abstract and the authors' public code
(huawei-noah/Federated-Learning, Layer_Normalization). A vector z of D features becomes sqrt(D) z / |z|, so that their
mean square is 1, as in that code's ResNet. In a network of linear layers without bias and ReLU, to scale the outputs of
every layer is to scale those of the last. A client with few classes can then no longer lower its loss by longer and
longer features, all in one direction, which forget the classes that it does not have.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import sqrt

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.method import Method, modifier
from ..core.selection import entries, find_classifier
from ..nn.surgery import replace_modules
from ..utils.errors import UsageError


class FeatureScaling(nn.Module):
    """Gives features ``[..., D]`` the length sqrt(D), whatever their length was; features of zeros stay."""

    def forward(self, z: Tensor) -> Tensor:
        """Return features of the same shape."""
        unit: Tensor = F.normalize(z, dim=-1)
        return unit * sqrt(z.shape[-1])


@dataclass(frozen=True)
class ScaleFeatures:
    """The surgery that puts a FeatureScaling before the classifier."""

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
