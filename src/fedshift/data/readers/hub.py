"""Images or arrays in datasets of HuggingFace: by client, ``{client: (train, test)}``, or with a column of clients.

A ``DatasetDict`` with a column of clients names the splits, and a single dataset is divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...utils.errors import unknown_name
from ..agreement import refuse_other_class_names
from ..arrays import is_hub_dataset, list_class_names, read_part
from ..files.read_options import ReadOptions
from ..samples import join_several, read_targets
from ..scan import SPLITS, UNGROUPED, UNSAID, Part, Scan, choose_clients
from . import _objects, arrays

holds = "datasets of HuggingFace"
options = frozenset({"test_fraction", "client_column", "target", "image_size", "groups"})


def can_read(source: object) -> bool:
    """Return whether ``source`` is or contains datasets of HuggingFace with images or arrays."""
    kinds = isinstance(source, Mapping) or is_hub_dataset(source)
    return kinds and _objects.holds_hub_datasets(source) and not _objects.holds_tables(source)


def scan(source: Any, reading: ReadOptions) -> Scan:
    """Return the clients in ``source``, whose samples are read now."""
    if not _objects.is_whole(source):
        _objects.refuse_column(reading)
        return arrays.scan(source, reading)
    _objects.require_column(source, reading)
    return _scan_whole(source if isinstance(source, Mapping) else {"": source}, reading)


load = arrays.load


def _scan_whole(splits: Mapping[str, Any], reading: ReadOptions) -> Scan:
    """Return the clients of datasets with a client column, by split (``""``: all in one)."""
    column = str(reading.client_column)
    skip = [column, *([reading.groups] if reading.groups else [])]
    refuse_other_class_names(
        {f"{split} data": list_class_names(data, reading.target, skip) for split, data in splits.items()}
    )
    found: dict[str, list[Part]] = {}
    names = arrays.list_wanted(reading)
    for split, data in splits.items():
        where = f"data, {split} data" if split else "data"
        for name in skip:
            if name not in data.column_names:
                raise unknown_name("column", name, data.column_names)
        x, y = read_part(data, where, reading.target, skip=skip)
        x, inputs = join_several(x, where, names)
        names = names or [each.name for each in inputs]
        targets = read_targets(x, y, where, reading.task)
        owners = np.array([str(name) for name in data[column]])
        groups = np.array([str(name) for name in data[reading.groups]]) if reading.groups else None
        side = SPLITS.index(split) if split == "validation" or "test" in splits else UNSAID
        for client in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == client)
            found.setdefault(client, []).append(
                Part(
                    client=client, where=f"client {client!r}, {split or 'train'} data", y=targets[rows],
                    side=np.full(len(rows), side, np.int8), rows=rows, source=x,
                    group=UNGROUPED if groups is None else groups[rows], inputs=inputs,
                )
            )  # fmt: skip
    parts = [part for client in choose_clients(sorted(found), reading) for part in found[client]]
    return Scan(name=_objects.NAME, parts=tuple(parts), task=reading.task)
