"""Digit networks of FedBN and FedWon, FedMMB's 3CFNN and 4CFNN, and a small one for demonstrations.

Each takes images of any number of channels, and of any size from 4 pixels on (4CFNN: 8). 3CFNN comes from FedAvg
(McMahan et al. 2017, arXiv:1602.05629, section 3), whose parameter counts show that convolutions keep the size; for
4CFNN, where FedMMB (arXiv:2011.07006, section 4) is silent, they do too, and initialization is PyTorch's for both.
"""

from __future__ import annotations

from torch import nn

from ._common import Shape, _Convolution, _pooled_cnn

_HALVED = (2, 2)
_FEDBN: tuple[_Convolution, ...] = ((64, 5, 1, 2, _HALVED, 32), (64, 5, 1, 2, _HALVED, 32), (128, 5, 1, 2, None, 64))
_CFNN3: tuple[_Convolution, ...] = ((32, 5, 1, 2, _HALVED, None), (64, 5, 1, 2, _HALVED, None))
_CFNN4: tuple[_Convolution, ...] = tuple((channels, 3, 1, 1, _HALVED, None) for channels in (128, 256, 512))
_SMALL: tuple[_Convolution, ...] = ((16, 3, 1, 1, _HALVED, None), (32, 3, 1, 1, _HALVED, None))


def digit_cnn_bn(shape: Shape = (3, 28, 28), classes: int = 10) -> nn.Module:
    """Digit network of FedBN's table 3: BatchNorm after every layer but the last; 14,219,210 parameters."""
    return _pooled_cnn("digit-cnn-bn", shape, _FEDBN, (2048, 512, classes), norm=True)


def digit_cnn_dropout(shape: Shape = (3, 28, 28), classes: int = 10) -> nn.Module:
    """Digit network of FedWon's table 5: BatchNorm after convolutions, dropout (0.5) before the two wide FC layers."""
    return _pooled_cnn("digit-cnn-dropout", shape, _FEDBN, (2048, 512, classes), norm=False, dropout=True)


def small_cnn(shape: Shape = (3, 28, 28), classes: int = 10, *, dense_norm: bool = True) -> nn.Module:
    """Two 3 x 3 convolutions (16, 32) and one hidden FC layer (64), BatchNorm after each: seconds on a CPU.

    ``dense_norm=False`` leaves BatchNorm after the FC layer out, so that the network trains on single samples too.
    """
    return _pooled_cnn("small-cnn", shape, _SMALL, (64, classes), norm=dense_norm)


def cfnn3(shape: Shape = (1, 28, 28), classes: int = 10) -> nn.Module:
    """3CFNN of FedSMB and FedMMB (arXiv:2011.07006): 5 x 5 convolutions (32, 64), FC (512); 1,663,370 parameters."""
    return _pooled_cnn("cfnn3", shape, _CFNN3, (512, classes), norm=False, conv_norm=False)


def cfnn4(shape: Shape = (3, 32, 32), classes: int = 10) -> nn.Module:
    """4CFNN of FedSMB and FedMMB (arXiv:2011.07006): 3 x 3 convolutions (128, 256, 512), FC (1024)."""
    return _pooled_cnn("cfnn4", shape, _CFNN4, (1024, classes), norm=False, conv_norm=False)
