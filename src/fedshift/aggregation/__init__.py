"""FedBN's aggregation over plain dictionaries of NumPy arrays or torch tensors, for users of other frameworks.

Li et al. 2021 (arXiv:2102.07623), Algorithm 1: every entry outside batch normalization becomes the mean of the clients'
entries weighted by their numbers of samples (McMahan et al. 2017, arXiv:1602.05629); normalization stays on its client.

In: each client's entries and number of samples. Out: the shared entries, without normalization, and each client's
model. Arrays become tensors at the door, and :mod:`fedshift.core.means` averages them. Layers have no types here: names
are matched as whole words ("bn" is in ``conv_bn.gamma``, not in ``subnet.weight``), and a layer with running statistics
is always batch normalization; where names do not suffice, shapes decide.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from itertools import product
from numbers import Real
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core import means
from ..utils.errors import UsageError
from ..utils.state import State

__all__ = [
    "BATCH_NORM", "LAYER_NORM", "RUNNING", "STATISTICS", "Aggregated", "Array", "FedBNAggregation", "weighted_mean",
]  # fmt: skip

BATCH_NORM = ("bn", "syncbn", "batchnorm", "batch_norm", "batchnormalization", "batch_normalization")
"""Words that name a batch normalization layer."""
LAYER_NORM = ("ln", "layernorm", "layer_norm", "layernormalization", "layer_normalization")
"""Words that name a layer normalization layer."""
RUNNING = ("running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_var", "moving_variance")
"""Words for batch normalization's statistics, which identify their layer as batch normalization."""
STATISTICS = (*RUNNING, "batch_stats")
"""The same and Flax's collection of statistics, whose entries are named only ``mean`` and ``var``."""

_WORD = re.compile(r"\d+|[A-Z]+(?![^\W\d_A-Z])|[A-Z]?[^\W\d_A-Z]+")
_COLLECTION = re.compile(r"(^|(?<=[./]))(params|batch_stats)[./]")  # Flax's collections, each with half of a layer

Array: TypeAlias = "np.ndarray[Any, Any] | Tensor"
Client = TypeVar("Client")
Models: TypeAlias = Mapping[Client, Mapping[str, Array]]


@dataclass(frozen=True, eq=False)
class Aggregated(Generic[Client]):
    """Result of one aggregation. All arrays are distinct copies.

    ``shared``: the global result, without local entries. ``clients``: for each client, by sorted keys, shared and its
    local entries, in its order of entries. ``local``: the names of the local entries.
    """

    shared: dict[str, Array]
    clients: dict[Client, dict[str, Array]]
    local: frozenset[str]


@dataclass(frozen=True)
class FedBNAggregation:
    """FedBN: normalization stays with its client, everything else is averaged.

    Args:
        local: exact names of the entries that stay local; None: detect them by name.
        patterns: additional words, such as "head" or "norm1": entries whose names contain one stay local.
        include_layer_norm: keep layer normalization local too.
        statistics_only: share batch normalization's affine parameters and keep its statistics local (SiloBN: Andreux
            et al. 2020, arXiv:2008.07424).

    Raises:
        UsageError: ``local`` is combined with another option, or a pattern does not consist of words.

    """

    local: Collection[str] | None = None
    _: KW_ONLY
    patterns: Collection[str] = ()
    include_layer_norm: bool = False
    statistics_only: bool = False

    def __post_init__(self) -> None:
        for option, value in (("local", self.local), ("patterns", self.patterns)):
            if isinstance(value, str):
                raise UsageError(f"{option}={value!r} is one string: give a collection of strings, [{value!r}]")
        if self.local is not None and (self.patterns or self.include_layer_norm or self.statistics_only):
            raise UsageError("local lists exact names and excludes every other option: drop local or the others")
        for pattern in self.patterns:
            if not re.fullmatch(r"[\w./:-]+", pattern) or not _WORD.search(pattern):
                words = "give whole words, such as 'head'; no wildcards"
                raise UsageError(f"pattern {pattern!r} does not consist of words: {words}")

    @property
    def name(self) -> str:
        """``"FedBN"``, or ``"SiloBN"`` if only statistics stay local."""
        return "SiloBN" if self.statistics_only else "FedBN"

    def local_names(self, model: Mapping[str, Array]) -> frozenset[str]:
        """Return the names of the entries of ``model`` (name to array of any shape) that stay local.

        Raises :class:`UsageError` if a local name, a pattern or an option matches no entry, if nothing stays local, or
        if a model without statistics has layers whose type is unclear from their names.
        """
        names = _Names({name: tuple(_read(f"entry {name!r}", value).shape) for name, value in model.items()})
        layers = (() if self.statistics_only else BATCH_NORM) + (LAYER_NORM if self.include_layer_norm else ())
        norms = names.find_normalization(layers, not self.statistics_only) if self.local is None else set()
        claims = {name: {name} & model.keys() for name in sorted(self.local or ())}
        claims |= {pattern: names.match([pattern]) for pattern in self.patterns}
        if self.include_layer_norm:
            claims["layer_norm"] = norms & names.match(LAYER_NORM)
        for claim in [claim for claim, matches in claims.items() if not matches]:
            near = ", ".join(get_close_matches(claim, model, n=3, cutoff=0.3)) or "none"
            raise UsageError(f"{claim!r} matches no entry; similar names: {near}. Correct it or drop it")
        local = frozenset(norms.union(*claims.values()))
        if not local:
            raise UsageError(
                f"{self.name} would keep nothing local: no entry ({', '.join([*model][:3])}, ...) is named like batch "
                "normalization. Give local=[names], patterns=[words] or include_layer_norm=True; for FedAvg call "
                "weighted_mean"
            )
        unclear = names.find_unclear() - local - names.match(LAYER_NORM)
        if self.local is None and unclear:
            some = ", ".join([name for name in model if name in unclear][:4])
            raise UsageError(
                f"the models have no running statistics, so it is unclear whether {some} are batch normalization. "
                "Give the statistics too (torch: state_dict(), not parameters()), or local=[names]"
            )
        return local

    def aggregate(self, client_models: Models[Client], client_weights: Mapping[Client, float]) -> Aggregated[Client]:
        """Average the shared entries and return each client's model.

        Args:
            client_models: entries of each client; names, kinds, dtypes and shapes must agree.
            client_weights: each client's number of samples.

        Raises:
            UsageError: see :func:`weighted_mean` and :meth:`local_names`.

        """
        mean, states = _average(client_models, client_weights)
        first = client_models[next(iter(states))]
        local = self.local_names(first)
        shared = {name: _write(mean[name], array) for name, array in first.items() if name not in local}
        clients = {
            client: {name: _write((state if name in local else mean)[name], first[name]) for name in state}
            for client, state in states.items()
        }
        return Aggregated(shared, clients, local)


def weighted_mean(client_models: Models[Client], client_weights: Mapping[Client, float]) -> dict[str, Array]:
    """Return the mean of every entry over the clients, weighted by ``client_weights`` (FedAvg).

    Sums are accumulated in float64 in the order of the sorted client keys; each result has the kind (NumPy, or torch
    and its device), dtype and shape of its entry. Entries that are equal everywhere, such as masks, are passed on bit
    for bit, infinities too. Integer scalars, which count, are rounded means. Other integers and Booleans that differ
    have no mean: they are those of the client with the largest weight, the first by key among equals.

    Raises:
        UsageError: naming client and entry, for entries that are missing, extra, or differ in kind, dtype or shape; for
            complex and object arrays; for NaN; where values differ, for infinity, and counters of 2**53 or more, which
            float64 cannot represent; for weights that are missing, extra, negative, not finite, or all zero; for no
            clients, and keys that cannot be sorted.

    """
    mean, states = _average(client_models, client_weights)
    return {name: _write(mean[name], array) for name, array in client_models[next(iter(states))].items()}


def _average(models: Models[Client], weights: Mapping[Client, float]) -> tuple[State, dict[Client, State]]:
    """Return the mean of all entries, and each client's entries by sorted keys; refuse what cannot be averaged."""
    order = _sort_clients(models, weights)
    states = {client: _read_model(client, models[client], order[0], models[order[0]]) for client in order}
    whole = {name for name in models[order[0]] if not _has_mean([state[name] for state in states.values()])}
    for client, name in product(order, states[order[0]].keys() - whole):
        limit = math.inf if states[client][name].is_floating_point() else 2**53
        if not (states[client][name].double().abs() < limit).all():
            fault = "NaN or infinity, or an integer of 2**53 or more, which float64 cannot represent"
            repair = "leave this client out of the round, or repair its model"
            raise UsageError(f"entry {name!r} of client {client!r} contains {fault}: {repair}")
    return means.weighted_mean([*states.values()], [float(weights[c]) for c in order], frozenset(whole)), states


def _has_mean(values: Sequence[Tensor]) -> bool:
    """Return whether values differ and are floating-point numbers, or integer scalars, which count."""
    first = values[0]
    differ = not all((value == first).all() for value in values)
    return differ and (first.is_floating_point() or (first.ndim == 0 and first.dtype != torch.bool))


def _sort_clients(models: Models[Client], weights: Mapping[Client, float]) -> list[Client]:
    if not models:
        raise UsageError("client_models is empty: give the entries of one client or more, {client: {name: array}}")
    for client in [client for client in [*models, *weights] if (client in models) != (client in weights)]:
        fault = "no weight" if client in models else "a weight but no model"
        raise UsageError(f"client {client!r} has {fault}: client_models and client_weights must have the same keys")
    for client, weight in weights.items():
        if not isinstance(weight, Real) or not 0 <= weight < math.inf:
            raise UsageError(f"client {client!r} has weight {weight!r}: give a finite number, zero or more")
    if not 0 < (total := float(sum(weights.values()))) < math.inf:
        raise UsageError(f"the weights of clients {[*weights]} add up to {total}: give their numbers of samples")
    try:
        return sorted(models)  # type: ignore[type-var]
    except TypeError as error:
        raise UsageError(f"clients {[*models]} cannot be sorted: use only strings, or only numbers") from error


def _read_model(client: Client, model: Mapping[str, Array], first: Client, expected: Mapping[str, Array]) -> State:
    """Return copies of the entries of ``model``; raise UsageError unless client ``first`` has their like."""
    if not isinstance(model, Mapping) or not model or not all(isinstance(name, str) for name in model):
        raise UsageError(f"the model of client {client!r} must be a dictionary from entry names (strings) to arrays")
    for name in [name for name in [*model, *expected] if (name in model) != (name in expected)]:
        lacks, has = (client, first) if name in expected else (first, client)
        raise UsageError(f"client {lacks!r} has no entry {name!r}, but client {has!r} has: add or remove it there")
    state = {name: _read(f"entry {name!r} of client {client!r}", value) for name, value in model.items()}
    for name, value in model.items():
        if (mine := _describe(value)) != (theirs := _describe(expected[name])):
            fault = f"entry {name!r} of client {client!r} is {mine}, but client {first!r} has {theirs}"
            raise UsageError(f"{fault}: make them equal")
    return state


def _describe(array: Array) -> str:
    if isinstance(array, np.ndarray):
        return f"a NumPy array of dtype {array.dtype.name} and shape {array.shape}"
    return f"a torch tensor on {array.device} of dtype {array.dtype} and shape {tuple(array.shape)}"


def _read(where: str, value: Array) -> Tensor:
    """Return a copy as a tensor, on the CPU where a device has no float64 (MPS); refuse what cannot be averaged."""
    if not isinstance(value, np.ndarray | Tensor) or isinstance(value, np.ma.MaskedArray):
        raise UsageError(f"{where} is a {type(value).__name__}: give a NumPy array (numpy.asarray) or a torch tensor")
    fits = False
    with suppress(TypeError):  # of objects, words, and numbers of more bits
        if isinstance(value, np.ndarray):
            native = torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
        else:
            native = value.detach()
        fits = native.layout == torch.strided and not native.is_complex()
    if not fits:
        allowed = "dense boolean, integer and floating-point arrays of up to 64 bits"
        raise UsageError(f"{where} has dtype {value.dtype}: allowed are {allowed}; convert it, or leave it out")
    return native.to("cpu" if native.device.type == "mps" else native.device, copy=True)


def _write(tensor: Tensor, like: Array) -> Array:
    """Return a copy of ``tensor`` in the kind, dtype and device of ``like``."""
    return tensor.numpy().astype(like.dtype) if isinstance(like, np.ndarray) else tensor.to(like.device, copy=True)


class _Names:
    """Entries of a model, known by name and shape."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.layers = {name: _layer_name(name) for name in shapes}
        self.kernels = {self.layers[name] for name, shape in shapes.items() if len(shape) > 1}
        self.statistics = self.match(STATISTICS)

    def match(self, patterns: Iterable[str]) -> set[str]:
        """Return the names that contain a pattern, as whole words."""
        return {name for name in self.shapes if _find_pattern(name, patterns)}

    def find_normalization(self, patterns: Iterable[str], affine: bool) -> set[str]:
        """Find statistics, layers that ``patterns`` name, and with ``affine`` other entries of layers with statistics.

        Patterns may name a whole block, as in ``conv_bn.0.weight``: they are ignored in a layer with a kernel, and if
        statistics show which layers of the block are its normalization.
        """
        owners = {self.layers[name] for name in self.statistics}
        statistics = {(self.layers[name], self.shapes[name]) for name in self.statistics}

        def is_normalization(name: str) -> bool:
            layer, shape = self.layers[name], self.shapes[name]
            if layer in owners:
                return affine and (len(shape) < 2 or (layer, shape) in statistics)
            span = _find_pattern(name, patterns)
            if span is None or len(shape) > 1 or (layer and layer in self.kernels):
                return False
            end = re.search(r"[./]", name[span[1] :])
            return not end or not any(o.startswith(_COLLECTION.sub("", name[: span[1] + end.end()])) for o in owners)

        return self.statistics | {name for name in self.shapes if is_normalization(name)}

    def find_unclear(self) -> set[str]:
        """Find likely scales and shifts in a model without statistics: vectors of a shape in layers without kernel."""
        vectors = {name for name, shape in self.shapes.items() if len(shape) == 1 and not self.statistics}
        counts = Counter((self.layers[name], self.shapes[name]) for name in vectors)
        pairs = {name for name in vectors if counts[self.layers[name], self.shapes[name]] > 1}
        return {name for name in pairs if self.layers[name] and self.layers[name] not in self.kernels}


def _find_pattern(name: str, patterns: Iterable[str]) -> tuple[int, int] | None:
    """Return the start and end of the last match of any pattern in ``name``, as whole words.

    Words end at separators, at camel case, and between letters and digits.
    """
    words = [*_WORD.finditer(name)]
    spans = [
        (words[first].start(), words[first + len(wanted) - 1].end())
        for wanted in [_WORD.findall(pattern.lower()) for pattern in patterns]
        for first in range(len(words) - len(wanted) + 1)
        if [word.group().lower() for word in words[first : first + len(wanted)]] == wanted
    ]
    return max(spans, default=None)


def _layer_name(name: str) -> str:
    """Return the prefix of the layer's entries: the name before its statistic, or before its last word."""
    name = _COLLECTION.sub("", name)
    starts = [word.start() for word in _WORD.finditer(name) if not word.group().isdigit()]
    end, _ = _find_pattern(name, RUNNING) or (max(starts, default=0), None)
    return name[:end]


def __dir__() -> list[str]:
    return __all__
