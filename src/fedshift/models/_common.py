"""Common parts of the networks: checks of samples, FC heads, published initialization, group counts for GroupNorm.

Initialization after He et al. 2015, arXiv:1502.01852; group counts after tables 5 and 6 of FedWon (Zhuang & Lyu 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

from torch import nn

from ..utils.errors import UsageError

Shape = tuple[int, ...]

_Convolution = tuple[int, int, int, int, tuple[int, int] | None, int | None]
"""Output channels, kernel, stride, padding, kernel and stride of the pooling that follows, and the number of groups
that the paper prescribes if GroupNorm replaces BatchNorm."""


def _image_channels(model: str, shape: Shape, smallest: int = 1) -> int:
    """Return the channels of an image of at least ``smallest`` pixels each way; refuse other samples."""
    if len(shape) != 3 or min(shape) < 1 or min(shape[1:]) < smallest:
        raise UsageError(
            f"model {model} takes images (C, H, W) of at least {smallest} x {smallest} pixels, not samples of shape "
            f"{shape}: choose another model, or give such images (image_size resizes)"
        ).about("model")
    return shape[0]


def _vector_length(model: str, shape: Shape) -> int:
    """Return the numbers in a sample of any shape, which the network takes as one vector; refuse an empty sample."""
    if not shape or min(shape) < 1:
        raise UsageError(f"model {model} takes samples of 1 or more numbers, not of shape {shape}: choose other data")
    return prod(shape)


def _dense_layers(widths: Sequence[int], first: int, *, norm: bool, dropout: bool = False) -> dict[str, nn.Module]:
    """Return FC layers ``fc1``, ``fc2``, ... from ``widths[0]`` to ``widths[-1]`` with ReLU after all but the last.

    ``norm``: BatchNorm before each ReLU; ``dropout``: dropout (0.5) before each hidden layer. ``bn`` and ``relu`` are
    numbered from ``first``.
    """
    layers: dict[str, nn.Module] = {}
    for i, (before, after) in enumerate(pairwise(widths), start=1):
        hidden = i < len(widths) - 1
        if dropout and hidden:
            layers[f"dropout{i}"] = nn.Dropout()
        layers[f"fc{i}"] = nn.Linear(before, after)
        if hidden:
            layers |= {f"bn{first + i - 1}": nn.BatchNorm1d(after)} if norm else {}
            layers[f"relu{first + i - 1}"] = nn.ReLU()
    return layers


def _conv_blocks(channels: int, layers: Iterable[_Convolution], *, norm: bool = True) -> dict[str, nn.Module]:
    """Return convolutions with ReLU, optional BatchNorm and max-pooling, numbered from 1."""
    made: dict[str, nn.Module] = {}
    for i, (after, kernel, stride, padding, pooling, groups) in enumerate(layers, start=1):
        made[f"conv{i}"] = nn.Conv2d(channels, after, kernel, stride, padding)
        if norm:
            made[f"bn{i}"] = nn.BatchNorm2d(after)
        if groups:
            made[f"bn{i}"].groups = groups  # type: ignore[assignment]
        made[f"relu{i}"] = nn.ReLU()
        if pooling:
            made[f"pool{i}"] = nn.MaxPool2d(*pooling)
        channels = after
    return made


def _pooled_cnn(
    model: str, shape: Shape, blocks: tuple[_Convolution, ...], widths: tuple[int, ...],
    *, norm: bool, dropout: bool = False, conv_norm: bool = True,
) -> nn.Module:  # fmt: skip
    """Return convolutions, some pooled by 2, and FC layers of ``widths``; refuse samples that are not images."""
    size = 2 ** sum(block[4] is not None for block in blocks)
    features = _conv_blocks(_image_channels(model, shape, size), blocks, norm=conv_norm) | {"flatten": nn.Flatten()}
    entering = blocks[-1][0] * (shape[1] // size) * (shape[2] // size)
    dense = _dense_layers((entering, *widths), len(blocks) + 1, norm=norm, dropout=dropout)
    return nn.Sequential(OrderedDict(features | dense))


def _kaiming(network: nn.Module, dense_std: float | None = None) -> nn.Module:
    """Initialize as torchvision does: convolutions by He's rule over outgoing connections, biases zero.

    ``dense_std``: standard deviation of fully connected weights; None leaves PyTorch's.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear) and dense_std is not None:
            nn.init.normal_(layer.weight, std=dense_std)
        else:
            continue
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return network
