"""Rows of tables: whose each is, its label, and whether it is for training, validation or testing.

Where no column says so, rows are drawn for testing within each client, as many of each class, or whole groups (all
samples of one patient, say) so that none is on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...utils.errors import UsageError, unknown_name
from ...utils.random_streams import stream
from ..stratification import split_stratified
from .table_columns import ColumnContents, Ints, clean_texts, is_text
from .table_files import TableFile

SIDES = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
"""Values of a split column, in any case, and the side that each means."""
SPLITS = ("train", "validation", "test")
MOST_CLASSES = 100

Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ColumnRoles:
    """Names of the columns that are no features; ``client`` is None where every client has a file."""

    target: str
    client: str | None = None
    split: str | None = None
    group: str | None = None

    @property
    def names(self) -> list[str]:
        """Those that there are, the target first."""
        return [name for name in (self.target, self.client, self.split, self.group) if name is not None]


@dataclass(frozen=True, kw_only=True, eq=False)
class TableRows:
    """The N rows of all files, in order, as numbers: of the client in ``names`` (-1: not wanted), the label, and so on.

    ``values``: what the numbers stand for, by column. ``files``: each file, and its number of rows.
    """

    names: list[str]
    client: Ints
    codes: dict[str, Ints]
    values: dict[str, list[str]]
    files: dict[TableFile, int]

    def describe_location(self, rows: NDArray[np.intp]) -> str:
        """What errors call these rows, in ascending order (those of the first file that has any), counted from 1."""
        ends = np.cumsum(list(self.files.values()))
        place = int(np.searchsorted(ends, rows[0], side="right"))
        table, count = list(self.files.items())[place]
        here = rows[rows < ends[place]] - ends[place] + count + 1
        return f"{table.path}, data row{'s' * (len(here) > 1)} {format_list(here)}"


def format_list(things: Iterable[object], most: int = 8) -> str:
    """The first few with commas between, and how many more there are."""
    words = [str(thing) for thing in things]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


class _Codes:
    """The different values of a column over all files, numbered as they come, and each row's number (-1: missing)."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.parts: list[Ints] = []

    def add(self, cells: pa.Array) -> None:
        """A further part of the column."""
        encoded = (clean_texts(cells) if is_text(cells.type) else cells).dictionary_encode()
        numbers = [
            -1 if value is None or value != value else self.places.setdefault(str(value), len(self.places))
            for value in encoded.dictionary.to_pylist()
        ]
        self.parts.append(np.array([*numbers, -1], dtype=np.int32)[encoded.indices.fill_null(-1).to_numpy()])


def scan_rows(
    tables: Sequence[TableFile], roles: ColumnRoles, seen: Mapping[str, ColumnContents], domains: Sequence[str] | None
) -> tuple[TableRows, dict[str, ColumnContents]]:
    """All rows, and what is known of the features' columns after them (``seen``: before, from the types of the files).

    ``domains``: the clients wanted, in this order; None: all, by name. Raises :class:`UsageError` for unknown clients,
    files without rows, and rows that lack a value in a column with a role.
    """
    codes, known, files = {name: _Codes() for name in roles.names}, dict(seen), dict.fromkeys(tables, 0)
    for table in tables:
        text = [name for name in seen if is_text(table.types[name])]
        for batch in table.batches([*roles.names, *text]):
            files[table] += batch.num_rows
            for name in roles.names:
                codes[name].add(batch.column(name))
            if len(codes[roles.target].places) > MOST_CLASSES:
                some = ", ".join(list(codes[roles.target].places)[:3])
                raise UsageError(
                    f"target {roles.target!r} has more than {MOST_CLASSES} different values (such as {some}), so it is "
                    "a measurement or an identifier, and only classes can be learned: group its values into classes, "
                    "or name another column (--target)"
                )
            if roles.client and domains is not None:
                wanted = [codes[roles.client].places.get(name, -2) for name in domains]
                batch = batch.filter(pa.array(np.isin(codes[roles.client].parts[-1], wanted)))
            known |= {name: known[name].look(batch.column(name)) for name in text}
        if files[table] == 0:
            raise UsageError(f"{table.path} has names of columns but no row: give it data, or leave it out")
    if roles.client:
        names, client = list(codes[roles.client].places), np.concatenate(codes[roles.client].parts)
    else:
        names = [table.path.stem for table in tables]
        client = np.repeat(np.arange(len(tables), dtype=np.int32), list(files.values()))
    chosen = {name: place for place, name in enumerate(dict.fromkeys(sorted(names) if domains is None else domains))}
    for name in chosen:
        if name not in names:
            raise unknown_name("domain", name, names)
    rows = TableRows(
        names=list(chosen),
        client=np.array([*(chosen.get(name, -1) for name in names), -1], dtype=np.int32)[client],
        codes={name: np.concatenate(code.parts) for name, code in codes.items()},
        values={name: list(code.places) for name, code in codes.items()},
        files=files,
    )
    _refuse_gaps(rows, roles)
    return rows, known


def _refuse_gaps(rows: TableRows, roles: ColumnRoles) -> None:
    for name in roles.names:
        missing = (rows.codes[name] < 0) & ((rows.client >= 0) | (name == roles.client))
        if missing.any():
            raise UsageError(
                f"{rows.describe_location(np.flatnonzero(missing))}: no value in column {name!r}: fill it in, or leave the rows out"
            )


def is_split_column(tables: Sequence[TableFile]) -> bool:
    """Whether every value in column ``split`` of every file is one of :data:`SIDES`."""
    for table in tables:
        for batch in table.batches(["split"]):
            codes = _Codes()
            codes.add(batch.column("split"))
            if not codes.places or not {value.lower() for value in codes.places} <= SIDES.keys():
                return False
    return True


def find_classes(rows: TableRows, target: str, least: int | None) -> tuple[int, Labels, tuple[str, ...]]:
    """How many classes there are, the class that each code of column ``target`` means, and the classes' names.

    See :func:`number_classes`.
    """
    used = np.unique(rows.codes[target][rows.codes[target] >= 0])  # of clients that are not chosen too
    label = np.full(len(rows.values[target]), -1, dtype=np.int64)
    classes, label[used], names = number_classes([rows.values[target][code] for code in used], target, least)
    return classes, label, names


def number_classes(values: Sequence[str], target: str, least: int | None) -> tuple[int, list[int], tuple[str, ...]]:
    """How many classes the different ``values`` of column ``target`` make, the class of each, and the classes' names.

    Whole numbers that are 0..K-1, or within 0..``least``-1, stand for themselves and have no names; other values are
    numbered in order. There are ``least`` classes or more. Raises :class:`UsageError` for numbers that are not whole.
    """
    meaning: Sequence[Any] = values
    if all(map(_is_number, values)):
        meaning = [_parse_whole(value, target) for value in values]
    distinct = sorted(set(meaning))
    classes = max(len(distinct), least or 0)
    if set(meaning) <= set(range(classes)):
        return classes, list(meaning), ()
    unseen = [f"unseen {k}" for k in range(len(distinct), classes)]
    return classes, [distinct.index(value) for value in meaning], (*map(str, distinct), *unseen)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _parse_whole(value: str, target: str) -> int:
    number = float(value)
    if not number.is_integer():
        raise UsageError(
            f"target {target!r} is {value} in some rows, not a whole number: only classes can be learned; group its "
            "values into classes, or name another column (--target)"
        )
    return int(number)


def assign_splits(
    rows: TableRows, here: NDArray[np.intp], y: Labels, roles: ColumnRoles, fraction: float
) -> NDArray[np.int8]:
    """Which of :data:`SPLITS`, by number, each row of one client is in (``here``: its rows, ``y``: their labels).

    Raises :class:`UsageError`, naming the client, where training or test would be empty or share a group.
    """
    name = rows.names[rows.client[here[0]]]
    if len(here) < 2:
        raise UsageError(f"client {name!r} has 1 row, and needs one for training and one for testing: leave it out")
    group = rows.codes[roles.group][here] if roles.group else None
    if roles.split is None:
        side = np.zeros(len(here), dtype=np.int8)
        rng = stream(0, "test", name)
        side[split_stratified(y, fraction, rng)[1] if group is None else draw_groups(group, fraction, rng)] = SIDES[
            "test"
        ]
        fix = "its rows are all of one group" if roles.group else "it has one row of each class"
    else:
        side = _read_split_column(rows, here, roles.split)
        fix = f"column {roles.split!r} must give it some"
    for split in ("train", "test"):
        if not (side == SIDES[split]).any():
            raise UsageError(f"client {name!r} has no row for {split} among its {len(here)}: {fix}, or leave it out")
    if group is not None and roles.split and roles.group:
        pairs = np.unique(np.stack([group, side.astype(np.int32)]), axis=1)
        both = pairs[0, 1:][pairs[0, 1:] == pairs[0, :-1]]
        if len(both):
            raise UsageError(
                f"group {rows.values[roles.group][both[0]]!r} of client {name!r} is on two sides of column "
                f"{roles.split!r}: a group must be on one side; correct the column, or name no group column"
            )
    return side


def _read_split_column(rows: TableRows, here: NDArray[np.intp], column: str) -> NDArray[np.int8]:
    values = rows.values[column]
    side = np.array([SIDES.get(value.lower(), -1) for value in values], dtype=np.int8)[rows.codes[column][here]]
    if (side < 0).any():
        wrong = here[side < 0]
        raise UsageError(
            f"{rows.describe_location(wrong)}: {values[rows.codes[column][wrong[0]]]!r} in column {column!r}, which says what rows "
            f"are for; allowed are {', '.join(SIDES)}"
        )
    return side


def draw_groups(group: NDArray[np.int32], fraction: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Rows [N] of the groups (numbers [N]) drawn for testing, together about ``fraction`` of the rows.

    In random order, each group is taken that brings the number of rows nearer to ``fraction * N``; where none does, the
    smallest is. At least one group stays, so that of a single one nothing is drawn. Raises :class:`UsageError` for a
    ``fraction`` outside 0..1.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"test_fraction={fraction:g}: must lie between 0 and 1")
    names, sizes = np.unique(group, return_counts=True)
    order = rng.permutation(len(names))
    taken: list[int] = []
    count, wanted = 0, fraction * len(group)
    for place in order:
        more = count + sizes[place]
        if abs(more - wanted) < abs(count - wanted) and more < len(group):
            taken, count = [*taken, place], more
    if not taken and len(names) > 1:
        taken = [order[sizes[order].argmin()]]
    return np.isin(group, names[taken])
