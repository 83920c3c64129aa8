"""Federations from objects in memory: dictionaries of arrays and datasets, pandas frames, HuggingFace datasets.

Objects of pandas and HuggingFace are recognized by their attributes; neither library is imported here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import override

from ..utils.errors import UsageError, unknown_name
from ..utils.random_streams import stream
from .agreement import refuse_other_class_names
from .arrays import LazyDataset, holds_arrays, is_hub_dataset, list_class_names, read_part
from .federation import Federation, federation
from .files.read_options import ReadOptions
from .files.table_schema import BATCH_CELLS, TableFile
from .files.tables import SPLITS, read_opened_tables
from .partition import split_stratified

NAME, SPLIT = "own data", "split"
"""Name of the federation, and name of the column that is added to tables given in parts."""
FORMS = (
    "a name, a directory, a Federation, {client: (x_train, y_train, x_test, y_test)}, {client: (train, test)} with "
    "torch or HuggingFace datasets or pandas frames, or one frame or HuggingFace dataset with client_column"
)
"""Supported kinds of data objects."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _TableInMemory(TableFile):
    """A frame in place of a file; ``path`` is its name in messages. ``in_parts``: its split column was added."""

    table: pa.Table
    in_parts: bool

    @override
    def pieces(self, columns: Sequence[str], together: int = 8) -> Iterator[tuple[int, pa.RecordBatch]]:
        for at in range(0, len(columns), together):
            names, row = list(columns[at : at + together]), 0
            for batch in self.table.select(names).to_batches(max(1, BATCH_CELLS // len(names))):
                yield row, batch
                row += batch.num_rows


def is_frame(thing: object) -> bool:
    """Return whether ``thing`` behaves like a ``pandas.DataFrame``."""
    return hasattr(thing, "iloc") and hasattr(thing, "columns")


def is_table(thing: Any) -> bool:
    """Return whether ``thing`` is a frame, or a HuggingFace dataset of single values."""
    if is_hub_dataset(thing):
        return not any(holds_arrays(thing, name) for name in thing.column_names)
    return is_frame(thing)


def holds_tables(data: object) -> bool:
    """Return whether ``data`` are or contain tables, to which the settings for reading tables apply."""
    if isinstance(data, Mapping):
        return any(map(holds_tables, data.values()))
    return any(map(is_table, data)) if isinstance(data, tuple | list) else is_table(data)


def holds_hub_datasets(data: object) -> bool:
    """Return whether ``data`` are or contain HuggingFace datasets."""
    if isinstance(data, Mapping):
        return any(map(holds_hub_datasets, data.values()))
    if isinstance(data, tuple | list):
        return any(map(holds_hub_datasets, data))
    return is_hub_dataset(data.dataset if isinstance(data, LazyDataset) else data)


def read_objects(data: object, reading: ReadOptions) -> Federation:
    """Return the federation of the clients in ``data``, which has one of the :data:`FORMS`.

    Frames are read like table files, see :func:`fedshift.data.files.tables.read_tables`. Images and arrays of a
    HuggingFace dataset with a client column are split by ``test_fraction`` like image files, unless it is a
    ``DatasetDict``.
    """
    if _is_whole(data):
        return _read_whole(data, reading)
    if not isinstance(data, Mapping):
        raise UsageError(f"data of type {type(data).__name__}: give {FORMS}")
    if reading.client_column is not None and reading.like is None:
        raise UsageError(
            f"client_column={reading.client_column!r}: data is a dictionary by client already: leave it out"
        )
    for name in data:
        if not isinstance(name, str):
            raise UsageError(f"the client {name!r} of data is named by a {type(name).__name__}: give a text")
    for name in reading.domains or ():
        if name not in data:
            raise unknown_name("domain", name, data)
    clients = {name: data[name] for name in reading.domains or data}
    if not holds_tables(clients):
        return federation(clients, name=NAME, classes=reading.classes, target=reading.target, task=reading.task)
    _refuse_other_classes(clients, reading)
    tables = [_open_table(name, given, reading) for name, given in clients.items()]
    return _read_tables(tables, replace(reading, client_column=None))


def _is_whole(data: object) -> bool:
    """Return whether ``data`` is a table or HuggingFace dataset with all clients, or has one of these per split."""
    if isinstance(data, Mapping):
        return (
            bool(data)
            and set(data) <= set(SPLITS)
            and all(is_table(part) or is_hub_dataset(part) for part in data.values())
        )
    return is_table(data) or is_hub_dataset(data)


def _read_whole(data: Any, reading: ReadOptions) -> Federation:
    """Return the federation of data that contain all clients, or one client that joins others."""
    if reading.client_column is None and reading.like is None:
        raise UsageError(
            f"data is one {type(data).__name__} of all clients: say which column holds the client of each row "
            "(--client-column), or give a dictionary, {client: data}"
        )
    if holds_tables(data):
        _refuse_other_classes({"data": data}, reading)
        table = _open_table("data", data, reading)
        if reading.like is not None and reading.client_column not in table.types:
            reading = replace(reading, client_column=None)
        return _read_tables([table], reading)
    return _group_samples(data if isinstance(data, Mapping) else {"": data}, reading)


def _refuse_other_classes(tables: Mapping[str, Any], reading: ReadOptions) -> None:
    """Refuse tables of HuggingFace whose labels do not mean the same, as their numbers alone are read."""
    meant = {}
    for name, given in tables.items():
        parts = dict(zip(("train", "test"), given, strict=False)) if isinstance(given, tuple | list) else given
        for split, part in (parts if isinstance(parts, Mapping) else {"": parts}).items():
            meant[f"{name}, {split} data" if split else name] = list_class_names(part, reading.target)
    refuse_other_class_names(meant)


def _open_table(name: str, given: Any, reading: ReadOptions) -> _TableInMemory:
    """Return a table, or the tables of its splits as one table with a split column."""
    if is_table(given):
        table = _to_arrow(name, given)
    else:
        parts = given if isinstance(given, Mapping) else dict(zip(("train", "test"), given, strict=False))
        if not isinstance(given, Mapping | tuple | list) or len(parts) != len(given) or not set(parts) <= set(SPLITS):
            raise UsageError(
                f"client {name!r}: give a frame, two, (train, test), or a dictionary of train, validation, test"
            )
        if reading.split_column is not None:
            raise UsageError(
                f"split_column={reading.split_column!r}: client {name!r} is given in parts already, "
                f"{', '.join(parts)}: leave it out"
            )
        found = {split: _to_arrow(f"{name}, {split}", part) for split, part in parts.items()}
        for split, part in found.items():
            if SPLIT in part.column_names:
                raise UsageError(f"{name}, {split}: column {SPLIT!r} is named as the parts are: give it another name")
        whole = [part.append_column(SPLIT, pa.array([split] * len(part), pa.string())) for split, part in found.items()]
        try:
            table = pa.concat_tables(whole, promote_options="permissive")
        except pa.ArrowException as error:
            raise UsageError(f"client {name!r}: its parts cannot be put together: {error}") from error
    types = dict(zip(table.schema.names, table.schema.types, strict=True))
    return _TableInMemory(path=Path(f"{name}.DataFrame"), types=types, table=table, in_parts=not is_table(given))


def _read_tables(tables: Sequence[_TableInMemory], reading: ReadOptions) -> Federation:
    in_parts = any(table.in_parts for table in tables)
    return read_opened_tables(tables, NAME, replace(reading, split_column=SPLIT) if in_parts else reading)


def _to_arrow(name: str, given: Any) -> pa.Table:
    """Return a frame, or a HuggingFace dataset of single values, as an Arrow table."""
    frame = given.to_pandas() if is_hub_dataset(given) else given
    frame = frame.rename(columns=str)
    twice = [column for column, count in Counter(frame.columns).items() if count > 1]
    if twice:
        raise UsageError(f"{name}: two columns are called {twice[0]!r}: names must differ; rename one")
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except pa.ArrowException as error:
        raise UsageError(f"{name}: {'; '.join(map(str, error.args))}: give each column values of one type") from error


def _group_samples(parts: Mapping[str, Any], reading: ReadOptions) -> Federation:
    """Return the federation of HuggingFace datasets with a client column, by split (``""``: all in one)."""
    column = str(reading.client_column)
    samples: dict[str, dict[str, tuple[Any, Any]]] = {}
    meant = {f"{split} data": list_class_names(data, reading.target, [column]) for split, data in parts.items()}
    refuse_other_class_names(meant)
    for split, data in parts.items():
        where = f"data, {split} data" if split else "data"
        if column not in data.column_names:
            raise unknown_name("column", column, data.column_names)
        x, y = (np.asarray(values) for values in read_part(data, where, reading.target, skip=[column]))
        owners = np.array([str(name) for name in data[column]])
        for client in np.unique(owners).tolist():
            samples.setdefault(client, {})[split] = x[owners == client], y[owners == client]
    for name in reading.domains or ():
        if name not in samples:
            raise unknown_name("domain", name, samples)
    clients = {}
    for client in reading.domains or sorted(samples):
        found = samples[client]
        if "" in found:
            x, y = found.pop("")
            rest, drawn = split_stratified(y, reading.test_fraction, stream(0, "test", client))
            found |= {"train": (x[rest], y[rest]), "test": (x[drawn], y[drawn])}
        clients[client] = found
    return federation(clients, name=NAME, classes=reading.classes)
