"""Residual networks of He et al. 2016 (arXiv:1512.03385): ResNet-18 for pictures, ResNet-20 for CIFAR.

ResNet-18 (table 1, projection shortcuts) has the names and shapes of torchvision's, so that its published weights load;
ResNet-20 (section 4.2) has shortcuts without parameters. FedWon uses both on Office-Caltech-10.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import pad

from ._common import Shape, _image_channels, _kaiming


class _Block(nn.Module):
    """Two 3 x 3 convolutions whose result is added to the input, or to what ``downsample`` makes of it."""

    def __init__(self, before: int, after: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, before, H, W]`` to ``[N, after, H / stride, W / stride]``, sizes rounded up."""
        residual = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu(residual + (x if self.downsample is None else self.downsample(x)))
        return result


class _Subsample(nn.Module):
    """Shortcut A: every second pixel each way, and ``new`` more channels that are zero."""

    def __init__(self, new: int) -> None:
        super().__init__()
        self.new = new

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, C, H, W]`` to ``[N, C + new, H / 2, W / 2]``, sizes rounded up."""
        return pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new))


def _projection(before: int, after: int) -> nn.Module:
    """Shortcut B: a 1 x 1 convolution of stride 2 with BatchNorm."""
    return nn.Sequential(nn.Conv2d(before, after, 1, 2, bias=False), nn.BatchNorm2d(after))


def _padding(before: int, after: int) -> nn.Module:
    return _Subsample(after - before)


def _stage(before: int, after: int, blocks: int, shortcut: Callable[[int, int], nn.Module]) -> nn.Module:
    """``blocks`` blocks of ``after`` channels; the first halves the image where channels change."""
    first = _Block(before, after, 1, None) if before == after else _Block(before, after, 2, shortcut(before, after))
    return nn.Sequential(first, *(_Block(after, after, 1, None) for _ in range(blocks - 1)))


def resnet18(shape: Shape = (3, 224, 224), classes: int = 1000) -> nn.Module:
    """ResNet-18 of He et al. 2016 (arXiv:1512.03385, table 1) as torchvision names it; 11,689,512 parameters."""
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(_image_channels("resnet18", shape), 64, 7, 2, padding=3, bias=False),
            bn1=nn.BatchNorm2d(64),
            relu=nn.ReLU(),
            maxpool=nn.MaxPool2d(3, stride=2, padding=1),
            layer1=_stage(64, 64, 2, _projection),
            layer2=_stage(64, 128, 2, _projection),
            layer3=_stage(128, 256, 2, _projection),
            layer4=_stage(256, 512, 2, _projection),
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(512, classes),
        )
    )
    return _kaiming(network)


def resnet20(shape: Shape = (3, 32, 32), classes: int = 10) -> nn.Module:
    """ResNet-20 for CIFAR of He et al. 2016 (arXiv:1512.03385, section 4.2, table 6); 269,722 parameters.

    Every weight is drawn by the rule of He et al. 2015 (arXiv:1502.01852) over incoming connections, as there.
    """
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(_image_channels("resnet20", shape), 16, 3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(16),
            relu=nn.ReLU(),
            layer1=_stage(16, 16, 3, _padding),
            layer2=_stage(16, 32, 3, _padding),
            layer3=_stage(32, 64, 3, _padding),
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(64, classes),
        )
    )
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network
