"""Networks with several inputs, such as tokens and their mask: one row of numbers a sample, divided for the network.

Samples stay one tensor ``[N, P]`` everywhere: the inputs of a sample, flattened and side by side. A hook of the network
divides the rows, so that the network's entries keep their names, and a call with the inputs themselves is unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from ..utils.errors import UsageError

Kind = Literal["floats", "pixels", "integers", "bools"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of numbers: ``pixels`` were uint8, and are floats from -1 to 1 in a row; others are what a network gets."""
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Input:
    """One of several inputs of a sample: its ``name``, its ``shape`` in a sample, and its ``kind`` of numbers."""

    name: str
    shape: tuple[int, ...]
    kind: Kind

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # a list, in JSON

    def __str__(self) -> str:
        return f"{self.name} [{', '.join(map(str, ('N', *self.shape)))}] ({self.kind})"

    @property
    def size(self) -> int:
        """Number of values in a sample."""
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Return whether the network is given floats."""
        return self.kind in ("floats", "pixels")


Inputs = tuple[Input, ...]
"""The inputs of a sample, in the order of their columns in a row; empty: a sample is one array."""


def name_inputs(inputs: Sequence[Input]) -> str:
    """Return the names in a text."""
    return ", ".join(repr(each.name) for each in inputs)


def divide_rows(x: Tensor, inputs: Sequence[Input]) -> dict[str, Tensor]:
    """Return each input ``[N, *shape]`` in rows ``x [N, P]``, by name; floats have the type of ``x``."""
    divided = {}
    for each, columns in zip(inputs, torch.split(x, [each.size for each in inputs], dim=1), strict=True):
        values = columns.reshape(len(x), *each.shape)
        divided[each.name] = values if each.is_float else values.long() if each.kind == "integers" else values.bool()
    return divided


@dataclass(frozen=True)
class DivideRows:
    """A hook before a network's forward that divides rows into the network's ``inputs``; ``by_name``: or in order."""

    inputs: Inputs
    by_name: bool

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the arguments for the network's forward; None: those that were given."""
        size = sum(each.size for each in self.inputs)
        if named or len(given) != 1 or not isinstance(given[0], Tensor) or given[0].shape[1:] != (size,):
            return None  # the inputs themselves
        parts = divide_rows(given[0], self.inputs)
        return ((), parts) if self.by_name else (tuple(parts.values()), {})


def find_inputs(network: nn.Module) -> Inputs:
    """Return the inputs into which ``network`` divides rows; empty if it takes one array."""
    return next((hook.inputs for hook in network._forward_pre_hooks.values() if isinstance(hook, DivideRows)), ())


def call_with(network: nn.Module, parts: Mapping[str, Tensor]) -> Any:
    """Return the outputs of ``network``, which divides rows, for its inputs by name."""
    by_name = any(hook.by_name for hook in network._forward_pre_hooks.values() if isinstance(hook, DivideRows))
    return network(**parts) if by_name else network(*parts.values())


def take_inputs(network: M, inputs: Inputs) -> M:
    """Return ``network``, changed to divide rows into ``inputs``: by the names of its parameters, or else in order.

    In order only if no parameter has the name of an input, and there are as many parameters, or as many without a
    default, as inputs. Raises :class:`UsageError` that lists both if neither fits.
    """
    network.register_forward_pre_hook(DivideRows(inputs, _match(network, inputs)), with_kwargs=True)
    return network


def _match(network: nn.Module, inputs: Inputs) -> bool:
    """Return whether ``network`` is given its inputs by name, rather than in order."""
    taken, kinds = inspect.signature(network.forward).parameters.values(), inspect.Parameter
    named = [each for each in taken if each.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    bind = inspect.Signature(named or [*taken]).bind
    names = [each.name for each in inputs]
    with suppress(TypeError):
        bind(**dict.fromkeys(names))
        return True
    counts = [each.kind != kinds.KEYWORD_ONLY for each in named], [each.default is kinds.empty for each in named]
    alike = {each.name for each in named if each.kind != kinds.POSITIONAL_ONLY}.intersection(names)
    with suppress(TypeError):
        bind(*names)
        if not named or (len(names) in map(sum, counts) and not alike):
            return False
    shown = ", ".join(str(each.replace(annotation=kinds.empty)) for each in taken) or "none"
    raise UsageError(
        f"the data have the inputs {name_inputs(inputs)}, and the network's forward takes {shown}: give the inputs the "
        "names of its parameters, or as many as it takes, in its order; leave out of the samples what is no input"
    ).about("model")
