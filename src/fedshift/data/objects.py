"""Federations from objects in memory: dictionaries of arrays and datasets, pandas frames, HuggingFace datasets.

Objects of pandas and HuggingFace are recognized by their attributes; neither library is imported here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

from ..utils.errors import UsageError
from .agreement import refuse_other_class_names
from .arrays import is_hub_dataset, list_class_names
from .assembly import assemble
from .federation import Federation
from .files.read_options import ReadOptions
from .files.table_schema import BATCH_CELLS, TableFile
from .files.tables import SPLITS, read_opened_tables
from .readers import arrays, hub
from .readers._objects import NAME, is_table, is_whole, refuse_column, require_column, require_names
from .scan import choose_clients

SPLIT = "split"
"""Name of the column that is added to tables given in parts."""
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


def read_objects(data: object, reading: ReadOptions) -> Federation:
    """Return the federation of the clients in ``data``, which has one of the :data:`FORMS`.

    Frames are read like table files, see :func:`fedshift.data.files.tables.read_tables`.
    """
    for reader in (arrays, hub):
        if reader.can_read(data):
            return assemble(reader, reader.scan(data, reading), reading)
    if is_whole(data):
        require_column(data, reading)
        _refuse_other_classes({"data": data}, reading)
        table = _open_table("data", data, reading)
        if reading.like is not None and reading.client_column not in table.types:
            reading = replace(reading, client_column=None)
        return _read_tables([table], reading)
    if not isinstance(data, Mapping):
        raise UsageError(f"data of type {type(data).__name__}: give {FORMS}")
    refuse_column(reading)
    require_names(data)
    clients = {name: data[name] for name in choose_clients(data, reading)}
    _refuse_other_classes(clients, reading)
    tables = [_open_table(name, given, reading) for name, given in clients.items()]
    return _read_tables(tables, replace(reading, client_column=None))


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
