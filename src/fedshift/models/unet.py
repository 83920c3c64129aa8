"""U-Nets, which score every pixel of an image or voxel of a volume: ``[N, C, (D,) H, W]`` to ``[N, K, (D,) H, W]``.

- Images: Ronneberger et al. 2015, arXiv:1505.04597, figure 1. Four poolings, two 3 x 3 convolutions at each size.
- Volumes: Cicek et al. 2016, arXiv:1606.06650, section 2. Three poolings, channels doubled before each of them.

Convolutions are padded here, so that scores have the input's size and no skip connection is cropped, and BatchNorm
follows each of them, as in the second paper. Poolings round sizes up, and the way back leaves the surplus row out: an
image may have any size. The way up is the first paper's, upsampling (nearest neighbors) and a convolution of 2. A
transposed convolution would leave checkerboard patterns, and scaled weight standardization (FedWon) does not know it.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from ..utils.errors import UsageError
from ._common import Shape


def _convolve_twice(before: int, middle: int, after: int, *, volumes: bool) -> nn.Module:
    """Return two convolutions of 3 that keep the size, each with BatchNorm and ReLU."""
    layers: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate(((before, middle), (middle, after)), start=1):
        layers[f"conv{i}"] = (nn.Conv3d if volumes else nn.Conv2d)(inputs, outputs, 3, padding=1, bias=False)
        layers[f"bn{i}"] = (nn.BatchNorm3d if volumes else nn.BatchNorm2d)(outputs)
        layers[f"relu{i}"] = nn.ReLU()
    return nn.Sequential(OrderedDict(layers))


class _Up(nn.Module):
    """Way from one size to the next larger one, where the features found there on the way down join."""

    def __init__(self, before: int, risen: int, after: int, *, volumes: bool) -> None:
        super().__init__()
        self.rise = (nn.Conv3d if volumes else nn.Conv2d)(before, risen, 2, bias=False)
        self.convs = _convolve_twice(after + risen, after, after, volumes=volumes)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Map ``x [N, before, ...]`` and ``skip [N, after, ...]``, about twice as large each way, to ``skip``'s shape.

        Upsampling gives as many rows as ``skip`` has, or one more; a convolution of 2 takes one away.
        """
        x = interpolate(x, scale_factor=2.0, mode="nearest")
        lacking = (skip.shape[axis] + 1 - x.shape[axis] for axis in reversed(range(2, x.ndim)))
        x = self.rise(pad(x, [rows for after in lacking for rows in (0, after)]))
        return self.convs(torch.cat((skip, x), dim=1))  # type: ignore[no-any-return]


class _UNet(nn.Module):
    """U-Net of ``depth`` poolings, with ``width`` channels at the size of the input and twice as many after each."""

    def __init__(self, channels: int, classes: int, *, width: int, depth: int, volumes: bool) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.pool = (nn.MaxPool3d if volumes else nn.MaxPool2d)(2, ceil_mode=True)
        for after in (width * 2**level for level in range(depth + 1)):
            self.down.append(_convolve_twice(channels, after // 2 if volumes else after, after, volumes=volumes))
            channels = after
        while channels > width:
            after = channels // 2
            self.up.append(_Up(channels, channels if volumes else after, after, volumes=volumes))
            channels = after
        self.out = (nn.Conv3d if volumes else nn.Conv2d)(width, classes, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Conv3d):  # deviation sqrt(2 / N): section 3 of the first paper
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [N, C, (D,) H, W]`` to a score of each class at each place, ``[N, K, (D,) H, W]``."""
        skips: list[Tensor] = []
        for level, convs in enumerate(self.down):
            x = convs(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()
        for up in self.up:
            x = up(x, skips.pop())
        return self.out(x)  # type: ignore[no-any-return]


def _unet(model: str, shape: Shape, classes: int, width: int) -> nn.Module:
    """Return a U-Net of four poolings of images, or three of volumes."""
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise UsageError(
            f"model {model} takes images (C, H, W) or volumes (C, D, H, W) of any size, not samples of shape {shape}: "
            "choose another model, or give such samples (a gray volume is (1, D, H, W))"
        )
    if width < 2 or width % 2:
        raise UsageError(f"model {model}: width={width}: give an even number of channels, 2 or more")
    volumes = len(shape) == 4
    return _UNet(shape[0], classes, width=width, depth=3 if volumes else 4, volumes=volumes)


def unet(shape: Shape = (1, 572, 572), classes: int = 2, *, width: int = 64) -> nn.Module:
    """U-Net of Ronneberger et al. 2015 (arXiv:1505.04597), 31,035,586 parameters; of volumes, arXiv:1606.06650."""
    return _unet("unet", shape, classes, width)


def unet_small(shape: Shape = (1, 64, 64), classes: int = 2, *, width: int = 8) -> nn.Module:
    """U-Net (arXiv:1505.04597) of an eighth of the width: 486,298 parameters, for volumes 298,598."""
    return _unet("unet-small", shape, classes, width)
