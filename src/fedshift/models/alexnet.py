"""AlexNet as FedBN (arXiv:2102.07623, table 9) and FedWon (ICLR 2024, table 6) adapt it for 256 x 256 pictures.

The convolutions are those of Krizhevsky's one-column AlexNet (arXiv:1404.5997) with BatchNorm; FedBN normalizes the
wide FC layers too, FedWon drops half of their inputs instead. Average pooling to 6 x 6 lets pictures have any size.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from ._common import Shape, _image_channels, _with_groups

_SMALLEST = 63
"""Below it nothing is left for the last pooling."""

_CONVOLUTIONS = (
    (64, 11, 4, 2, 32, True),
    (192, 5, 1, 2, 32, True),
    (384, 3, 1, 1, 64, False),
    (256, 3, 1, 1, 64, False),
    (256, 3, 1, 1, 64, True),
)
"""Output channels, kernel, stride, padding, groups where GroupNorm replaces BatchNorm, whether a pooling follows."""


def _features(channels: int) -> dict[str, nn.Module]:
    """The five convolutions up to a vector of 9216 features."""
    layers: dict[str, nn.Module] = {}
    for i, (after, kernel, stride, padding, groups, pooled) in enumerate(_CONVOLUTIONS, start=1):
        layers[f"conv{i}"] = nn.Conv2d(channels, after, kernel, stride, padding)
        layers[f"bn{i}"] = _with_groups(nn.BatchNorm2d(after), groups)
        layers[f"relu{i}"] = nn.ReLU()
        if pooled:
            layers[f"pool{i}"] = nn.MaxPool2d(3, stride=2)
        channels = after
    return layers | {"avgpool": nn.AdaptiveAvgPool2d(6), "flatten": nn.Flatten()}


def alexnet_bn(shape: Shape = (3, 256, 256), classes: int = 10) -> nn.Module:
    """AlexNet of FedBN's table 9: BatchNorm after every layer but the last; 57,063,498 parameters for ten classes."""
    return nn.Sequential(
        OrderedDict(
            **_features(_image_channels("alexnet-bn", shape, _SMALLEST)),
            fc1=nn.Linear(9216, 4096),
            bn6=nn.BatchNorm1d(4096),
            relu6=nn.ReLU(),
            fc2=nn.Linear(4096, 4096),
            bn7=nn.BatchNorm1d(4096),
            relu7=nn.ReLU(),
            fc3=nn.Linear(4096, classes),
        )
    )


def alexnet_dropout(shape: Shape = (3, 256, 256), classes: int = 10) -> nn.Module:
    """AlexNet of FedWon's table 6: BatchNorm after convolutions, dropout (0.5) before the two wide FC layers."""
    return nn.Sequential(
        OrderedDict(
            **_features(_image_channels("alexnet-dropout", shape, _SMALLEST)),
            dropout1=nn.Dropout(),
            fc1=nn.Linear(9216, 4096),
            relu6=nn.ReLU(),
            dropout2=nn.Dropout(),
            fc2=nn.Linear(4096, 4096),
            relu7=nn.ReLU(),
            fc3=nn.Linear(4096, classes),
        )
    )
