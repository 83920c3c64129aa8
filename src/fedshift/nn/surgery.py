"""Surgery: transformations of a network by layer type, applied before its entries are named.

A surgery is a frozen callable that modifies a module and returns it; its repr describes it. See
:func:`fedshift.core.preparation.apply_surgery`. Sources: FedWon (Zhuang & Lyu 2024, arXiv:2306.05879), section 3.2,
tables 5 and 6, appendix A.2.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from typing_extensions import override

from ..utils.errors import UsageError
from .hybrid_batch_norm import HybridBatchNorm
from .recognition import Function, is_scaled, list_hooks, require_understood, torch_kind
from .scaled_std_conv import STANDARDIZED, ScaledStd, count_fan_in

LEARNED = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, HybridBatchNorm)
"""Normalization layers that may have entries."""
NORMALIZATION = (*LEARNED, nn.LocalResponseNorm, nn.CrossMapLRN2d)
BATCH_NORM: tuple[Function, ...] = (F.batch_norm, torch.batch_norm, torch.native_batch_norm)
"""Functions of BatchNorm, which a layer of one's own may call."""
FUNCTIONS: tuple[Function, ...] = (
    *BATCH_NORM, F.instance_norm, F.group_norm, F.layer_norm, F.rms_norm, F.local_response_norm
)  # fmt: skip
"""Functions that normalize, with which a network can do without a layer."""


def replace_modules(module: nn.Module, make: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """Replace each submodule of ``module``, and ``module`` itself, by ``make(name, submodule)`` unless that is None.

    A layer that occurs several times, or in lists that torch does not register, is replaced by one layer everywhere.
    Raises :class:`UsageError` if a replaced layer has submodules or hooks that its replacement lacks.
    """
    originals = dict(module.named_modules())  # keeps replaced layers alive, so that ids stay unique
    replacements: dict[int, nn.Module] = {}
    for name, layer in originals.items():
        if (new := make(name, layer)) is not None:
            _refuse_loss(name, layer, new)
            replacements[id(layer)] = new
            for each in set(new.modules()) - {*originals.values()}:
                each.training = layer.training
    for holder in originals.values():
        _swap(holder.__dict__, replacements)
    for replaced, new in replacements.items():
        others = {key: each for key, each in replacements.items() if key != replaced}  # it may contain the original
        for holder in new.modules():
            _swap(holder.__dict__, others)
    return replacements.get(id(module), module)


def _swap(held: Any, replacements: Mapping[int, nn.Module], seen: tuple[int, ...] = ()) -> Any:
    """Return ``held`` with modules replaced at any depth of lists, tuples and dictionaries."""
    if isinstance(held, nn.Module):
        return replacements.get(id(held), held)
    if not isinstance(held, dict | list | tuple) or id(held) in seen:
        return held
    pairs = list(held.items() if isinstance(held, dict) else enumerate(held))
    inner = (*seen, id(held))
    changed = {key: new for key, value in pairs if (new := _swap(value, replacements, inner)) is not value}
    if isinstance(held, tuple):
        return tuple(changed.get(key, value) for key, value in pairs) if changed else held
    for key, new in changed.items():
        held[key] = new
    return held


def _refuse_loss(name: str, layer: nn.Module, new: nn.Module) -> None:
    """Raise :class:`UsageError` if replacing ``layer`` by ``new`` would lose submodules or hooks."""
    after = set(new.modules())
    if layer in after:
        return
    lost = [f"submodule {part!r}" for part, child in layer.named_children() if child not in after]
    lost += ["hooks"] if {*map(id, list_hooks(layer))} - {*map(id, list_hooks(new))} else []
    if lost:
        raise UsageError(
            f"layer {name!r} is a {type(layer).__name__} with {', '.join(lost)}, which its replacement by "
            f"{type(new).__name__} would lose: remove them from the model, or use torch's {torch_kind(layer).__name__}"
        )


def replace_layers(
    module: nn.Module, kinds: tuple[type[nn.Module], ...], what: str, make: Callable[[Any], nn.Module]
) -> nn.Module:
    """Replace each layer of ``kinds`` in ``module`` by ``make(layer)``, ``what``, followed by the layer's other parts.

    Raises :class:`UsageError` if a layer computes something else than torch's of its type.
    """

    def place(name: str, layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, kinds):
            return None
        parts = require_understood(name, layer, what)
        first = "norm" if "norm" not in parts else "norm_"
        return nn.Sequential(OrderedDict({first: make(layer), **parts})) if parts else make(layer)

    return replace_modules(module, place)


@dataclass(frozen=True)
class _BatchNormReplacement:
    """Surgery that replaces every BatchNorm by a layer of the type ``what``."""

    what: ClassVar[str]
    replaced: ClassVar[tuple[Function, ...]] = BATCH_NORM

    def __str__(self) -> str:
        return f"{self.what} for BatchNorm"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; raise :class:`UsageError` if it has no BatchNorm of torch."""
        if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
            foreign = (name for name, layer in module.named_modules() if has_foreign_statistics(layer))
            only = next((f" of torch's, but layer {name!r}: make it one of them" for name in foreign), ": remove it")
            raise UsageError(f"{self.what} replaces BatchNorm, but the model has none{only}")
        return replace_layers(module, (_BatchNorm,), self.what, self._convert)

    @abstractmethod
    def _convert(self, layer: _BatchNorm) -> nn.Module:
        """Return the layer that replaces ``layer``."""


@dataclass(frozen=True)
class BatchNormToGroupNorm(_BatchNormReplacement):
    """Replaces every BatchNorm by a GroupNorm with the same affine parameters.

    ``groups``: number of groups; None: the layer's attribute ``groups`` (the paper's tables), else the rule of appendix
    A.2: 32, or 8 below 32 channels. If it does not divide the channels, the next smaller divisor is used (24 for 144
    channels, as in the paper). A BatchNorm1d without that attribute gets at most one group per 8 features, since a
    group of one feature of a vector has no variance; the layers of ``resnet-1d``, which see signals, have it.
    """

    groups: int | None = None
    what = "GroupNorm"

    @override
    def _convert(self, layer: _BatchNorm) -> nn.GroupNorm:
        channels = layer.num_features
        wanted = self.groups or getattr(layer, "groups", None) or (32 if channels >= 32 else 8)
        if isinstance(layer, nn.BatchNorm1d) and not hasattr(layer, "groups"):
            wanted = min(wanted, max(1, channels // 8))
        groups = max(n for n in range(1, min(wanted, channels) + 1) if channels % n == 0)
        new = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
        new._parameters.update(layer._parameters)
        return new


@dataclass(frozen=True)
class BatchNormToHybrid(_BatchNormReplacement):
    """Replaces every BatchNorm by a HybridBatchNorm with the same parameters and statistics."""

    what = "HybridBatchNorm"

    @override
    def _convert(self, layer: _BatchNorm) -> HybridBatchNorm:
        return HybridBatchNorm.of(layer)


@dataclass(frozen=True)
class RemoveNorm:
    """Replaces every normalization layer by the identity, and adds zero biases to layers that relied on its bias.

    These are bias-free convolutions and linear layers with as many outputs as a removed layer has channels.
    ``required``: whether models without normalization are refused.
    """

    required: bool = True
    replaced: ClassVar[tuple[Function, ...]] = FUNCTIONS

    def __str__(self) -> str:
        return "no normalization"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``."""
        for name, layer in module.named_modules():
            if is_foreign_normalization(layer):
                raise UsageError(
                    f"layer {name!r} is a {type(layer).__name__}, which seems to normalize (by its name or statistics) "
                    "but is not one of torch's normalization layers: replace it by one of these, or remove it"
                )
        removed = [layer for layer in module.modules() if isinstance(layer, NORMALIZATION)]
        if not removed and self.required:
            raise UsageError("the method removes normalization, but the model has none: choose another method")
        channels = {_count_channels(layer) for layer in removed}
        module = replace_layers(module, NORMALIZATION, "nothing", lambda _: nn.Identity())
        for layer in module.modules():
            if isinstance(layer, _ConvNd | nn.Linear) and layer.bias is None:
                width = layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features
                if width in channels:
                    layer.bias = nn.Parameter(torch.zeros(width, dtype=layer.weight.dtype, device=layer.weight.device))
        return module


def is_foreign_normalization(layer: nn.Module) -> bool:
    """Return whether ``layer`` is not torch's, but normalizes by its name or its running statistics."""
    if torch_kind(layer) is not nn.Module or type(layer).__module__.startswith("torch."):
        return False
    named = re.search("norm(?!al)|normalization", type(layer).__name__, re.IGNORECASE) is not None
    entries = {*layer._parameters, *layer._buffers}
    return has_foreign_statistics(layer) or (named and (bool(entries) or not layer._modules))


def has_foreign_statistics(layer: nn.Module) -> bool:
    """Return whether ``layer`` is not torch's, but has the running statistics of BatchNorm."""
    return torch_kind(layer) is nn.Module and layer._buffers.get("running_var") is not None


def _count_channels(layer: Any) -> int | None:
    widths = (getattr(layer, name, None) for name in ("num_features", "num_channels", "normalized_shape"))
    width = next(filter(None, widths), None)
    return width[-1] if isinstance(width, tuple) else width


@dataclass(frozen=True)
class ScaledStandardization:
    """Replaces every convolution by one with scaled weight standardization (``fedshift.nn.scaled_std_conv``).

    ``init``: ``xavier`` initializes weights Xavier-normal as in listing 1; ``keep`` keeps the model's weights, for
    pretrained models. ``gain``: initial value of the trained gains. Convolutions with a fan-in of 1 have no variance
    and are not replaced, nor are those that already scale their kernels (timm's ``ScaledStdConv2d``).
    """

    stage: ClassVar[int] = 0
    init: Literal["xavier", "keep"] = "xavier"
    gain: float = 1.0

    def __post_init__(self) -> None:
        if self.init not in ("xavier", "keep"):
            raise UsageError(f"init={self.init!r}: give 'xavier' or 'keep'")
        if not 0 < self.gain < float("inf"):
            raise UsageError(f"gain={self.gain:g}: give a number above 0, 1 as in FedWon's listing")

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; raise :class:`UsageError` if it has no convolution, or one that cannot be standardized."""
        if not any(isinstance(layer, _ConvNd) and count_fan_in(layer) > 1 for layer in module.modules()):
            raise UsageError(
                "scaled weight standardization needs convolutions with a fan-in above 1, but the model has none: "
                "use another method, or FedWon without WSConv"
            )
        return replace_modules(module, self._make)

    def _make(self, name: str, layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, _ConvNd) or isinstance(layer, ScaledStd):
            return None
        if is_scaled(layer):
            return None
        require_understood(name, layer, "scaled weight standardization (wsconv)")
        return STANDARDIZED[torch_kind(layer)].of(layer, self.init, self.gain) if count_fan_in(layer) > 1 else None
