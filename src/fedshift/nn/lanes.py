"""Fast convolution, normalization and pooling of lanes (stacked clients), which are slow under ``torch.vmap``.

``torch.vmap`` scales, shifts and adds biases in separate operations, and moves channels first, where torch's max
pooling is seven times slower. Here the channels of all lanes are merged into one channels-last image, the output format
of grouped convolutions. These operations process channels, or groups of channels, independently, so that values are
torch's up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format of inputs by number of dimensions."""


class _Merged(torch.autograd.Function):
    """One lane of ``function(x [N, C, ...], *params [C, ...])``, to be called under ``torch.vmap``.

    ``function`` processes channels, or groups of them, independently; ``params`` have a row for each output channel.
    """

    @staticmethod
    def forward(function: Callable[..., Tensor], x: Tensor, *params: Tensor | None) -> Tensor:
        return function(x, *params)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: the merged function of all lanes provides gradients."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], function: Any, *tensors: Tensor | None) -> tuple[Tensor, int]:
        lanes = info.batch_size
        x, *params = (
            None if each is None else each.expand(lanes, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip(tensors, in_dims[1:], strict=True)
        )
        assert x is not None
        layout = _LAST.get(x.ndim - 1, torch.contiguous_format)
        merged = x.movedim(0, 1).flatten(1, 2).contiguous(memory_format=layout)
        out = function(merged, *(None if each is None else each.flatten(0, 1) for each in params))
        return out.unflatten(1, (lanes, -1)), 1


def _merge(function: Callable[..., Tensor], x: Tensor, *params: Tensor | None) -> Tensor:
    out: Tensor = _Merged.apply(function, x, *params)  # type: ignore[no-untyped-call]
    return out


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    def convolve(x_NCHW: Tensor, w_OIKL: Tensor, b_O: Tensor | None) -> Tensor:
        return F.conv2d(x_NCHW, w_OIKL, b_O, stride, padding, dilation, x_NCHW.shape[1] // w_OIKL.shape[1])

    return _merge(convolve, x, weight, bias)


def _normalize_batch(
    x: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    def normalize(x: Tensor, m: Tensor | None, v: Tensor | None, w: Tensor | None, b: Tensor | None) -> Tensor:
        return F.batch_norm(x, m, v, w, b, training, momentum, eps)

    return _merge(normalize, x, mean, var, weight, bias)


def _normalize_groups(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    channels = x.shape[1]

    def normalize(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return F.group_norm(x, groups * x.shape[1] // channels, w, b, eps)

    return _merge(normalize, x, weight, bias)


def _pool(pool: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _merge(lambda x: pool(x, *args, **kwargs), x)


_MERGED: dict[Any, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    F.conv2d: (_convolve, (4,)),
    F.batch_norm: (_normalize_batch, (2, 3, 4, 5)),
    F.group_norm: (_normalize_groups, (2, 3, 4, 5)),
    F.adaptive_avg_pool2d: (partial(_pool, F.adaptive_avg_pool2d), (4,)),
    F.max_pool2d: (partial(_pool, F.max_pool2d), (4,)),
}
"""Replacements of torch's functions, each with the supported numbers of input dimensions."""


def count_transforms() -> int:
    """Return how many transforms of ``torch.func`` (``vmap``, ``grad``) surround the caller."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return 0 if innermost is None else int(innermost.level())


class MergedLanes(TorchFunctionMode):
    """Makes networks under ``torch.vmap`` convolve, normalize and pool all lanes at once, on the CPU.

    Gradients must be computed outside of ``torch.vmap``: nothing is merged inside a second transform, such as
    ``torch.func.grad``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` or its replacement."""
        kwargs = kwargs or {}
        merged, dimensions = _MERGED.get(func, (func, ()))
        fits = args and dimensions and args[0].ndim in dimensions and args[0].is_cpu and count_transforms() == 1
        if fits and not kwargs.get("return_indices"):
            return merged(*args, **kwargs)
        if func in (F.group_norm, torch.group_norm) and args:  # torch.vmap cannot copy channels-last inputs
            args = args[0].contiguous(), *args[1:]
        return func(*args, **kwargs)
