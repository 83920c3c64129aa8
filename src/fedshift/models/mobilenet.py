"""MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381, table 2) with the names and shapes of torchvision's.

FedWon trains torchvision's network, unchanged, on CIFAR-10 (section A.2).
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from ._common import Shape, _image_channels, _kaiming

_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, output channels, blocks, and stride of the first block."""


def _convolution(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    """A convolution with BatchNorm and ReLU6 that keeps the size at stride 1."""
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU6(),
    )


class _InvertedResidual(nn.Module):
    """Widen each pixel, filter each channel alone, narrow without a non-linearity; add the input where it fits."""

    def __init__(self, before: int, after: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = before * expansion
        self.adds = stride == 1 and before == after
        self.conv = nn.Sequential(
            *([_convolution(before, wide, 1)] if expansion > 1 else []),
            _convolution(wide, wide, 3, stride, groups=wide),
            nn.Conv2d(wide, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, before, H, W]`` to ``[N, after, H / stride, W / stride]``, sizes rounded up."""
        result: Tensor = self.conv(x)
        return x + result if self.adds else result


def mobilenet_v2(shape: Shape = (3, 224, 224), classes: int = 1000) -> nn.Module:
    """MobileNetV2 of Sandler et al. 2018 (arXiv:1801.04381, table 2) as torchvision names it; 3,504,872 parameters."""
    before = 32
    features = [_convolution(_image_channels("mobilenet-v2", shape), before, 3, stride=2)]
    for expansion, after, blocks, stride in _STAGES:
        for i in range(blocks):
            features.append(_InvertedResidual(before, after, stride if i == 0 else 1, expansion))
            before = after
    features.append(_convolution(before, 1280, 1))
    network = nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features),
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes)),
        )
    )
    return _kaiming(network, dense_std=0.01)
