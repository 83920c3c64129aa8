"""What a layer does: what torch's layer of its kind does, the same and then its submodules, or something else.

Libraries derive layers from torch's: timm's ``BatchNormAct2d`` is a ``BatchNorm2d`` that also applies the activation it
holds, its ``ScaledStdConv2d`` a ``Conv2d`` that standardizes its kernel. The type alone does not tell these apart. A
layer that inherits torch's ``forward`` does what torch's does. Any other is run on random inputs, in training and in
evaluation, and its outputs and statistics are compared with those of torch's ``forward`` followed by its submodules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from ..utils.errors import UsageError

KNOWN = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
"""Entries of torch's normalization layers, convolutions and linear layers."""
STEPS = ("forward", "_conv_forward", "__call__", "_call_impl")
"""Methods that determine what a layer computes."""
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
BATCH = 4
"""Number of samples on which a layer is tried."""
CLOSE = 1e-4
"""Relative difference of outputs up to which they are the same: some layers compute in float32 whatever they get."""
OWN = __name__.rpartition(".")[0] + "."


def torch_kind(layer: nn.Module) -> type[nn.Module]:
    """Return the class of torch, or of this package, that ``layer`` is or derives from; ``nn.Module`` if from none."""
    return next(kind for kind in type(layer).__mro__ if kind.__module__.startswith(("torch.nn.modules.", OWN)))


def runs_as_torch(layer: nn.Module) -> bool:
    """Return whether ``layer`` inherits, and does not hide, everything that determines what torch's layer computes."""
    kind = torch_kind(layer)
    own = type(layer).__mro__[: type(layer).__mro__.index(kind)]
    return not any(step in vars(place) for place in (layer, *own) for step in STEPS)


def find_parts(layer: nn.Module) -> dict[str, nn.Module] | None:
    """Return the submodules that ``layer`` applies to what torch's layer of its kind gives, in order.

    None if it does something else, such as a ``BatchNorm2d`` that does not center.
    """
    if is_parametrized(layer):
        return {} if runs_as_torch(layer) else None
    own = torch_kind(layer).__module__.startswith(OWN)
    if not own and not {*layer._parameters, *layer._buffers} <= set(KNOWN):
        return None
    if runs_as_torch(layer):
        return {}
    tried = [_agrees(layer, x, training=training) for x in _make_inputs(layer) for training in (True, False)]
    agreed = [each for each in tried if each is not None]
    return dict(layer.named_children()) if agreed and all(agreed) else None


def require_understood(name: str, layer: nn.Module, what: str) -> dict[str, nn.Module]:
    """Return :func:`find_parts`; raise :class:`UsageError` where ``what`` cannot take the layer's place."""
    if is_parametrized(layer):
        raise UsageError(
            f"layer {name!r} has a parametrization, which {what} would lose: remove it from the model first"
        )
    parts = find_parts(layer)
    if parts is None:
        raise UsageError(
            f"layer {name!r} is a {type(layer).__name__}, which does not compute what torch's "
            f"{torch_kind(layer).__name__} does, alone or followed by its submodules, so {what} would lose a part of "
            f"it: use torch's layer, and put what else it does into a layer behind it"
        )
    return parts


def find_hooks(layer: nn.Module) -> set[object]:
    """Return the functions that are registered to run with ``layer``."""
    return {id(hook) for kind in HOOKS for hook in getattr(layer, kind, {}).values()}


def _make_inputs(layer: nn.Module) -> Iterator[Tensor]:
    """Yield random inputs of shapes that torch's layer of this kind takes, float64, always the same."""
    generator = torch.Generator().manual_seed(0)
    for shape in _input_shapes(layer):
        yield torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)


def _input_shapes(layer: nn.Module) -> list[tuple[int, ...]]:
    if isinstance(layer, _BatchNorm | _InstanceNorm | nn.GroupNorm):
        channels = layer.num_channels if isinstance(layer, nn.GroupNorm) else layer.num_features
        return [(channels, *[5] * pixels) for pixels in range(4)]
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        last = tuple(layer.normalized_shape)
        return [last, (3, *last), *([(*last, 5, 5)] if len(last) == 1 else [])]
    return [(8, 5, 5)] if isinstance(layer, nn.LocalResponseNorm | nn.CrossMapLRN2d) else []


def _agrees(layer: nn.Module, x: Tensor, *, training: bool) -> bool | None:
    """Return whether ``layer`` and torch's with its submodules give the same for ``x``; None if one takes no such."""
    forward = torch_kind(layer).forward

    def along_channels(made: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = forward(made, x.movedim(1, -1)).movedim(-1, 1)
        return out

    def follow(normalize: Callable[..., Tensor], made: nn.Module, x: Tensor) -> Tensor:
        out = normalize(made, x)
        for part in made.children():
            out = part(out)
        return out

    found = _run(layer, x, lambda made, x: made(x), training=training)
    ways = (forward, along_channels) if isinstance(layer, nn.LayerNorm | nn.RMSNorm) else (forward,)
    tried = [_run(layer, x, partial(follow, way), training=training) for way in ways]
    expected = [made for made in tried if made is not None]
    if found is None or not expected:
        return None
    return any(all(map(_is_close, found, made)) for made in expected)


@torch.no_grad()
def _run(
    layer: nn.Module, x: Tensor, forward: Callable[[nn.Module, Tensor], Tensor], *, training: bool
) -> list[Tensor] | None:
    """Return what ``forward`` gives for a copy of ``layer`` and ``x``, and the copy's buffers then; None if it fails.

    Torch's generator is put back to where it was.
    """
    made = _copy_with_random_entries(layer).train(training)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            out = forward(made, x.clone())
        except Exception:  # a layer of others may raise any type
            return None
    return [out, *made.buffers()] if isinstance(out, Tensor) else None


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=CLOSE, atol=CLOSE)


def _copy_with_random_entries(layer: nn.Module) -> nn.Module:
    """Return a copy in float64 on the CPU whose normalization is not the identity, as it is in a new layer."""
    made = copy.deepcopy(layer)
    on_meta = any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))
    made = (made.to_empty(device="cpu") if on_meta else made.cpu()).double()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        if tensor.is_floating_point() and (on_meta or name in KNOWN):
            tensor.data = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
        elif on_meta:
            tensor.zero_()
    return made
