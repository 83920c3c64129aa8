"""Kinds of objects in memory; objects of pandas and HuggingFace are recognized without importing these libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...utils.errors import Ref, UsageError
from ..arrays import LazyDataset, holds_arrays, is_hub_dataset
from ..files.read_options import ReadOptions
from ..scan import SPLITS

NAME = "own data"
"""Name of the federation of objects in memory."""


def is_table(thing: Any) -> bool:
    """Return whether ``thing`` behaves like a pandas frame, or is a HuggingFace dataset of single values."""
    if is_hub_dataset(thing):
        return not any(holds_arrays(thing, name) for name in thing.column_names)
    return hasattr(thing, "iloc") and hasattr(thing, "columns")


def holds_tables(data: object) -> bool:
    """Return whether ``data`` are or contain tables."""
    return _holds(is_table, data)


def holds_hub_datasets(data: object) -> bool:
    """Return whether ``data`` are or contain HuggingFace datasets."""
    return _holds(lambda each: is_hub_dataset(each.dataset if isinstance(each, LazyDataset) else each), data)


def _holds(kind: Callable[[Any], bool], data: object) -> bool:
    if isinstance(data, Mapping):
        return any(_holds(kind, each) for each in data.values())
    return any(_holds(kind, each) for each in data) if isinstance(data, tuple | list) else kind(data)


def is_whole(data: object) -> bool:
    """Return whether ``data`` is a table or HuggingFace dataset of all clients, or has one of these per split."""
    parts = data.values() if isinstance(data, Mapping) else [data]
    named = not isinstance(data, Mapping) or (bool(data) and set(data) <= set(SPLITS))
    return named and all(is_table(part) or is_hub_dataset(part) for part in parts)


def require_column(data: object, reading: ReadOptions) -> None:
    """Raise :class:`UsageError` if no option names the column of ``data`` with the client of each row."""
    if reading.client_column is None and reading.schema is None:
        raise UsageError(
            f"data is one {type(data).__name__} of all clients: say which column holds the client of each row "
            "({}), or give a dictionary, {client: data}",
            Ref("client_column"),
        )


def refuse_column(reading: ReadOptions) -> None:
    """Raise :class:`UsageError` if a column of clients is named for data that are a dictionary by client."""
    if reading.client_column is not None and reading.schema is None:
        raise UsageError(
            f"client_column={reading.client_column!r}: data is a dictionary by client already: leave it out"
        )


def require_names(clients: Mapping[Any, Any]) -> None:
    """Raise :class:`UsageError` unless all clients are named by texts."""
    for name in clients:
        if not isinstance(name, str):
            raise UsageError(f"the client {name!r} of data is named by a {type(name).__name__}: give a text")
