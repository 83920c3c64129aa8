"""A stable text description of a network: the types and settings of its layers, the shapes and dtypes of its tensors.

A checkpoint can be resumed by any network with the same description. The description excludes the ``repr`` of layers,
which changes between releases of torch, and default settings of torch's and torchvision's layers, which releases
extend.
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
        kind = nn.Conv2d if type(layer) is FastConv2d else type(layer)
        settings = (f"{name}={value}" for name, value in sorted(_settings(layer, kind).items()))
        tensors = {**layer._parameters, **layer._buffers}
        shapes = (f"{name}: {_shape(path, name, tensors[name], names)}" for name in sorted(tensors))
        lines.append(f"{path} {_name(kind)}({', '.join(settings)}) {', '.join(shapes)}".strip())
    return "\n".join(lines)


def _settings(layer: nn.Module, kind: type) -> dict[str, str]:
    defaults = _defaults(kind)
    public = {name: value for name, value in vars(layer).items() if name[0] != "_" and name != "training"}
    return {name: text for name, value in public.items() if (text := _text(value)) != defaults.get(name)}


def _shape(path: str, name: str, tensor: Tensor | None, names: dict[int, str]) -> str:
    """Return a tensor's dtype and shape, or its name in ``names``; add a new tensor to ``names``."""
    if tensor is None:
        return "none"
    full_name = f"{path}.{name}".lstrip(".")
    first = names.setdefault(id(tensor), full_name)
    return f"{tensor.dtype}{tuple(tensor.shape)}" if first == full_name else first


@cache
def _defaults(kind: type) -> Mapping[str, str]:
    """Return the default settings, as text, of the constructors that ``kind`` inherits from torch or torchvision."""
    library = [parent for parent in reversed(kind.__mro__) if parent.__module__.partition(".")[0] in LIBRARIES]
    parameters = (inspect.signature(parent).parameters.values() for parent in library)
    return {one.name: _text(one.default) for many in parameters for one in many if one.default is not one.empty}


def _text(value: Any) -> str:
    """Describe ``value`` identically in every process, and equal values of NumPy and Python alike."""
    if value is None or isinstance(value, str | bool | torch.dtype):
        return repr(value)
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(each)}' for key, each in value.items())}}}"
    if isinstance(value, partial):
        return f"{_text(value.func)}({_text(value.args)}, {_text(value.keywords)})"
    if isinstance(value, type):
        return _name(value)
    if callable(value) and not isinstance(value, nn.Module):
        return str(getattr(value, "__name__", _name(type(value))))
    return _name(type(value))


def _name(kind: type) -> str:
    """Return the top-level package and the name of a type, since types move within their package."""
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
