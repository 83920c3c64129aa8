"""Six-layer digit networks of FedBN and FedWon, and a small one for demonstrations.

Each takes images of any number of channels and any size of at least 4 pixels; 3 x 28 x 28 gives the published networks.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import nn

from ..utils.errors import UsageError
from ._common import Shape, _dense_layers, _with_groups


def _pooled_twice(shape: Shape, model: str) -> int:
    """Return the pixels per channel after two 2 x 2 poolings; refuse samples that are no image or too small."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise UsageError(
            f"model {model} takes images of at least 4 x 4 pixels, not samples of shape {shape}: "
            "choose another model, or give images (C, H, W)"
        )
    return (shape[1] // 4) * (shape[2] // 4)


def _blocks(channels: tuple[int, ...], kernel: int, groups: tuple[int, ...] = ()) -> dict[str, nn.Module]:
    """Return convolutions that keep the size, each with BatchNorm and ReLU, the first two with 2 x 2 max-pooling.

    ``groups``: groups of each BatchNorm if GroupNorm replaces it (FedWon's table 5).
    """
    layers: dict[str, nn.Module] = {}
    for i, (before, after) in enumerate(pairwise(channels), start=1):
        layers[f"conv{i}"] = nn.Conv2d(before, after, kernel, padding=kernel // 2)
        norm = nn.BatchNorm2d(after)
        layers[f"bn{i}"] = _with_groups(norm, groups[i - 1]) if groups else norm
        layers[f"relu{i}"] = nn.ReLU()
        if i <= 2:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
    return layers | {"flatten": nn.Flatten()}


def digit_cnn_bn(shape: Shape = (3, 28, 28), classes: int = 10) -> nn.Module:
    """Digit network of FedBN's table 3: BatchNorm after every layer but the last; 14,219,210 parameters."""
    pixels = _pooled_twice(shape, "digit-cnn-bn")
    features = _blocks((shape[0], 64, 64, 128), kernel=5, groups=(32, 32, 64))
    return nn.Sequential(OrderedDict(features | _dense_layers((128 * pixels, 2048, 512, classes), 4, norm=True)))


def digit_cnn_dropout(shape: Shape = (3, 28, 28), classes: int = 10) -> nn.Module:
    """Digit network of FedWon's table 5: BatchNorm after convolutions, dropout (0.5) before the two wide FC layers."""
    pixels = _pooled_twice(shape, "digit-cnn-dropout")
    features = _blocks((shape[0], 64, 64, 128), kernel=5, groups=(32, 32, 64))
    dense = _dense_layers((128 * pixels, 2048, 512, classes), 4, norm=False, dropout=True)
    return nn.Sequential(OrderedDict(features | dense))


def small_cnn(shape: Shape = (3, 28, 28), classes: int = 10) -> nn.Module:
    """Two 3 x 3 convolutions (16, 32) and one hidden FC layer (64), BatchNorm after each: seconds on a CPU."""
    pixels = _pooled_twice(shape, "small-cnn")
    features = _blocks((shape[0], 16, 32), kernel=3)
    return nn.Sequential(OrderedDict(features | _dense_layers((32 * pixels, 64, classes), 3, norm=True)))
