"""FedBN's aggregation over plain dictionaries of NumPy arrays or torch tensors, for users of other frameworks.

Li et al. 2021 (arXiv:2102.07623), Algorithm 1: every entry outside batch normalization becomes the mean of the clients'
entries weighted by their numbers of samples (McMahan et al. 2017, arXiv:1602.05629); normalization stays on its client.
The global result therefore contains no normalization, and each client keeps its normalization entries.

fedshift itself selects entries by layer type (:mod:`fedshift.core.selection`). Here only names are available, so they
are matched as whole words ("bn" is in ``conv_bn.gamma``, not in ``subnet.weight``), and a layer with running statistics
is always batch normalization; where names do not suffice, shapes decide. torch is used only for tensors, and never
imported.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from functools import reduce
from numbers import Real
from operator import add
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from ..utils.errors import UsageError

if TYPE_CHECKING:
    import torch

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

Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"
Client = TypeVar("Client")
Models: TypeAlias = Mapping[Client, Mapping[str, Array]]
Description: TypeAlias = tuple[str, str, tuple[int, ...]]
_FIELDS = ("kind", "dtype", "shape")


@dataclass(frozen=True, eq=False)
class Aggregated(Generic[Client]):
    """Result of one aggregation. All arrays are distinct copies.

    ``shared``: the global result, without local entries. ``clients``: for each client, in the order of their keys, the
    shared entries and the client's local entries, in the client's order of entries. ``local``: the names of the local
    entries.
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
        for field, value in (("local", self.local), ("patterns", self.patterns)):
            if isinstance(value, str):
                raise UsageError(f"{field}={value!r} is one string: give a collection of strings, [{value!r}]")
        if self.local is not None:
            if self.patterns or self.include_layer_norm or self.statistics_only:
                raise UsageError("local lists exact names and excludes every other option: drop local or the others")
            object.__setattr__(self, "local", frozenset(self.local))
        object.__setattr__(self, "patterns", tuple(self.patterns))
        for pattern in self.patterns:
            if not re.fullmatch(r"[\w./:-]+", pattern) or not split_words(pattern):
                raise UsageError(
                    f"pattern {pattern!r} does not consist of words: give whole words, such as 'head'; no wildcards"
                )

    @property
    def name(self) -> str:
        """``"FedBN"``, or ``"SiloBN"`` if only statistics stay local."""
        return "SiloBN" if self.statistics_only else "FedBN"

    @property
    def batch_norm_patterns(self) -> tuple[str, ...]:
        """Words that mark local entries; empty if ``local`` lists exact names."""
        return () if self.local is not None else (*self._layers(), *STATISTICS, *self.patterns)

    def _layers(self) -> tuple[str, ...]:
        return (() if self.statistics_only else BATCH_NORM) + (LAYER_NORM if self.include_layer_norm else ())

    def local_names(self, model: Mapping[str, Array]) -> frozenset[str]:
        """Return the names of the entries of ``model`` (name to array of any shape) that stay local.

        Raises :class:`UsageError` if a local name, a pattern or an option matches no entry, if nothing stays local, or
        if a model without statistics has layers whose type is unclear from their names.
        """
        shapes = {name: describe_array(f"entry {name!r}", value)[2] for name, value in model.items()}
        normalization = (
            find_normalization(shapes, self._layers(), not self.statistics_only) if self.local is None else frozenset()
        )
        claims = {name: {name} & shapes.keys() for name in sorted(self.local or ())}
        claims |= {pattern: {name for name in shapes if find_pattern(name, [pattern])} for pattern in self.patterns}
        if self.include_layer_norm:
            claims["layer_norm"] = {name for name in normalization if find_pattern(name, LAYER_NORM)}
        for claim, names in claims.items():
            if not names:
                near = ", ".join(get_close_matches(claim, shapes, n=3, cutoff=0.3)) or "none"
                raise UsageError(f"{claim!r} matches no entry; similar names: {near}. Correct it or drop it")
        local = normalization.union(*claims.values())
        if not local:
            raise UsageError(
                f"{self.name} would keep nothing local: no entry ({', '.join([*shapes][:3])}, ...) is named like batch "
                "normalization. Give local=[names], patterns=[words] or include_layer_norm=True; for FedAvg call "
                "weighted_mean"
            )
        if self.local is None and (doubtful := find_unclear(shapes, local)):
            raise UsageError(
                f"the models have no running statistics, so it is unclear whether {', '.join(doubtful[:4])} are batch "
                "normalization. Give the statistics too (torch: state_dict(), not parameters()), or local=[names]"
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
        models, shares = check_models(client_models, client_weights)
        local = self.local_names(next(iter(models.values())))
        shared = _means(models, shares, leave=local)
        clients = {
            client: {name: _copy(value if name in local else shared[name]) for name, value in model.items()}
            for client, model in models.items()
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
    return _means(*check_models(client_models, client_weights), leave=frozenset())


def _means(models: Models[Client], shares: Sequence[float], *, leave: frozenset[str]) -> dict[str, Array]:
    largest = [*models.values()][max(range(len(shares)), key=shares.__getitem__)]
    means: dict[str, Array] = {}
    for name in [name for name in next(iter(models.values())) if name not in leave]:
        value, values = largest[name], [model[name] for model in models.values()]
        if not has_mean(value) or is_constant(values):
            means[name] = _copy(value)
            continue
        total = reduce(add, (share * to_float64(each) for each, share in zip(values, shares, strict=True)))
        if isinstance(value, np.ndarray):
            means[name] = np.asarray(total if is_float(value) else np.rint(total)).astype(value.dtype)
        else:
            means[name] = (total if is_float(value) else total.round()).to(value.device, value.dtype)
    return means


def has_mean(value: Array) -> bool:
    """Return whether a mean makes sense: of floating-point numbers, and of integer scalars, which count."""
    return is_float(value) or (value.ndim == 0 and "bool" not in str(value.dtype))


def is_constant(values: Sequence[Array]) -> bool:
    """Return whether all ``values`` are equal; NaN is not."""
    first: Any = values[0]
    return all(bool((value == first).all()) for value in values)


def _copy(value: Array) -> Array:
    return np.array(value) if isinstance(value, np.ndarray) else value.detach().clone()


def to_float64(value: Array) -> Any:
    """Convert to float64."""
    if isinstance(value, np.ndarray):
        return np.asarray(value, np.float64)
    return value.detach().to("cpu" if value.device.type == "mps" else value.device).double()  # MPS has no float64


def describe_array(where: str, value: object) -> Description:
    """Return kind, dtype and shape of an array; raise UsageError, prefixed by ``where``, if it cannot be averaged."""
    torch = sys.modules.get("torch")  # without the import, there are no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        described = (f"torch on {value.device}", str(value.dtype), tuple(value.shape))
        fits = value.layout == torch.strided and not value.is_complex()
    elif isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        described = ("NumPy", value.dtype.name, value.shape)
        fits = value.dtype.kind in "biu" or (value.dtype.kind == "f" and value.dtype.itemsize <= 8)
    else:
        raise UsageError(f"{where} is a {type(value).__name__}: give a NumPy array (numpy.asarray) or a torch tensor")
    if not fits:
        allowed = "dense boolean, integer and floating-point arrays of up to 64 bits"
        raise UsageError(f"{where} has dtype {described[1]}: allowed are {allowed}; convert it, or leave it out")
    return described


def is_float(value: Array) -> bool:
    """Return whether the array holds floating-point numbers."""
    return value.dtype.kind == "f" if isinstance(value, np.ndarray) else value.is_floating_point()


def check_models(
    models: Models[Client], weights: Mapping[Client, float]
) -> tuple[dict[Client, Mapping[str, Array]], list[float]]:
    """Return the models sorted by key, and their normalized weights; refuse models that cannot be averaged."""
    if not models:
        raise UsageError("client_models is empty: give the entries of one client or more, {client: {name: array}}")
    for client in [*models, *weights]:
        if (client in models) != (client in weights):
            fault = "no weight" if client in models else "a weight but no model"
            raise UsageError(f"client {client!r} has {fault}: client_models and client_weights must have the same keys")
    try:
        order: list[Client] = sorted(models)  # type: ignore[type-var]
    except TypeError as error:
        raise UsageError(f"clients {[*models]} cannot be sorted: use only strings, or only numbers") from error
    for client in order:
        if not isinstance(weights[client], Real) or not 0 <= weights[client] < math.inf:
            raise UsageError(f"client {client!r} has weight {weights[client]!r}: give a finite number, zero or more")
    total = sum(float(weights[client]) for client in order)
    if not 0 < total < math.inf:
        raise UsageError(f"the weights of clients {order} add up to {total}: give their numbers of samples")
    expected: dict[str, Description] = {}
    for client in order:
        expected = _check_entries(client, models[client], order[0], expected)
    for name in expected:
        _check_values(name, {client: models[client][name] for client in order})
    return {client: models[client] for client in order}, [float(weights[client]) / total for client in order]


def _check_entries(
    client: Client, model: Mapping[str, Array], first: Client, expected: Mapping[str, Description]
) -> dict[str, Description]:
    """Describe the entries of ``model``; raise UsageError unless they match ``expected``, from client ``first``."""
    if not isinstance(model, Mapping) or not model or not all(isinstance(name, str) for name in model):
        raise UsageError(f"the model of client {client!r} must be a dictionary from entry names (strings) to arrays")
    for name in [*model, *expected] if expected else ():
        if (name in model) != (name in expected):
            lacks, has = (client, first) if name in expected else (first, client)
            raise UsageError(f"client {lacks!r} has no entry {name!r}, but client {has!r} has: add or remove it there")
    described = {name: describe_array(f"entry {name!r} of client {client!r}", value) for name, value in model.items()}
    for name in model:
        where = f"entry {name!r} of client {client!r}"
        for part, mine, theirs in zip(_FIELDS, described[name], expected.get(name, described[name]), strict=True):
            if mine != theirs:
                raise UsageError(f"{where} has {part} {mine}, but client {first!r} has {theirs}: make them equal")
    return described


def _check_values(name: str, values: Mapping[Client, Array]) -> None:
    """Raise UsageError if values of one entry, by client, differ and cannot be averaged."""
    if is_constant([*values.values()]):
        return
    for client, value in values.items():
        limit, fault = math.inf, "NaN or infinity"
        if not is_float(value):
            limit, fault = 2**53, "integers of 2**53 or more, which float64 cannot represent"
        if has_mean(value) and not bool((abs(to_float64(value)) < limit).all()):
            where = f"entry {name!r} of client {client!r}"
            raise UsageError(f"{where} contains {fault}: leave this client out of the round, or repair its model")


def split_words(name: str) -> list[str]:
    """Split ``name`` into lower-case words at separators, at camel case, and between letters and digits."""
    return [word.lower() for word in _WORD.findall(name)]


def find_pattern(name: str, patterns: Iterable[str]) -> tuple[int, int] | None:
    """Return the start and end of the last match of any pattern in ``name``, as whole words."""
    spans, words = [match.span() for match in _WORD.finditer(name)], split_words(name)
    matches = [
        (spans[at][0], spans[at + len(wanted) - 1][1])
        for wanted in map(split_words, patterns)
        for at in range(len(words) - len(wanted) + 1)
        if words[at : at + len(wanted)] == wanted
    ]
    return max(matches, default=None)


def _layer_name(name: str) -> str:
    """Return the prefix of the layer's entries: the name before its statistic, or before its last word."""
    name = _COLLECTION.sub("", name)
    statistic = find_pattern(name, RUNNING)
    starts = [match.start() for match in _WORD.finditer(name) if not match.group().isdigit()]
    return name[: statistic[0] if statistic else max(starts, default=0)]


def find_normalization(shapes: Mapping[str, tuple[int, ...]], patterns: Iterable[str], affine: bool) -> frozenset[str]:
    """Find statistics, layers named by ``patterns``, and with ``affine`` the other entries of layers with statistics.

    Patterns may name a whole block, as in ``conv_bn.0.weight``: they are ignored in a layer with a kernel, and if
    statistics show which layers of the block are its normalization.
    """
    layer = {name: _layer_name(name) for name in shapes}
    statistics = {name for name in shapes if find_pattern(name, STATISTICS)}
    owners = {layer[name] for name in statistics}
    statistic_shapes = {(layer[name], shapes[name]) for name in statistics}
    kernels = {layer[name] for name, shape in shapes.items() if len(shape) > 1} - {""}

    def is_normalization(name: str, shape: tuple[int, ...]) -> bool:
        if layer[name] in owners:
            return affine and (len(shape) < 2 or (layer[name], shape) in statistic_shapes)
        span = find_pattern(name, patterns)
        if span is None or len(shape) > 1 or layer[name] in kernels:
            return False
        end = re.search(r"[./]", name[span[1] :])
        block = end and _COLLECTION.sub("", name[: span[1] + end.end()])
        return not block or not any(owner.startswith(block) for owner in owners)

    return frozenset(statistics | {name for name, shape in shapes.items() if is_normalization(name, shape)})


def find_unclear(shapes: Mapping[str, tuple[int, ...]], local: frozenset[str]) -> list[str]:
    """Find likely scales and shifts in a model without statistics: vectors of one shape in layers without a kernel."""
    if any(find_pattern(name, STATISTICS) for name in local):
        return []
    counts = Counter((_layer_name(name), shape) for name, shape in shapes.items())
    kernels = {_layer_name(name) for name, shape in shapes.items() if len(shape) > 1} | {""}
    return [
        name
        for name, shape in shapes.items()
        if len(shape) == 1 and counts[_layer_name(name), shape] > 1 and _layer_name(name) not in kernels
        if name not in local and not find_pattern(name, LAYER_NORM)
    ]


def __dir__() -> list[str]:
    return __all__
