"""Networks for pictures: AlexNet, FedMMB's VGG16, ResNet-18 and ResNet-20, MobileNetV2.

- AlexNet as FedBN (arXiv:2102.07623, table 9) and FedWon (ICLR 2024, table 6) adapt it for 256 x 256 pictures. The
  convolutions come from Krizhevsky's one-column AlexNet (arXiv:1404.5997) with BatchNorm; FedBN normalizes the wide FC
  layers too, FedWon drops half of their inputs instead. Average pooling to 6 x 6 lets pictures have any size.
- FedMMB's VGG16 (arXiv:2011.07006, section 4; Simonyan & Zisserman 2015, arXiv:1409.1556, table 1, column D) is
  TensorFlow's, whose FC layers read the last feature map directly, without an average pool and without dropout.
- Residual networks of He et al. 2016 (arXiv:1512.03385). ResNet-18 (table 1, projection shortcuts) has torchvision's
  names and shapes, so that its published weights load; ResNet-20 (section 4.2) has shortcuts without parameters. FedWon
  uses both on Office-Caltech-10.
- MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381, table 2) with torchvision's names and shapes. FedWon trains
  torchvision's network, unchanged, on CIFAR-10 (section A.2).
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import pad

from ._common import Shape, _conv_blocks, _Convolution, _dense_layers, _image_channels, _kaiming, _pooled_cnn

_SMALLEST = 63
"""Below this size nothing is left for the last pooling."""

_ALEXNET: tuple[_Convolution, ...] = (
    (64, 11, 4, 2, (3, 2), 32), (192, 5, 1, 2, (3, 2), 32),
    (384, 3, 1, 1, None, 64), (256, 3, 1, 1, None, 64), (256, 3, 1, 1, (3, 2), 64),
)  # fmt: skip


def _alexnet(model: str, shape: Shape, widths: tuple[int, ...], *, norm: bool) -> nn.Module:
    """Return the five convolutions, up to a vector of 9216 features, and FC layers of ``widths``."""
    features = _conv_blocks(_image_channels(model, shape, _SMALLEST), _ALEXNET)
    features |= {"avgpool": nn.AdaptiveAvgPool2d(6), "flatten": nn.Flatten()}
    dense = _dense_layers((9216, *widths), len(_ALEXNET) + 1, norm=norm, dropout=not norm)
    return nn.Sequential(OrderedDict(features | dense))


def alexnet_bn(shape: Shape = (3, 256, 256), classes: int = 10, *, width: int = 4096) -> nn.Module:
    """AlexNet of FedBN's table 9: BatchNorm after every layer but the last; 57,063,498 parameters for ten classes.

    ``width``: features of the two hidden dense layers; 1024 in the network that FedFA's authors released.
    """
    return _alexnet("alexnet-bn", shape, (width, width, classes), norm=True)


def alexnet_dropout(shape: Shape = (3, 256, 256), classes: int = 10) -> nn.Module:
    """AlexNet of FedWon's table 6: BatchNorm after convolutions, dropout (0.5) before the two wide FC layers."""
    return _alexnet("alexnet-dropout", shape, (4096, 4096, classes), norm=False)


_VGG: tuple[_Convolution, ...] = tuple(
    (channels, 3, 1, 1, (2, 2) if number == convolutions else None, None)
    for channels, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
    for number in range(1, convolutions + 1)
)


def vgg16_fedmmb(shape: Shape = (3, 150, 200), classes: int = 7) -> nn.Module:
    """VGG16 of FedSMB and FedMMB (arXiv:2011.07006, section 4): no average pool, no dropout; 81,860,423 parameters."""
    network = _pooled_cnn("vgg16-fedmmb", shape, _VGG, (4096, 4096, classes), norm=False, conv_norm=False)
    return _kaiming(network, dense_std=0.01)


class _Block(nn.Module):
    """Two 3 x 3 convolutions whose result is added to the input, or to ``downsample`` of it, which halves the image."""

    def __init__(self, before: int, after: int, downsample: nn.Module | None = None) -> None:
        super().__init__()
        stride = 1 if downsample is None else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [N, before, H, W]`` to ``[N, after, H / stride, W / stride]``, sizes rounded up."""
        residual = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu(residual + (x if self.downsample is None else self.downsample(x)))
        return result


class _Subsample(nn.Module):
    """Shortcut A: every second pixel each way, and ``new`` more channels that are zero."""

    def __init__(self, new: int) -> None:
        super().__init__()
        self.new = new

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [N, C, H, W]`` to ``[N, C + new, H / 2, W / 2]``, sizes rounded up."""
        return pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new))


def _residual(
    stem: dict[str, nn.Module], channels: tuple[int, ...], blocks: int, classes: int, *, projected: bool
) -> nn.Module:
    """Return ``stem`` followed by a stage of blocks for each number of channels, pooling, and the output layer.

    Where channels change, a stage halves the image, by shortcut B (``projected``: a 1 x 1 convolution of stride 2 with
    BatchNorm) or A.
    """
    layers = dict(stem)
    for i, (before, after) in enumerate(pairwise((channels[0], *channels)), start=1):
        shortcut: nn.Module | None = None
        if before != after and projected:
            shortcut = nn.Sequential(nn.Conv2d(before, after, 1, 2, bias=False), nn.BatchNorm2d(after))
        elif before != after:
            shortcut = _Subsample(after - before)
        rest = (_Block(after, after) for _ in range(blocks - 1))
        layers[f"layer{i}"] = nn.Sequential(_Block(before, after, shortcut), *rest)
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(channels[-1], classes)}
    return nn.Sequential(OrderedDict(layers))


def resnet18(shape: Shape = (3, 224, 224), classes: int = 1000) -> nn.Module:
    """ResNet-18 of He et al. 2016 (arXiv:1512.03385, table 1) as torchvision names it; 11,689,512 parameters."""
    stem = {
        "conv1": nn.Conv2d(_image_channels("resnet18", shape), 64, 7, 2, padding=3, bias=False),
        "bn1": nn.BatchNorm2d(64),
        "relu": nn.ReLU(),
        "maxpool": nn.MaxPool2d(3, stride=2, padding=1),
    }
    return _kaiming(_residual(stem, (64, 128, 256, 512), 2, classes, projected=True))


def resnet20(shape: Shape = (3, 32, 32), classes: int = 10) -> nn.Module:
    """ResNet-20 for CIFAR of He et al. 2016 (arXiv:1512.03385, section 4.2, table 6); 269,722 parameters.

    Every weight is drawn by the rule of He et al. 2015 (arXiv:1502.01852) over incoming connections, as in the paper.
    """
    stem = {
        "conv1": nn.Conv2d(_image_channels("resnet20", shape), 16, 3, padding=1, bias=False),
        "bn1": nn.BatchNorm2d(16),
        "relu": nn.ReLU(),
    }
    network = _residual(stem, (16, 32, 64), 3, classes, projected=False)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network


_MOBILENET_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
"""Expansion, output channels, blocks, and stride of the first block."""


def _convolution(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    """Return a convolution with BatchNorm and ReLU6 that keeps the size at stride 1."""
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU6(),
    )


class _InvertedResidual(nn.Module):
    """Block that widens each pixel, filters each channel, narrows linearly, and adds the input if shapes match."""

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
        """Map ``x [N, before, H, W]`` to ``[N, after, H / stride, W / stride]``, sizes rounded up."""
        result: Tensor = self.conv(x)
        return x + result if self.adds else result


def mobilenet_v2(shape: Shape = (3, 224, 224), classes: int = 1000) -> nn.Module:
    """MobileNetV2 of Sandler et al. 2018 (arXiv:1801.04381, table 2) as torchvision names it; 3,504,872 parameters."""
    before = 32
    features = [_convolution(_image_channels("mobilenet-v2", shape), before, 3, stride=2)]
    for expansion, after, blocks, stride in _MOBILENET_STAGES:
        for i in range(blocks):
            features.append(_InvertedResidual(before, after, stride if i == 0 else 1, expansion))
            before = after
    features.append(_convolution(before, 1280, 1))
    parts = {"features": nn.Sequential(*features), "avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    parts["classifier"] = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))
    return _kaiming(nn.Sequential(OrderedDict(parts)), dense_std=0.01)
