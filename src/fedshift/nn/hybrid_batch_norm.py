"""Hybrid batch normalization: normalize by a mix of the batch's and the federation's statistics in training.

HBN (Chen et al. 2025, arXiv:2505.21877), following the authors' public code. The weight of the batch's statistics is
``share = sigmoid(factor)`` for each channel; ``factor`` is trained and starts at 0, so that the share starts at one
half. The batch's variance is biased, and gradients include its mean and variance. Local work does not change
statistics.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class HybridBatchNorm(nn.Module):
    """Normalization of inputs ``[B, C, ...]`` by channel.

    ``factor [C]`` weighs the batch's statistics against ``global_mean`` and ``global_var [C]``; evaluation normalizes
    by ``running_mean`` and ``running_var [C]``.
    """

    weight: Tensor | None
    bias: Tensor | None
    global_mean: Tensor
    global_var: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.factor = nn.Parameter(torch.zeros(channels))
        for kind in ("global", "running"):
            self.register_buffer(f"{kind}_mean", torch.zeros(channels))
            self.register_buffer(f"{kind}_var", torch.ones(channels))

    @classmethod
    def of(cls, layer: _BatchNorm) -> Self:
        """Convert ``layer``, sharing its affine parameters and copying its statistics."""
        hybrid = cls(layer.num_features, layer.eps)
        like = next((tensor for tensor in (layer.weight, layer.running_mean) if tensor is not None), None)
        hybrid = hybrid if like is None else hybrid.to(like)
        hybrid._parameters.update(layer._parameters)
        if layer.running_mean is not None and layer.running_var is not None:
            for kind in ("global", "running"):
                getattr(hybrid, f"{kind}_mean").copy_(layer.running_mean)
                getattr(hybrid, f"{kind}_var").copy_(layer.running_var)
        return hybrid

    def mix_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and variance ``[C]`` that normalize ``x`` in training."""
        x, over = x.to(self.global_mean.dtype), [0, *range(2, x.ndim)]
        mean = x.mean(dim=over)
        var = (x - self._along(mean, x)).square().mean(dim=over)
        share = self.factor.sigmoid()
        return (1 - share) * self.global_mean + share * mean, (1 - share) * self.global_var + share * var

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x [B, C, ...]``."""
        mean, var = self.mix_statistics(x) if self.training else (self.running_mean, self.running_var)
        scale = (var + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        out = (x.to(mean.dtype) - self._along(mean, x)) * self._along(scale, x)
        return (out if self.bias is None else out + self._along(self.bias, x)).to(x.dtype)

    @staticmethod
    def _along(values_C: Tensor, x: Tensor) -> Tensor:
        """Return the channels' values in a shape that broadcasts to ``x``."""
        return values_C.reshape(-1, *[1] * (x.ndim - 2))
