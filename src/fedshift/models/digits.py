"""Six-layer digit networks of FedBN and FedWon, and a small one for demonstrations.

Each takes images of any number of channels and any size of at least 4 pixels; 3 x 28 x 28 gives the published networks.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from ._common import Shape, _conv_blocks, _Convolution, _dense_layers, _image_channels

_HALVED = (2, 2)
_FEDBN: tuple[_Convolution, ...] = ((64, 5, 1, 2, _HALVED, 32), (64, 5, 1, 2, _HALVED, 32), (128, 5, 1, 2, None, 64))
_SMALL: tuple[_Convolution, ...] = ((16, 3, 1, 1, _HALVED, None), (32, 3, 1, 1, _HALVED, None))


def _digit_cnn(
    model: str, shape: Shape, blocks: tuple[_Convolution, ...], widths: tuple[int, ...], *, norm: bool, dropout: bool
) -> nn.Module:
    """Return convolutions, two of them pooled by 2, and FC layers of ``widths``; refuse samples that are not images."""
    features = _conv_blocks(_image_channels(model, shape, 4), blocks) | {"flatten": nn.Flatten()}
    entering = blocks[-1][0] * (shape[1] // 4) * (shape[2] // 4)
    dense = _dense_layers((entering, *widths), len(blocks) + 1, norm=norm, dropout=dropout)
    return nn.Sequential(OrderedDict(features | dense))


def digit_cnn_bn(shape: Shape = (3, 28, 28), classes: int = 10) -> nn.Module:
    """Digit network of FedBN's table 3: BatchNorm after every layer but the last; 14,219,210 parameters."""
    return _digit_cnn("digit-cnn-bn", shape, _FEDBN, (2048, 512, classes), norm=True, dropout=False)


def digit_cnn_dropout(shape: Shape = (3, 28, 28), classes: int = 10) -> nn.Module:
    """Digit network of FedWon's table 5: BatchNorm after convolutions, dropout (0.5) before the two wide FC layers."""
    return _digit_cnn("digit-cnn-dropout", shape, _FEDBN, (2048, 512, classes), norm=False, dropout=True)


def small_cnn(shape: Shape = (3, 28, 28), classes: int = 10, *, dense_norm: bool = True) -> nn.Module:
    """Two 3 x 3 convolutions (16, 32) and one hidden FC layer (64), BatchNorm after each: seconds on a CPU.

    ``dense_norm=False`` leaves BatchNorm after the FC layer out, so that the network trains on single samples too.
    """
    return _digit_cnn("small-cnn", shape, _SMALL, (64, classes), norm=dense_norm, dropout=False)
