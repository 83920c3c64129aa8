"""Recognition of normalization entries by whole words of their names, and by shapes where names do not suffice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

BATCH_NORM = ("bn", "syncbn", "batchnorm", "batch_norm", "batchnormalization", "batch_normalization")
"""Words that name a batch normalization layer."""
LAYER_NORM = ("ln", "layernorm", "layer_norm", "layernormalization", "layer_normalization")
"""Words that name a layer normalization layer."""
RUNNING = ("running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_var", "moving_variance")
"""Words for batch normalization's statistics: their layer is batch normalization whatever its name."""
STATISTICS = (*RUNNING, "batch_stats")
"""The same and Flax's collection of them, whose entries are named only ``mean`` and ``var``."""

_WORD = re.compile(r"\d+|[A-Z]+(?![^\W\d_A-Z])|[A-Z]?[^\W\d_A-Z]+")
_COLLECTION = re.compile(r"(^|(?<=[./]))(params|batch_stats)[./]")  # Flax's collections, each with half of a layer


def split_words(name: str) -> list[str]:
    """Split ``name`` into lower-case words at separators, at camel case, and between letters and digits."""
    return [word.lower() for word in _WORD.findall(name)]


def find_pattern(name: str, patterns: Iterable[str]) -> tuple[int, int] | None:
    """Return start and end of the last match of any pattern in ``name``, as whole words."""
    spans, own = [match.span() for match in _WORD.finditer(name)], split_words(name)
    matches = [
        (spans[at][0], spans[at + len(wanted) - 1][1])
        for wanted in map(split_words, patterns)
        for at in range(len(own) - len(wanted) + 1)
        if own[at : at + len(wanted)] == wanted
    ]
    return max(matches, default=None)


def _layer_name(name: str) -> str:
    """Return the common prefix of the layer's entries: the name up to its statistic, or up to its last word."""
    name = _COLLECTION.sub("", name)
    statistic = find_pattern(name, RUNNING)
    starts = [match.start() for match in _WORD.finditer(name) if not match.group().isdigit()]
    return name[: statistic[0] if statistic else max(starts, default=0)]


def find_normalization(shapes: Mapping[str, tuple[int, ...]], patterns: Iterable[str], affine: bool) -> frozenset[str]:
    """Find statistics, with ``affine`` the other entries of layers that own them, and layers that ``patterns`` name.

    Patterns may name a whole block, as in ``conv_bn.0.weight``: they do not count in a layer that has a kernel, nor if
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
    """Find, in a model without statistics, likely scales and shifts: vectors of one shape in layers without kernel."""
    if any(find_pattern(name, STATISTICS) for name in local):
        return []
    alike = Counter((_layer_name(name), shape) for name, shape in shapes.items())
    kernels = {_layer_name(name) for name, shape in shapes.items() if len(shape) > 1} | {""}
    return [
        name
        for name, shape in shapes.items()
        if len(shape) == 1 and alike[_layer_name(name), shape] > 1 and _layer_name(name) not in kernels
        if name not in local and not find_pattern(name, LAYER_NORM)
    ]
