"""Depthwise convolutions of small images, whose weights' gradients are sums of products in place of a convolution.

Torch's library for convolutions, oneDNN, is up to 200 times slower at the gradient of a depthwise kernel once the
padding is as tall as the outputs, as in the last blocks of MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381) on
images of 32 x 32. Each weight meets few pixels then, and its gradient is the sum of their products with the outputs'.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[int, int]


class _Depthwise(torch.autograd.Function):
    """``F.conv2d`` with one kernel for each channel and zeros as padding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_NCHW: Tensor, w_C1KL: Tensor, b_C: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        return F.conv2d(x_NCHW, w_C1KL, b_C, stride, padding, groups=len(w_C1KL))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004 - torch's interface
        x_NCHW, w_C1KL, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x_NCHW, w_C1KL)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        (x_NCHW, w_C1KL), (grad_NCHW,) = ctx.saved_tensors, given
        x_wanted, w_wanted, b_wanted, *_ = ctx.needs_input_grad
        how = ctx.stride, ctx.padding, (1, 1), False, (0, 0), len(w_C1KL)
        only_inputs = True, False, False
        return (
            torch.ops.aten.convolution_backward(grad_NCHW, x_NCHW, w_C1KL, None, *how, only_inputs)[0]
            if x_wanted
            else None,
            differentiate_kernels(x_NCHW, grad_NCHW, w_C1KL.shape[2:], ctx.stride, ctx.padding) if w_wanted else None,
            grad_NCHW.sum(dim=(0, 2, 3)) if b_wanted else None,
            None,
            None,
        )


def differentiate_kernels(x_NCHW: Tensor, grad_NCHW: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the gradient ``[C, 1, *kernel]`` of a depthwise convolution's kernels.

    ``x_NCHW``: its inputs. ``grad_NCHW``: gradient of its outputs.
    """
    x_NHWC, grad_NHWC = x_NCHW.permute(0, 2, 3, 1), grad_NCHW.permute(0, 2, 3, 1)
    places = tuple(zip(x_NHWC.shape[1:3], grad_NHWC.shape[1:3], stride, padding, strict=True))
    sums = []
    for row in range(kernel[0]):
        rows = _match(row, *places[0])
        for column in range(kernel[1]):
            columns = _match(column, *places[1])
            if rows is None or columns is None:
                sums.append(grad_NHWC.new_zeros(grad_NHWC.shape[-1]))
            else:
                products = x_NHWC[:, rows[0], columns[0]] * grad_NHWC[:, rows[1], columns[1]]
                sums.append(products.sum(dim=(0, 1, 2)))
    return torch.stack(sums, dim=1).reshape(-1, 1, *kernel)


def _match(tap: int, inputs: int, outputs: int, stride: int, padding: int) -> tuple[slice, slice] | None:
    """Return the input pixels that a kernel's row or column ``tap`` meets, and the outputs they go to; None: no pixel.

    Output ``i`` meets input ``i * stride + tap - padding``.
    """
    first, last = max(0, -((tap - padding) // stride)), min(outputs - 1, (inputs - 1 + padding - tap) // stride)
    if last < first:
        return None
    start = first * stride + tap - padding
    return slice(start, start + (last - first) * stride + 1, stride), slice(first, last + 1)


class FastConv2d(nn.Conv2d):
    """A 2D convolution that differentiates depthwise kernels on small images by :func:`differentiate_kernels`."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._is_slow(input):
            return super()._conv_forward(input, weight, bias)
        made: Tensor = _Depthwise.apply(input, weight, bias, self.stride, self.padding)  # type: ignore[no-untyped-call]
        return made

    def _is_slow(self, x: Tensor) -> bool:
        """Return whether torch's gradient of the kernels would be slow."""
        if x.ndim != 4 or isinstance(self.padding, str) or not x.is_cpu or torch.is_autocast_enabled("cpu"):
            return False
        depthwise = 1 < self.groups == self.in_channels == self.out_channels == x.shape[1]
        if not depthwise or self.padding_mode != "zeros" or self.dilation != (1, 1) or self.kernel_size == (1, 1):
            return False
        outputs = (x.shape[2] + 2 * self.padding[0] - self.kernel_size[0]) // self.stride[0] + 1
        reached = (outputs - 1) * self.stride[0] + self.kernel_size[0]
        return 0 < outputs <= reached - x.shape[2]

    def _get_name(self) -> str:
        return "Conv2d" if type(self) is FastConv2d else super()._get_name()  # type: ignore[no-untyped-call,no-any-return]


def use_fast_convolutions(module: nn.Module) -> nn.Module:
    """``module`` with depthwise convolutions that are fast on small images too."""
    for layer in module.modules():
        if type(layer) is nn.Conv2d and layer.groups > 1:
            layer.__class__ = FastConv2d
    return module
