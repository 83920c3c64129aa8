"""VGG16 (Simonyan & Zisserman 2015, arXiv:1409.1556, table 1, column D) with torchvision's names and shapes.

FedMMB's VGG16 (arXiv:2011.07006, section 4) is another one: TensorFlow's, whose FC layers read the last feature map as
it is, without an average pool to 7 x 7 and without dropout.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from ._common import Shape, _image_channels, _kaiming

_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and number of the 3 x 3 convolutions before each of the five poolings."""


def _features(channels: int, batch_norm: bool) -> nn.Module:
    features: list[nn.Module] = []
    for after, convolutions in _STAGES:
        for _ in range(convolutions):
            features.append(nn.Conv2d(channels, after, 3, padding=1))
            features += [nn.BatchNorm2d(after), nn.ReLU()] if batch_norm else [nn.ReLU()]
            channels = after
        features.append(nn.MaxPool2d(2))
    return nn.Sequential(*features)


def _vgg16(channels: int, classes: int, batch_norm: bool) -> nn.Module:
    classifier = nn.Sequential(
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, classes),
    )
    network = nn.Sequential(
        OrderedDict(
            features=_features(channels, batch_norm),
            avgpool=nn.AdaptiveAvgPool2d(7),
            flatten=nn.Flatten(),
            classifier=classifier,
        )
    )
    return _kaiming(network, dense_std=0.01)


def vgg16_fedmmb(shape: Shape = (3, 150, 200), classes: int = 7) -> nn.Module:
    """VGG16 of FedSMB and FedMMB (arXiv:2011.07006, section 4): no average pool, no dropout; 81,860,423 parameters."""
    channels = _image_channels("vgg16-fedmmb", shape, 32)
    classifier = nn.Sequential(
        nn.Linear(512 * (shape[1] // 32) * (shape[2] // 32), 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, classes),
    )
    return _kaiming(
        nn.Sequential(OrderedDict(features=_features(channels, False), flatten=nn.Flatten(), classifier=classifier)),
        dense_std=0.01,
    )


def vgg16(shape: Shape = (3, 224, 224), classes: int = 1000) -> nn.Module:
    """VGG16 of Simonyan & Zisserman 2015 (arXiv:1409.1556, table 1 D), torchvision's; 138,357,544 parameters."""
    return _vgg16(_image_channels("vgg16", shape, 32), classes, batch_norm=False)


def vgg16_bn(shape: Shape = (3, 224, 224), classes: int = 1000) -> nn.Module:
    """VGG16 (arXiv:1409.1556, table 1 D) with BatchNorm after convolutions, torchvision's; 138,365,992 parameters."""
    return _vgg16(_image_channels("vgg16-bn", shape, 32), classes, batch_norm=True)
