"""What the networks here share: which samples they take, weights as published, group counts for GroupNorm.

Initialization after He et al. 2015, arXiv:1502.01852; group counts after tables 5 and 6 of FedWon (Zhuang & Lyu 2024).
"""

from __future__ import annotations

from math import prod

from torch import nn

from ..utils.errors import UsageError

Shape = tuple[int, ...]


def _image_channels(model: str, shape: Shape, smallest: int = 1) -> int:
    """Channels of an image of at least ``smallest`` pixels each way; refuses samples that are no such image."""
    if len(shape) != 3 or min(shape) < 1 or min(shape[1:]) < smallest:
        raise UsageError(
            f"model {model} takes images (C, H, W) of at least {smallest} x {smallest} pixels, not samples of shape "
            f"{shape}: choose another model, or give such images (image_size resizes)"
        )
    return shape[0]


def _vector_length(model: str, shape: Shape) -> int:
    """Numbers in a sample of any shape, which the network sees as one vector; refuses a sample without any."""
    if not shape or min(shape) < 1:
        raise UsageError(f"model {model} takes samples of 1 or more numbers, not of shape {shape}: choose other data")
    return prod(shape)


def _with_groups(layer: nn.BatchNorm2d, groups: int) -> nn.BatchNorm2d:
    """The same layer with the number of groups that its paper prescribes where GroupNorm takes its place."""
    layer.groups = groups  # type: ignore[assignment]
    return layer


def _kaiming(network: nn.Module, dense_std: float | None = None) -> nn.Module:
    """Weights as torchvision draws them: convolutions by He's rule over outgoing connections, biases zero.

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
