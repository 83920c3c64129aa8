"""Arrays and torch datasets in memory, by client: ``{client: (x_train, y_train, x_test, y_test)}`` and other forms.

A torch dataset is read once, sample by sample; a :class:`~fedshift.data.arrays.LazyDataset` is read for each batch. If
a client has only one dataset, its test samples are drawn from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ...utils.errors import Ref, UsageError, unknown_name
from ..agreement import refuse_other_class_names
from ..arrays import LazyDataset, find_item_groups, is_hub_dataset, list_class_names, read_part
from ..files.read_options import ReadOptions
from ..samples import join_several, read_targets, to_store
from ..scan import UNGROUPED, Assign, Loaded, Part, Scan, choose_clients
from ..schema import Schema
from ..stores import DatasetStore
from . import _objects

holds = "arrays or datasets in memory"
options = frozenset({"test_fraction", "image_size", "groups"})

SUFFIXES = {"train": "train", "validation": "val", "test": "test"}
"""Suffixes of array names by split, as in ``x_val``."""
ACCEPTED = (
    "give four arrays, (x_train, y_train, x_test, y_test), or one map-style torch dataset or two, (train, test), whose "
    "samples are pairs (input, label), or a dictionary of either"
)


def can_read(source: object) -> bool:
    """Return whether ``source`` is a dictionary of clients that are neither tables nor of HuggingFace."""
    return isinstance(source, Mapping) and not (_objects.holds_tables(source) or _objects.holds_hub_datasets(source))


def scan(source: Mapping[str, Any], reading: ReadOptions) -> Scan:
    """Return the clients in ``source``, whose datasets are read now."""
    _objects.require_names(source)
    parts, meant = list[Part](), {}
    names = list_wanted(reading)
    for client in choose_clients(source, reading):
        where = f"client {client!r}"
        own, groups = _take_groups(client, source[client], reading)
        for split, given in list_splits(client, own).items():
            told = f"{where}, {split or 'train'} data"
            meant[told] = list_class_names(given, reading.target)
            parts.append(_scan_part(client, split, given, told, reading, groups, names))
            names = names or [each.name for each in parts[0].inputs]
    refuse_other_class_names(meant)
    return Scan(name=_objects.NAME, parts=tuple(parts), task=reading.task)


def load(scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
    """Return the clients' inputs; parts with one array share its store."""
    wheres = {id(part.source): (part.source, part.where) for part in scan.parts}
    stores = {key: to_store(x, where) for key, (x, where) in wheres.items()}
    return Loaded(stores=[stores[id(part.source)] for part in scan.parts])


def _take_groups(client: str, given: Any, reading: ReadOptions) -> tuple[Any, dict[str, Any]]:
    """Return a client's data without the arrays of groups, and these by their names."""
    if reading.groups is None:
        return given, {}
    names = {f"{reading.groups}_{end}" for end in SUFFIXES.values()}
    if not isinstance(given, Mapping) or not names & set(given):
        parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple | list) else [given]
        if all(isinstance(part, Dataset | LazyDataset) for part in parts):
            return given, {}
        raise UsageError(
            f"{{}}: client {client!r} has no array {reading.groups}_train: give a dictionary with x_train, y_train, "
            f"{reading.groups}_train and so on, with the group of each sample, or torch datasets with an attribute "
            f"{reading.groups}",
            Ref(groups=reading.groups),
        )
    rest = {name: array for name, array in given.items() if name not in names}
    return rest, {name: given[name] for name in names & set(given)}


def check_groups(
    reading: ReadOptions, arrays: Mapping[str, Any], name: str, y: Tensor, where: str,
    read: Callable[[Any], Any] = np.asarray,
) -> NDArray[np.str_]:  # fmt: skip
    """Return the group of each sample from the one of ``arrays`` called ``name``; empty if there are to be none.

    Raises :class:`UsageError` if it is missing or has another length than the targets ``y``.
    """
    if reading.groups is None:
        return UNGROUPED
    if name not in arrays:
        raise UsageError(f"{{}}: {where} have no array {name!r}: add it", Ref(groups=reading.groups))
    found = read(arrays[name])
    if found.shape != (len(y),):
        raise UsageError(f"{where}: groups of shape {found.shape} for {len(y)} samples: give each sample one")
    return np.array(found, np.str_)


def list_wanted(reading: ReadOptions) -> list[str]:
    """Return the names of several inputs in the order of the run that the data are read for; empty if there is none."""
    return [each.name for each in reading.schema.preparation.inputs] if isinstance(reading.schema, Schema) else []


def _scan_part(
    client: str, split: str, given: Any, where: str, reading: ReadOptions, groups: Mapping[str, Any],
    names: Sequence[str],
) -> Part:  # fmt: skip
    if isinstance(given, LazyDataset):
        x: Any = DatasetStore(given, where, reading.target, names)
        y, inputs = x.targets, x.inputs
    else:
        x, y = read_part(given, where, reading.target)
        x, inputs = join_several(x, where, names)
    targets = read_targets(x, y, where, reading.task)
    if not groups and isinstance(given, Dataset | LazyDataset) and not is_hub_dataset(given):
        group = find_item_groups(given, reading.groups, where)
    else:
        group = check_groups(reading, groups, f"{reading.groups}_{SUFFIXES[split or 'train']}", targets, where)
    return Part.whole(client, where, targets, split, x, group, inputs)


def list_splits(client: str, given: Any) -> dict[str, Any]:
    """Return the splits of a client, by name: each is a pair of arrays, or a dataset with inputs and labels.

    Args:
        client: name of the client.
        given: arrays ``(x_train, y_train, x_test, y_test)``; parts ``(train, test)``; or a dictionary of either, with
            keys ``x_train``, ... (optionally ``x_val`` and ``y_val``) or ``train``, ``test`` and ``validation``; or one
            dataset, whose split is an empty text.

    Raises:
        UsageError: ``given`` is none of these.

    """
    if isinstance(given, Mapping):
        return _name_splits(client, given)
    if _is_dataset(given):
        return {"": given}
    parts: Sequence[Any] = given if isinstance(given, tuple | list) else [given]
    if len(parts) == 4:
        return {"train": tuple(parts[:2]), "test": tuple(parts[2:])}
    if len(parts) == 2 and all(
        (isinstance(part, tuple | list) and len(part) == 2) or _is_dataset(part) for part in parts
    ):
        return dict(zip(("train", "test"), parts, strict=True))
    kinds = ", ".join(type(part).__name__ for part in parts)
    raise UsageError(f"client {client!r}: {kinds or 'nothing'} given: {ACCEPTED}")


def _name_splits(client: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the splits in a dictionary of arrays or datasets."""
    keys: dict[str, tuple[str, ...]] = {split: (f"x_{end}", f"y_{end}") for split, end in SUFFIXES.items()}
    if not any(key in given for pair in keys.values() for key in pair):
        keys = {split: (split,) for split in SUFFIXES}
    known = [key for names in keys.values() for key in names]
    for key in given:
        if key not in known:
            raise unknown_name(f"key of client {client!r}", str(key), known)
    found = {}
    for split, names in keys.items():
        if split == "validation" and not any(name in given for name in names):
            continue
        for name in names:
            if name not in given:
                raise UsageError(f"client {client!r} has no {name!r}, only {', '.join(given) or 'nothing'}: {ACCEPTED}")
        found[split] = tuple(given[name] for name in names) if len(names) == 2 else given[names[0]]
    return found


def _is_dataset(part: object) -> bool:
    return isinstance(part, Dataset | LazyDataset) or is_hub_dataset(part)
