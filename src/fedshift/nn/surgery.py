"""Surgery: changes of a network before its entries are named, by the type of its layers and for any torch module.

A surgery is a frozen value that is called with a module, changes it and returns it; its repr says what it does. See
:func:`fedshift.core.preparation.apply_surgery`. Sources: FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), section 3.2,
tables 5 and 6, appendix A.2.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ..utils.errors import UsageError
from .convolution import FastConv2d
from .hybrid_batch_norm import HybridBatchNorm
from .recognition import find_hooks, require_understood, runs_as_torch, torch_kind
from .scaled_std_conv import STANDARDIZED, ScaledStd

LEARNED = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, HybridBatchNorm)
"""Normalization layers that may hold entries."""
NORMALIZATION = (*LEARNED, nn.LocalResponseNorm, nn.CrossMapLRN2d)


def replace_modules(module: nn.Module, make: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """``module`` with each submodule (itself too) for which ``make(name, submodule)`` is not None replaced by that.

    A layer that stands in several places, or in lists that torch does not know, is replaced by one layer in all of
    them. Raises :class:`UsageError` where a replaced layer holds submodules or hooks that its replacement has not.
    """
    kept = dict(module.named_modules())  # keeps replaced layers alive, so that no id is used again
    made: dict[int, nn.Module] = {}
    for name, layer in kept.items():
        if (new := make(name, layer)) is not None:
            _refuse_loss(name, layer, new)
            made[id(layer)] = new
            for each in set(new.modules()) - {*kept.values()}:
                each.training = layer.training
    for holder in kept.values():
        _swap(holder.__dict__, made)
    for replaced, new in made.items():
        others = {own: each for own, each in made.items() if own != replaced}  # a layer may stand in its replacement
        for holder in new.modules():
            _swap(holder.__dict__, others)
    return made.get(id(module), module)


def _swap(held: Any, made: Mapping[int, nn.Module], seen: tuple[int, ...] = ()) -> Any:
    """Return ``held`` with replaced modules in it, at any depth of lists, tuples and dictionaries, exchanged."""
    if isinstance(held, nn.Module):
        return made.get(id(held), held)
    if not isinstance(held, dict | list | tuple) or id(held) in seen:
        return held
    pairs = list(held.items() if isinstance(held, dict) else enumerate(held))
    changed = {key: new for key, value in pairs if (new := _swap(value, made, (*seen, id(held)))) is not value}
    if isinstance(held, tuple):
        return tuple(changed.get(key, value) for key, value in pairs) if changed else held
    for key, new in changed.items():
        held[key] = new
    return held


def _refuse_loss(name: str, layer: nn.Module, new: nn.Module) -> None:
    """Raise :class:`UsageError` where ``new`` in place of ``layer`` would lose submodules or hooks."""
    after = set(new.modules())
    if layer in after:
        return
    lost = [f"submodule {part!r}" for part, child in layer.named_children() if child not in after]
    lost += ["hooks"] if find_hooks(layer) - find_hooks(new) else []
    if lost:
        raise UsageError(
            f"layer {name!r} is a {type(layer).__name__} with {', '.join(lost)}, which its replacement by "
            f"{type(new).__name__} would lose: remove them from the model, or use torch's {torch_kind(layer).__name__}"
        )


def take_place(name: str, layer: nn.Module, what: str, make: Callable[[], nn.Module]) -> nn.Module:
    """Return what ``make`` gives, with the parts of ``layer`` behind it; refuse a layer that is not understood."""
    parts = require_understood(name, layer, what)
    if not parts:
        return make()
    first = "norm" if "norm" not in parts else "norm_"
    return nn.Sequential(OrderedDict({first: make(), **parts}))


@dataclass(frozen=True)
class BatchNormToGroupNorm:
    """Every BatchNorm becomes a GroupNorm of the same channels that starts from its affine parameters.

    ``groups``: how many; None takes those that the paper's tables give for the layer (its attribute ``groups``), else
    the rule of appendix A.2, 32, or 8 below 32 channels. Where channels do not divide, the largest number of groups
    below that divides them is taken (24 for 144 channels, as in the paper). A BatchNorm1d gets at most one group for
    every 8 features, since a group of one has no variance.
    """

    groups: int | None = None
    decides_normalization: ClassVar[bool] = True

    def __str__(self) -> str:
        return "GroupNorm in place of BatchNorm"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; :class:`UsageError` where it has no BatchNorm."""
        found = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
        if not found:
            raise UsageError("GroupNorm replaces BatchNorm, but the model has none: remove it")
        return replace_modules(module, self._make)

    def _make(self, name: str, layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, _BatchNorm):
            return None
        return take_place(name, layer, "GroupNorm", partial(self._convert, layer))

    def _convert(self, layer: _BatchNorm) -> nn.GroupNorm:
        channels = layer.num_features
        wanted = self.groups or getattr(layer, "groups", None) or (32 if channels >= 32 else 8)
        if isinstance(layer, nn.BatchNorm1d):
            wanted = min(wanted, max(1, channels // 8))
        groups = max(n for n in range(1, min(wanted, channels) + 1) if channels % n == 0)
        new = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
        new._parameters.update(layer._parameters)
        return new


@dataclass(frozen=True)
class BatchNormToHybrid:
    """Replaces every BatchNorm by a HybridBatchNorm that starts from its parameters and statistics."""

    decides_normalization: ClassVar[bool] = True

    def __str__(self) -> str:
        return "HybridBatchNorm in place of BatchNorm"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; :class:`UsageError` where it has no BatchNorm."""
        if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
            raise UsageError("HybridBatchNorm replaces BatchNorm, but the model has none: remove it")
        return replace_modules(module, self._make)

    def _make(self, name: str, layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, _BatchNorm):
            return None
        return take_place(name, layer, "HybridBatchNorm", partial(HybridBatchNorm.of, layer))


@dataclass(frozen=True)
class RemoveNorm:
    """Every normalization layer becomes the identity; layers that left their bias to it get one, of zeros.

    Those are bias-free convolutions and linear layers with as many outputs as a removed layer has channels.
    ``required``: whether a model without any normalization is refused.
    """

    required: bool = True
    decides_normalization: ClassVar[bool] = True

    def __str__(self) -> str:
        return "no normalization at all"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``."""
        for name, layer in module.named_modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                raise UsageError(
                    f"layer {name!r} is a TransformerEncoderLayer, which reads its normalization in evaluation: use a "
                    "model that spells its layers out, or keep normalization"
                )
            if is_foreign_normalization(layer):
                raise UsageError(
                    f"layer {name!r} is a {type(layer).__name__}, which by its name or its statistics normalizes, but "
                    "is none of torch's normalization layers: replace it in the model by one of these or by nothing"
                )
        gone = [layer for layer in module.modules() if isinstance(layer, NORMALIZATION)]
        if not gone and self.required:
            raise UsageError("the method removes normalization, but the model has none: remove it")
        channels = {width for layer in gone if (width := _channel_count(layer)) is not None}
        module = replace_modules(module, self._make)
        for layer in module.modules():
            if isinstance(layer, _ConvNd | nn.Linear) and layer.bias is None:
                width = layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features
                if width in channels:
                    layer.bias = nn.Parameter(torch.zeros(width, dtype=layer.weight.dtype, device=layer.weight.device))
        return module

    @staticmethod
    def _make(name: str, layer: nn.Module) -> nn.Module | None:
        return take_place(name, layer, "nothing", nn.Identity) if isinstance(layer, NORMALIZATION) else None


def is_foreign_normalization(layer: nn.Module) -> bool:
    """Return whether ``layer`` normalizes, by its name or its running statistics, and is of none of torch's types."""
    if torch_kind(layer) is not nn.Module or type(layer).__module__.startswith("torch."):
        return False
    named = re.search("norm(?!al)|normalization", type(layer).__name__, re.IGNORECASE) is not None
    entries = {*layer._parameters, *layer._buffers}
    return "running_var" in entries or (named and (bool(entries) or not layer._modules))


def _channel_count(layer: Any) -> int | None:
    width = getattr(layer, "num_features", None) or getattr(layer, "num_channels", None)
    return width if width is not None else (getattr(layer, "normalized_shape", None) or (None,))[-1]


@dataclass(frozen=True)
class ScaledStandardization:
    """Every convolution becomes one with scaled weight standardization (``fedshift.nn.scaled_std_conv``).

    ``init``: ``xavier`` draws Xavier-normal weights as in listing 1; ``keep`` takes those that the model has, for a
    pretrained one. ``gain``: where the trained gains start. Convolutions with a fan-in of 1 have no variance and stay
    as they are.
    """

    init: Literal["xavier", "keep"] = "xavier"
    gain: float = 1.0

    def __post_init__(self) -> None:
        if self.init not in ("xavier", "keep"):
            raise UsageError(f"init={self.init!r}: 'xavier' or 'keep'")
        if not 0 < self.gain < float("inf"):
            raise UsageError(f"gain={self.gain:g}: give a number above 0, 1 as in FedWon's listing")

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; :class:`UsageError` where it has no convolution, or one that cannot be standardized."""
        if not any(isinstance(layer, _ConvNd) and layer.weight[0].numel() > 1 for layer in module.modules()):
            raise UsageError(
                "scaled weight standardization acts on convolutions of a fan-in above 1, but the model has none: "
                "use another method, or FedWon without WSConv"
            )
        return replace_modules(module, self._make)

    def _make(self, name: str, layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, _ConvNd) or isinstance(layer, ScaledStd):
            return None
        kind = torch_kind(layer)
        kind = nn.Conv2d if kind is FastConv2d else kind
        if kind not in STANDARDIZED:
            raise UsageError(
                f"layer {name!r} is a {type(layer).__name__}: scaled weight standardization knows Conv1d, Conv2d and "
                "Conv3d; use one of them, or FedWon without WSConv"
            )
        if not runs_as_torch(layer):
            raise UsageError(
                f"layer {name!r} is a {type(layer).__name__}, whose forward is not that of torch's {kind.__name__}: it "
                "may pad or standardize by itself, which scaled weight standardization would lose; use "
                f"{kind.__name__}, or FedWon without WSConv (fedwon(wsconv=False); agc alone where the model has "
                "neither normalization)"
            )
        require_understood(name, layer, "scaled weight standardization")
        return STANDARDIZED[kind].of(layer, self.init, self.gain) if layer.weight[0].numel() > 1 else None
