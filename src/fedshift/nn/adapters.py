"""Adapters: a network whose layers stay fixed, with small trained layers added to some of them, made by ``peft``.

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
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from ..config.catalog import Catalog
from ..utils.errors import UsageError
from ..utils.words import join_some
from .recognition import runs_as_torch
from .scaled_std_conv import ScaledStd
from .surgery import NORMALIZATION, is_foreign_normalization

NAMED = 8
"""Maximum number of layers that a message lists."""
KINDS = {
    "linear": lambda layer: isinstance(layer, nn.Linear),
    "pointwise": lambda layer: isinstance(layer, _ConvNd) and set(layer.kernel_size) == {1},
}
"""Words for layers by type, in ``targets``."""
INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules that read the weights of their layers without calling these."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adds low-rank layers to linear layers and convolutions, and fixes all but these, the classifier and norms.

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

        head = [layer for layer in module.modules() if any(p is not None for p in layer._parameters.values())][-1]
        chosen = self._choose(module, head)
        staying = [layer for layer in module.modules() if _stays(layer, head)]
        kept = [(each, each.requires_grad) for layer in staying for each in layer.parameters(recurse=False)]
        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha or self.rank, target_modules="|".join(map(re.escape, chosen))
        )
        inject_adapter_in_model(config, module)
        module.__dict__.pop("peft_config", None)
        for parameter, requires_grad in kept:  # peft trains its own layers alone
            parameter.requires_grad_(requires_grad)
        for name, layer in module.named_modules():
            if not (_stays(layer, head) or ".lora_" in f".{name}"):
                _fix(layer)
        return module

    def _choose(self, module: nn.Module, head: nn.Module) -> list[str]:
        """Return the names of the layers to adapt."""
        layers = {name: layer for name, layer in module.named_modules() if name and layer is not head}
        readers = {id(part): at for at, each in layers.items() if isinstance(each, INSIDE) for part in each.modules()}
        reasons = {name: _explain_unsuitable(layer, readers.get(id(layer))) for name, layer in layers.items()}
        suitable = [name for name, reason in reasons.items() if not reason]
        known = join_some(map(repr, suitable), shown=NAMED) if suitable else "none that it could adapt"
        chosen: list[str] = []
        for target in (each.strip() for each in self.targets.split("|")):
            if target in KINDS:
                matching = [name for name in suitable if KINDS[target](layers[name])]
            else:
                held = [name for name, layer in layers.items() if layer._parameters]
                matching = [each for each in held if any(fnmatchcase(n, target) for n in (each, each.split(".")[-1]))]
            if not matching:
                raise UsageError(
                    f"lora: targets={self.targets!r}: the model has no layer {target!r} beside its classifier. It has "
                    f"{known}: give their names or last parts joined by |, linear or pointwise"
                )
            for name in matching:
                if reasons[name]:
                    raise UsageError(
                        f"lora: targets={self.targets!r} names layer {name!r}, which {reasons[name]}: name other "
                        f"layers, such as {known}"
                    )
            chosen += matching
        return list(dict.fromkeys(chosen))


def _explain_unsuitable(layer: nn.Module, reader: str | None) -> str:
    """Return why a layer cannot be adapted, as a predicate; empty if it can. ``reader``: reads its weights."""
    if reader is not None:
        return f"is read by {reader!r} without being called"
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return f"is a {type(layer).__name__}, neither linear nor a convolution"
    if not runs_as_torch(layer) or isinstance(layer, ScaledStd):
        return f"is a {type(layer).__name__}, which computes something else than torch's layer"
    if is_parametrized(layer):
        return "has a parametrization"
    if isinstance(layer, nn.Linear):
        return ""
    if layer.groups > 1:
        return f"has {layer.groups} groups"
    plain = layer.padding_mode == "zeros" and set(layer.dilation) == {1} and not isinstance(layer.padding, str)
    return "" if plain else "is dilated, or pads in another way than by a number of zeros"


def _stays(layer: nn.Module, head: nn.Module) -> bool:
    return layer is head or isinstance(layer, NORMALIZATION) or is_foreign_normalization(layer)


def _fix(layer: nn.Module) -> None:
    """Turn the layer's parameters into constants: attributes that stand before parameters of None."""
    layer.__dict__ |= {name: each.detach() for name, each in layer._parameters.items() if each is not None}
    layer._parameters = dict.fromkeys(layer._parameters)


def list_constants(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that became constants, with their names."""
    for prefix, layer in module.named_modules():
        for name in filter(layer.__dict__.__contains__, layer._parameters):
            yield f"{prefix}.{name}" if prefix else name, layer.__dict__[name]


@torch.no_grad()
def merge_adapters(module: nn.Module) -> nn.Module:
    """Return ``module`` with adapters added to the weights of their layers, and constants as parameters, in place.

    The network has the layers and names that it had before :class:`Lora` changed it; without adapters it is unchanged.
    """
    for name, layer in list(module.named_modules()):
        merged: Any = layer
        if type(layer).__module__.startswith("peft.") and hasattr(layer, "get_base_layer"):
            merged.merge()
            holder, _, last = name.rpartition(".")
            setattr(module.get_submodule(holder), last, merged.get_base_layer())
    for layer in module.modules():
        for name in filter(layer.__dict__.__contains__, layer._parameters):
            layer.register_parameter(name, nn.Parameter(layer.__dict__.pop(name), requires_grad=False))
    return module


def _accept(adapter: object, _text: str | None) -> Lora | None:
    if adapter is None or isinstance(adapter, Lora):
        return adapter
    raise UsageError(f"adapter is a {type(adapter).__name__}: give lora(rank=8, targets='linear')")


ADAPTERS = Catalog[Lora | None]("adapter", {"lora": Lora}, _accept)
"""Adapters by name."""
