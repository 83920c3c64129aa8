"""Recognition of layers: whether a layer computes the same as torch's layer of its type, possibly then its submodules.

Libraries derive layers from torch's: timm's ``BatchNormAct2d`` is a ``BatchNorm2d`` that also applies an activation,
and its ``ScaledStdConv2d`` is a ``Conv2d`` that standardizes its kernel. The type does not distinguish them. A layer
that inherits torch's ``forward`` computes the same. Any other layer runs on random inputs, in training and evaluation
mode, and its outputs and statistics are compared with torch's ``forward`` followed by its submodules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..utils.errors import UsageError
from ..utils.random_streams import torch_stream

KNOWN = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
"""Entries of torch's normalization layers, convolutions and linear layers."""
STEPS = ("forward", "_conv_forward", "__call__", "_call_impl")
"""Methods that determine what a layer computes."""
HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
"""Attributes of every layer that hold hooks."""
BATCH = 4
"""Number of samples in a trial run of a layer."""
CLOSE = 1e-4
"""Relative tolerance of outputs, because some layers always compute in float32."""
SCALED = 1e-2
"""Tolerance of scaled kernels: constants within square roots differ between libraries."""
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
Function: TypeAlias = Callable[..., Any]
PACKAGE = __name__.rpartition(".")[0] + "."


def torch_kind(layer: nn.Module) -> type[nn.Module]:
    """Return the class of torch, or of this package, that ``layer`` is an instance of; ``nn.Module`` if none."""
    return next(kind for kind in type(layer).__mro__ if kind.__module__.startswith(("torch.nn.modules.", PACKAGE)))


def runs_as_torch(layer: nn.Module) -> bool:
    """Return whether ``layer`` inherits every method that determines what torch's layer computes."""
    kind = torch_kind(layer)
    derived = type(layer).__mro__[: type(layer).__mro__.index(kind)]
    return not any(step in vars(place) for place in (layer, *derived) for step in STEPS)


def find_parts(layer: nn.Module) -> dict[str, nn.Module] | None:
    """Return the submodules that ``layer`` applies, in order, to the output of torch's layer of its type.

    None if it computes something else, such as a ``BatchNorm2d`` that does not center.
    """
    if is_parametrized(layer):
        return {} if runs_as_torch(layer) else None
    ours = torch_kind(layer).__module__.startswith(PACKAGE)
    if not ours and not {*layer._parameters, *layer._buffers} <= set(KNOWN):
        return None
    if runs_as_torch(layer):
        return {}
    agreed = {_agrees(layer, x, training=training) for x in _make_inputs(layer) for training in (True, False)}
    return dict(layer.named_children()) if agreed - {None} == {True} else None


def require_understood(name: str, layer: nn.Module, what: str) -> dict[str, nn.Module]:
    """Return :func:`find_parts`; raise :class:`UsageError` if ``what`` cannot replace the layer."""
    if is_parametrized(layer):
        raise UsageError(
            f"layer {name!r} has a parametrization, which {what} would lose: remove it from the model first"
        )
    parts = find_parts(layer)
    if parts is None:
        raise UsageError(
            f"layer {name!r} is a {type(layer).__name__}, which computes something else than torch's "
            f"{torch_kind(layer).__name__}, with or without its submodules, so {what} would lose a part of "
            f"it: use torch's layer, and move the other operations to a separate layer"
        )
    return parts


class Call(NamedTuple):
    """A call of ``function``, made in ``layer``, the network's layer called ``name``."""

    name: str
    layer: nn.Module
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def recorded_calls(module: nn.Module, functions: Collection[Function]) -> Iterator[list[Call]]:
    """Yield a list that receives the calls of ``functions`` in a network inside the block, in order."""
    calls, entered = list[Call](), [("", module)]

    class Recorder(TorchFunctionMode):
        def __torch_function__(
            self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func in functions:
                calls.append(Call(*entered[-1], func, args, kwargs or {}))
            return func(*args, **kwargs or {})

    handles = [
        handle
        for at in module.named_modules()
        for handle in (
            at[1].register_forward_pre_hook(lambda *_, at=at: entered.append(at)),
            at[1].register_forward_hook(lambda *_: entered.pop() and None, always_call=True),
        )
    ]
    with placed_hooks(handles), Recorder():
        yield calls


def is_scaled(layer: _ConvNd) -> bool:
    """Return whether a convolution's own ``forward`` already scales and standardizes its kernel.

    It does if the kernel that it convolves with has mean 0 and variance 1 / N over the fan-in N, times the square of an
    activation's constant (Brock et al. 2021, arXiv:2101.08692), and is the same for twice the weights plus 3.
    """
    if runs_as_torch(layer) or is_parametrized(layer) or layer.transposed:
        return False
    copied = _copy_with_random_entries(layer).eval()
    for name, entry in copied.named_parameters():
        if name not in KNOWN:
            entry.data.fill_(1)
    size = [(extent - 1) * step + 1 for extent, step in zip(layer.kernel_size, layer.dilation, strict=True)]
    with recorded_calls(copied, CONVOLUTIONS) as calls, suppress(Exception), torch.no_grad():  # of a user's layer
        for factor, term in ((1, 0), (2, 3)):
            copied.weight.data = factor * copied.weight.data + term
            copied(torch.zeros(1, layer.in_channels, *size, dtype=torch.float64))
    kernels = [(call.args[1] if len(call.args) > 1 else call.kwargs["weight"]).flatten(1) for call in calls]
    if len(kernels) != 2 or not torch.allclose(kernels[0], kernels[1], rtol=SCALED, atol=SCALED):
        return False
    squares, centered = kernels[0].square().sum(1), kernels[0].mean(1).abs() <= SCALED
    return bool((centered & (squares > 0.5) & (squares < 5)).all())


@contextmanager
def placed_hooks(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks of ``handles`` after the block."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield


def list_hooks(layer: nn.Module) -> list[Any]:
    """Return the hooks registered on ``layer``."""
    return [hook for name in HOOKS for hook in getattr(layer, name).values()]


def _make_inputs(layer: nn.Module) -> list[Tensor]:
    """Return reproducible random inputs, float64, in shapes that torch's layer of this type accepts."""
    shapes: list[tuple[int, ...]] = []
    if isinstance(layer, _BatchNorm | _InstanceNorm | nn.GroupNorm):
        channels = layer.num_channels if isinstance(layer, nn.GroupNorm) else layer.num_features
        shapes = [(channels, *[5] * pixels) for pixels in range(4)]
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        last = tuple(layer.normalized_shape)
        shapes = [last, (3, *last), *([(*last, 5, 5)] if len(last) == 1 else [])]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _agrees(layer: nn.Module, x: Tensor, *, training: bool) -> bool | None:
    """Return whether ``layer`` equals torch's with its submodules on ``x``; None if either rejects ``x``."""
    forward = torch_kind(layer).forward
    normalizers = [forward]
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        normalizers.append(lambda module, x: forward(module, x.movedim(1, -1)).movedim(-1, 1))

    def follow(normalize: Function, module: nn.Module, x: Tensor) -> Tensor:
        x = normalize(module, x)
        for part in module.children():
            x = part(x)
        return x

    actual = _run(layer, x, lambda module, x: module(x), training=training)
    results = (_run(layer, x, partial(follow, normalize), training=training) for normalize in normalizers)
    expected = [result for result in results if result is not None]
    return any(all(map(_is_close, actual, result)) for result in expected) if actual and expected else None


@torch.no_grad()
def _run(layer: nn.Module, x: Tensor, forward: Function, *, training: bool) -> list[Tensor] | None:
    """Return the output of ``forward`` for a copy of ``layer`` and ``x``, and the copy's buffers; None if it fails."""
    module = _copy_with_random_entries(layer).train(training)
    with torch_stream(0, "recognition"), suppress(Exception):  # a user's layer may raise any type
        out = forward(module, x.clone())
        return [out, *module.buffers()] if isinstance(out, Tensor) else None
    return None


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=CLOSE, atol=CLOSE)


def _copy_with_random_entries(layer: nn.Module) -> Any:
    """Return a float64 copy on the CPU with random entries, since normalization in new layers is the identity."""
    copied = copy.deepcopy(layer)
    on_meta = any(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers()))
    copied = (copied.to_empty(device="cpu") if on_meta else copied.cpu()).double()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in (*copied.named_parameters(), *copied.named_buffers()):
        if tensor.is_floating_point() and (on_meta or name in KNOWN):
            tensor.data = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
        elif on_meta:
            tensor.zero_()
    return copied
