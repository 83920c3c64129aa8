"""Scaled weight standardization: convolutions whose kernels have zero mean and variance 1/N over the fan-in N.

Brock et al. 2021 (arXiv:2101.08692), equation 1; FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), equation 3 and listing
1: W_hat = gain * (W - mean) * rsqrt(max(var * N, 1e-4)), with the unbiased variance over the fan-in and a trained gain
of each output channel. Unlike the listing, the layer also supports ``padding_mode``, and transposed convolutions, whose
fan-in counts the weights of one output channel.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .convolution import FastConv2d

EPS = 1e-4
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
"""Transposed convolutions by dimension."""


def count_fan_in(layer: _ConvNd) -> int:
    """Return the number of weights of one output channel."""
    return layer.weight.numel() // layer.out_channels


def standardize(weight: Tensor, over: tuple[int, ...]) -> Tensor:
    """Return kernels with mean 0 and variance 1/N over the N weights along the dimensions ``over``."""
    centered = weight - weight.mean(dim=over, keepdim=True)
    fan_in = math.prod(weight.shape[dim] for dim in over)
    variance = centered.square().sum(dim=over, keepdim=True) / (fan_in - 1)  # 16 times faster than torch.var_mean
    return centered * torch.rsqrt((variance * fan_in).clamp(min=EPS))


class ScaledStd(nn.Module):
    """Base class of the layers in one, two and three dimensions.

    ``weight`` ``[O, I / groups, ...]``, ``gain`` ``[O, 1, ...]``.
    """

    weight: Tensor
    bias: Tensor | None
    gain: nn.Parameter

    @classmethod
    def of(cls, layer: _ConvNd, init: Literal["xavier", "keep"], gain: float = 1.0) -> Self:
        """Convert ``layer``, sharing its parameters, so that tied parameters stay tied.

        Weights are initialized Xavier-normal as in the listing, or kept; all gains start at ``gain``.
        """
        standardized = cls.__new__(cls)
        nn.Module.__init__(standardized)
        standardized.__dict__.update({k: v for k, v in layer.__dict__.items() if k not in ("_parameters", "_modules")})
        standardized._parameters = dict(layer._parameters)
        if init == "xavier":
            nn.init.xavier_normal_(layer.weight)
        shape = layer.out_channels, *[1] * (layer.weight.ndim - 1)
        standardized.gain = nn.Parameter(layer.weight.new_full(shape, gain))
        return standardized

    def standardized_weight(self) -> Tensor:
        """Return the standardized kernel, in the shape of ``weight``."""
        return standardize(self.weight, tuple(range(1, self.weight.ndim))) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``x`` ``[N, I, ...]`` with the standardized kernel."""
        return self._conv_forward(x, self.standardized_weight(), self.bias)  # type: ignore[no-any-return, operator]


class ScaledStdTransposed(ScaledStd):
    """Base class of the transposed layers; ``weight`` ``[I, O / groups, ...]``, ``gain`` ``[O, 1, ...]``."""

    groups: int

    def standardized_weight(self) -> Tensor:
        """Return the standardized kernel, in the shape of ``weight``."""
        inputs, outputs, *kernel = self.weight.shape
        grouped = self.weight.reshape(self.groups, inputs // self.groups, outputs, *kernel)
        gain = self.gain.reshape(len(grouped), 1, outputs, *[1] * len(kernel))
        return (standardize(grouped, (1, *range(3, grouped.ndim))) * gain).reshape(self.weight.shape)

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Convolve ``x`` ``[N, I, ...]`` with the standardized kernel, transposed."""
        layer: Any = self  # one of torch's layers, too
        dims, step, pad, spread = self.weight.ndim - 2, layer.stride, layer.padding, layer.dilation
        added = layer._output_padding(x, output_size, step, pad, layer.kernel_size, dims, spread)
        kernel, convolve = self.standardized_weight(), TRANSPOSED[dims - 1]
        return convolve(x, kernel, self.bias, step, pad, added, self.groups, spread)


class ScaledStdConv1d(ScaledStd, nn.Conv1d):
    """``nn.Conv1d`` with a standardized kernel."""


class ScaledStdConv2d(ScaledStd, FastConv2d):
    """``nn.Conv2d`` with a standardized kernel."""


class ScaledStdConv3d(ScaledStd, nn.Conv3d):
    """``nn.Conv3d`` with a standardized kernel."""


class ScaledStdConvTranspose1d(ScaledStdTransposed, nn.ConvTranspose1d):
    """``nn.ConvTranspose1d`` with a standardized kernel."""


class ScaledStdConvTranspose2d(ScaledStdTransposed, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d`` with a standardized kernel."""


class ScaledStdConvTranspose3d(ScaledStdTransposed, nn.ConvTranspose3d):
    """``nn.ConvTranspose3d`` with a standardized kernel."""


STANDARDIZED: dict[type[nn.Module], type[ScaledStd]] = {
    nn.Conv1d: ScaledStdConv1d, nn.Conv2d: ScaledStdConv2d, nn.Conv3d: ScaledStdConv3d,
    nn.ConvTranspose1d: ScaledStdConvTranspose1d, nn.ConvTranspose2d: ScaledStdConvTranspose2d,
    nn.ConvTranspose3d: ScaledStdConvTranspose3d, FastConv2d: ScaledStdConv2d,
}  # fmt: skip
