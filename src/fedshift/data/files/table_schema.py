"""Schemas of tables: files with typed columns, and the encoding of columns as float32 features.

Files (CSV, TSV, Parquet) are read in batches of rows, so that no file is ever completely in memory. Cells of CSV and
TSV are text (RFC 4180, UTF-8); cells of Parquet have the types declared in the file.

A number is one feature; text is one feature per category (one-hot). Imputation and scaling use only a client's training
rows, so that no statistic leaves a client and none comes from its test rows. Clients must agree on the columns and, for
a text column, on the list of categories: the sorted union of the categories of all clients. A trained model identifies
an input by its position. Clients that join others are therefore matched by column name, and columns or categories that
the others do not have are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...utils.errors import Ref, UsageError
from ...utils.files import check_expansion, open_regular, require_regular
from ...utils.words import join_some
from ..columns import CODES, MISSING, TRUTHS, Column
from ..preparation import FeatureScaling
from ..usual_values import find_outlying

SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Of a .csv file whose line of names has semicolons and no comma, the separator is the semicolon."""
SUFFIXES = (*SEPARATORS, ".parquet")
TEXT_BLOCK = 1 << 18
"""Bytes of text to parse at a time (more for long lines); Arrow reads ahead about 32 times as many."""
FEATURE_BYTES = 4
"""Bytes per number of the table in memory."""
BATCH_CELLS = 1 << 17
"""Cells in a batch of rows."""
MOST_CATEGORIES = 50

_DECIMAL_COMMA, _POINT = r"^\s*([+-]?\d*),(\d+([eE][+-]?\d+)?)\s*$", r"^\s*[+-]?\d*\.\d+\s*$"
_DATE = re.compile(r"\d{4}[-/.]\d\d?[-/.]\d\d?([T ].*)?|\d\d?[-/.]\d\d?[-/.]\d{2,4}([T ].*)?")

Floats = NDArray[np.float32]
Floats64 = NDArray[np.float64]
Ints = NDArray[np.int32]
Rows = slice | NDArray[np.intp]


def find_tables(path: Path) -> list[Path]:
    """Return the tables at ``path``, sorted by name: the file itself, or the tables directly in a directory."""
    return [file for file in sorted(path.iterdir() if path.is_dir() else [path]) if is_table(file)]


def is_table(file: Path) -> bool:
    """Return whether the file's name ends with one of :data:`SUFFIXES` and does not begin with a dot or underscore."""
    return (
        file.suffix.lower() in SUFFIXES and not file.name.startswith((".", "_")) and file.exists() and not file.is_dir()
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class TableFile:
    """A file and the types of its columns by name, in file order.

    ``semicolons``: whether they separate its columns; the comma in a number is then its decimal point.
    """

    path: Path
    types: dict[str, Any]
    semicolons: bool = False

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield batches of rows of ``columns``, in this order; raise :class:`UsageError` for a damaged file."""
        return (batch for _, batch in self.pieces(columns, together=len(columns)))

    def pieces(self, columns: Sequence[str], together: int = 8) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield first rows and batches of some ``columns`` from there on, until every cell was yielded once.

        Parquet stores columns one after another, and each open column takes memory, so ``together`` columns are read at
        a time.
        """
        with _explain_errors(self.path):
            if self.path.suffix.lower() in SEPARATORS:
                options = pa.csv.ConvertOptions(
                    include_columns=columns, column_types=self.types, null_values=MISSING, strings_can_be_null=True
                )
                batches = _join_batches(_open_text(self.path, options))
                yield from _number_batches(map(self._read_decimals, batches) if self.semicolons else batches)
                return
            with pq.ParquetFile(self.path, buffer_size=1 << 16, pre_buffer=False) as file:
                for at in range(0, len(columns), together):
                    names = list(columns[at : at + together])
                    batches = file.iter_batches(max(1, BATCH_CELLS // len(names)), columns=names)
                    yield from _number_batches(batch.select(names) for batch in batches)

    def _read_decimals(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return ``batch`` with decimal points; raise :class:`UsageError` if a column has points and commas."""
        columns = []
        for name, cells in zip(batch.schema.names, batch.columns, strict=True):
            if pc.any(pc.match_substring_regex(cells, _DECIMAL_COMMA)).as_py():
                if pc.any(pointed := pc.match_substring_regex(cells, _POINT)).as_py():
                    raise UsageError(
                        f"{self.path}: column {name!r} has numbers with a comma and numbers with a point, such as "
                        f"{cells.filter(pointed)[0]}: write all decimals in one way, and no thousands separators"
                    )
                cells = pc.replace_substring_regex(cells, _DECIMAL_COMMA, r"\1.\2")
            columns.append(cells)
        return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _join_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in fewer batches of at least :data:`BATCH_CELLS` cells."""
    parts: list[pa.RecordBatch] = []
    for batch in batches:
        parts.append(batch)
        if sum(part.num_rows for part in parts) * batch.num_columns >= BATCH_CELLS:
            yield from pa.Table.from_batches(parts).combine_chunks().to_batches()
            parts = []
    if parts:
        yield from pa.Table.from_batches(parts).combine_chunks().to_batches()


def _number_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    row = 0
    for batch in batches:
        yield row, batch
        row += batch.num_rows


def open_table(path: Path) -> TableFile:
    """Return the file with its columns; raise :class:`UsageError` if it is unreadable or its header is unusable."""
    with _explain_errors(path):
        require_regular(path)
        text = path.suffix.lower() in SEPARATORS
        if text:
            schema = _open_text(path).schema
        else:
            facts = pq.read_metadata(path)
            schema = facts.schema.to_arrow_schema()
            groups = [facts.row_group(number).total_byte_size for number in range(facts.num_row_groups)]
            check_expansion(path, max(sum(groups), facts.num_rows * len(schema.names) * FEATURE_BYTES))
        names = schema.names  # decoded here
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"{path} has two columns {twice[0]!r}: names must differ; rename one")
    for place, name in enumerate(names, start=1):
        if not name.strip() or name.startswith(("Unnamed: ", "__index_level_")):
            raise UsageError(
                f"{path}: column {place} has no name ({name!r}), and is probably the number of the row: "
                "write the table without it (row.names=FALSE in R, index=False in pandas), or name it"
            )
    return TableFile(
        path=path,
        types={name: pa.string() if text else schema.field(name).type for name in names},
        semicolons=text and _find_separator(path, _read_header(path)) == ";",
    )


def _read_header(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.readline(1 << 24)


def _find_separator(path: Path, header: bytes) -> str:
    """Return what separates the columns of a text file with the line of names ``header``."""
    names, usual = re.sub(rb'"[^"]*"', b"", header), SEPARATORS[path.suffix.lower()]
    return ";" if usual == "," and b";" in names and b"," not in names else usual


def _open_text(path: Path, options: pa.csv.ConvertOptions | None = None) -> pa.csv.CSVStreamingReader:
    header = _read_header(path)
    return pa.csv.open_csv(
        path,
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=max(TEXT_BLOCK, 16 * len(header))),
        parse_options=pa.csv.ParseOptions(delimiter=_find_separator(path, header), newlines_in_values=True),
        convert_options=options,
    )


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"{path} cannot be read as a table ({reason}): it must have a line of names and as many cells in every "
            "row, in UTF-8, or be a whole Parquet file; write it again, or leave it out"
        ) from error


@dataclass(frozen=True, kw_only=True)
class ColumnContents:
    """Known contents of a column.

    Attributes:
        typed: Whether a file declares the column as numbers.
        declared: Whether a file declares the column as categories.
        values: Up to 51 distinct texts in the column.
        truth: File and row of the first true or false; empty if there is none.
        odd: The first text that is neither a number nor one of :data:`~fedshift.data.columns.CODES`, if there is one.
        place: File and row of ``odd``.
        codes: The CODES that occur, each with the file and row of the first.

    """

    typed: bool = False
    declared: bool = False
    values: frozenset[str] = frozenset()
    truth: str = ""
    odd: str | None = None
    place: str = ""
    codes: Mapping[str, str] = field(default_factory=dict)

    def update(self, cells: pa.Array, path: Path, rows: NDArray[np.int64]) -> ColumnContents:
        """Return the contents updated with text ``cells`` ``[B]`` from ``rows`` (from 1) of a file."""
        values, odd, place, truth, codes = self.values, self.odd, self.place, self.truth, {**self.codes}
        if len(values) <= MOST_CATEGORIES:
            found = pc.unique(clean_texts(cells)).drop_null().to_pylist()
            values = frozenset(sorted(values.union(found))[: MOST_CATEGORIES + 1])
        if odd is None and not _are_plain(cells):
            texts = clean_texts(cells)
            if not _are_numbers(texts):
                odd, at = next(
                    (text, at) for at, text in enumerate(texts.to_pylist()) if not _are_numbers(pa.array([text]))
                )
                place = f"{path}, data row {rows[at]}"
            for word, at in _find_words(texts).items() if odd is None else ():
                if word.lower() in CODES:
                    codes.setdefault(word, f"{path}, data row {rows[at]}")
                else:
                    truth = truth or f"{path}, data row {rows[at]}"
        return replace(self, values=values, odd=odd, place=place, truth=truth, codes=codes)


def fill_cells(column: Column, cells: pa.Array, out: Floats) -> None:
    """Write ``cells`` ``[B]`` of ``column`` into ``out`` ``[B, width]``; all features of a missing value become NaN."""
    if column.categories is None:
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite and are refused as infinite
            out[:, 0] = parse_numbers(cells)
        return
    place = pc.index_in(clean_texts(cells), value_set=pa.array(column.categories)).fill_null(-1).to_numpy()
    out[:] = place[:, None] == np.arange(column.width)
    out[place < 0] = np.nan


def feature_offsets(columns: Sequence[Column]) -> list[int]:
    """Return the index of each column's first feature, followed by the number of features."""
    return [0, *np.cumsum([column.width for column in columns]).tolist()]


def feature_slices(columns: Sequence[Column]) -> Iterator[tuple[Column, slice]]:
    """Yield each column with the slice of its features."""
    offsets = feature_offsets(columns)
    return zip(columns, map(slice, offsets, offsets[1:]), strict=True)


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is text (a dictionary, pandas' category, always counts as text)."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def is_number(kind: Any) -> bool:
    """Return whether an Arrow type is numeric or Boolean (or contains only missing values)."""
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean, pa.types.is_null)
    return any(test(kind) for test in tests)


def clean_texts(cells: pa.Array) -> pa.Array:
    """Return text cells without surrounding spaces; texts in :data:`MISSING` become null."""
    trimmed = pc.utf8_trim_whitespace(_to_strings(cells))
    return pc.if_else(pc.is_in(trimmed, value_set=pa.array(MISSING)), pa.scalar(None, pa.string()), trimmed)


def parse_numbers(cells: pa.Array) -> NDArray[np.float64]:
    """Return cells as float64 ``[B]``: NaN for missing, 1 for true, 0 for false; raise ``pa.ArrowInvalid`` for text.

    Texts of :data:`~fedshift.data.columns.CODES` are missing.
    """
    if not is_text(cells.type):
        return _to_float64(cells)
    for form in (_to_strings, clean_texts):  # the first usually suffices; the second is slower
        with suppress(pa.ArrowInvalid):
            return _to_float64(form(cells))
    lower = pc.utf8_lower(clean_texts(cells))
    plain = pc.if_else(pc.is_in(lower, value_set=pa.array(CODES)), pa.scalar(None, pa.string()), clean_texts(cells))
    return _to_float64(pc.if_else(pc.equal(lower, "true"), "1", pc.if_else(pc.equal(lower, "false"), "0", plain)))


def _find_words(texts: pa.Array) -> dict[str, int]:
    """Return the clean ``texts`` that are true, false or codes for a missing value, each with its first place."""
    (places,) = np.nonzero(
        pc.is_in(pc.utf8_lower(texts), value_set=pa.array([*TRUTHS, *CODES])).to_numpy(zero_copy_only=False)
    )
    first: dict[str, int] = {}
    for at, word in zip(places.tolist(), texts.take(pa.array(places)).to_pylist(), strict=True):
        first.setdefault(word, at)
    return first


def _are_plain(cells: pa.Array) -> bool:
    """Return whether all cells are numbers without spaces."""
    with suppress(pa.ArrowInvalid):
        _to_float64(_to_strings(cells))
        return True
    return False


def _are_numbers(cells: pa.Array) -> bool:
    try:
        parse_numbers(cells)
    except pa.ArrowInvalid:
        return False
    return True


def _to_strings(cells: pa.Array) -> pa.Array:
    return (cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells).cast(pa.string())


def _to_float64(cells: pa.Array) -> NDArray[np.float64]:
    values: NDArray[np.float64] = cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values


def read_declared_types(name: str, tables: Sequence[TableFile]) -> ColumnContents:
    """Return what the files' types imply for column ``name``; raise :class:`UsageError` if it cannot be a feature."""
    types = [table.types[name] for table in tables]
    for table, kind in zip(tables, types, strict=True):
        if pa.types.is_temporal(kind):
            raise _date_error(name, f"{kind} in {table.path}")
        if not (is_text(kind) or is_number(kind)):
            raise UsageError(
                f"{table.path}: column {name!r} holds {kind}, neither numbers nor text: leave it out ({{}})",
                Ref(ignore_columns=name),
            )
    return ColumnContents(
        typed=any(is_number(kind) and not pa.types.is_null(kind) for kind in types),
        declared=any(pa.types.is_dictionary(kind) for kind in types),
        truth=next((f"{t.path}" for t, kind in zip(tables, types, strict=True) if pa.types.is_boolean(kind)), ""),
    )


def infer_column(name: str, seen: ColumnContents) -> tuple[Column, str]:
    """Return a column's encoding and a notice (may be empty); raise :class:`UsageError` if it cannot be encoded."""
    numeric = seen.typed or any(value.lower() not in CODES and _are_numbers(pa.array([value])) for value in seen.values)
    if not seen.values or (seen.odd is None and numeric and not seen.declared):
        codes = join_some(f"{code!r} ({place})" for code, place in seen.codes.items())
        told = (
            f"column {name!r} holds {codes} among numbers, which counts as a missing value; leave the cells empty, or "
        )
        return Column(name=name), told + "write all values as words if it is a category" if codes else ""
    found = sorted(seen.values)
    odd, where = (found[0], "") if seen.odd is None else (seen.odd, f"{seen.place}: ")
    if seen.typed:
        raise UsageError(
            f"{where}column {name!r} holds text such as {odd!r} here and numbers in another file: give it one type"
        )
    if all(_DATE.fullmatch(value) for value in found):
        raise _date_error(name, f"such as {found[0]!r}")
    if len(found) > MOST_CATEGORIES:
        raise UsageError(
            f"{where}column {name!r} holds text such as {odd!r} and more than {MOST_CATEGORIES} different values, so "
            "it is an identifier, free text, or numbers with a slip among them: correct it, or leave it out "
            "({})",
            Ref(ignore_columns=name),
        )
    mixed = numeric and not seen.declared
    notice = (
        f"column {name!r} has numbers and text such as {odd!r} ({seen.place}): it is read as {len(found)} categories; "
        "if the text is a slip or marks a missing value, correct it or leave the cell empty"
    )
    return Column(name=name, categories=tuple(found)), notice if mixed else ""


def _date_error(name: str, example: str) -> UsageError:
    return UsageError(
        f"column {name!r} holds dates or times ({example}), which have no scale: make it a number, such as the age or "
        "the days since an event, or leave it out ({})",
        Ref(ignore_columns=name),
    )


def choose_features(table: TableFile, features: Sequence[str], only: Collection[str]) -> list[str]:
    """Return the ``features`` that are in ``only``; raise :class:`UsageError` naming one that ``table`` lacks."""
    for name in only:
        if name not in features:
            raise UsageError(f"{table.path} has no column {name!r} for inputs: columns are {', '.join(features)}")
    return [name for name in features if name in only]


def match_features(table: TableFile, features: Sequence[str], columns: Sequence[Column], other: str) -> list[str]:
    """Return the names ``features`` in the order of ``columns`` in the data ``other``; unchanged without columns.

    Raises :class:`UsageError` naming all columns that ``table`` lacks and all columns that only ``table`` has.
    """
    theirs = [column.name for column in columns]
    if not theirs or sorted(theirs) == sorted(features):
        return theirs or list(features)
    lacking = ", ".join(repr(name) for name in theirs if name not in features)
    further = ", ".join(repr(name) for name in features if name not in theirs)
    said = [f"has no {lacking}"] * bool(lacking) + [f"has {further} besides"] * bool(further)
    raise UsageError(
        f"{table.path} does not have the columns of {other!r}, the data that it joins: it {' and '.join(said)}. "
        "Name columns alike, leave out what is too much, and add what is missing (empty where it was not measured)"
    )


def match_column(column: Column, seen: ColumnContents, other: str) -> Column:
    """Return ``column`` of ``other``, data or a model; raise :class:`UsageError` if the contents do not fit it."""
    have = f"column {column.name!r} holds"
    if column.categories is None:
        if seen.truth and column.holds == "numbers":
            raise UsageError(
                f"{seen.truth}: {have} True or False, but numbers other than 0 and 1 in {other}: "
                "give the same measurement"
            )
        if seen.odd is not None:
            raise UsageError(
                f"{seen.place}: {have} text such as {seen.odd!r}, but numbers in {other}: "
                "make it numbers, empty where there is none"
            )
        return column
    listed = ", ".join(column.categories)
    if seen.typed:
        raise UsageError(f"{have} numbers, but text in {other}: give one of {listed}, as text")
    unknown = sorted(seen.values.difference(column.categories))
    if unknown:
        raise UsageError(
            f"{have} {', '.join(map(repr, unknown[:8]))}, but its categories in {other}, are "
            f"{listed}: call it one of them, or leave the cells empty"
        )
    return column


def read_rows(path: Path, columns: Sequence[Column], other: str) -> Floats:
    """Return a table's rows as ``columns`` of ``other``, float32 ``[N, D]`` with NaN for missing values.

    Further columns are ignored. Raises :class:`UsageError` for a table without one of the columns or without rows, and
    for cells that do not fit.
    """
    table, names = open_table(path), [column.name for column in columns]
    lacking = [name for name in names if name not in table.types]
    if lacking:
        raise UsageError(
            f"{path} has no column {', '.join(map(repr, lacking))}: give every column, with empty cells where a value "
            f"is missing; its columns are {', '.join(table.types)}"
        )
    seen = {name: read_declared_types(name, [table]) for name in names}
    offsets, parts = feature_offsets(columns), [np.empty((0, feature_offsets(columns)[-1]), np.float32)]
    for batch in table.batches(names):
        numbers = 1 + sum(map(len, parts)) + np.arange(batch.num_rows)
        parts.append(np.empty((batch.num_rows, offsets[-1]), np.float32))
        for number, (column, cells) in enumerate(zip(columns, batch.columns, strict=True)):
            if is_text(cells.type):
                seen[column.name] = seen[column.name].update(cells, path, numbers)
            match_column(column, seen[column.name], f"the model {other!r}")
            fill_cells(column, cells, parts[-1][:, offsets[number] : offsets[number + 1]])
    rows = np.concatenate(parts)
    if not len(rows):
        raise UsageError(f"{path} has names of columns but no row: give it data, or leave it out")
    if np.isinf(rows).any():
        row, at = np.argwhere(np.isinf(rows))[0]
        name = names[int(np.searchsorted(offsets, at, side="right")) - 1]
        raise UsageError(
            f"{path}, data row {row + 1}: an infinite value in column {name!r}: correct it, or leave it empty"
        )
    return rows


def prepare_rows(
    x: Floats, train: Rows, columns: Sequence[Column], *, scaled: bool = True,
    locate: Callable[[int], str] = "row {}".format,
) -> tuple[int, list[str], FeatureScaling]:  # fmt: skip
    """:func:`impute` and (if ``scaled``) :func:`scale` one client's ``x`` ``[N, D]`` in place.

    ``locate``: function that names a row, for values far from all others of their column.
    Returns the number of values filled, the columns that became 0, and how each feature was prepared.
    """
    numbers = (pair for pair in feature_slices(columns) if pair[0].categories is None)
    far = tuple(
        f"{column.name!r} {text[:-1]}, {locate(row)})"
        for column, features in numbers for text, row in find_outlying(x[:, features.start])
    )  # fmt: skip
    filled, empty, fill = impute(x, train, columns)
    mean, std = scale(x, train, columns, skip=empty) if scaled else (np.zeros(x.shape[1]), np.ones(x.shape[1]))
    for column, features in feature_slices(columns):
        if column.name in empty:
            std[features] = np.inf
    return filled, empty, FeatureScaling(fill=fill, mean=mean, std=std, far=far)


def impute(x: Floats, train: Rows, columns: Sequence[Column]) -> tuple[int, list[str], Floats64]:
    """Fill a client's missing values in place, from its training rows.

    A number becomes the median of the training rows; a text becomes their most frequent category (the first in a tie).
    A column without values in the training rows becomes 0 in all rows.

    Args:
        x: Features ``[N, D]``, with NaN for missing values.
        train: Indices of the training rows.
        columns: Encodings of the columns, which have D features in total.

    Returns:
        The number of values filled, the names of the columns that became 0, and the fill values ``[D]``.

    """
    filled, empty, fill = 0, [], np.zeros(x.shape[1])
    for column, features in feature_slices(columns):
        part = x[:, features]
        absent = np.isnan(part[:, 0])
        known = part[train][~absent[train]]
        if len(known) == 0:
            part[:] = 0
            empty.append(column.name)
            continue
        if column.categories is None:
            usual = np.median(known)
        else:
            usual = np.arange(column.width) == known.sum(axis=0, dtype=np.float64).argmax()
        fill[features] = usual
        part[absent] = usual
        filled += int(absent.sum())
    return filled, empty, fill


def scale(x: Floats, train: Rows, columns: Sequence[Column], skip: Sequence[str] = ()) -> tuple[Floats64, Floats64]:
    """Standardize the numbers of one client's ``x`` ``[N, D]`` in place, except for the columns named in ``skip``.

    Mean and standard deviation are computed on the rows ``train`` (divided by N, as in scikit-learn's
    StandardScaler; a standard deviation of 0 is replaced by 1). Returns both, ``[D]``; 0 and 1 for unchanged features.
    """
    center, deviation = np.zeros(x.shape[1]), np.ones(x.shape[1])
    for column, features in feature_slices(columns):
        if column.categories is None and column.name not in skip:
            at, values = features.start, x[:, features.start].astype(np.float64)
            first = values[0]  # differences from it are exactly 0 if all are equal
            center[at] = first + (values[train] - first).mean()
            deviation[at] = (values[train] - first).std() or 1
            x[:, at] = (values - center[at]) / deviation[at]
    return center, deviation
