"""Federations from tables: one table with a column of clients, or one table per client.

Files are read twice, in batches of rows. The first pass finds each row's client, label and split, and the categories of
every text column; the second writes the features into float32 arrays of their final size. Little more than the result
is ever in memory.

Columns are matched by name. All columns are features unless they have a role or are ignored: a number or Boolean is
one feature, text (at most 50 distinct values) is one feature per category. The list of categories is the sorted union
over the clients read. Missing values (cells that are empty, NaN, NA, N/A, null or ?, among numbers also -, . and words
such as unknown) are filled, and numbers scaled, based on each client's training rows. Integer labels 0..K-1 keep their
value; all others are numbered in order.

``target`` is the label column or, if ``task`` is not classification, the columns of labels or numbers, separated by
commas. Clients are the values of ``client_column`` or, without it, the files of a directory. The split is given by
``split_column`` (or by a column ``split`` whose values are all in :data:`SIDES`). Clients that join others (``schema``)
are read with their columns and categories; a single table may then be one client, and files without the client
column are one client each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...tasks import CLASSIFICATION, Classification, Task
from ...utils.errors import Ref, UsageError, unknown_name
from ...utils.words import Information, join_some
from ..agreement import refuse_other_labels
from ..columns import CODES, TRUTHS, Column, Holds
from ..files import table_schema as schema
from ..files.read_options import Progress, ReadOptions
from ..files.table_schema import ColumnContents, Floats, Ints, TableFile
from ..partition import may_match
from ..preparation import FeatureScaling
from ..samples import digest_each
from ..scan import SPLITS, UNSAID, Assign, Loaded, Part, Scan, Sides, choose_clients

TARGETS = ("target", "label", "y", "class", "outcome")
CLIENTS = ("client", "site", "hospital", "center", "institution")
holds = "tables"
options = frozenset(
    {"test_fraction", "client_column", "target", "split_column", "ignore_columns", "groups", "missing", "scaling"}
)

SIDES = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
"""Values of a split column (case-insensitive), and the index in :data:`~fedshift.data.scan.SPLITS` of each."""
MOST_CLASSES = 100

Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class TableRows:
    """The N rows of all files, in order, with the values of role columns as integer codes.

    Attributes:
        names: Names of the clients to read.
        client: Index in ``names`` of each row's client ``[N]``; -1 if the client is not read.
        codes: By column, the code of each row's value ``[N]``; -1 if it is missing.
        values: By column, the values of the codes 0, 1, ....
        files: Each file and its number of rows.

    """

    names: list[str]
    client: Ints
    codes: dict[str, Ints]
    values: dict[str, list[str]]
    files: dict[TableFile, int]

    def describe_location(self, rows: NDArray[np.intp]) -> str:
        """Return the file and row numbers (from 1) of ``rows``, in ascending order; only rows of the first file."""
        ends = np.cumsum(list(self.files.values()))
        place = int(np.searchsorted(ends, rows[0], side="right"))
        table, count = list(self.files.items())[place]
        here = rows[rows < ends[place]] - ends[place] + count + 1
        return f"{table.path}, data row{'s' * (len(here) > 1)} {join_some(map(str, here))}"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Contents:
    """All rows, the encodings of the columns, and what is known of each."""

    rows: TableRows
    columns: Sequence[Column]
    seen: Mapping[str, ColumnContents]


class _Codes:
    """Distinct values of a column over all files, numbered by first occurrence, and the code of each row."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.parts: list[Ints] = []

    def add(self, cells: pa.Array) -> None:
        """Add the next rows of the column."""
        encoded = (schema.clean_texts(cells) if schema.is_text(cells.type) else cells).dictionary_encode()
        numbers = [
            -1 if value is None or value != value else self.places.setdefault(str(value), len(self.places))
            for value in encoded.dictionary.to_pylist()
        ]
        self.parts.append(np.array([*numbers, -1], dtype=np.int32)[encoded.indices.fill_null(-1).to_numpy()])


def can_read(source: object) -> bool:
    """Return whether ``source`` is a ``.csv``, ``.tsv`` or ``.parquet`` file or a directory with one."""
    return isinstance(source, Path) and bool(schema.find_tables(source))


def scan(source: Path, reading: ReadOptions) -> Scan:
    """Return the clients of the table at ``source``, or of the tables in that directory.

    Raises :class:`UsageError` if the data cannot be used, for example because of infinite values, dates, or labels that
    are missing or continuous. The message names file, column, client or rows.
    """
    files = schema.find_tables(source)
    column = reading.client_column
    if reading.schema is not None and column is not None and files and column not in schema.open_table(files[0]).types:
        reading = replace(reading, client_column=None)
    tables = _open_tables(source, files, reading)
    return scan_tables(tables, source.resolve().name if source.is_dir() else source.resolve().stem, reading)


def scan_tables(tables: Sequence[TableFile], name: str, reading: ReadOptions) -> Scan:
    """Return the clients of ``tables`` as the data ``name``; refuse tables with other columns."""
    ignored = reading.ignored
    if not reading.schema:
        for column in ignored:
            if not any(column in table.types for table in tables):
                raise unknown_name("column", column, tables[0].types).about("ignore_columns")
    for table in tables:
        for one, other in ((table, tables[0]), (tables[0], table)):
            lacking = [name for name in other.types if name not in one.types and name not in ignored]
            if lacking:
                raise UsageError(
                    f"{one.path} has no column {lacking[0]!r}, which {other.path} has: all files need the same "
                    "columns; rename it, or leave it out ({})",
                    Ref(ignore_columns=lacking[0]),
                )
    reading, notices = _check_roles(tables, reading)
    roles = reading.role_columns
    features = [name for name in tables[0].types if name not in roles and name not in ignored]
    if not features:
        raise UsageError(
            f"{tables[0].path} has no column except {', '.join([*roles, *ignored])}: a table needs features"
        )
    if reading.schema and reading.schema.only is not None:
        features = schema.choose_features(tables[0], features, reading.schema.only)
    if reading.schema:
        features = schema.match_features(tables[0], features, reading.schema.columns, reading.schema.name)
    declared = {name: schema.read_declared_types(name, tables) for name in features}
    rows, seen = _scan_rows(tables, reading, declared)
    if reading.schema and reading.schema.columns:
        columns = [
            schema.match_column(column, seen[column.name], f"{reading.schema.name!r}, the data that it joins")
            for column in reading.schema.columns
        ]
        remarks = []
    else:
        inferred = [schema.infer_column(name, seen[name]) for name in features]
        columns, remarks = [column for column, _ in inferred], [notice for _, notice in inferred if notice]
    task = reading.task or CLASSIFICATION
    y, classes, class_names = _read_targets(rows, task, reading)
    parts = [_make_part(rows, y, client, reading) for client in range(len(rows.names))]
    note = f"{{samples}} rows of {{clients}} clients, {len(columns)} columns"
    return Scan(
        name=name, parts=tuple(parts), task=task, classes=classes, class_names=class_names, note=note,
        notices=(*notices, *remarks), source=_Contents(rows=rows, columns=columns, seen=seen),
    )  # fmt: skip


def load(scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
    """Return the features of each client's rows, float32 ``[N, D]``, filled and scaled by its training rows."""
    rows, columns, seen = scan.source.rows, scan.source.columns, scan.source.seen
    order = np.concatenate([part.source for part in scan.parts])
    place = np.full(len(rows.client), -1, dtype=np.int32)
    place[order] = np.arange(len(order))
    x = np.empty((len(order), schema.feature_offsets(columns)[-1]), dtype=np.float32)
    _fill_features(x, place, rows, columns, reading.progress)
    columns = [
        _describe_numbers(column, x[:, span], seen[column.name], rows, order)
        for column, span in schema.feature_slices(columns)
    ]
    same = np.fmin.reduce(x) == np.fmax.reduce(x)
    constant = [repr(column.name) for column, features in schema.feature_slices(columns) if same[features].all()]
    notices = []
    if constant:
        notices.append(f"the same in all rows, so nothing can be learned from it: {join_some(constant)}")
    stores = np.split(x, np.cumsum([len(part.rows) for part in scan.parts])[:-1])
    train = [np.flatnonzero(assign(part, ()) == SPLITS.index("train")) for part in scan.parts]
    clients = {part.client: (store, rows) for part, store, rows in zip(scan.parts, stores, train, strict=True)}
    source = {part.client: part.source for part in scan.parts}
    remarks, scalings = _impute_and_scale(
        clients, columns, reading, lambda name, row: rows.describe_location(source[name][row : row + 1])
    )
    return Loaded(
        stores=[torch.from_numpy(store) for store in stores],
        normalizations=scalings,
        columns=tuple(columns),
        notices=(*notices, *remarks),
    )


def _make_part(rows: TableRows, y: Tensor, client: int, reading: ReadOptions) -> Part:
    """Return the rows of one client."""
    here, name = np.flatnonzero(rows.client == client), rows.names[client]
    group = np.empty(0, np.str_)
    if reading.groups:
        group = np.array(rows.values[reading.groups])[rows.codes[reading.groups][here]]
    return Part(
        client=name, where=f"client {name!r}", y=y[torch.from_numpy(here)], side=_read_sides(rows, here, reading),
        rows=np.arange(len(here)), group=group, source=here,
    )  # fmt: skip


def _open_tables(path: Path, files: Sequence[Path], reading: ReadOptions) -> list[TableFile]:
    """Return the opened ``files``, in the order of the requested clients if each client has a file."""
    if reading.client_column is None:
        if len(files) == 1 and reading.schema is None:
            names = list(schema.open_table(files[0]).types)
            raise UsageError(
                f"{files[0]} is a single table: say which column holds the client of each row ({{}}), or "
                f"give a directory with a file for each client; {_describe_candidates(names, CLIENTS)}",
                Ref("client_column"),
            )
        by_stem: dict[str, Path] = {}
        for file in files:
            if by_stem.setdefault(file.stem, file) != file:
                raise UsageError(f"{by_stem[file.stem]} and {file} are both of client {file.stem!r}: keep one")
        files = [by_stem[name] for name in choose_clients(by_stem, reading)] if reading.domains else files
    return [schema.open_table(file) for file in files]


def _check_roles(tables: Sequence[TableFile], reading: ReadOptions) -> tuple[ReadOptions, list[str]]:
    """Check the columns with a role; return ``reading``, with the split column if one was found, and notices."""
    names = list(tables[0].types)
    if reading.target is None:
        raise UsageError(
            f"{tables[0].path}: say which column holds the label ({{}}); {_describe_candidates(names, TARGETS)}",
            Ref("target"),
        )
    roles = reading.role_columns
    for name, count in Counter(roles + [name for name in reading.ignored if name in roles]).items():
        if name not in names and reading.schema:
            raise UsageError(
                f"{tables[0].path} has no column {name!r} of {reading.schema.name!r}, the data that it joins: "
                f"rename a column; columns are {', '.join(names)}"
            )
        if name not in names:
            raise unknown_name("column", name, names)
        if count > 1:
            raise UsageError(
                f"column {name!r} is named for {count} purposes: target, client, split, group and ignored "
                "columns differ"
            )
        nested = [table for table in tables if pa.types.is_nested(table.types[name])]
        if nested:
            raise UsageError(
                f"{nested[0].path}: column {name!r} holds {nested[0].types[name]}: give it one value a row"
            )
    notices: list[str] = [
        Information(f"{table.path}: semicolons separate its columns, and a comma in a number is its decimal point")
        for table in tables
        if table.semicolons
    ]
    free = "split" in names and "split" not in (*roles, *reading.ignored)
    if reading.split_column is None and free and _is_split_column(tables):
        notices.append(Information("column 'split' assigns rows to training, validation and testing"))
        reading = replace(reading, split_column="split")
    return reading, notices


def _describe_candidates(names: Sequence[str], usual: Sequence[str]) -> str:
    likely = [name for name in names if name.lower() in usual]
    return (f"perhaps {likely[0]!r}; " if likely else "") + f"columns are {', '.join(names)}"


def _is_split_column(tables: Sequence[TableFile]) -> bool:
    """Return whether every value in column ``split`` of every file is in :data:`SIDES`."""
    for table in tables:
        for batch in table.batches(["split"]):
            codes = _Codes()
            codes.add(batch.column("split"))
            if not codes.places or not {value.lower() for value in codes.places} <= SIDES.keys():
                return False
    return True


def _scan_rows(
    tables: Sequence[TableFile], reading: ReadOptions, seen: Mapping[str, ColumnContents]
) -> tuple[TableRows, dict[str, ColumnContents]]:
    """Read the columns with roles and the text columns; return all rows and the contents of the feature columns.

    Raises :class:`UsageError` for unknown clients, files without rows, and rows without a value in a column with a
    role.
    """
    roles, domains, client_column = reading.role_columns, reading.domains, reading.client_column
    codes, known, files = {name: _Codes() for name in roles}, dict(seen), dict.fromkeys(tables, 0)
    is_wanted = cache(partial(may_match, patterns=domains or ""))
    for table in tables:
        text = [name for name in seen if schema.is_text(table.types[name])]
        for batch in table.batches([*roles, *text]):
            numbers = 1 + files[table] + np.arange(batch.num_rows)
            files[table] += batch.num_rows
            for name in roles:
                codes[name].add(batch.column(name))
            labels = list(codes[roles[0]].places)
            if len(labels) > MOST_CLASSES and (reading.task or CLASSIFICATION) == CLASSIFICATION:
                raise UsageError(
                    f"target {reading.target!r} has more than {MOST_CLASSES} different values (such as "
                    f"{', '.join(labels[:3])}), so it is a measurement or an identifier, and no class: "
                    "group its values into classes, name another column ({}), or learn numbers ({})",
                    Ref("target"),
                    Ref(task="regression"),
                )
            if client_column and domains is not None:
                wanted = [code for name, code in codes[client_column].places.items() if is_wanted(name)]
                read = np.isin(codes[client_column].parts[-1], wanted)
                batch, numbers = batch.filter(pa.array(read)), numbers[read]
            known |= {name: known[name].update(batch.column(name), table.path, numbers) for name in text}
        if files[table] == 0:
            raise UsageError(f"{table.path} has names of columns but no row: give it data, or leave it out")
    if client_column:
        names, client = list(codes[client_column].places), np.concatenate(codes[client_column].parts)
    else:
        names = [table.path.stem for table in tables]
        client = np.repeat(np.arange(len(tables), dtype=np.int32), list(files.values()))
    by_file = domains is not None and not client_column  # then the files are those of the chosen clients, in order
    chosen = {name: place for place, name in enumerate(names if by_file else choose_clients(sorted(names), reading))}
    rows = TableRows(
        names=list(chosen),
        client=np.array([*(chosen.get(name, -1) for name in names), -1], dtype=np.int32)[client],
        codes={name: np.concatenate(code.parts) for name, code in codes.items()},
        values={name: list(code.places) for name, code in codes.items()},
        files=files,
    )
    for name in roles:
        missing = (rows.codes[name] < 0) & ((rows.client >= 0) | (name == client_column))
        if missing.any():
            where = rows.describe_location(np.flatnonzero(missing))
            raise UsageError(f"{where}: no value in column {name!r}: fill it in, or leave the rows out")
    return rows, known


def _read_targets(rows: TableRows, task: Task, reading: ReadOptions) -> tuple[Tensor, int, tuple[str, ...]]:
    """Return the target of each row, the number of classes, labels or targets, and their names.

    Raises :class:`UsageError` naming a value that is not a number if the task needs numbers.
    """
    if isinstance(task, Classification):
        (target,) = reading.targets
        _refuse_other_labels(rows, target)
        _refuse_codes(rows, target)
        classes, label, names = _find_classes(rows, target, reading.classes)
        return torch.from_numpy(label[rows.codes[target]]), classes, names
    read = []
    for name in reading.targets:
        numbers = np.empty(len(rows.values[name]))
        for code, value in enumerate(rows.values[name]):
            try:
                numbers[code] = TRUTHS.get(value.lower(), value)
            except ValueError as error:
                raise UsageError(
                    f"target {name!r} is {value!r} in some rows, no number, which {task} needs: correct it, or name "
                    "another column ({})",
                    Ref("target"),
                ) from error
        read.append(numbers[rows.codes[name]])
    y = task.read_targets(np.stack(read, axis=1), (), "the table")
    outputs = task.count_outputs([y])
    return y, outputs, tuple(reading.targets)[-outputs:]


def _refuse_other_labels(rows: TableRows, target: str) -> None:
    """Refuse labels of different kinds at different clients, except True and False for 1 and 0."""
    values, codes = rows.values[target], rows.codes[target]
    if _read_truths(values):
        return
    pairs = np.unique(np.stack([rows.client, codes])[:, (rows.client >= 0) & (codes >= 0)], axis=1)
    held: dict[str, list[str]] = {}
    for client, code in pairs.T.tolist():
        held.setdefault(rows.names[client], []).append(values[code])
    refuse_other_labels(held)


def _refuse_codes(rows: TableRows, target: str) -> None:
    """Refuse labels that are numbers except for a code for a missing value, which would be a class."""
    values = rows.values[target]
    codes = [number for number, value in enumerate(values) if value.lower() in CODES]
    if codes and len(codes) < len(values) and all(map(_is_number, (v for v in values if v.lower() not in CODES))):
        where = rows.describe_location(np.flatnonzero(rows.codes[target] == codes[0]))
        raise UsageError(
            f"{where}: {values[codes[0]]!r} in column {target!r}, whose other values are numbers, seems to mark a "
            "missing label: fill it in, or leave the rows out"
        )


def _is_number(value: str) -> bool:
    try:
        _to_number(value)
    except ValueError:
        return False
    return True


def _read_truths(values: Sequence[str]) -> dict[str, int]:
    """Return the class of each of ``values`` if they are True and False together with 0 and 1, else nothing."""
    found = {value: TRUTHS.get(value.casefold()) for value in values}
    rest = [value for value, truth in found.items() if truth is None]
    try:
        numbers = {value: _to_number(value) for value in rest}
    except ValueError:
        return {}
    if len(rest) in (0, len(values)) or not set(numbers.values()) <= {0, 1}:
        return {}
    return {value: int(numbers[value]) if truth is None else truth for value, truth in found.items()}


def _find_classes(rows: TableRows, target: str, least: int | None) -> tuple[int, Labels, tuple[str, ...]]:
    """Return the number of classes, the class of each code of column ``target``, and the classes' names."""
    used = np.unique(rows.codes[target][rows.codes[target] >= 0])  # including clients that are not read
    label = np.full(len(rows.values[target]), -1, dtype=np.int64)
    classes, label[used], names = number_classes([rows.values[target][code] for code in used], target, least)
    return classes, label, names


def _to_number(value: str) -> int | float:
    """Return the number in a text, exactly if it is an integer; raise :class:`ValueError` if it is none."""
    try:
        return int(value)
    except ValueError:
        return float(value)


def number_classes(values: Sequence[str], target: str, least: int | None) -> tuple[int, list[int], tuple[str, ...]]:
    """Number the distinct ``values`` of column ``target`` as classes.

    Integers that are 0..K-1, or within 0..``least``-1, keep their value and have no names; other values are numbered in
    order. Returns the number of classes (at least ``least``), the class of each value, and the class names. Raises
    :class:`UsageError` for numbers that are not integers.
    """
    if truths := _read_truths(values):
        return max(2, least or 0), [truths[value] for value in values], ()
    meaning: Sequence[Any] = values
    try:
        numbers = {value: _to_number(value) for value in values}
    except ValueError:
        pass
    else:
        for value, number in numbers.items():
            if isinstance(number, float) and not number.is_integer():
                raise UsageError(
                    f"target {target!r} is {value} in some rows, not a whole number, and no class: "
                    "group its values into classes, name another column ({}), or learn numbers ({})",
                    Ref("target"),
                    Ref(task="regression"),
                )
        meaning = [int(numbers[value]) for value in values]
    distinct = sorted(set(meaning))
    classes = max(len(distinct), least or 0)
    if set(meaning) <= set(range(classes)):
        return classes, list(meaning), ()
    unseen = [f"unseen {k}" for k in range(len(distinct), classes)]
    return classes, [distinct.index(value) for value in meaning], (*map(str, distinct), *unseen)


def _read_sides(rows: TableRows, here: NDArray[np.intp], reading: ReadOptions) -> Sides:
    """Return the split of the rows ``here`` from the split column."""
    column = reading.split_column
    if column is None:
        return np.full(len(here), UNSAID, dtype=np.int8)
    values, codes = rows.values[column], rows.codes[column][here]
    side = np.array([SIDES.get(value.lower(), -1) for value in values], dtype=np.int8)[codes]
    if (side < 0).any():
        raise UsageError(
            f"{rows.describe_location(here[side < 0])}: {values[codes[side < 0][0]]!r} in column {column!r}, "
            f"the split of rows; allowed are {', '.join(SIDES)}"
        )
    return side


def _fill_features(
    x: Floats, place: Ints, rows: TableRows, columns: Sequence[Column], progress: Progress | None
) -> None:
    """Read all files again and write the features of every requested row to its ``place`` in ``x``."""
    names, begin = [column.name for column in columns], schema.feature_offsets(columns)
    top, done = 0, 0
    for table, count in rows.files.items():
        for first, batch in table.pieces(names):
            left = names.index(batch.schema.names[0])
            span = slice(begin[left], begin[left + batch.num_columns])
            block = np.empty((batch.num_rows, span.stop - span.start), dtype=np.float32)
            for k, cells in enumerate(batch.columns, start=left):
                schema.fill_cells(columns[k], cells, block[:, begin[k] - span.start : begin[k + 1] - span.start])
            here = place[top + first : top + first + batch.num_rows]
            infinite = np.argwhere(np.isinf(block) & (here[:, None] >= 0))
            if len(infinite):
                at = infinite[0, 1]
                name = names[int(np.searchsorted(begin, span.start + at, side="right")) - 1]
                where = rows.describe_location(top + first + infinite[infinite[:, 1] == at, 0])
                raise UsageError(
                    f"{where}: an infinite value in column {name!r} (or one beyond float32): correct it, or leave it "
                    "empty to have it imputed"
                )
            x[here[here >= 0], span] = block[here >= 0]
            done += batch.num_rows * batch.num_columns
            if progress is not None:
                progress("values", done, len(rows.client) * len(columns))
        top += count


def _describe_numbers(
    column: Column, x: Floats, seen: ColumnContents, rows: TableRows, order: NDArray[np.intp]
) -> Column:
    """Return ``column`` with what it holds; ``x [N, width]``: its features before scaling, of the rows in ``order``.

    Raises :class:`UsageError` if it has True or False and, elsewhere, numbers other than 0 and 1, or joins such data.
    """
    if column.categories is not None:
        return column
    other = np.flatnonzero(~np.isnan(x[:, 0]) & (x[:, 0] != 0) & (x[:, 0] != 1))
    if len(other) and (seen.truth or column.holds == "True and False"):
        row = order[other[0]]
        raise UsageError(
            f"column {column.name!r} holds True or False ({seen.truth or 'in the data that these rows join'}), which "
            f"are 1 and 0, but {x[other[0], 0]:g} elsewhere ({rows.describe_location(row[None])}): give it one meaning "
            "at all clients, or leave it out"
        )
    holds: Holds = "numbers" if len(other) else "True and False" if seen.truth else "0 and 1"
    return replace(column, holds=holds)


def _impute_and_scale(
    clients: Mapping[str, tuple[Floats, NDArray[np.intp]]], columns: Sequence[Column], reading: ReadOptions,
    locate: Callable[[str, int], str],
) -> tuple[list[str], list[FeatureScaling]]:  # fmt: skip
    """Impute and scale each client's rows in place, based on its training rows, whose places follow them.

    ``locate``: function that names the file and row of a client's row.
    Returns notices about imputed values, and how each client's rows were prepared.
    """
    filled: list[str] = []
    empty: dict[str, list[str]] = {}
    scalings = []
    for name, (part, train) in clients.items():
        for column, features in schema.feature_slices(columns) if reading.missing == "refuse" else ():
            missing = int(np.isnan(part[:, features.start]).sum())
            if missing:
                raise UsageError(
                    f"client {name!r} has no value of {column.name!r} in {missing} of {len(part)} rows: fill them in, "
                    "leave the column out ({}), or have them imputed from the client's training rows ({})",
                    Ref(ignore_columns=column.name),
                    Ref(missing="impute"),
                )
        digests = digest_each(part) if len(part) else np.empty((0, 2), np.uint64)
        imputed, without, scaling = schema.prepare_rows(
            part, train, columns, scaled=reading.scaling == "client", locate=partial(locate, name)
        )
        scalings.append(replace(scaling, digests=digests))
        filled += [f"{name} {imputed}"] if imputed else []
        for lacking in without:
            empty.setdefault(lacking, []).append(name)
    notices = [
        f"column {column!r} has no value in the training rows of {join_some(map(repr, clients))}: it is 0 in all "
        "their rows"
        for column, clients in empty.items()
    ]
    if filled:
        notices.append(
            "missing values imputed from each client's own training rows (median, or most frequent category): "
            + join_some(filled)
        )
    return notices, scalings
