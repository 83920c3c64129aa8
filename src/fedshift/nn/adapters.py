"""Adapters: a network whose layers stay fixed, with small trained layers beside some of them, made by ``peft``.

LoRA (Hu et al. 2022, arXiv:2106.09685), section 4.1: a layer with the weight W computes W x + (alpha / r) B A x, where
A has r outputs and B starts at zero. A, B, the classifier and normalization layers are trained. Every other parameter
becomes a constant of its layer, no entry of the network, so that it is neither trained nor sent nor stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..config.catalog import Catalog
from ..utils.errors import UsageError
from ..utils.words import join_some
from .recognition import runs_as_torch, torch_kind
from .surgery import NORMALIZATION, is_foreign_normalization

CONSTANTS = "_constants"
"""Attribute of a layer with the names of its parameters that became constants."""
NAMED = 8
"""Maximum number of layers that a message lists."""
KINDS = {
    "linear": lambda layer: isinstance(layer, nn.Linear),
    "pointwise": lambda layer: isinstance(layer, nn.modules.conv._ConvNd) and set(layer.kernel_size) == {1},
}
"""Words for layers by type, in ``targets``."""
INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that read the weights of their layers without calling these."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adds low-rank layers beside linear layers and convolutions, and fixes all but these, the classifier and norms.

    Args:
        rank: Number of outputs r of A, 1 or more.
        targets: Names of layers, or their last part, joined by ``|``; ``*`` stands for any text; ``linear``: all linear
            layers; ``pointwise``: all convolutions of one pixel. The classifier is never among them.
        alpha: Factor of B A before it is divided by the rank; None: the rank.

    Raises:
        UsageError: A value is out of range, or the package peft is missing.

    """

    stage: ClassVar[int] = 3
    rank: int = 8
    targets: str = "linear"
    alpha: float | None = None

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise UsageError(f"lora: rank={self.rank!r}: give a whole number, 1 or more")
        if not isinstance(self.targets, str) or not all(part.strip() for part in self.targets.split("|")):
            raise UsageError(f"lora: targets={self.targets!r}: give names of layers joined by |, linear or pointwise")
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise UsageError(f"lora: alpha={self.alpha!r}: give a number above 0")
        if find_spec("peft") is None:
            raise UsageError("lora needs the package peft: pip install 'fedshift[lora]'")

    def __str__(self) -> str:
        factor = "" if self.alpha is None else f", alpha={self.alpha:g}"
        return f"lora(rank={self.rank}, targets={self.targets!r}{factor})"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; raise :class:`UsageError` if ``targets`` matches no layer, or one that it cannot adapt."""
        from peft import LoraConfig, inject_adapter_in_model

        head = find_last_layer(module)
        chosen = self._choose(module, head)
        staying = [layer for layer in module.modules() if _stays(layer, head)]
        kept = [(each, each.requires_grad) for layer in staying for each in layer.parameters(recurse=False)]
        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha or self.rank, target_modules="|".join(map(re.escape, chosen))
        )
        inject_adapter_in_model(config, module)
        module.__dict__.pop("peft_config", None)
        for parameter, requires_grad in kept:  # peft trains nothing but its own layers
            parameter.requires_grad_(requires_grad)
        for name, layer in module.named_modules():
            if not (_stays(layer, head) or ".lora_" in f".{name}"):
                _fix(layer)
        return module

    def _choose(self, module: nn.Module, head: nn.Module) -> list[str]:
        """Return the names of the layers to adapt."""
        found, parts = [], [part.strip() for part in self.targets.split("|")]
        layers = {name: layer for name, layer in module.named_modules() if name and layer is not head}
        inside = {id(part): at for at, each in layers.items() if isinstance(each, INSIDE) for part in each.modules()}
        possible = [name for name, layer in layers.items() if _why_not(layer) == "" and id(layer) not in inside]
        for part in parts:
            if part in KINDS:
                matching = [name for name in possible if KINDS[part](layers[name])]
            else:
                matching = [
                    name
                    for name, layer in layers.items()
                    if (fnmatchcase(name, part) or fnmatchcase(name.rpartition(".")[2], part)) and layer._parameters
                ]
            if not matching:
                named = join_some(map(repr, possible), shown=NAMED) if possible else "no layer that it could adapt"
                raise UsageError(
                    f"lora: targets={self.targets!r}: the model has no layer {part!r} beside its classifier. It has "
                    f"{named}: give their names or last parts joined by |, linear or pointwise"
                )
            for name in matching:
                within = inside.get(id(layers[name]))
                why = _why_not(layers[name]) if within is None else f"is read by {within!r} without being called"
                if why:
                    raise UsageError(
                        f"lora: targets={self.targets!r} names layer {name!r}, which {why}: name other layers, such as "
                        f"{join_some(map(repr, possible), shown=NAMED) if possible else 'none of this model'}"
                    )
            found += matching
        return list(dict.fromkeys(found))


def _why_not(layer: nn.Module) -> str:
    """Return why a layer cannot be adapted, as a predicate; empty if it can."""
    kind = torch_kind(layer)
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return f"is a {type(layer).__name__}, neither linear nor a convolution"
    if not runs_as_torch(layer) or kind.__name__.startswith("ScaledStd"):
        return f"is a {type(layer).__name__}, which computes something else than torch's layer"
    if is_parametrized(layer):
        return "has a parametrization"
    if isinstance(layer, nn.modules.conv._ConvNd):
        if layer.groups > 1:
            return f"has {layer.groups} groups"
        if layer.padding_mode != "zeros" or set(layer.dilation) != {1} or isinstance(layer.padding, str):
            return "is dilated, or pads in another way than by a number of zeros"
    return ""


def find_last_layer(module: nn.Module) -> nn.Module:
    """Return the last layer with parameters, usually the classifier."""
    return [layer for layer in module.modules() if any(p is not None for p in layer._parameters.values())][-1]


def _stays(layer: nn.Module, head: nn.Module) -> bool:
    return layer is head or isinstance(layer, NORMALIZATION) or is_foreign_normalization(layer)


def _fix(layer: nn.Module) -> None:
    """Turn the layer's parameters into constants."""
    fixed = {name: parameter.detach() for name, parameter in layer._parameters.items() if parameter is not None}
    for name in fixed:
        del layer._parameters[name]
    if fixed:
        layer.__dict__.update(fixed)
        layer.__dict__[CONSTANTS] = tuple(fixed)


def list_constants(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that became constants, with their names."""
    for prefix, layer in module.named_modules():
        for name in layer.__dict__.get(CONSTANTS, ()):
            yield f"{prefix}.{name}" if prefix else name, layer.__dict__[name]


@torch.no_grad()
def merge_adapters(module: nn.Module) -> nn.Module:
    """Return ``module`` with adapters added to the weights of their layers, and constants as parameters, in place.

    The network has the layers and names that it had before :class:`Lora` changed it; without adapters it is unchanged.
    """
    for name, layer in list(module.named_modules()):
        if type(layer).__module__.startswith("peft."):
            merged: Any = layer
            if not hasattr(merged, "get_base_layer"):
                continue
            merged.merge()
            holder, _, last = name.rpartition(".")
            setattr(module.get_submodule(holder), last, merged.get_base_layer())
    for layer in module.modules():
        for name in layer.__dict__.pop(CONSTANTS, ()):
            layer.register_parameter(name, nn.Parameter(layer.__dict__.pop(name), requires_grad=False))
    return module


def _accept(adapter: object, _text: str | None) -> Lora | None:
    if adapter is None or isinstance(adapter, Lora):
        return adapter
    raise UsageError(f"adapter is a {type(adapter).__name__}: give lora(rank=8, targets='linear')")


ADAPTERS = Catalog[Lora | None]("adapter", {"lora": Lora}, _accept)
"""Adapters by name."""
