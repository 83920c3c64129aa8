"""Six-layer digit networks of FedBN and FedWon, and a small one for demonstrations.

Each takes images of any number of channels and any size of at least 4 pixels; 3 x 28 x 28 gives the published networks.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from ..utils.errors import UsageError
from ._common import Shape, _conv_blocks, _Convolution, _dense_layers

_HALVED = (2, 2)
_FEDBN: tuple[_Convolution, ...] = ((64, 5, 1, 2, _HALVED, 32), (64, 5, 1, 2, _HALVED, 32), (128, 5, 1, 2, None, 64))
_SMALL: tuple[_Convolution, ...] = ((16, 3, 1, 1, _HALVED, None), (32, 3, 1, 1, _HALVED, None))


def _pooled_twice(shape: Shape, model: str) -> int:
    """Return the pixels per channel after two 2 x 2 poolings; refuse samples that are not images or too small."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise UsageError(
            f"model {model} takes images of at least 4 x 4 pixels, not samples of shape {shape}: "
            "choose another model, or give images (C, H, W)"
        ).about("model")
    return (shape[1] // 4) * (shape[2] // 4)


def digit_cnn_bn(shape: Shape = (3, 28, 28), classes: int = 10) -> nn.Module:
    """Digit network of FedBN's table 3: BatchNorm after every layer but the last; 14,219,210 parameters."""
    pixels = _pooled_twice(shape, "digit-cnn-bn")
    features = _conv_blocks(shape[0], _FEDBN) | {"flatten": nn.Flatten()}
    return nn.Sequential(OrderedDict(features | _dense_layers((128 * pixels, 2048, 512, classes), 4, norm=True)))


def digit_cnn_dropout(shape: Shape = (3, 28, 28), classes: int = 10) -> nn.Module:
    """Digit network of FedWon's table 5: BatchNorm after convolutions, dropout (0.5) before the two wide FC layers."""
    pixels = _pooled_twice(shape, "digit-cnn-dropout")
    features = _conv_blocks(shape[0], _FEDBN) | {"flatten": nn.Flatten()}
    dense = _dense_layers((128 * pixels, 2048, 512, classes), 4, norm=False, dropout=True)
    return nn.Sequential(OrderedDict(features | dense))


def small_cnn(shape: Shape = (3, 28, 28), classes: int = 10, *, dense_norm: bool = True) -> nn.Module:
    """Two 3 x 3 convolutions (16, 32) and one hidden FC layer (64), BatchNorm after each: seconds on a CPU.

    ``dense_norm=False`` leaves BatchNorm after the FC layer out, so that the network trains on single samples too.
    """
    pixels = _pooled_twice(shape, "small-cnn")
    features = _conv_blocks(shape[0], _SMALL) | {"flatten": nn.Flatten()}
    return nn.Sequential(OrderedDict(features | _dense_layers((32 * pixels, 64, classes), 3, norm=dense_norm)))
