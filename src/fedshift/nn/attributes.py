"""Attributes of a network: all that its layers, their classes and the globals of its code hold outside of its entries.

A network whose outputs depend on its entries alone may write attributes, such as a record of attention maps, but never
reads what an earlier call wrote.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

USUAL = frozenset(vars(nn.Module())) | {"training"}
"""Attributes of every layer: its entries, submodules and hooks."""
NUMBERS = (int, float)
PLAIN = (bool, *NUMBERS, complex, str, bytes, type(None))
DEPTH = 4
"""Depth of the search in containers, functions and objects."""


class Attribute(NamedTuple):
    """A value in an attribute, or in a container there; ``write`` replaces it, if it can be replaced.

    ``where``: the layer, class or module that holds the attribute ``name``. ``value``: a copy, or a text that shows the
    state of what cannot be copied, as of generators of random numbers. ``entry``: the entry whose memory it shares.
    """

    where: str
    name: str
    value: Any
    write: Callable[[Any], None]
    entry: str = ""

    @property
    def is_number(self) -> bool:
        """Return whether a number can be added to the value."""
        return type(self.value) in NUMBERS or isinstance(self.value, Tensor | np.ndarray)

    def equals(self, other: Attribute | None) -> bool:
        """Return whether ``other`` has the same value; NaN equals NaN."""
        if other is None or type(self.value) is not type(other.value):
            return False
        if isinstance(self.value, Tensor | np.ndarray):
            return bool(self.value.shape == other.value.shape and not (_fill(self.value) != _fill(other.value)).any())
        return repr(self.value) == repr(other.value)


def _fill(value: Any) -> Any:
    return value.nan_to_num() if isinstance(value, Tensor) else value


def list_attributes(module: nn.Module) -> dict[str, Attribute]:
    """Return the attributes of ``module``, by their paths."""
    search = _Search(dict((*module.named_parameters(), *module.named_buffers())))
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        where = f"layer {name!r} of the model ({kind})" if name else f"the model {kind}"
        held = (held for attribute, held in vars(layer).items() if attribute in USUAL and "hooks" in attribute)
        search.add(where, "hooks", [hook for hooks in held for hook in hooks.values()], _keep)
        for attribute in sorted(vars(layer).keys() - USUAL):
            search.add(where, attribute, vars(layer)[attribute], partial(setattr, layer, attribute))
        for parent in _list_classes(layer):
            search.add_class(parent)
    return search.found


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[None]:
    """Set numbers and texts in attributes of ``module``, such as counts of calls, back after the block."""
    before = list_attributes(module)
    try:
        yield
    finally:
        for path, attribute in list_attributes(module).items():
            if path in before and isinstance(before[path].value, PLAIN) and not attribute.equals(before[path]):
                attribute.write(before[path].value)


def describe_network(module: nn.Module) -> Hashable:
    """Return what the behavior of ``module`` depends on, except the values of entries: classes, shapes, attributes."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return (
        *((name, type(layer), layer.extra_repr()) for name, layer in module.named_modules()),
        *((name, type(t), t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors),
        *(getattr(t, hook, None) is None for _, t in tensors for hook in hooks),
        *((path, _to_text(attribute.value)) for path, attribute in list_attributes(module).items()),
    )  # fmt: skip


def _to_text(value: Any) -> str | bytes:
    if isinstance(value, Tensor):
        return str(value.shape).encode() + pickle.dumps(value.cpu())
    return pickle.dumps(value) if isinstance(value, np.ndarray) else repr(value)


def _list_classes(layer: nn.Module) -> Iterator[type]:
    """Yield the classes of ``layer`` that neither torch nor this package defines."""
    package = __name__.partition(".")[0]
    for kind in type(layer).__mro__:
        if kind is not object and kind.__module__.partition(".")[0] not in ("torch", "torchvision", package):
            yield kind


class _Search:
    """Collects values that can change, except the tensors ``entries``, by their paths."""

    def __init__(self, entries: Mapping[str, Tensor]) -> None:
        self.found: dict[str, Attribute] = {}
        self._entries, self._seen = {id(tensor) for tensor in entries.values()}, set[int]()
        self._memory = {_find_memory(tensor): name for name, tensor in entries.items() if _find_memory(tensor)}

    def add(self, where: str, name: str, value: Any, write: Callable[[Any], None]) -> None:
        self._add(where, name, f"{where}.{name}", value, write, 0)

    def add_class(self, kind: type) -> None:
        """Add the attributes of a class, and the globals and closures of its methods."""
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        for name, value in vars(kind).items():
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType):
                self._add_function(f"{kind.__module__}.{kind.__name__}", function)
            elif not name.startswith("__"):
                self.add(f"the class {kind.__name__}", name, value, partial(setattr, kind, name))

    def _add_function(self, where: str, function: FunctionType) -> None:
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, (*PLAIN, Tensor, np.ndarray, list, dict, set, deque)):
                self.add(
                    f"the module {function.__module__}", name, value, partial(function.__globals__.__setitem__, name)
                )
        for name, value, write in _list_cells(function):
            self.add(f"the function {where}", name, value, write)

    def _add(self, where: str, name: str, path: str, value: Any, write: Callable[[Any], None], depth: int) -> None:
        copied = _copy(value)
        if copied is not None and id(value) not in self._entries:
            entry = self._memory.get(_find_memory(value), "") if isinstance(value, Tensor) else ""
            write = _keep if type(copied[0]) is not type(value) and not isinstance(value, Tensor) else write
            self.found[path] = Attribute(where, name, *copied, write, entry)
        if isinstance(value, FunctionType):
            self.found[f"{path}()"] = Attribute(where, name, repr(value.__code__), _keep)
        if copied is not None or depth == DEPTH or id(value) in self._seen or isinstance(value, nn.Module | type):
            return
        self._seen.add(id(value))
        for key, held, change in _list_items(value):
            self._add(where, name, f"{path}[{key!r}]", held, change, depth + 1)


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


def _list_items(value: Any) -> Iterator[tuple[Any, Any, Callable[[Any], None]]]:
    """Yield keys and values in a container, a function or a plain object, and functions that replace the values."""
    if isinstance(value, MutableMapping):
        yield from ((key, held, partial(value.__setitem__, key)) for key, held in list(value.items()))
    elif isinstance(value, MutableSequence):
        yield from ((at, held, partial(value.__setitem__, at)) for at, held in enumerate(list(value)))
    elif isinstance(value, tuple | set | frozenset | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        yield from ((key, held, _keep) for key, held in items)
    elif isinstance(value, partial | MethodType | FunctionType):
        yield from _list_bound(value)
    else:
        for key, held in list(getattr(value, "__dict__", {}).items()):
            yield key, held, partial(setattr, value, key)


def _list_bound(function: Any) -> Iterator[tuple[Any, Any, Callable[[Any], None]]]:
    """Yield what a partial, a method or a function holds: arguments, defaults and closures."""
    held: tuple[Any, ...]
    if isinstance(function, partial):
        held = (function.func, function.args, function.keywords)
    elif isinstance(function, MethodType):
        held = (function.__self__, function.__func__)
    else:
        held = (function.__defaults__, function.__kwdefaults__)
        yield from _list_cells(function)
    yield from ((at, each, _keep) for at, each in enumerate(held))


def _list_cells(function: FunctionType) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yield the names, values and replacing functions of the variables in the closure of ``function``."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents, partial(setattr, cell, "cell_contents")


def _keep(_: Any) -> None:
    """Ignore a value for a tuple, a set or a generator, which cannot be replaced."""
