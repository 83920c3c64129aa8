"""FedBN's aggregation over plain dictionaries of NumPy arrays or torch tensors, for users of other frameworks.

Li et al. 2021 (arXiv:2102.07623), Algorithm 1: every entry outside batch normalization becomes the mean of the clients'
entries weighted by their numbers of samples (McMahan et al. 2017, arXiv:1602.05629); normalization never leaves its
client. The global result therefore holds no normalization at all, and each client gets its own back.

fedshift itself chooses entries by the type of their layer (:mod:`fedshift.core.selection`). Here there are names alone, so
they are read as whole words ("bn" is in ``conv_bn.gamma``, not in ``subnet.weight``), and a layer that owns running
statistics is batch normalization whatever its name. torch is used where tensors are given, and never imported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from functools import reduce
from operator import add
from typing import Generic

import numpy as np

from ..utils.errors import UsageError
from .checks import Array, Client, Models, check_models, describe_array, is_float, to_float64
from .name_matching import (
    BATCH_NORM,
    LAYER_NORM,
    RUNNING,
    STATISTICS,
    find_normalization,
    find_pattern,
    find_unclear,
    split_words,
)

__all__ = [
    "BATCH_NORM", "LAYER_NORM", "RUNNING", "STATISTICS", "Aggregated", "Array", "FedBNAggregation", "weighted_mean",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Aggregated(Generic[Client]):
    """What one aggregation gives. Every array in it is its own: none is an input, and none stands in it twice.

    ``shared`` is the global result, without any local entry. ``clients`` gives each client, in the order of their keys,
    the shared entries and its own local ones, in that client's order of entries. ``local`` names what stayed local.
    """

    shared: dict[str, Array]
    clients: dict[Client, dict[str, Array]]
    local: frozenset[str]


@dataclass(frozen=True)
class FedBNAggregation:
    """FedBN: normalization stays with its client, everything else is averaged.

    ``local`` gives the exact names of the entries that stay local. Without it they are found by their names: batch
    normalization's, and with ``include_layer_norm`` layer normalization's. ``patterns`` are words of yours in addition
    ("head", "norm1"): each entry whose name holds one stays local. ``statistics_only`` shares batch normalization's
    affine parameters and keeps its statistics (SiloBN: Andreux et al. 2020, arXiv:2008.07424).

    Raises :class:`UsageError` for ``local`` beside another option, and for a pattern that is not words.
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
                raise UsageError("local gives exact names and excludes every other option: drop local or the others")
            object.__setattr__(self, "local", frozenset(self.local))
        object.__setattr__(self, "patterns", tuple(self.patterns))
        for pattern in self.patterns:
            if not re.fullmatch(r"[\w./:-]+", pattern) or not split_words(pattern):
                raise UsageError(f"pattern {pattern!r} is not made of words: give whole words, as 'head'; no wildcards")

    @property
    def name(self) -> str:
        """``"FedBN"``, or ``"SiloBN"`` where only statistics stay local."""
        return "SiloBN" if self.statistics_only else "FedBN"

    @property
    def batch_norm_patterns(self) -> tuple[str, ...]:
        """The words looked for; none where ``local`` gives exact names."""
        return () if self.local is not None else (*self._layers(), *STATISTICS, *self.patterns)

    def _layers(self) -> tuple[str, ...]:
        return (() if self.statistics_only else BATCH_NORM) + (LAYER_NORM if self.include_layer_norm else ())

    def local_names(self, model: Mapping[str, Array]) -> frozenset[str]:
        """Names of the entries of ``model`` (name to array of any shape) that stay local.

        Raises :class:`UsageError` where a local name, a pattern or an option matches no entry, where nothing stays
        local, and where a model without any statistics has layers of which names do not tell what they are.
        """
        shapes = {name: describe_array(f"entry {name!r}", value)[2] for name, value in model.items()}
        found = (
            find_normalization(shapes, self._layers(), not self.statistics_only) if self.local is None else frozenset()
        )
        claims = {name: {name} & shapes.keys() for name in sorted(self.local or ())}
        claims |= {pattern: {name for name in shapes if find_pattern(name, [pattern])} for pattern in self.patterns}
        if self.include_layer_norm:
            claims["layer_norm"] = {name for name in found if find_pattern(name, LAYER_NORM)}
        for claim, names in claims.items():
            if not names:
                near = ", ".join(get_close_matches(claim, shapes, n=3, cutoff=0.3)) or "none"
                raise UsageError(f"{claim!r} matches no entry; near it are: {near}. Correct it or drop it")
        local = found.union(*claims.values())
        if not local:
            raise UsageError(
                f"{self.name} would keep nothing local: no entry ({', '.join([*shapes][:3])}, ...) is named as batch "
                "normalization. Give local=[names], patterns=[words] or include_layer_norm=True; for FedAvg call "
                "weighted_mean"
            )
        if self.local is None and (doubtful := find_unclear(shapes, local)):
            raise UsageError(
                f"the models hold no running statistics, so it is unclear whether {', '.join(doubtful[:4])} are batch "
                "normalization. Give the statistics too (torch: state_dict(), not parameters()), or local=[names]"
            )
        return local

    def aggregate(self, client_models: Models[Client], client_weights: Mapping[Client, float]) -> Aggregated[Client]:
        """Average what is shared and give each client its own model back.

        ``client_models`` are alike in names, kinds, dtypes and shapes, which may be any; ``client_weights`` are the
        clients' numbers of samples. Raises :class:`UsageError` as :func:`weighted_mean` and :meth:`local_names` do.
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
    """Mean of every entry over the clients, weighted by ``client_weights``: plain FedAvg, nothing stays local.

    Sums run in float64 in the order of the sorted client keys; each result has the kind (NumPy, or torch and its
    device), dtype and shape of its entry. Integers (and booleans, as 0 and 1) are rounded to the nearest.

    Raises :class:`UsageError`, naming client and entry, for entries that are missing, extra, or differ in kind, dtype
    or shape; for complex and object arrays, NaN, infinity, and integers from 2**53 on, which float64 cannot hold; for
    weights that are missing, extra, negative, not finite, or all zero; for no clients, and keys that do not sort.
    """
    return _means(*check_models(client_models, client_weights), leave=frozenset())


def _means(models: Models[Client], shares: Sequence[float], *, leave: frozenset[str]) -> dict[str, Array]:
    folded: dict[str, Array] = {}
    for name, first in next(iter(models.values())).items():
        if name not in leave:
            total = reduce(add, (share * to_float64(m[name]) for m, share in zip(models.values(), shares, strict=True)))
            if isinstance(first, np.ndarray):
                folded[name] = np.asarray(total if is_float(first) else np.rint(total)).astype(first.dtype)
            else:
                folded[name] = (total if is_float(first) else total.round()).to(first.device, first.dtype)
    return folded


def _copy(value: Array) -> Array:
    return np.array(value) if isinstance(value, np.ndarray) else value.detach().clone()
