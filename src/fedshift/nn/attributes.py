"""Attributes of a network: all that its layers, their classes and the globals of its code hold outside of its entries.

A network whose outputs depend on its entries alone may write attributes, such as a record of attention maps, but never
reads what an earlier call wrote.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .recognition import list_hooks

USUAL = frozenset(vars(nn.Module())) | {"training"}
"""Attributes of every layer: its entries, submodules and hooks."""
PLAIN = (bool, int, float, complex, str, bytes, type(None))
DEPTH = 4
"""Depth of the search in containers, functions and objects."""
LONGEST = 10_000
"""Maximum length of a list that is extended."""
SKIPPED = ("torch", "torchvision", __name__.partition(".")[0])
"""Packages whose classes and functions are not searched."""
Write = Callable[[Any], None]


class Attribute(NamedTuple):
    """A value in an attribute, or in a container there; ``write`` replaces it, if it can be replaced.

    ``where``: the layer or code that holds the attribute ``name``. ``value``: a copy, the length of a list, or a text
    that shows the state of what cannot be copied, as of generators of random numbers. ``entry``: the entry whose memory
    it shares.
    """

    where: str
    name: str
    value: Any
    write: Write
    entry: str = ""

    @property
    def bytes(self) -> bytes:
        """The value as bytes, which are equal for equal values, NaN included."""
        if not isinstance(self.value, Tensor):
            return pickle.dumps(self.value)
        flat = self.value.cpu().to_dense().contiguous().flatten()
        return pickle.dumps((self.value.shape, self.value.dtype)) + flat.view(torch.uint8).numpy().tobytes()


def list_attributes(module: nn.Module) -> dict[str, Attribute]:
    """Return the attributes of ``module``, by their paths."""
    search = _Search(dict((*module.named_parameters(), *module.named_buffers())))
    for name, layer in module.named_modules():
        where = f"layer {name!r} of the model ({type(layer).__name__})" if name else f"the model {type(layer).__name__}"
        search.add(where, "hooks", list_hooks(layer), _keep)
        for key in sorted(vars(layer).keys() - USUAL):
            search.add(where, key, vars(layer)[key], partial(setattr, layer, key))
        for kind in filter(_is_searched, type(layer).__mro__[:-1]):
            for key, value in vars(kind).items():
                value = getattr(value, "__func__", value)  # of a static method or a class method
                if isinstance(value, FunctionType) or not key.startswith("__"):
                    search.add(f"the code of {kind.__name__}", key, value, partial(setattr, kind, key))
    return search.found


def list_changed(before: Mapping[str, Attribute], after: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """Return the attributes of ``after`` that are new or have other values than in ``before``."""
    return {path: each for path, each in after.items() if path not in before or each.bytes != before[path].bytes}


def set_back(module: nn.Module, before: Mapping[str, Attribute]) -> None:
    """Write the values of ``before``, by path, into attributes of ``module`` that have others."""
    for path, attribute in list_changed(before, list_attributes(module)).items():
        if path in before:
            value = before[path].value
            attribute.write(value.clone() if isinstance(value, Tensor) else value)


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[None]:
    """Set numbers, texts and lengths of lists in attributes of ``module`` back after the block."""
    before = {path: each for path, each in list_attributes(module).items() if isinstance(each.value, PLAIN)}
    try:
        yield
    finally:
        set_back(module, before)


def describe_network(module: nn.Module) -> Hashable:
    """Return what the behavior of ``module`` depends on, except the values of entries: classes, shapes, attributes."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return (
        *((name, type(layer)) for name, layer in module.named_modules()),
        *((name, type(t), t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors),
        *(getattr(t, hook, None) is None for _, t in tensors for hook in hooks),
        *((path, attribute.bytes) for path, attribute in list_attributes(module).items()),
    )


def _is_searched(code: type | FunctionType) -> bool:
    return (code.__module__ or "").partition(".")[0] not in SKIPPED


class _Search:
    """Collects values that can change, except the tensors ``entries``, by their paths."""

    def __init__(self, entries: Mapping[str, Tensor]) -> None:
        self.found: dict[str, Attribute] = {}
        self._entries, self._seen = {id(tensor) for tensor in entries.values()}, set[int]()
        self._memory = {_find_memory(tensor): name for name, tensor in entries.items() if _find_memory(tensor)}

    def add(self, where: str, name: str, value: Any, write: Write, path: str = "", depth: int = 0) -> None:
        """Add the value of the attribute ``name``, or one that it holds at ``path``, and all that this holds."""
        path = path or f"{where}.{name}"
        copied = _copy(value)
        if copied is not None and id(value) not in self._entries:
            entry = self._memory.get(_find_memory(value), "") if isinstance(value, Tensor) else ""
            write = write if isinstance(value, (*PLAIN, Tensor, np.ndarray)) else _keep
            self.found[path] = Attribute(where, name, *copied, write, entry)
        if copied is not None or depth == DEPTH or id(value) in self._seen or isinstance(value, nn.Module | type):
            return
        self._seen.add(id(value))
        if isinstance(value, MutableSequence):
            self.found[f"{path}.length"] = Attribute(where, name, len(value), partial(_resize, value))
        if isinstance(value, FunctionType):
            self.found[f"{path}()"] = Attribute(where, name, repr(value.__code__), _keep)
        for key, held, change in _list_items(value):
            variable = key if isinstance(value, FunctionType) else name
            self.add(where, variable, held, change, f"{path}[{key!r}]", depth + 1)


def _find_memory(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory; None if it has none."""
    return (tensor.untyped_storage().data_ptr() or None) if tensor.layout == torch.strided else None


def _copy(value: Any) -> tuple[Any] | None:
    """Return a copy of a value without parts, or the text of its state; None if it has parts or none that is known."""
    if isinstance(value, PLAIN):
        return (value,)
    if isinstance(value, Tensor):
        return (value.detach().clone(),)
    if isinstance(value, np.ndarray):
        return (value.copy(),)
    if isinstance(value, random.Random):
        return (repr(value.getstate()),)
    if isinstance(value, np.random.Generator):
        return (repr(value.bit_generator.state),)
    if isinstance(value, torch.Generator):
        return (repr(value.get_state().tolist()),)
    return (repr(value),) if type(value).__module__ == "itertools" else None


def _list_items(value: Any) -> list[tuple[Any, Any, Write]]:
    """Return keys and values in a container, a function or a plain object, and functions that replace the values."""
    if isinstance(value, Mapping | MutableSequence | tuple | set | frozenset):
        change = getattr(value, "__setitem__", None)
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [(key, held, partial(change, key) if change else _keep) for key, held in items]
    if isinstance(value, FunctionType):
        return list(_list_variables(value)) if _is_searched(value) else []
    names = {partial: ("func", "args", "keywords"), MethodType: ("__self__", "__func__")}.get(type(value))
    if names:
        return [(key, getattr(value, key), _keep) for key in names]
    return [(key, held, partial(setattr, value, key)) for key, held in getattr(value, "__dict__", {}).items()]


def _list_variables(function: FunctionType) -> Iterator[tuple[str, Any, Write]]:
    """Yield the defaults, and the variables in the closure and the globals of a function, that may hold a state."""
    yield "defaults", (function.__defaults__, function.__kwdefaults__), _keep
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents, partial(setattr, cell, "cell_contents")
    known = function.__globals__
    for name in function.__code__.co_names:
        if isinstance(known.get(name, nn), (*PLAIN, Tensor, np.ndarray, list, dict, set, deque)):
            yield name, known[name], partial(known.__setitem__, name)


def _resize(values: MutableSequence[Any], length: int) -> None:
    """Shorten ``values``, or extend them by what they hold, at most to :data:`LONGEST`."""
    while len(values) > length:
        values.pop()
    start = list(values)
    for place in range(len(start), min(length, LONGEST) if start else 0):
        values.append(start[place % len(start)])


def _keep(_: Any) -> None:
    """Ignore a value for a tuple, a set or a generator, which cannot be replaced."""
