"""A stable text description of a network: the types and settings of its layers, the shapes and dtypes of its tensors.

In comes a network; out goes a text, with which a checkpoint can be resumed by any network of the same text. It excludes
the ``repr`` of layers, which changes between releases of torch, and default settings of torch's and torchvision's
layers, which releases extend.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.convolution import FastConv2d

LIBRARIES = ("torch", "torchvision")


def architecture(module: nn.Module) -> str:
    """Describe ``module`` in one line per layer: name, type, settings and tensors.

    A setting is a public attribute with a plain value (number, text, function, or a collection of these): a dropout
    rate, a stride, eps, momentum, an activation function. A tensor is described by its dtype and shape, or by its first
    name if layers share it. The code of layers, private attributes and the training mode are not described.
    """
    names: dict[int, str] = {}
    lines = []
    for path, layer in module.named_modules(remove_duplicate=False):
        kind: type = nn.Conv2d if type(layer) is FastConv2d else type(layer)
        texts = {name: _text(value) for name, value in vars(layer).items() if name[0] != "_" and name != "training"}
        settings = [f"{name}={text}" for name, text in sorted(texts.items()) if text != _defaults(kind).get(name)]
        tensors = sorted({**layer._parameters, **layer._buffers}.items())
        shapes = [f"{name}: {_shape(f'{path}.{name}'.lstrip('.'), tensor, names)}" for name, tensor in tensors]
        lines.append(f"{path} {_name(kind)}({', '.join(settings)}) {', '.join(shapes)}".strip())
    return "\n".join(lines)


def _shape(name: str, tensor: Tensor | None, names: dict[int, str]) -> str:
    """Return a tensor's dtype and shape, or its name in ``names``; add a new tensor to ``names``."""
    if tensor is None:
        return "none"
    first = names.setdefault(id(tensor), name)
    return f"{tensor.dtype}{tuple(tensor.shape)}" if first == name else first


@cache
def _defaults(kind: type) -> Mapping[str, str]:
    """Return the default settings, as text, of the constructors that ``kind`` inherits from torch or torchvision."""
    library = [parent for parent in reversed(kind.__mro__) if parent.__module__.partition(".")[0] in LIBRARIES]
    parameters = (inspect.signature(parent).parameters.values() for parent in library)
    return {one.name: _text(one.default) for many in parameters for one in many if one.default is not one.empty}


def _text(value: Any) -> str:
    """Describe ``value`` identically in every process, and equal values of NumPy and Python alike."""
    if isinstance(value, int | float) and not isinstance(value, bool | Enum):
        return repr(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, Mapping | partial):
        return _text(list(value.items()) if isinstance(value, Mapping) else [value.func, value.args, value.keywords])
    if isinstance(value, list | tuple | set | frozenset):
        texts = map(_text, value)
        return f"({', '.join(sorted(texts) if isinstance(value, set | frozenset) else texts)})"
    if value is None or isinstance(value, str | bool | torch.dtype | Enum):
        return str(value) if isinstance(value, Enum) else repr(value)
    if isinstance(value, nn.Module) or not callable(value):
        return _name(type(value))
    return _name(value) if isinstance(value, type) else str(getattr(value, "__name__", _name(type(value))))


def _name(kind: type) -> str:
    """Return the top-level package and the name of a type, since types move within their package."""
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
