"""Tables with a column of labels: one table whose column names the clients, or a table for each client.

Files are read twice, a batch of rows at a time. The first reading finds who the clients are, which side of the split
each row is on, and the categories of every column of text; the second writes the features into float32 arrays that are
as large as they will be. So little more is held than the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ...utils.errors import UsageError, unknown_name
from ..federation import ClientData, Federation
from ..samples import Samples
from .read_options import Progress, ReadOptions
from .table_columns import (
    Column,
    ColumnContents,
    Floats,
    Ints,
    date_column_error,
    feature_offsets,
    impute,
    infer_column,
    is_number,
    is_text,
    scale,
)
from .table_files import SUFFIXES, TableFile, find_tables, is_table, open_table
from .table_rows import (
    SPLITS,
    ColumnRoles,
    Labels,
    TableRows,
    assign_splits,
    find_classes,
    format_list,
    is_split_column,
    scan_rows,
)
from .table_schema import adopt_column, order_features, without_client_column

TARGETS = ("target", "label", "y", "class", "outcome")
CLIENTS = ("client", "site", "hospital", "center", "institution")


def holds_tables(path: Path) -> bool:
    """Whether ``path`` is a ``.csv``, ``.tsv`` or ``.parquet`` file, or a directory with one; none is opened."""
    return any(is_table(file) for file in (path.iterdir() if path.is_dir() else [path]))


def read_tables(path: Path, reading: ReadOptions) -> Federation:
    """The federation of the ``.csv``, ``.tsv`` or ``.parquet`` table at ``path``, or of the tables in that directory.

    ``reading.target`` names the column of labels. Clients are the values of ``reading.client_column``, or without it
    the files of a directory. Columns are matched by name; all but those that ``reading`` gives a role are features:
    numbers and truth values one, text (at most 50 different values) one for each category. That list of categories,
    sorted, is the union over the clients read, and so the one thing that sites would have to agree on; what is imputed
    (cells that are empty, NaN, NA, N/A, null or ?) and how numbers are scaled follows from each client's own training
    rows. Whole labels 0..K-1 stay as they are, all others are numbered in order.

    Rows are for training, validation or testing as ``reading.split_column`` says (or a column ``split`` of such
    values); without one, ``reading.test_fraction`` of each client's rows are drawn for testing, the same in every run:
    as many of each class, or whole groups of ``reading.group_column``.

    Clients that come to the federation ``reading.like`` are read by its columns and categories; of them, one table may
    be one client, and files without the client column are a client each.

    Samples are float32 ``[N, D]``. Raises :class:`UsageError` naming file, column, client or rows for what cannot be
    used, among it infinite values, dates, and labels that are missing or continuous.
    """
    reading = without_client_column(find_tables(path), reading)
    tables = _open_tables(path, reading)
    roles, notices = _find_roles(tables, reading)
    features = [name for name in tables[0].types if name not in roles.names]
    if not features:
        raise UsageError(f"{tables[0].path} has no column beside {', '.join(roles.names)}: a table needs features")
    features = order_features(tables[0], features, reading.like) if reading.like else features
    rows, seen = scan_rows(tables, roles, {name: _declared_types(name, tables) for name in features}, reading.domains)
    columns, remarks = _encode_columns(features, seen, reading)
    classes, label, class_names = find_classes(rows, roles.target, reading.classes)
    y, ends, place = _arrange_rows(rows, label, roles, reading)
    x = [np.empty((len(labels), feature_offsets(columns)[-1]), dtype=np.float32) for labels in y]
    _fill_features(x, place, rows, columns, reading.progress)
    notices += remarks
    constant = _find_constant(x, columns)
    if constant:
        notices.append(f"the same in all rows, so nothing can be learned from it: {format_list(map(repr, constant))}")
    notices += _impute_and_scale(x, [end[1] for end in ends], rows.names, columns, reading)
    clients = []
    for k, name in enumerate(rows.names):
        parts = {
            split: Samples(x=torch.from_numpy(x[k][first:last]), y=torch.from_numpy(y[k][first:last]))
            for split, first, last in zip(SPLITS, ends[k], ends[k][1:], strict=False)
            if last > first
        }
        clients.append(ClientData(name=name, **parts))
    return Federation(
        name=path.resolve().name if path.is_dir() else path.resolve().stem,
        clients=tuple(clients),
        classes=classes,
        note=f"{sum(map(len, y))} rows of {len(clients)} clients, {len(columns)} columns",
        class_names=class_names,
        notices=tuple(notices),
        columns=tuple(columns),
    )


def _open_tables(path: Path, reading: ReadOptions) -> list[TableFile]:
    """The tables at ``path``, of the clients wanted in their order where each has one; all have the same columns."""
    files = find_tables(path)
    if not files:
        raise UsageError(f"{path} is no table and no directory with one: give files of {', '.join(SUFFIXES)}")
    if reading.client_column is None and len(files) == 1 and reading.like is None:
        names = list(open_table(files[0]).types)
        raise UsageError(
            f"{files[0]} is a single table: say which column holds the client of each row (--client-column), or give "
            f"a directory with a file for each client; {_describe_candidates(names, CLIENTS)}"
        )
    if reading.client_column is None:
        by_stem: dict[str, Path] = {}
        for file in files:
            if by_stem.setdefault(file.stem, file) != file:
                raise UsageError(f"{by_stem[file.stem]} and {file} are both of client {file.stem!r}: keep one")
        for name in reading.domains or ():
            if name not in by_stem:
                raise unknown_name("domain", name, by_stem)
        files = [by_stem[name] for name in reading.domains] if reading.domains else files
    tables = [open_table(file) for file in files]
    for table in tables:
        for one, other in ((table, tables[0]), (tables[0], table)):
            lacking = [name for name in other.types if name not in one.types]
            if lacking:
                raise UsageError(
                    f"{one.path} has no column {lacking[0]!r}, which {other.path} has: all files need the same columns"
                )
    return tables


def _find_roles(tables: Sequence[TableFile], reading: ReadOptions) -> tuple[ColumnRoles, list[str]]:
    names, notices = list(tables[0].types), []
    if reading.target is None:
        raise UsageError(
            f"{tables[0].path}: say which column holds the label (--target); {_describe_candidates(names, TARGETS)}"
        )
    roles = ColumnRoles(
        target=reading.target, client=reading.client_column, split=reading.split_column, group=reading.group_column
    )
    for name, count in Counter(roles.names).items():
        if name not in names and reading.like:
            raise UsageError(
                f"{tables[0].path} has no column {name!r}, by which {reading.like.name!r}, the data that it joins, was "
                f"read: call it so; columns are {', '.join(names)}"
            )
        if name not in names:
            raise unknown_name("column", name, names)
        if count > 1:
            raise UsageError(f"column {name!r} is named for {count} purposes: target, client, split and group differ")
        nested = [table for table in tables if pa.types.is_nested(table.types[name])]
        if nested:
            raise UsageError(
                f"{nested[0].path}: column {name!r} holds {nested[0].types[name]}: give it one value a row"
            )
    if roles.split is None and "split" in names and "split" not in roles.names and is_split_column(tables):
        roles = replace(roles, split="split")
        notices = ["column 'split' says which rows are for training, validation and testing"]
    return roles, notices


def _describe_candidates(names: Sequence[str], usual: Sequence[str]) -> str:
    likely = [name for name in names if name.lower() in usual]
    return (f"perhaps {likely[0]!r}; " if likely else "") + f"columns are {', '.join(names)}"


def _declared_types(name: str, tables: Sequence[TableFile]) -> ColumnContents:
    """What the types that files declare say of a feature."""
    types = [table.types[name] for table in tables]
    for table, kind in zip(tables, types, strict=True):
        if pa.types.is_temporal(kind):
            raise date_column_error(name, f"{kind} in {table.path}")
        if not (is_text(kind) or is_number(kind)):
            raise UsageError(f"{table.path}: column {name!r} holds {kind}, neither numbers nor text: leave it out")
    return ColumnContents(
        typed=any(is_number(kind) and not pa.types.is_null(kind) for kind in types),
        declared=any(pa.types.is_dictionary(kind) for kind in types),
    )


def _encode_columns(
    features: Sequence[str], seen: Mapping[str, ColumnContents], reading: ReadOptions
) -> tuple[list[Column], list[str]]:
    """How each column becomes features, and notices; as those of ``reading.like`` do, where it has columns."""
    if reading.like and reading.like.columns:
        return [adopt_column(column, seen[column.name], reading.like) for column in reading.like.columns], []
    found = [infer_column(name, seen[name]) for name in features]
    return [column for column, _ in found], [notice for _, notice in found if notice]


def _arrange_rows(
    rows: TableRows, label: Labels, roles: ColumnRoles, reading: ReadOptions
) -> tuple[list[Labels], list[list[int]], Ints]:
    """Of each client the labels in the order of :data:`SPLITS`, and where each begins (and the last ends).

    Third, the place of each row in its client's arrays.
    """
    y, ends, place = [], [], np.full(len(rows.client), -1, dtype=np.int32)
    order = np.argsort(rows.client, kind="stable")
    for here in np.split(order, np.searchsorted(rows.client, range(len(rows.names)), sorter=order))[1:]:
        labels = label[rows.codes[roles.target][here]]
        side = assign_splits(rows, here, labels, roles, reading.test_fraction)
        by_side = np.argsort(side, kind="stable")
        place[here[by_side]] = np.arange(len(here))
        y.append(labels[by_side])
        ends.append(np.searchsorted(side[by_side], range(len(SPLITS) + 1)).tolist())
    return y, ends, place


def _fill_features(
    x: Sequence[Floats], place: Ints, rows: TableRows, columns: Sequence[Column], progress: Progress | None
) -> None:
    """The second reading: every feature of every wanted row to its ``place`` in its client's array."""
    names, begin = [column.name for column in columns], feature_offsets(columns)
    top, done = 0, 0
    for table, count in rows.files.items():
        for first, batch in table.pieces(names):
            left = names.index(batch.schema.names[0])
            span = slice(begin[left], begin[left + batch.num_columns])
            block = np.empty((batch.num_rows, span.stop - span.start), dtype=np.float32)
            for k, cells in enumerate(batch.columns, start=left):
                columns[k].fill(cells, block[:, begin[k] - span.start : begin[k + 1] - span.start])
            here = slice(top + first, top + first + batch.num_rows)
            client = rows.client[here]
            infinite = np.argwhere(np.isinf(block) & (client[:, None] >= 0))
            if len(infinite):
                at = infinite[0, 1]
                name = names[int(np.searchsorted(begin, span.start + at, side="right")) - 1]
                raise UsageError(
                    f"{rows.describe_location(here.start + infinite[infinite[:, 1] == at, 0])}: an infinite value in column "
                    f"{name!r} (or one beyond float32): correct it, or leave it empty to have it imputed"
                )
            order = np.argsort(client, kind="stable")
            for mine in np.split(order, np.flatnonzero(np.diff(client[order])) + 1):
                if client[mine[0]] >= 0:
                    x[client[mine[0]]][place[here][mine], span] = block[mine]
            done += batch.num_rows * batch.num_columns
            if progress is not None:
                progress("values", done, len(rows.client) * len(columns))
        top += count


def _find_constant(x: Sequence[Floats], columns: Sequence[Column]) -> list[str]:
    """Names of the columns that have one value in all rows where they have any."""
    least = np.fmin.reduce([np.fmin.reduce(part) for part in x])
    most = np.fmax.reduce([np.fmax.reduce(part) for part in x])
    spans = [
        (column.name, slice(at, at + column.width))
        for column, at in zip(columns, feature_offsets(columns), strict=False)
    ]
    return [name for name, span in spans if (least[span] == most[span]).all()]


def _impute_and_scale(
    x: Sequence[Floats], train: Sequence[int], names: Sequence[str], columns: Sequence[Column], reading: ReadOptions
) -> list[str]:
    """Impute and scale each client's array by its first ``train`` rows, in place; notices of what was imputed."""
    filled: list[str] = []
    empty: dict[str, list[str]] = {}
    for part, count, name in zip(x, train, names, strict=True):
        if reading.missing == "refuse":
            _refuse_missing(part, name, columns)
        imputed, without = impute(part, count, columns)
        filled += [f"{name} {imputed}"] if imputed else []
        for column in without:
            empty.setdefault(column, []).append(name)
        numeric = [
            at
            for column, at in zip(columns, feature_offsets(columns), strict=False)
            if column.categories is None and column.name not in without
        ]
        if reading.scaling == "client" and numeric:
            scale(part, count, numeric)
    notices = [
        f"column {column!r} has no value in the training rows of {format_list(map(repr, clients))}: it is 0 in all "
        "their rows"
        for column, clients in empty.items()
    ]
    if filled:
        notices.append(
            "missing values imputed from each client's own training rows (median, or most frequent category): "
            + format_list(filled)
        )
    return notices


def _refuse_missing(x: Floats, client: str, columns: Sequence[Column]) -> None:
    for column, at in zip(columns, feature_offsets(columns), strict=False):
        missing = int(np.isnan(x[:, at]).sum())
        if missing:
            raise UsageError(
                f"client {client!r} has no value of {column.name!r} in {missing} of {len(x)} rows: fill them in, leave "
                "the column out, or have them imputed from the client's training rows (--missing impute)"
            )
