"""Tables in memory: pandas frames and HuggingFace datasets of single values, read like table files.

One frame has all clients, in a column; or each client has one, or one for each split. Objects are recognized by their
attributes; neither library is imported here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

from ...utils.errors import UsageError
from ..agreement import refuse_other_class_names
from ..arrays import list_class_names
from ..files.read_options import ReadOptions
from ..files.table_schema import BATCH_CELLS, TableFile
from ..scan import SPLITS, Scan, choose_clients
from . import tables
from .arrays import NAME, holds_tables, is_table, is_whole, refuse_column, require_column, require_names

holds = "tables in memory"
options = tables.options
load = tables.load

SPLIT = "split"
"""Name of the column that is added to tables given in parts."""


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


def can_read(source: object) -> bool:
    """Return whether ``source`` is a frame or a dataset of single values, or contains some by client or split."""
    return (isinstance(source, Mapping) or is_table(source)) and holds_tables(source)


def scan(source: Any, reading: ReadOptions) -> Scan:
    """Return the clients in ``source``."""
    if is_whole(source):
        require_column(source, reading)
        frames = {"data": source}
    else:
        refuse_column(reading)
        require_names(source)
        frames = {name: source[name] for name in choose_clients(source, reading)}
        reading = replace(reading, client_column=None)
    _refuse_other_classes(frames, reading)
    opened = [_open_table(name, given, reading) for name, given in frames.items()]
    if any(table.in_parts for table in opened):
        reading = replace(reading, split_column=SPLIT)
    if reading.schema is not None and reading.client_column not in opened[0].types:
        reading = replace(reading, client_column=None)
    return tables.scan_tables(opened, NAME, reading)


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


def _to_arrow(name: str, given: Any) -> pa.Table:
    """Return a frame, or a HuggingFace dataset of single values, as an Arrow table."""
    frame = given.to_pandas() if hasattr(given, "to_pandas") else given
    frame = frame.rename(columns=str)
    twice = [column for column, count in Counter(frame.columns).items() if count > 1]
    if twice:
        raise UsageError(f"{name}: two columns are called {twice[0]!r}: names must differ; rename one")
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except pa.ArrowException as error:
        raise UsageError(f"{name}: {'; '.join(map(str, error.args))}: give each column values of one type") from error
