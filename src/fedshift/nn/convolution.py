"""Depthwise convolutions of small images, whose gradient oneDNN, torch's backend, computes slowly.

If the padding is as tall as the outputs, as in the last blocks of MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381)
on images of 32 x 32, the gradient of the kernels takes up to 200 times as long as the sum of products that defines it.
Results differ from torch's by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .lanes import count_transforms

Pair = tuple[int, int]


class _Depthwise(torch.autograd.Function):
    """``F.conv2d`` with one kernel per channel and zero padding."""

    @staticmethod
    def forward(ctx: Any, x_NCHW: Tensor, w_C1KL: Tensor, b_C: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x_NCHW, w_C1KL)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x_NCHW, w_C1KL, b_C, stride, padding, groups=len(w_C1KL))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_NCHW, w_C1KL), (grad_NCHW,) = ctx.saved_tensors, grads
        needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
        settings = ctx.stride, ctx.padding, (1, 1), False, (0, 0), len(w_C1KL)
        only_inputs = needs_x, False, False
        return (
            torch.ops.aten.convolution_backward(grad_NCHW, x_NCHW, w_C1KL, None, *settings, only_inputs)[0],
            differentiate_kernels(x_NCHW, grad_NCHW, w_C1KL.shape[2:], ctx.stride, ctx.padding) if needs_w else None,
            grad_NCHW.sum(dim=(0, 2, 3)) if needs_b else None,
            None,
            None,
        )


def differentiate_kernels(x_NCHW: Tensor, grad_NCHW: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the gradient ``[C, 1, *kernel]`` of a depthwise convolution's kernels.

    ``x_NCHW``: the inputs. ``grad_NCHW``: the gradient of the outputs.
    """
    x_NHWC, grad_NHWC = x_NCHW.permute(0, 2, 3, 1), grad_NCHW.permute(0, 2, 3, 1)
    sizes = zip(kernel, x_NHWC.shape[1:3], grad_NHWC.shape[1:3], stride, padding, strict=True)
    rows, columns = ([_match(tap, *size) for tap in range(taps)] for taps, *size in sizes)
    sums = [
        (x_NHWC[:, row, column] * grad_NHWC[:, row_out, column_out]).sum(dim=(0, 1, 2))
        for row, row_out in rows
        for column, column_out in columns
    ]
    return torch.stack(sums, dim=1).reshape(-1, 1, *kernel)


def _match(tap: int, inputs: int, outputs: int, stride: int, padding: int) -> tuple[slice, slice]:
    """Return the inputs that a kernel's row or column ``tap`` multiplies, and their outputs, possibly none.

    Output ``i`` uses input ``i * stride + tap - padding``.
    """
    first, last = max(0, -((tap - padding) // stride)), min(outputs - 1, (inputs - 1 + padding - tap) // stride)
    start, count = first * stride + tap - padding, max(0, last - first + 1)
    return slice(start, start + count * stride, stride), slice(first, first + count)


class FastConv2d(nn.Conv2d):
    """A 2D convolution with fast depthwise kernels on small images."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        fits = input.ndim == 4 and input.shape[1] == self.in_channels and input.numel() > 0 and input.is_cpu
        if not fits or torch.is_autocast_enabled("cpu") or count_transforms() or not self._is_slow(input):
            usual: Tensor = super()._conv_forward(input, weight, bias)
            return usual
        output: Tensor = _Depthwise.apply(input, weight, bias, self.stride, self.padding)  # type: ignore[no-untyped-call]
        return output

    def _is_slow(self, x: Tensor) -> bool:
        """Return whether torch's gradient of depthwise kernels would be slow."""
        if isinstance(self.padding, str) or not 1 < self.groups == self.in_channels == self.out_channels:
            return False
        if self.padding_mode != "zeros" or self.dilation != (1, 1) or self.kernel_size == (1, 1):
            return False
        outputs = (x.shape[2] + 2 * self.padding[0] - self.kernel_size[0]) // self.stride[0] + 1
        reached = (outputs - 1) * self.stride[0] + self.kernel_size[0]
        return 0 < outputs <= reached - x.shape[2]

    def _get_name(self) -> str:
        return "Conv2d" if type(self) is FastConv2d else super()._get_name()  # type: ignore[no-untyped-call]


def use_fast_convolutions(module: nn.Module) -> nn.Module:
    """Replace depthwise convolutions in ``module`` by :class:`FastConv2d`, in place; return ``module``."""
    for layer in module.modules():
        if type(layer) is nn.Conv2d and layer.groups > 1:
            layer.__class__ = FastConv2d
    return module
