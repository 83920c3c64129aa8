"""Tables in memory: pandas frames and HuggingFace datasets of single values, read like table files.

One frame has all clients, in a column; or each client has one, or one for each split. Objects are recognized by their
attributes; HuggingFace's library is not imported here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from ...utils.errors import UsageError
from ..agreement import refuse_other_class_names
from ..arrays import list_class_names
from ..files.read_options import ReadOptions
from ..scan import SPLITS, Scan, choose_clients
from . import tables
from .arrays import NAME, hold_all_clients, holds_tables, is_table

holds = "tables in memory"
options = tables.options
load = tables.load

SPLIT = "split"
"""Name of the column that is added to tables given in parts."""


def can_read(source: object) -> bool:
    """Return whether ``source`` is a frame or a dataset of single values, or contains some by client or split."""
    return (isinstance(source, Mapping) or is_table(source)) and holds_tables(source)


def scan(source: Any, reading: ReadOptions) -> Scan:
    """Return the clients in ``source``."""
    if hold_all_clients(source, reading):
        frames = {"data": source}
    else:
        frames = {name: source[name] for name in choose_clients(source, reading)}
        reading = replace(reading, client_column=None)
    parts = {name: _name_parts(name, given) for name, given in frames.items()}
    meant = {f"{name}, {split} data" if split else name: list_class_names(part, reading.target)
             for name, own in parts.items() for split, part in own.items()}  # fmt: skip
    refuse_other_class_names(meant)
    in_parts = [name for name, own in parts.items() if "" not in own]
    if in_parts and reading.split_column is not None:
        raise UsageError(
            f"split_column={reading.split_column!r}: client {in_parts[0]!r} is given in parts already, "
            f"{', '.join(parts[in_parts[0]])}: leave it out"
        )
    opened = [tables.Table(Path(f"{name}.DataFrame"), _join(name, own)) for name, own in parts.items()]
    reading = replace(reading, split_column=SPLIT) if in_parts else reading
    if reading.schema is not None and reading.client_column not in opened[0].names:
        reading = replace(reading, client_column=None)
    return tables.scan_tables(opened, NAME, reading)


def _name_parts(name: str, given: Any) -> dict[str, Any]:
    """Return the tables of a client by split; the name of a single one is empty."""
    if is_table(given):
        return {"": given}
    parts = dict(given) if isinstance(given, Mapping) else dict(zip(("train", "test"), given, strict=False))
    if not isinstance(given, Mapping | tuple | list) or len(parts) != len(given) or not set(parts) <= set(SPLITS):
        raise UsageError(
            f"client {name!r}: give a frame, two, (train, test), or a dictionary of train, validation, test"
        )
    return parts


def _join(name: str, parts: Mapping[str, Any]) -> pa.Table:
    """Return the tables of a client as one, with a column of splits if there are several."""
    found = []
    for split, given in parts.items():
        told = f"{name}, {split}" if split else name
        frame = (given.to_pandas() if hasattr(given, "to_pandas") else given).rename(columns=str)
        twice = [column for column, count in Counter(frame.columns).items() if count > 1]
        if twice:
            raise UsageError(f"{told}: two columns are called {twice[0]!r}: names must differ; rename one")
        if split and SPLIT in frame:
            raise UsageError(f"{told}: column {SPLIT!r} is named as the parts are: give it another name")
        try:
            table = pa.Table.from_pandas(frame.apply(_simplify), preserve_index=False)
        except (pa.ArrowException, TypeError) as error:
            reasons = "; ".join(map(str, error.args))
            raise UsageError(f"{told}: {reasons}: give each column values of one type") from error
        found.append(table.append_column(SPLIT, pa.array([split] * len(table), pa.string())) if split else table)
    try:
        return pa.concat_tables(found, promote_options="permissive")
    except pa.ArrowException as error:
        raise UsageError(f"client {name!r}: its parts cannot be put together: {error}") from error


def _simplify(column: Any) -> Any:
    """Return a series as Arrow takes it: dense if it is sparse, and intervals as categories."""
    if isinstance(column.dtype, pd.SparseDtype):
        return column.sparse.to_dense()
    categories = getattr(column.dtype, "categories", column)
    return column.astype(str).astype("category") if isinstance(categories.dtype, pd.IntervalDtype) else column
