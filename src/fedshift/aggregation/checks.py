"""What can be averaged: arrays of one kind, dtype and shape on all clients, finite, with weights that make sense."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from ..utils.errors import UsageError

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"
Client = TypeVar("Client")
Models: TypeAlias = Mapping[Client, Mapping[str, Array]]
Facts: TypeAlias = tuple[str, str, tuple[int, ...]]
_FACTS = ("kind", "dtype", "shape")


def to_float64(value: Array) -> Any:
    """The same numbers in float64."""
    if isinstance(value, np.ndarray):
        return np.asarray(value, np.float64)
    return value.detach().to("cpu" if value.device.type == "mps" else value.device).double()  # MPS has no float64


def describe_array(where: str, value: object) -> Facts:
    """Kind, dtype and shape of an array; :class:`UsageError` beginning with ``where`` for what cannot be averaged."""
    torch = sys.modules.get("torch")  # where nobody has imported it, nothing is a tensor
    if torch is not None and isinstance(value, torch.Tensor):
        facts = (f"torch on {value.device}", str(value.dtype), tuple(value.shape))
        fits = value.layout == torch.strided and not value.is_complex()
    elif isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        facts = ("NumPy", value.dtype.name, value.shape)
        fits = value.dtype.kind in "biu" or (value.dtype.kind == "f" and value.dtype.itemsize <= 8)
    else:
        raise UsageError(f"{where} is a {type(value).__name__}: give a NumPy array (numpy.asarray) or a torch tensor")
    if not fits:
        allowed = "dense boolean, integer and floating-point arrays of up to 64 bits"
        raise UsageError(f"{where} has dtype {facts[1]}: allowed are {allowed}; convert it, or leave it out")
    return facts


def is_float(value: Array) -> bool:
    """Whether the array holds floating-point numbers."""
    return value.dtype.kind == "f" if isinstance(value, np.ndarray) else value.is_floating_point()


def check_models(
    models: Models[Client], weights: Mapping[Client, float]
) -> tuple[dict[Client, Mapping[str, Array]], list[float]]:
    """The models in the order of their sorted keys, and their shares of the weight; refuses what cannot be averaged."""
    if not models:
        raise UsageError("client_models is empty: give the entries of one client or more, {client: {name: array}}")
    for client in [*models, *weights]:
        if (client in models) != (client in weights):
            fault = "no weight" if client in models else "a weight but no model"
            raise UsageError(f"client {client!r} has {fault}: client_models and client_weights must have the same keys")
    try:
        order: list[Client] = sorted(models)  # type: ignore[type-var]
    except TypeError as error:
        raise UsageError(f"clients {[*models]} have no common order: use strings alone, or numbers alone") from error
    for client in order:
        if not isinstance(weights[client], Real) or not 0 <= weights[client] < math.inf:
            raise UsageError(f"client {client!r} has weight {weights[client]!r}: give a finite number, zero or more")
    total = sum(float(weights[client]) for client in order)
    if not 0 < total < math.inf:
        raise UsageError(f"the weights of clients {order} add up to {total}: give their numbers of samples")
    expected: dict[str, Facts] = {}
    for client in order:
        expected = _check_entries(client, models[client], order[0], expected)
    return {client: models[client] for client in order}, [float(weights[client]) / total for client in order]


def _check_entries(
    client: Client, model: Mapping[str, Array], first: Client, expected: Mapping[str, Facts]
) -> dict[str, Facts]:
    """The facts of the entries of ``model``, which are those that client ``first`` has, unless it is that client."""
    if not isinstance(model, Mapping) or not model or not all(isinstance(name, str) for name in model):
        raise UsageError(f"the model of client {client!r} must be a dictionary from entry names (strings) to arrays")
    for name in [*model, *expected] if expected else ():
        if (name in model) != (name in expected):
            lacks, has = (client, first) if name in expected else (first, client)
            raise UsageError(f"client {lacks!r} has no entry {name!r}, but client {has!r} has: add or remove it there")
    facts = {name: describe_array(f"entry {name!r} of client {client!r}", value) for name, value in model.items()}
    for name, value in model.items():
        where = f"entry {name!r} of client {client!r}"
        for part, mine, theirs in zip(_FACTS, facts[name], expected.get(name, facts[name]), strict=True):
            if mine != theirs:
                raise UsageError(f"{where} has {part} {mine}, but client {first!r} has {theirs}: make them alike")
        if not bool((abs(to_float64(value)) < (math.inf if is_float(value) else 2**53)).all()):
            fault = "NaN or infinity" if is_float(value) else "integers of 2**53 or more, which float64 cannot hold"
            raise UsageError(f"{where} holds {fault}: leave this client out of the round, or repair its model")
    return facts
