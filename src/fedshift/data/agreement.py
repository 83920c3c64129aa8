"""Check that the numbers of all splits and clients have the same scale, and their labels the same kind.

8-bit pixels are scaled when a batch is taken, and floats are not. Arrays of both kinds, or floats from 0 to 1 together
with gray levels stored as floats, would therefore reach the network at different scales. The checks compare kinds of
values, in words that a site may disclose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from ..nn.several_inputs import Inputs, divide_rows
from ..utils.errors import FedshiftError, UsageError
from ..utils.words import join_some
from .preparation import HALF, FeatureScaling
from .samples import Samples, map_store
from .stores import CHUNK_ROWS

PIXELS, BITS, WHOLE, TABLE = "8-bit pixels", "8-bit pixels of 0 and 1", "whole numbers", "columns of a table"
FRACTIONS, SIGNED, LEVELS, FLOATS = (
    "floats from 0 to 1", "floats from -1 to 1", "whole numbers up to 255 as floats", "floats",
)  # fmt: skip
KINDS = (PIXELS, BITS, WHOLE, TABLE, FRACTIONS, SIGNED, LEVELS, FLOATS)
"""Kinds of values that samples hold."""
IMAGE_LIKE = 16
"""Fractions and gray levels are the same pixels at two scales if samples have this many numbers; a few may differ."""


def name_values(split: Samples) -> str:
    """Return which of the :data:`KINDS` the array of ``split`` holds; of lazy samples, only some are read."""
    if isinstance(split.normalization, FeatureScaling):
        return TABLE
    if split.dtype == torch.uint8:
        return BITS if isinstance(split.store, Tensor) and _holds_bits(split.store) else PIXELS
    if not split.dtype.is_floating_point or not len(split):
        return FLOATS if split.dtype.is_floating_point else WHOLE
    try:
        low, high = split.find_range()
    except FedshiftError:  # a lazy sample cannot be read, which the check reports
        return FLOATS
    if low >= 0 and high <= 255 and _is_integral(split):
        return LEVELS if high > 1 else FLOATS
    return FRACTIONS if low >= 0 and high <= 1 else SIGNED if low >= -1 and high <= 1 else FLOATS


def _holds_bits(store: Tensor) -> bool:
    """Return whether 1 occurs, and no larger number."""
    return all(not (piece > 1).any() for piece in torch.split(store, CHUNK_ROWS)) and bool(store.any())


def _is_integral(split: Samples) -> bool:
    pieces = torch.split(split.store, CHUNK_ROWS) if isinstance(split.store, Tensor) else split.probe()
    return all(bool((piece == piece.round()).all()) for piece in pieces)


def refuse_other_scales(values: Mapping[str, str], shape: tuple[int, ...], *, half: bool) -> None:
    """Raise :class:`UsageError` naming two arrays whose numbers reach a network at different scales.

    Args:
        values: Kind of values of each array, by its name in messages.
        shape: Shape of one sample.
        half: Whether 8-bit pixels are scaled to [-1, 1], the scale of floats from -1 to 1.

    """
    first: dict[str, str] = {}
    for where, kind in values.items():
        first.setdefault(kind, where)
    for one, other in combinations(first, 2):
        if fix := _find_fix(one, other, shape, half=half):
            raise UsageError(f"{first[one]}: {one}, but {first[other]}: {other}; {fix}")


def _find_fix(one: str, other: str, shape: tuple[int, ...], *, half: bool) -> str:
    """Return what makes values of both kinds have one scale; empty if they have one, or may."""
    both = {one, other}
    if both == {PIXELS, BITS}:
        return "multiply the ones of 0 and 1 by 255 (or store them as Booleans)"
    if LEVELS in both and both & {FRACTIONS, SIGNED} and prod(shape) >= IMAGE_LIKE:
        return "their scales differ: divide all by the same number"
    if (both & {PIXELS, BITS}) and (both & {FRACTIONS, SIGNED, LEVELS, FLOATS}):
        if both == {PIXELS, SIGNED} and half:
            return ""
        return "pixels of 8 bits are scaled and floats are not: give all as uint8 from 0 to 255, or all as floats"
    return ""


def name_scales(splits: Mapping[str, Samples]) -> dict[str, str]:
    """Return :func:`name_values` of each split; an array that several share is looked at once."""
    kinds = {store: name_values(split) for store, split in {split.store: split for split in splits.values()}.items()}
    return {where: kinds[split.store] for where, split in splits.items()}


def check_scales(splits: Mapping[str, Samples], shape: tuple[int, ...], inputs: Inputs = ()) -> None:
    """Raise :class:`UsageError` unless all ``splits``, by their names in messages, have one scale, or each input."""
    for each in inputs:
        if each.kind == "floats":  # all pixels have one scale
            part = partial(take_part, inputs=inputs, name=each.name)
            stores = {store: map_store(store, part) for store in {split.store for split in splits.values()}}
            named = {f"{where}, input {each.name!r}": split for where, split in splits.items()}
            check_scales({where: s.replace(x=stores[s.store]) for where, s in named.items()}, each.shape)
    if inputs:
        return
    half = all(split.normalization == HALF for split in splits.values() if split.dtype == torch.uint8)
    refuse_other_scales(name_scales(splits), shape, half=half)


def take_part(x: Tensor, inputs: Inputs, name: str) -> Tensor:
    """Return the input ``name`` of rows ``x [N, P]``."""
    return divide_rows(x, inputs)[name]


def refuse_other_labels(labels: Mapping[str, Collection[str]]) -> None:
    """Raise :class:`UsageError` if some clients label with numbers and others with words, which no client links.

    Args:
        labels: Labels that occur at each client, by its name.

    """
    kinds: dict[str, str] = {}
    for client, own in labels.items():
        held = {_name_label(label) for label in own}
        if len(held) > 1:
            return  # such as grades 0, 1, 2, 3+: one client has both, so that they are classes of one list
        for kind in held:
            kinds.setdefault(kind, client)
    if len(kinds) > 1:
        told = "; ".join(
            f"client {client!r} has {kind} ({', '.join(sorted(labels[client])[:4])})" for kind, client in kinds.items()
        )
        raise UsageError(
            f"labels are of different kinds: {told}: they would all be different classes; write the same class in the "
            "same way at all clients"
        )


def refuse_other_class_names(names: Mapping[str, Sequence[str]]) -> None:
    """Raise :class:`UsageError` unless the datasets, by their names in messages, agree on the names of labels.

    An empty sequence agrees with all, and a dataset may lack the last classes of others.
    """
    where = max(names, key=lambda each: len(names[each]), default="")
    for other, own in names.items():
        for label, (name, called) in enumerate(zip(own, names[where], strict=False)):
            if name != called:
                classes, others = (join_some(each, shown=8) for each in (names[where], own))
                raise UsageError(
                    f"label {label} means {called!r} in {where} and {name!r} in {other} (classes {classes}, and "
                    f"{others}): give all datasets the same classes in the same order (folders for all classes, "
                    "align_labels_with_mapping; or an equal attribute classes if only the words differ)"
                )


def _name_label(label: str) -> str:
    if label.casefold() in ("true", "false"):
        return "True and False"
    try:
        float(label)
    except ValueError:
        return "words"
    return "numbers"
