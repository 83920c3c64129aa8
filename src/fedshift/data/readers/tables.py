"""Tables, as files or frames: one with a column of clients, or one for each client.

A table is read whole, as Arrow reads it: cells of CSV and TSV as text (RFC 4180, UTF-8), of Parquet and frames by their
declared type. Columns are matched by name. Every column without a role is an input: a number is one feature, text (at
most 50 distinct values) one feature per category, in the sorted union over the clients read. Missing values are filled,
and numbers scaled, by each client's training rows alone. Integer labels 0..K-1 keep their value; all others are
numbered in order. Clients that join others (``schema``) are read with these' columns and categories.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from ...tasks import CLASSIFICATION, Classification, Task
from ...utils.errors import Ref, UsageError, unknown_name
from ...utils.files import check_expansion, open_regular, require_regular
from ...utils.words import Information, join_some
from ..agreement import refuse_other_labels
from ..columns import CODES, MISSING, TRUTHS, Column, feature_slices
from ..files.read_options import ReadOptions
from ..preparation import FeatureScaling
from ..samples import digest_each
from ..scan import SPLITS, UNSAID, Assign, Loaded, Part, Scan, Sides, choose_clients
from ..usual_values import find_outlying

TARGETS = ("target", "label", "y", "class", "outcome")
CLIENTS = ("client", "site", "hospital", "center", "institution")
SIDES = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
"""Values of a split column (case-insensitive), and the index in :data:`~fedshift.data.scan.SPLITS` of each."""
MOST_CLASSES, MOST_CATEGORIES = 100, 50
SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*SEPARATORS, ".parquet")
holds = "tables"
options = frozenset(
    {"test_fraction", "client_column", "target", "split_column", "ignore_columns", "groups", "missing", "scaling"}
)

_NUMBER = r"(?i)^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|^[+-]?inf(inity)?$"
_DECIMAL_COMMA, _POINT = r"^\s*([+-]?\d*),(\d+([eE][+-]?\d+)?)\s*$", r"^\s*[+-]?\d*\.\d+\s*$"
_DATE = re.compile(r"\d{4}[-/.]\d\d?[-/.]\d\d?([T ].*)?|\d\d?[-/.]\d\d?[-/.]\d{2,4}([T ].*)?")


# Files


@dataclass(frozen=True, eq=False)
class Table:
    """A table in memory; ``path``: its file, or its name in messages; ``commas``: commas were decimal points."""

    path: Path
    cells: pa.Table
    commas: bool = False

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.cells.column_names)


def find_tables(path: Path) -> list[Path]:
    """Return the tables at ``path``, sorted by name: the file itself, or the tables directly in a directory."""
    return [file for file in sorted(path.iterdir() if path.is_dir() else [path]) if is_table(file)]


def is_table(file: Path) -> bool:
    """Return whether the file's name ends with one of :data:`SUFFIXES` and does not begin with a dot or underscore."""
    return file.suffix.lower() in SUFFIXES and file.name[:1] not in "._" and file.exists() and not file.is_dir()


def read_table(path: Path, names_only: bool = False) -> Table:
    """Return a table, or its names without rows; raise :class:`UsageError` if the file or its line of names is bad."""
    with _explain_errors(path):
        require_regular(path)
        if path.suffix.lower() == ".parquet":
            facts = pq.read_metadata(path)
            groups = [facts.row_group(number).total_byte_size for number in range(facts.num_row_groups)]
            check_expansion(path, max(sum(groups), 4 * facts.num_rows * facts.num_columns))
            _check_names(path, facts.schema.to_arrow_schema().names)
            return Table(path, facts.schema.to_arrow_schema().empty_table() if names_only else pq.read_table(path))
        with open_regular(path) as file:
            header = re.sub(rb'"[^"]*"', b"", file.readline(1 << 24))
        separator = SEPARATORS[path.suffix.lower()]
        commas = separator == "," and b";" in header and b"," not in header
        parse = pa.csv.ParseOptions(delimiter=";" if commas else separator, newlines_in_values=True)
        block = pa.csv.ReadOptions(use_threads=False, block_size=max(1 << 20, 16 * len(header)))
        names = pa.csv.open_csv(path, block, parse).schema.names
        _check_names(path, names)
        types = dict.fromkeys(names, pa.string())
        convert = pa.csv.ConvertOptions(column_types=types, null_values=MISSING, strings_can_be_null=True)
        cells = pa.table({name: pa.array([], pa.string()) for name in names})
        cells = cells if names_only else pa.csv.read_csv(path, block, parse, convert)
        return Table(path, _read_decimals(path, cells) if commas else cells, commas)


def _check_names(path: Path, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"{path} has two columns {twice[0]!r}: names must differ; rename one")
    for place, name in enumerate(names, start=1):
        if not name.strip() or name.startswith(("Unnamed: ", "__index_level_")):
            raise UsageError(
                f"{path}: column {place} has no name ({name!r}), and is probably the number of the row: "
                "write the table without it (row.names=FALSE in R, index=False in pandas), or name it"
            )


def _read_decimals(path: Path, cells: pa.Table) -> pa.Table:
    """Return ``cells`` with decimal points; raise :class:`UsageError` if a column has points and commas."""
    for place, name in enumerate(cells.column_names):
        column = cells.column(place)
        if pc.any(pc.match_substring_regex(column, _DECIMAL_COMMA)).as_py():
            if pc.any(pointed := pc.match_substring_regex(column, _POINT)).as_py():
                raise UsageError(
                    f"{path}: column {name!r} has numbers with a comma and numbers with a point, such as "
                    f"{column.filter(pointed)[0]}: write all decimals in one way, and no thousands separators"
                )
            cells = cells.set_column(place, name, pc.replace_substring_regex(column, _DECIMAL_COMMA, r"\1.\2"))
    return cells


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read as a table ({str(error).strip().splitlines()[0]}): it must have a line of names "
            "and as many cells in every row, in UTF-8, or be a whole Parquet file; write it again, or leave it out"
        ) from error


# Columns


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """The cells of a column over all rows that are read.

    Attributes:
        name: Name of the column.
        texts: Trimmed texts ``[N]``; missing where the cell is missing, or has a number by its file's declared type.
        numbers: Float64 ``[N]``; NaN where the cell is missing or a word.
        typed: Whether a file declares the column as numbers.
        declared: Whether a file declares the column as categories.
        where: Function that names the file and number of a row.

    """

    name: str
    texts: pd.Series[str]
    numbers: NDArray[np.float64]
    typed: bool
    declared: bool
    where: Any

    @cached_property
    def words(self) -> pd.Series[str]:
        """Texts in lower case that are no numbers, ``[N]``."""
        return self.texts.where(np.isnan(self.numbers)).str.lower()

    @cached_property
    def odd(self) -> NDArray[np.intp]:
        """Rows of words that are neither true, false nor codes for a missing value."""
        return np.flatnonzero(self.words.notna() & ~self.words.isin([*TRUTHS, *CODES]))

    @cached_property
    def truths(self) -> NDArray[np.intp]:
        """Rows with true or false."""
        return np.flatnonzero(self.words.isin(list(TRUTHS)))

    @cached_property
    def categories(self) -> list[str]:
        """The distinct texts, sorted."""
        return sorted(self.texts.dropna().unique())

    def encode(self, column: Column) -> NDArray[np.float32]:
        """Return the features of ``column``, ``[N, width]``; all of a missing value are NaN."""
        if column.categories is not None:
            place = pd.Index(column.categories).get_indexer(pd.Index(self.texts))
            return np.where(place[:, None] < 0, np.nan, place[:, None] == np.arange(column.width)).astype(np.float32)
        with np.errstate(over="ignore"):
            numbers = np.where(np.isnan(self.numbers), self.words.map(TRUTHS), self.numbers).astype(np.float32)
        if infinite := np.flatnonzero(np.isinf(numbers)).tolist():
            raise UsageError(
                f"{self.where(infinite)}: an infinite value in column {self.name!r} (or one beyond float32): correct "
                "it, or leave it empty to have it imputed"
            )
        return numbers[:, None]


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is text (a dictionary, pandas' category, always counts as text)."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def clean_texts(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return text cells without surrounding spaces; texts in :data:`MISSING` become null."""
    trimmed = pc.utf8_trim_whitespace(cells.cast(pa.string()))
    return pc.if_else(pc.is_in(trimmed, value_set=pa.array(MISSING)), pa.scalar(None, pa.string()), trimmed)


def _read_cells(name: str, rows: Rows, known: Column | None = None) -> Cells:
    """Return the cells of a column in the rows that are read; raise :class:`UsageError` if it cannot be an input."""
    kinds = [table.cells.schema.field(name).type for table in rows.tables]
    for table, kind in zip(rows.tables, kinds, strict=True):
        if pa.types.is_temporal(kind):
            raise _refuse_dates(name, f"{kind} in {table.path}")
        if not (is_text(kind) or _is_number(kind)):
            raise UsageError(
                f"{table.path}: column {name!r} holds {kind}, neither numbers nor text: leave it out ({{}})",
                Ref(ignore_columns=name),
            )
    cells = [table.cells.column(name) for table in rows.tables]
    declared = any(map(pa.types.is_dictionary, kinds))
    worded = declared or (known is not None and known.categories is not None)
    texts, numbers = zip(*(_divide(each, whole=worded) for each in cells), strict=True)
    if any(len(each) for each in texts):  # else no word is among them
        texts, numbers = zip(*(_divide(each, whole=True) for each in cells), strict=True)
    missing = pd.Series(None, range(len(rows.read)), object)
    return Cells(
        name=name, numbers=np.concatenate(numbers)[rows.read], declared=declared,
        texts=pd.concat(texts, ignore_index=True)[rows.read].reset_index(drop=True) if len(texts[0]) else missing,
        typed=not all(is_text(kind) or pa.types.is_null(kind) for kind in kinds),
        where=lambda some: rows.locate(rows.read[some]),
    )  # fmt: skip


def _is_number(kind: Any) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean, pa.types.is_null)
    return any(test(kind) for test in tests)


def _divide(cells: pa.ChunkedArray, *, whole: bool) -> tuple[pd.Series[str], NDArray[np.float64]]:
    """Return cells as texts, none unless there are words or ``whole``, and as numbers, NaN for words."""
    texts, kind = pd.Series([], dtype=object), cells.type
    if is_text(kind):
        clean = clean_texts(cells)
        cells = pc.utf8_ltrim(clean, "+")
        with suppress(pa.ArrowInvalid):
            if not whole:
                return texts, cells.cast(pa.float64()).to_numpy().astype(np.float64)
        cells = pc.if_else(pc.match_substring_regex(cells, _NUMBER), cells, pa.scalar(None, pa.string()))
        texts = clean.to_pandas().astype(object)
    elif pa.types.is_boolean(kind):  # words, since they are numbers only among 0 and 1
        texts = pc.cast(cells, pa.string()).to_pandas().astype(object)
        cells = pa.chunked_array([pa.nulls(len(cells))])
    elif whole:
        texts = pd.Series(None, range(len(cells)), object)
    return texts, cells.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)


def infer_column(seen: Cells) -> tuple[Column, str]:
    """Return a column's encoding and a notice (may be empty); raise :class:`UsageError` if it cannot be encoded."""
    name, numeric = seen.name, seen.typed or len(seen.truths) > 0 or not np.isnan(seen.numbers).all()
    if not seen.categories or (not len(seen.odd) and numeric and not seen.declared):
        codes = seen.texts[seen.words.isin(CODES)].drop_duplicates()
        held = join_some(f"{code!r} ({seen.where([row])})" for row, code in codes.items())
        notice = (
            f"column {name!r} holds {held} among numbers, which counts as a missing value; leave the cells empty, or "
            "write all values as words if it is a category"
        )
        return Column(name=name), notice if held else ""
    first = int(seen.odd[0]) if len(seen.odd) else 0
    odd, where = (seen.texts[first], f"{seen.where([first])}: ") if len(seen.odd) else (seen.categories[0], "")
    if seen.typed:
        raise UsageError(
            f"{where}column {name!r} holds text such as {odd!r} here and numbers in another file: give it one type"
        )
    if all(_DATE.fullmatch(value) for value in seen.categories[: MOST_CATEGORIES + 1]):
        raise _refuse_dates(name, f"such as {seen.categories[0]!r}")
    if len(seen.categories) > MOST_CATEGORIES:
        raise UsageError(
            f"{where}column {name!r} holds text such as {odd!r} and more than {MOST_CATEGORIES} different values, so "
            "it is an identifier, free text, or numbers with a slip among them: correct it, or leave it out ({})",
            Ref(ignore_columns=name),
        )
    notice = (
        f"column {name!r} has numbers and text such as {odd!r} ({where[:-2]}): it is read as {len(seen.categories)} "
        "categories; if the text is a slip or marks a missing value, correct it or leave the cell empty"
    )
    return Column(name=name, categories=tuple(seen.categories)), notice if numeric and not seen.declared else ""


def _refuse_dates(name: str, example: str) -> UsageError:
    return UsageError(
        f"column {name!r} holds dates or times ({example}), which have no scale: make it a number, such as the age or "
        "the days since an event, or leave it out ({})",
        Ref(ignore_columns=name),
    )


def match_column(column: Column, seen: Cells, other: str) -> Column:
    """Return ``column`` of ``other``, data or a model; raise :class:`UsageError` if the cells do not fit it."""
    have = f"column {column.name!r} holds"
    if column.categories is None:
        if len(seen.truths) and column.holds == "numbers":
            raise UsageError(
                f"{seen.where(seen.truths[:1])}: {have} True or False, but numbers other than 0 and 1 in {other}: "
                "give the same measurement"
            )
        if len(seen.odd):
            raise UsageError(
                f"{seen.where(seen.odd[:1])}: {have} text such as {seen.texts[seen.odd[0]]!r}, but numbers in {other}: "
                "make it numbers, empty where there is none"
            )
        return column
    listed = ", ".join(column.categories)
    if seen.typed:
        raise UsageError(f"{have} numbers, but text in {other}: give one of {listed}, as text")
    if unknown := sorted(set(seen.categories).difference(column.categories)):
        raise UsageError(
            f"{have} {', '.join(map(repr, unknown[:8]))}, but its categories in {other}, are {listed}: call it one of "
            "them, or leave the cells empty"
        )
    return column


def _describe_numbers(column: Column, x: NDArray[np.float32], seen: Cells) -> Column:
    """Return ``column`` with what its features ``x [N, width]`` hold; refuse True and False beside other numbers."""
    if column.categories is not None:
        return column
    other = np.flatnonzero(~np.isnan(x[:, 0]) & (x[:, 0] != 0) & (x[:, 0] != 1))
    if len(other) and (len(seen.truths) or column.holds == "True and False"):
        where = seen.where(seen.truths[:1]) if len(seen.truths) else "in the data that these rows join"
        raise UsageError(
            f"column {column.name!r} holds True or False ({where}), which are 1 and 0, but {x[other[0], 0]:g} "
            f"elsewhere ({seen.where(other[:1])}): give it one meaning at all clients, or leave it out"
        )
    return replace(column, holds="numbers" if len(other) else "True and False" if len(seen.truths) else "0 and 1")


# Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The rows of all tables.

    Attributes:
        tables: The tables.
        roles: Text of each row in each column with a role, and its client (``""``).
        read: Numbers of the rows of chosen clients.
        names: The chosen clients.

    """

    tables: Sequence[Table]
    roles: pd.DataFrame
    read: NDArray[np.intp]
    names: Sequence[str]

    def locate(self, rows: NDArray[np.intp]) -> str:
        """Return the file and row numbers (from 1) of ``rows``, in ascending order; only rows of the first file."""
        ends = np.cumsum([len(table.cells) for table in self.tables])
        place = int(np.searchsorted(ends, rows[0], side="right"))
        here = rows[rows < ends[place]] - ends[place] + len(self.tables[place].cells) + 1
        return f"{self.tables[place].path}, data row{'s' * (len(here) > 1)} {join_some(map(str, here))}"


def _find_rows(tables: Sequence[Table], reading: ReadOptions) -> Rows:
    """Return the rows; raise :class:`UsageError` for unknown clients, and for tables or roles without values."""
    for table in tables:
        if not len(table.cells):
            raise UsageError(f"{table.path} has names of columns but no row: give it data, or leave it out")
    roles = pd.DataFrame({name: pd.concat([_to_texts(t.cells.column(name)) for t in tables], ignore_index=True)
                          for name in reading.role_columns})  # fmt: skip
    column = reading.client_column
    names = [table.path.stem for table in tables]
    roles[""] = roles[column] if column else np.repeat(names, [len(table.cells) for table in tables])
    by_file = reading.domains is not None and not column  # then the files are those of the chosen clients, in order
    known = sorted(roles[column].dropna().unique()) if column else names if by_file else sorted(names)
    if (reading.task or CLASSIFICATION) == CLASSIFICATION and reading.target:
        labels = roles[reading.targets[0]].dropna().unique().tolist()
        if len(labels) > MOST_CLASSES:
            raise UsageError(
                f"target {reading.target!r} has more than {MOST_CLASSES} different values (such as "
                f"{', '.join(labels[:3])}), so it is a measurement or an identifier, and no class: group its values "
                "into classes, name another column ({}), or learn numbers ({})",
                Ref("target"),
                Ref(task="regression"),
            )
    chosen = known if by_file else choose_clients(known, reading)
    read = roles[""].isin(chosen).to_numpy()
    made = Rows(tables=tables, roles=roles, read=np.flatnonzero(read), names=chosen)
    for name in reading.role_columns:
        missing = roles[name].isna().to_numpy() & (read | (name == column))
        if missing.any():
            where = made.locate(np.flatnonzero(missing))
            raise UsageError(f"{where}: no value in column {name!r}: fill it in, or leave the rows out")
    return made


def _to_texts(cells: pa.ChunkedArray) -> pd.Series[str]:
    """Return cells as texts, None where they are missing."""
    texts: pd.Series[str] = (
        (clean_texts(cells) if is_text(cells.type) else cells).to_pandas(integer_object_nulls=True).astype(object)
    )
    return texts if is_text(cells.type) else texts.where(texts.isna(), texts.map(str))


# Reading


def can_read(source: object) -> bool:
    """Return whether ``source`` is a ``.csv``, ``.tsv`` or ``.parquet`` file or a directory with one."""
    return isinstance(source, Path) and bool(find_tables(source))


def scan(source: Path, reading: ReadOptions) -> Scan:
    """Return the clients of the table at ``source``, or of the tables in that directory.

    Raises :class:`UsageError` if the data cannot be used, naming file, column, client or rows.
    """
    files, column = find_tables(source), reading.client_column
    if reading.schema is not None and column and files and column not in read_table(files[0], names_only=True).names:
        reading, column = replace(reading, client_column=None), None
    if column is None:
        if len(files) == 1 and reading.schema is None:
            names = read_table(files[0], names_only=True).names
            raise UsageError(
                f"{files[0]} is a single table: say which column holds the client of each row ({{}}), or give a "
                f"directory with a file for each client; {_describe_candidates(names, CLIENTS)}",
                Ref("client_column"),
            )
        by_stem: dict[str, Path] = {}
        for file in files:
            if by_stem.setdefault(file.stem, file) != file:
                raise UsageError(f"{by_stem[file.stem]} and {file} are both of client {file.stem!r}: keep one")
        files = [by_stem[name] for name in choose_clients(by_stem, reading)] if reading.domains else files
    name = source.resolve().name if source.is_dir() else source.resolve().stem
    return scan_tables(list(map(read_table, files)), name, reading)


def scan_tables(tables: Sequence[Table], name: str, reading: ReadOptions) -> Scan:
    """Return the clients of ``tables`` as the data ``name``; refuse tables with other columns."""
    _refuse_other_columns(tables, reading)
    reading, notices = _check_roles(tables, reading)
    features = _choose_features(tables[0], reading)
    rows = _find_rows(tables, reading)
    task = reading.task or CLASSIFICATION
    y, classes, class_names = _read_targets(rows, task, reading)
    columns, parts, joined = [], [], reading.schema.name if reading.schema else ""
    for done, feature in enumerate(features, 1):
        known = next((c for c in (reading.schema.columns if reading.schema else ()) if c.name == feature), None)
        seen = _read_cells(feature, rows, known)
        if known:
            column, said = match_column(known, seen, f"{joined!r}, the data that it joins"), ""
        else:
            column, said = infer_column(seen)
        notices += [said] if said else []
        parts.append(seen.encode(column))
        columns.append(_describe_numbers(column, parts[-1], seen))
        if reading.progress:
            reading.progress("columns", done, len(features))
    x = np.concatenate(parts, axis=1)
    same = np.fmin.reduce(x) == np.fmax.reduce(x)
    constant = [repr(column.name) for column, span in feature_slices(columns) if same[span].all()]
    if constant:
        notices.append(f"the same in all rows, so nothing can be learned from it: {join_some(constant)}")
    client = rows.roles[""].to_numpy()[rows.read]
    made = [_make_part(rows, y, x, name, np.flatnonzero(client == name), reading) for name in rows.names]
    return Scan(
        name=name, parts=tuple(made), task=task, classes=classes, class_names=class_names, notices=tuple(notices),
        note=f"{{samples}} rows of {{clients}} clients, {len(columns)} columns", source=(rows, tuple(columns)),
    )  # fmt: skip


def load(scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
    """Return the features of each client's rows, float32 ``[N, D]``, filled and scaled by its training rows."""
    rows, columns = scan.source
    scalings, filled, empty = [], list[str](), dict[str, list[str]]()
    for part in scan.parts:
        x, here = part.source
        if reading.missing == "refuse":
            _refuse_missing(part.client, x, columns)
        digests = digest_each(x) if len(x) else np.empty((0, 2), np.uint64)
        train = np.flatnonzero(assign(part, ()) == SPLITS.index("train"))
        count, without, scaling = prepare_rows(
            x, train, columns, scaled=reading.scaling == "client",
            locate=lambda row, here=here: rows.locate(rows.read[here[row : row + 1]]),
        )  # fmt: skip
        scalings.append(replace(scaling, digests=digests))
        filled += [f"{part.client} {count}"] if count else []
        for name in without:
            empty.setdefault(name, []).append(part.client)
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
    stores = [torch.from_numpy(part.source[0]) for part in scan.parts]
    return Loaded(stores=stores, normalizations=scalings, columns=columns, notices=tuple(notices))


def read_rows(path: Path, columns: Sequence[Column], other: str) -> NDArray[np.float32]:
    """Return a table's rows as ``columns`` of ``other``, float32 ``[N, D]`` with NaN for missing values.

    Further columns are ignored. Raises :class:`UsageError` for a table without one of the columns or without rows, and
    for cells that do not fit.
    """
    table = read_table(path)
    lacking = [column.name for column in columns if column.name not in table.names]
    if lacking:
        raise UsageError(
            f"{path} has no column {', '.join(map(repr, lacking))}: give every column, with empty cells where a value "
            f"is missing; its columns are {', '.join(table.names)}"
        )
    rows = _find_rows([table], ReadOptions())
    cells = [(column, _read_cells(column.name, rows, column)) for column in columns]
    return np.concatenate(
        [seen.encode(match_column(column, seen, f"the model {other!r}")) for column, seen in cells], 1
    )


def prepare_rows(
    x: NDArray[np.float32], train: Any, columns: Sequence[Column], *, scaled: bool = True,
    locate: Any = "row {}".format,
) -> tuple[int, list[str], FeatureScaling]:  # fmt: skip
    """Fill and (if ``scaled``) scale one client's rows ``x [N, D]`` in place, by its training rows alone.

    A missing number becomes the median, a text the most frequent category (the first in a tie), and a column without
    values in the training rows 0 in all rows. Numbers are standardized (divided by N, as scikit-learn's StandardScaler;
    a deviation of 0 becomes 1). ``locate``: function that names a row, for values far from all others of their column.
    Returns the number of values filled, the columns that became 0, and how each feature was prepared.
    """
    fill, mean, std = np.zeros(x.shape[1]), np.zeros(x.shape[1]), np.ones(x.shape[1])
    filled, empty, far = 0, list[str](), list[str]()
    for column, span in feature_slices(columns):
        part = x[:, span]
        absent = np.isnan(part[:, 0])
        known = part[train][~absent[train]]
        if column.categories is None:
            far += [f"{column.name!r} {text[:-1]}, {locate(row)})" for text, row in find_outlying(part[:, 0])]
        if not len(known):
            part[:], std[span] = 0, np.inf
            empty.append(column.name)
            continue
        often = np.arange(column.width) == known.sum(axis=0, dtype=np.float64).argmax()
        fill[span] = np.median(known) if column.categories is None else often
        part[absent] = fill[span]
        filled += int(absent.sum())
        if scaled and column.categories is None:
            values = part[:, 0].astype(np.float64)
            own = values[train] - values[0]  # exactly 0 if all are equal
            mean[span], std[span] = values[0] + own.mean(), own.std() or 1
            part[:, 0] = (values - mean[span]) / std[span]
    return filled, empty, FeatureScaling(fill=fill, mean=mean, std=std, far=tuple(far))


def _make_part(
    rows: Rows, y: torch.Tensor, x: NDArray[np.float32], client: str, here: NDArray[np.intp], reading: ReadOptions
) -> Part:
    """Return the rows of one client, whose numbers among those that are read are ``here``."""
    own, group = rows.roles.iloc[rows.read[here]], np.empty(0, np.str_)
    if reading.groups:
        group = own[reading.groups].to_numpy(np.str_)
    side: Sides = np.full(len(here), UNSAID, np.int8)
    if reading.split_column:
        told = own[reading.split_column].str.lower().map(SIDES)
        if told.isna().any():
            at = np.flatnonzero(told.isna())
            raise UsageError(
                f"{rows.locate(rows.read[here[at]])}: {own[reading.split_column].iloc[at[0]]!r} in column "
                f"{reading.split_column!r}, the split of rows; allowed are {', '.join(SIDES)}"
            )
        side = told.to_numpy().astype(np.int8)
    return Part(
        client=client, where=f"client {client!r}", y=y[torch.from_numpy(here)], side=side, rows=np.arange(len(here)),
        group=group, source=(x[here], here),
    )  # fmt: skip


def _refuse_missing(client: str, x: NDArray[np.float32], columns: Sequence[Column]) -> None:
    for column, span in feature_slices(columns):
        missing = int(np.isnan(x[:, span.start]).sum())
        if missing:
            raise UsageError(
                f"client {client!r} has no value of {column.name!r} in {missing} of {len(x)} rows: fill them in, "
                "leave the column out ({}), or have them imputed from the client's training rows ({})",
                Ref(ignore_columns=column.name),
                Ref(missing="impute"),
            )


# Roles


def _refuse_other_columns(tables: Sequence[Table], reading: ReadOptions) -> None:
    ignored = reading.ignored
    for column in () if reading.schema else ignored:
        if not any(column in table.names for table in tables):
            raise unknown_name("column", column, tables[0].names).about("ignore_columns")
    for table in tables:
        for one, other in ((table, tables[0]), (tables[0], table)):
            lacking = [name for name in other.names if name not in one.names and name not in ignored]
            if lacking:
                raise UsageError(
                    f"{one.path} has no column {lacking[0]!r}, which {other.path} has: all files need the same "
                    "columns; rename it, or leave it out ({})",
                    Ref(ignore_columns=lacking[0]),
                )


def _check_roles(tables: Sequence[Table], reading: ReadOptions) -> tuple[ReadOptions, list[str]]:
    """Check the columns with a role; return ``reading``, with the split column if one was found, and notices."""
    names = tables[0].names
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
        for table in tables:
            if pa.types.is_nested(kind := table.cells.schema.field(name).type):
                raise UsageError(f"{table.path}: column {name!r} holds {kind}: give it one value a row")
    notices: list[str] = [
        Information(f"{table.path}: semicolons separate its columns, and a comma in a number is its decimal point")
        for table in tables
        if table.commas
    ]
    if reading.split_column is None and "split" in names and "split" not in (*roles, *reading.ignored):
        values = pd.concat([_to_texts(table.cells.column("split")) for table in tables]).dropna().str.lower()
        if len(values) and values.isin(list(SIDES)).all():
            notices.append(Information("column 'split' assigns rows to training, validation and testing"))
            reading = replace(reading, split_column="split")
    return reading, notices


def _describe_candidates(names: Sequence[str], usual: Sequence[str]) -> str:
    likely = [name for name in names if name.lower() in usual]
    return (f"perhaps {likely[0]!r}; " if likely else "") + f"columns are {', '.join(names)}"


def _choose_features(table: Table, reading: ReadOptions) -> list[str]:
    """Return the names of the inputs, in the order of the data that these join; raise :class:`UsageError` if odd."""
    roles, ignored, schema = reading.role_columns, reading.ignored, reading.schema
    features = [name for name in table.names if name not in roles and name not in ignored]
    if not features:
        raise UsageError(f"{table.path} has no column except {', '.join([*roles, *ignored])}: a table needs features")
    if schema and schema.only is not None:
        for name in schema.only:
            if name not in features:
                raise UsageError(f"{table.path} has no column {name!r} for inputs: columns are {', '.join(features)}")
        features = [name for name in features if name in schema.only]
    theirs = [column.name for column in schema.columns] if schema else []
    if not schema or not theirs or sorted(theirs) == sorted(features):
        return theirs or features
    lacking = ", ".join(repr(name) for name in theirs if name not in features)
    further = ", ".join(repr(name) for name in features if name not in theirs)
    said = [f"has no {lacking}"] * bool(lacking) + [f"has {further} besides"] * bool(further)
    raise UsageError(
        f"{table.path} does not have the columns of {schema.name!r}, the data that it joins: it {' and '.join(said)}. "
        "Name columns alike, leave out what is too much, and add what is missing (empty where it was not measured)"
    )


# Targets


def _read_targets(rows: Rows, task: Task, reading: ReadOptions) -> tuple[torch.Tensor, int, tuple[str, ...]]:
    """Return the target of each row that is read, the number of classes, labels or targets, and their names."""
    if isinstance(task, Classification):
        (target,) = reading.targets
        texts = rows.roles[target]
        values = texts.dropna().unique().tolist()  # of all clients, also of those that are not read
        if not _read_truths(values):
            held = rows.roles.iloc[rows.read].groupby("", sort=False)[target].unique()
            refuse_other_labels({str(client): list(labels) for client, labels in held.items()})
        _refuse_codes(rows, target, values)
        classes, numbers, names = number_classes(values, target, reading.classes)
        label = dict(zip(values, numbers, strict=True))
        return torch.from_numpy(np.array(texts.iloc[rows.read].map(label), np.int64)), classes, names
    read = []
    for name in reading.targets:
        texts = rows.roles[name].iloc[rows.read]
        known = {}
        for value in texts.unique():
            try:
                known[value] = float(TRUTHS.get(value.lower(), value))
            except ValueError as error:
                raise UsageError(
                    f"target {name!r} is {value!r} in some rows, no number, which {task} needs: correct it, or name "
                    "another column ({})",
                    Ref("target"),
                ) from error
        read.append(texts.map(known).to_numpy(np.float64))
    y = task.read_targets(np.stack(read, axis=1), (), "the table")
    outputs = task.count_outputs([y])
    return y, outputs, tuple(reading.targets)[-outputs:]


def _refuse_codes(rows: Rows, target: str, values: Sequence[str]) -> None:
    """Refuse labels that are numbers except for a code for a missing value, which would be a class."""
    codes = [value for value in values if value.lower() in CODES]
    rest = [value for value in values if value.lower() not in CODES]
    if codes and rest and all(_to_number(value) is not None for value in rest):
        where = rows.locate(np.flatnonzero(rows.roles[target] == codes[0]))
        raise UsageError(
            f"{where}: {codes[0]!r} in column {target!r}, whose other values are numbers, seems to mark a missing "
            "label: fill it in, or leave the rows out"
        )


def _to_number(value: str) -> int | float | None:
    """Return the number in a text, exactly if it is an integer; None if it is none."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return None


def _read_truths(values: Sequence[str]) -> dict[str, int]:
    """Return the class of each of ``values`` if they are True and False together with 0 and 1, else nothing."""
    found: Mapping[str, Any] = {value: TRUTHS.get(value.casefold(), _to_number(value)) for value in values}
    words = sum(value.casefold() in TRUTHS for value in values)
    mixed = 0 < words < len(values) and set(found.values()) <= {0, 1}
    return {value: int(number) for value, number in found.items()} if mixed else {}


def number_classes(values: Sequence[str], target: str, least: int | None) -> tuple[int, list[int], tuple[str, ...]]:
    """Number the distinct ``values`` of column ``target`` as classes.

    Integers that are 0..K-1, or within 0..``least``-1, keep their value and have no names; other values are numbered in
    order. Returns the number of classes (at least ``least``), the class of each value, and the class names. Raises
    :class:`UsageError` for numbers that are not integers.
    """
    if truths := _read_truths(values):
        return max(2, least or 0), [truths[value] for value in values], ()
    meaning: Sequence[Any] = [_to_number(value) for value in values]
    if None in meaning:
        meaning = values
    for value, number in zip(values, meaning, strict=True):
        if isinstance(number, float) and not number.is_integer():
            raise UsageError(
                f"target {target!r} is {value} in some rows, not a whole number, and no class: group its values into "
                "classes, name another column ({}), or learn numbers ({})",
                Ref("target"),
                Ref(task="regression"),
            )
    meaning = [int(number) if isinstance(number, float) else number for number in meaning]
    distinct = sorted(set(meaning))
    classes = max(len(distinct), least or 0)
    if set(meaning) <= set(range(classes)):
        return classes, list(meaning), ()
    unseen = [f"unseen {k}" for k in range(len(distinct), classes)]
    return classes, [distinct.index(value) for value in meaning], (*map(str, distinct), *unseen)
