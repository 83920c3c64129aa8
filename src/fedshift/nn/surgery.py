"""Surgery: changes of a network before its entries are named, by the type of its layers and for any torch module.

A surgery is a frozen value that is called with a module, changes it and returns it; its repr says what it does. See
:func:`fedshift.core.preparation.apply_surgery`. Sources: FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), section 3.2,
tables 5 and 6, appendix A.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from ..utils.errors import UsageError
from .hybrid_batch_norm import HybridBatchNorm
from .scaled_std_conv import STANDARDIZED, ScaledStd

LEARNED = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, HybridBatchNorm)
"""Normalization layers that may hold entries."""
NORMALIZATION = (*LEARNED, nn.LocalResponseNorm, nn.CrossMapLRN2d)


def replace_modules(module: nn.Module, make: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """``module`` with each submodule (itself too) for which ``make(name, submodule)`` is not None replaced by that.

    A layer that stands in several places is replaced by one layer in all of them.
    """
    kept = dict(module.named_modules())  # keeps replaced layers alive, so that no id is used again
    made = {id(layer): make(name, layer) for name, layer in kept.items()}
    for layer in kept.values():
        for name, child in list(layer._modules.items()):
            if child is not None and (new := made.get(id(child))) is not None:
                setattr(layer, name, new)
    return made[id(module)] or module


def _refuse_parametrized(name: str, layer: nn.Module, what: str) -> None:
    if is_parametrized(layer):
        raise UsageError(
            f"layer {name!r} has a parametrization, which {what} would lose: remove it from the model first"
        )


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
        _refuse_parametrized(name, layer, "GroupNorm")
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
        _refuse_parametrized(name, layer, "HybridBatchNorm")
        return HybridBatchNorm.of(layer)


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
        gone = [layer for layer in module.modules() if isinstance(layer, NORMALIZATION)]
        if not gone and self.required:
            raise UsageError("the method removes normalization, but the model has none: remove it")
        channels = {width for layer in gone if (width := _channel_count(layer)) is not None}
        module = replace_modules(module, lambda _, layer: nn.Identity() if isinstance(layer, NORMALIZATION) else None)
        for layer in module.modules():
            if isinstance(layer, _ConvNd | nn.Linear) and layer.bias is None:
                width = layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features
                if width in channels:
                    layer.bias = nn.Parameter(torch.zeros(width, dtype=layer.weight.dtype, device=layer.weight.device))
        return module


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
        _refuse_parametrized(name, layer, "scaled weight standardization")
        if isinstance(layer, _ConvTransposeNd) or type(layer) not in STANDARDIZED:
            raise UsageError(
                f"layer {name!r} is a {type(layer).__name__}: scaled weight standardization knows Conv1d, Conv2d and "
                "Conv3d; use one of them, or FedWon without WSConv"
            )
        return STANDARDIZED[type(layer)].of(layer, self.init, self.gain) if layer.weight[0].numel() > 1 else None
