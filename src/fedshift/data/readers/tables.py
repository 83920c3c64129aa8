"""Tables, as files or frames: one with a column of clients, or one for each client.

A table is read whole, as Arrow reads it: cells of CSV and TSV as text (RFC 4180, UTF-8), of Parquet and frames by their
declared type. Columns are matched by name. Every column without a role is an input: a number is one feature, text (at
most 50 distinct values) one feature per category, in the sorted union over the clients read. Missing values are filled,
and numbers scaled, only by each client's training rows. Integer labels 0..K-1 keep their value; all others are
numbered in order. Clients that join others (``schema``) are read with these' columns and categories.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

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
from ..columns import (
    CODES,
    GROUPED,
    MISSING,
    PLAIN,
    TRUTHS,
    Column,
    Numerals,
    are_dates,
    feature_slices,
    may_measure,
    read_numerals,
)
from ..identity import clean_name, group_alike, match_name, merge_names, sort_names
from ..preparation import FeatureScaling
from ..samples import digest_each
from ..source import DRAWN, Array, Decoded, Divide, ReadOptions, Rows, Source, choose_clients
from ..usual_values import find_outlying

TARGETS = ("target", "label", "y", "class", "outcome")
CLIENTS = ("client", "site", "hospital", "center", "institution")
SIDES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "development"), "validation"),
    **dict.fromkeys(("test", "testing", "holdout", "hold-out"), "test"),
}
"""Values of a split column (case-insensitive), and the split of each."""
MOST_CLASSES, MOST_CATEGORIES, MOST_REMARKS = 100, 50, 50
SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*SEPARATORS, ".parquet")
TEXTS, UNREAD = (".txt", ".dat", ".data", ""), (
    ".gz", ".bz2", ".xz", ".zst", ".zip", ".xlsx", ".xls", ".xlsm", ".ods", ".feather", ".arrow", ".pq", ".orc",
    ".json", ".jsonl", ".sav", ".dta", ".sas7bdat", ".xpt", ".rds", ".rdata",
)  # fmt: skip
"""Names of files that may be tables and are not read."""
LOST = "most differences are lost, since the network's numbers have seven digits, in {}"
holds = "tables"
options = frozenset(
    {"test_fraction", "client_column", "target", "split_column", "ignore_columns", "groups", "missing", "scaling"}
)

_ONE_COMMA, _ONE_POINT = (rf"^\s*[+-]?\d*{sign}(\d{{1,2}}|\d{{4,}})\s*$" for sign in (",", r"\."))
"""Numbers whose only comma, or point, does not separate thousands."""
_ZERO_FIRST = r"^\s*[+-]?0\d"
_COMMA = r"^\s*([+-]?\d*),(\d+([eE][+-]?\d+)?)\s*$"
Numbers = NDArray[np.float64]
Ints = NDArray[np.intp]


# Files


@dataclass(eq=False)
class Table:
    """A table in memory.

    Attributes:
        path: Its file, or its name in messages.
        cells: Its cells.
        decimal: Decimal point of its texts, ``?`` if not known, as in :func:`~fedshift.data.columns.read_numerals`.
        notices: Remarks on how the file is written.

    """

    path: Path
    cells: pa.Table
    decimal: Literal["", ".", ",", "?"] = ""
    notices: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.cells.column_names)

    def take(self, name: str) -> pa.ChunkedArray:
        """Return the cells of a column, which the table loses, so that their memory is free once they are read."""
        column = self.cells.column(name)
        self.cells = self.cells.drop_columns(name)
        return column


def find_tables(path: Path) -> list[Path]:
    """Return the tables at ``path``, sorted by name: the file itself, or the tables directly in a directory."""
    return [file for file in sorted(path.iterdir() if path.is_dir() else [path]) if is_table(file)]


def is_table(file: Path) -> bool:
    """Return whether the file's name ends with one of :data:`SUFFIXES` and does not begin with a dot or underscore."""
    return file.suffix.lower() in SUFFIXES and file.name[:1] not in "._" and file.exists() and not file.is_dir()


def read_table(path: Path) -> Table:
    """Return a table; raise :class:`UsageError` if the file or its line of names is bad."""
    with _explain_errors(path):
        require_regular(path)
        if path.suffix.lower() == ".parquet":
            facts = pq.read_metadata(path)
            groups = [facts.row_group(number).total_byte_size for number in range(facts.num_row_groups)]
            check_expansion(path, max(sum(groups), 4 * facts.num_rows * facts.num_columns))
            _check_names(path, facts.schema.to_arrow_schema().names)
            return Table(path, pq.read_table(path))
        before, separator, header = _find_form(path)
        parse = pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
        size = max(1 << 20, 16 * len(header))
        block = pa.csv.ReadOptions(use_threads=False, block_size=size, skip_rows=before)
        names = pa.csv.open_csv(path, block, parse).schema.names
        _check_names(path, names)
        types = dict.fromkeys(names, pa.string())
        convert = pa.csv.ConvertOptions(column_types=types, null_values=MISSING, strings_can_be_null=True)
        cells = pa.csv.read_csv(path, block, parse, convert)
        decimal = _find_decimal(cells, separator) if separator in ";\t" else ""
        return Table(path, cells, decimal, tuple(_describe_form(path, before, separator, decimal)))


def _find_form(path: Path) -> tuple[int, str, bytes]:
    """Return the number of lines before the line of names, what separates columns, and that line.

    Lines that begin with ``#`` are remarks, unless the last one has as many columns as the next line. Excel's first
    line ``sep=;`` names the separator.
    """
    with open_regular(path) as file:
        lines = [file.readline(1 << 24).removeprefix(b"\xef\xbb\xbf")]
        while len(lines) < MOST_REMARKS and (lines[-1].startswith((b"#", b"sep=")) or lines[-1] in (b"\n", b"\r\n")):
            lines.append(file.readline(1 << 24))
    told = next((line[4:].rstrip(b"\r\n") for line in lines if line.startswith(b"sep=")), b"").decode("latin-1")
    usual = told or SEPARATORS[path.suffix.lower()]
    names = re.sub(rb'"[^"]*"', b"", lines[-1])
    most = max(",;\t|", key=lambda sign: names.count(sign.encode()))
    separator = usual if usual.encode() in names or most.encode() not in names else most
    before = len(lines) - 1
    if before and lines[-2].startswith(b"#") and lines[-2].count(separator.encode()) == names.count(
        separator.encode()) > 0:  # fmt: skip
        before -= 1
    return before, separator, lines[before]


def _find_decimal(cells: pa.Table, separator: str) -> Literal["", ".", ",", "?"]:
    """Return the decimal point of a file that programs write with commas in some countries."""
    decimals: list[tuple[str, Literal[",", "."]]] = [(_ONE_COMMA, ","), (_ONE_POINT, "."), (_COMMA, ",")]
    for pattern, sign in decimals[: 3 if separator == ";" else 2]:
        if any(pc.any(pc.match_substring_regex(column, pattern)).as_py() for column in cells.columns):
            return sign
    return "?" if separator == ";" else ""


def _describe_form(path: Path, before: int, separator: str, decimal: str) -> Iterator[Information]:
    if before:
        yield Information(f"{path}: what precedes its line of names is left out ({before} line{'s' * (before > 1)})")
    commas = decimal == "," or (separator == ";" and decimal != ".")
    if commas or separator != SEPARATORS[path.suffix.lower()]:
        signs = {";": "semicolons separate", "\t": "tabs separate", ",": "commas separate", "|": "bars separate"}
        told = ", and a comma in a number is its decimal point" if commas else ""
        yield Information(f"{path}: {signs.get(separator, f'{separator!r} separates')} its columns{told}")


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
    """The cells of a column over the N rows that are read.

    Attributes:
        name: Name of the column.
        numbers: Number of each cell, float64 ``[N]``; NaN where it is missing or a word. True is 1, and false 0.
        texts: Distinct texts; none if no cell is a word.
        place: Index in ``texts`` of each cell ``[N]``; -1 where it is missing, or a number by its file's declared type.
        typed: Whether a file declares the column as numbers.
        declared: Whether a file declares the column as categories.
        numerals: What the texts of each file are as numbers.
        where: Function that names the file and number of rows.

    """

    name: str
    numbers: Numbers
    texts: Sequence[str] = ()
    place: Ints
    typed: bool
    declared: bool
    numerals: Sequence[Numerals] = ()
    where: Callable[[Ints], str]

    def find(self, words: Container[str]) -> Ints:
        """Return the rows whose text, in lower case, is one of ``words``."""
        return np.flatnonzero(np.array([*(text.lower() in words for text in self.texts), False])[self.place])

    @cached_property
    def odd(self) -> Ints:
        """Rows of words that are neither true, false nor codes for a missing value."""
        return np.setdiff1d(np.flatnonzero((self.place >= 0) & np.isnan(self.numbers)), self.find(CODES))

    @cached_property
    def truths(self) -> Ints:
        """Rows with true or false."""
        return self.find(TRUTHS)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Number of rows of each distinct text, in order of the texts."""
        counts = np.bincount(self.place[self.place >= 0], minlength=len(self.texts))
        return dict(sorted(zip(self.texts, counts.tolist(), strict=True)))

    def list_texts(self, rows: Ints) -> list[str]:
        """Return the distinct texts of ``rows``, by first occurrence."""
        return [self.texts[place] for place in dict.fromkeys(self.place[rows].tolist())]

    def rename(self, stands: Mapping[str, str]) -> Cells:
        """Return the cells with other texts, by text; those that are not in ``stands`` stay."""
        renamed = [stands.get(text, text) for text in self.texts]
        texts = list(dict.fromkeys(renamed))
        return replace(self, texts=texts, place=np.array([*map(texts.index, renamed), -1])[self.place])

    def read_values(self, column: Column) -> Numbers:
        """Return the value of each cell as ``column`` has it, ``[N]``: a number, or that of its category, or NaN.

        Raises :class:`UsageError` for a number that is infinite, or beyond float32.
        """
        if column.categories is not None:
            known = {category: float(number) for number, category in enumerate(column.categories)}
            return np.array([*(known.get(text, np.nan) for text in self.texts), np.nan])[self.place]
        if len(infinite := np.flatnonzero(np.abs(self.numbers) > np.finfo(np.float32).max)):
            raise UsageError(
                f"{self.where(infinite)}: an infinite value in column {self.name!r} (or one beyond float32): correct "
                "it, or leave it empty to have it imputed"
            )
        return self.numbers


def spread(values: Numbers, column: Column) -> Numbers:
    """Return the features ``[N, width]`` of the ``values [N]`` of a column; all of a missing value are NaN."""
    if column.categories is None:
        return values[:, None]
    return np.where(np.isnan(values)[:, None], np.nan, values[:, None] == np.arange(column.width))


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is text (a dictionary, pandas' category, always counts as text)."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def clean_texts(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return text cells without surrounding spaces; texts in :data:`MISSING` become null."""
    trimmed = pc.utf8_trim_whitespace(cells.cast(pa.string()))
    return pc.if_else(pc.is_in(trimmed, value_set=pa.array(MISSING)), pa.scalar(None, pa.string()), trimmed)


def _read_cells(name: str, rows: TableRows, known: Column | None = None) -> Cells:
    """Return the cells of a column in the rows that are read; raise :class:`UsageError` if it cannot be an input."""
    kinds = {table.cells.schema.field(name).type: table.path for table in rows.tables}
    for kind, path in kinds.items():
        if pa.types.is_temporal(kind):
            raise _refuse_dates(name, f"{kind} in {path}")
        if not (is_text(kind) or _is_number(kind)):
            raise UsageError(
                f"{path}: column {name!r} holds {kind}, neither numbers nor text: leave it out ({{}})",
                Ref(ignore_columns=name),
            )
    declared = any(map(pa.types.is_dictionary, kinds))
    told: Any = {
        "name": name, "declared": declared, "where": lambda some: rows.locate(rows.read[some]),
        "typed": not all(is_text(kind) or pa.types.is_null(kind) for kind in kinds),
    }  # fmt: skip
    pairs = list(zip(rows.take(name), rows.tables, strict=True))
    if not declared and (known is None or known.categories is None):
        plain = [values for cells, table in pairs if (values := _read_plain(cells, table.decimal)) is not None]
        if len(plain) == len(pairs):
            return Cells(numbers=np.concatenate(plain), place=np.full(sum(map(len, plain)), -1), **told)
    numbers, distinct, places, numerals = zip(
        *(_read_words(cells, table.decimal) for cells, table in pairs), strict=True
    )
    index = {text: at for at, text in enumerate(dict.fromkeys(chain(*distinct)))}
    shared = [np.array([*map(index.get, texts), -1])[place] for texts, place in zip(distinct, places, strict=True)]
    return Cells(
        numbers=np.concatenate(numbers), place=np.concatenate(shared), texts=list(index), numerals=numerals, **told
    )


def _merge_texts(seen: Cells, clients: NDArray[np.object_]) -> tuple[Cells, list[str]]:
    """Return cells with one spelling for each category, and notices."""
    words = len(seen.odd) > 0 or seen.declared
    if not words or len(seen.texts) > 4 * MOST_CATEGORIES or not group_alike(seen.texts):
        return seen, []
    held = {name: seen.list_texts(np.flatnonzero((clients == name) & (seen.place >= 0))) for name in set(clients)}
    stands, notices = merge_names(held, f"categories of {seen.name!r}")
    return seen.rename(stands), notices


def _is_number(kind: Any) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean, pa.types.is_null)
    return any(test(kind) for test in tests)


def _read_plain(cells: pa.ChunkedArray, decimal: str) -> Numbers | None:
    """Return cells as float64, NaN where they are missing; None if there are words, or signs that may mean others."""
    if pa.types.is_boolean(cells.type):  # words, since they are numbers only among 0 and 1
        return None
    if not is_text(cells.type):
        return _to_float64(cells)
    for clean in (False, True):  # clean is slower
        with suppress(pa.ArrowInvalid):
            values = _to_float64(clean_texts(cells) if clean else cells)
            doubtful = (
                GROUPED if decimal in (",", "?") else _ZERO_FIRST if not (values > np.floor(values)).any() else ""
            )
            return None if doubtful and pc.any(pc.match_substring_regex(cells, doubtful)).as_py() else values
    return None


def _to_float64(cells: pa.ChunkedArray) -> Numbers:
    values: Numbers = cells.cast(pa.float64(), safe=False).to_numpy()
    return values


def _read_words(cells: pa.ChunkedArray, decimal: Any) -> tuple[Numbers, list[str], Ints, Numerals]:
    """Return cells' numbers, NaN where there is none, distinct texts, each cell's place among them, and the rule."""
    if not (is_text(cells.type) or pa.types.is_boolean(cells.type)):
        numbers = _to_float64(cells)
        first = {f"{number:g}": number for number in numbers[~np.isnan(numbers)][:1].tolist()}
        return numbers, [], np.full(len(cells), -1), Numerals(first)
    encoded = clean_texts(cells).combine_chunks().dictionary_encode()
    distinct = list(map(clean_name, encoded.dictionary.to_pylist()))
    numerals = read_numerals([text for text in distinct if text.lower() not in (*CODES, *TRUTHS)], decimal)
    place = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.intp)
    known = [numerals.numbers.get(text, TRUTHS.get(text.lower(), np.nan)) for text in distinct]
    return np.array([*known, np.nan])[place], distinct, place, numerals


def infer_column(seen: Cells) -> tuple[Column, str]:
    """Return a column's encoding and a notice (may be empty); raise :class:`UsageError` if it cannot be encoded."""
    name, unit, numeric = seen.name, _find_unit(seen), seen.typed or not np.isnan(seen.numbers).all()
    if not seen.texts or (not len(seen.odd) and numeric and not seen.declared):
        return Column(name=name, unit=unit), _describe_numerals(seen)
    odd = seen.list_texts(seen.odd) or list(seen.counts)
    where, shown = f"{seen.where(seen.odd[:1])}: " if len(seen.odd) else "", ", ".join(map(repr, odd[:3]))
    if are_dates({text: count for text, count in seen.counts.items() if text.lower() not in CODES}):
        raise _refuse_dates(name, f"such as {', '.join(map(repr, list(seen.counts)[:3]))}")
    if seen.typed:
        raise UsageError(
            f"{where}column {name!r} holds text such as {shown} here and numbers in another file: give it one type"
        )
    if len(seen.counts) > MOST_CATEGORIES:
        raise UsageError(
            f"{where}column {name!r} holds text such as {shown} and more than {MOST_CATEGORIES} different values, so "
            "it is an identifier, free text, or numbers with a slip among them: correct it, or leave it out ({})",
            Ref(ignore_columns=name),
        )
    column, doubtful = Column(name=name, categories=tuple(seen.counts)), list(filter(may_measure, seen.counts))
    if seen.declared:
        return column, ""
    if numeric:
        return column, (
            f"column {name!r} has numbers and text such as {shown} ({where[:-2]}): it is read as {column.width} "
            "categories; if the text is a slip or marks a missing value, correct it or leave the cell empty"
        )
    measured = 2 * sum(seen.counts[text] for text in doubtful) > sum(seen.counts.values())
    return column, (
        f"column {name!r} holds text such as {', '.join(map(repr, doubtful[:3]))}: it is read as {column.width} "
        "categories; if they are measurements, write plain numbers"
    ) if measured else ""  # fmt: skip


def _describe_numerals(seen: Cells) -> str:
    """Return a notice of texts among numbers, and of numbers that may not mean what they say."""
    first = {text: np.flatnonzero(seen.place == at)[:1] for at, text in enumerate(seen.texts) if text.lower() in CODES}
    codes = join_some(f"{code!r} ({seen.where(row)})" for code, row in first.items())
    read = {
        text: number for each in seen.numerals for text, number in each.numbers.items()
        if (not PLAIN.fullmatch(text) or number != float(text))
        and (each.decimal != "," or not re.fullmatch(_COMMA, text))
    }  # fmt: skip
    pairs = join_some((f"{text!r} as {number:.15g}" for text, number in read.items()), shown=3)
    zeros = next((text for text in seen.texts if re.fullmatch(r"0\d+", text)), "")
    date = _find_compact_date(seen.numbers)
    told = {
        f"{codes} among numbers, which counts as a missing value; leave the cells empty, or write all values as words "
        "if it is a category": codes,
        f"numbers in other forms, read by one rule: {pairs}": pairs,
        f"{zeros!r}, which is read as a number; if its zeros count, as in a postal code, write it with a letter": zeros,
        f"numbers such as {date}; if they are dates, whose differences are not days, write the days since one": date,
    }
    return "; ".join(f"column {seen.name!r} holds {text}" for text, holds in told.items() if holds)


def _find_compact_date(numbers: Numbers) -> str:
    """Return the first of ``numbers`` if all can be dates such as 20240131; else an empty text."""
    known = numbers[~np.isnan(numbers)]
    if not len(known) or not 19e6 < known.min() <= known.max() < 21e6:
        return ""
    month, day = known // 100 % 100, known % 100
    dates = (month > 0) & (month < 13) & (day > 0) & (day < 32)
    return f"{known[0]:.0f}" if dates.all() else ""


def _find_unit(seen: Cells) -> str:
    """Return the unit of a column's texts; refuse several, and texts that may be two numbers each."""
    rules = [] if seen.declared else seen.numerals
    for doubt in filter(None, (each.doubt for each in rules)):
        signed = list(dict.fromkeys([doubt, *(text for text in seen.counts if re.search("[.,]", text))]))
        raise UsageError(
            f"{seen.where(seen.find([doubt.lower()])[:1])}: column {seen.name!r} has numbers whose commas and points "
            f"may mean two things, such as {', '.join(map(repr, signed[:3]))}: write all decimals in one way, and no "
            "thousands separators"
        )
    units = {each.unit: next(iter(each.numbers)) for each in rules if each.numbers}
    if len(units) > 1:
        raise UsageError(
            f"column {seen.name!r} holds {' and '.join(map(repr, units.values()))} in two files: give one unit in all"
        )
    return next(iter(units), "")


def _refuse_dates(name: str, example: str) -> UsageError:
    return UsageError(
        f"column {name!r} holds dates or times ({example}), which have no scale: make it a number, such as the age or "
        "the days since an event, or leave it out ({})",
        Ref(ignore_columns=name),
    )


def match_column(column: Column, seen: Cells, other: str) -> tuple[Numbers, list[str]]:
    """Return the values ``[N]`` of a ``column`` of ``other``, data or a model, and notices of other spellings.

    Raises :class:`UsageError` if the cells do not fit it.
    """
    have = f"column {column.name!r} holds"
    if column.categories is None:
        _refuse_other_numbers(column, seen, other)
        return seen.read_values(column), []
    listed = ", ".join(column.categories)
    if seen.typed:
        raise UsageError(f"{have} numbers, but text in {other}: give one of {listed}, as text")
    names = {text: match_name(text, column.categories) for text in seen.counts}
    if unknown := [text for text, name in names.items() if name is None]:
        raise UsageError(
            f"{have} {', '.join(map(repr, unknown[:8]))}, but its categories in {other}, are {listed}: call it one of "
            "them, or leave the cells empty"
        )
    stands = {text: str(name) for text, name in names.items() if name != text}
    told = join_some(f"{text!r} is read as {name!r}" for text, name in stands.items())
    notices = [f"column {column.name!r} is spelled as in {other}: {told}"] if told else []
    return seen.rename(stands).read_values(column), notices


def _refuse_other_numbers(column: Column, seen: Cells, other: str) -> None:
    """Raise :class:`UsageError` unless cells are numbers as those of ``column`` in ``other`` are."""
    have = f"column {column.name!r} holds"
    unit = _find_unit(seen)
    if len(seen.truths) and column.holds == "numbers":
        raise UsageError(
            f"{seen.where(seen.truths[:1])}: {have} True or False, but numbers other than 0 and 1 in {other}: give the "
            "same measurement"
        )
    if len(seen.odd):
        raise UsageError(
            f"{seen.where(seen.odd[:1])}: {have} text such as {seen.list_texts(seen.odd)[0]!r}, but numbers in "
            f"{other}: make it numbers, empty where there is none"
        )
    if unit not in ("", column.unit):
        raise UsageError(f"{have} numbers in {unit}, but in {column.unit or 'no unit'} in {other}: give the same unit")


def _describe_numbers(column: Column, values: Numbers, seen: Cells) -> Column:
    """Return ``column`` with what its ``values [N]`` are; refuse True and False beside other numbers."""
    if column.categories is not None:
        return column
    other = np.flatnonzero(~np.isnan(values) & (values != 0) & (values != 1))
    if len(other) and (len(seen.truths) or column.holds == "True and False"):
        where = seen.where(seen.truths[:1]) if len(seen.truths) else "in the data that these rows join"
        raise UsageError(
            f"column {column.name!r} holds True or False ({where}), which are 1 and 0, but {values[other[0]]:g} "
            f"elsewhere ({seen.where(other[:1])}): give it one meaning at all clients, or leave it out"
        )
    return replace(column, holds="numbers" if len(other) else "True and False" if len(seen.truths) else "0 and 1")


# Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class TableRows:
    """The rows of all tables.

    Attributes:
        tables: The tables.
        starts: Number of the first row of each table, and of all rows.
        roles: Text of each row in each column with a role, and its client (``""``).
        read: Numbers of the rows of chosen clients, ascending.
        names: The chosen clients.

    """

    tables: Sequence[Table]
    starts: Ints
    roles: pd.DataFrame
    read: Ints
    names: Sequence[str]

    def take(self, name: str) -> list[pa.ChunkedArray]:
        """Return the cells of a column in the rows that are read, of each table, which loses the column."""
        columns = [table.take(name) for table in self.tables]
        if len(self.read) == self.starts[-1]:
            return columns
        cuts = np.split(self.read, np.searchsorted(self.read, self.starts[1:-1]))
        triples = zip(columns, cuts, self.starts, strict=False)
        return [column.take(pa.array(rows - start)) for column, rows, start in triples]

    def locate(self, rows: Ints) -> str:
        """Return the file and row numbers (from 1) of ``rows``, in ascending order; only rows of the first file."""
        place = int(np.searchsorted(self.starts, rows[0], side="right")) - 1
        here = rows[rows < self.starts[place + 1]] - self.starts[place] + 1
        return f"{self.tables[place].path}, data row{'s' * (len(here) > 1)} {join_some(map(str, here))}"


def _find_rows(tables: Sequence[Table], reading: ReadOptions) -> TableRows:
    """Return the rows; raise :class:`UsageError` for unknown clients, and for tables or roles without values."""
    for table in tables:
        if not len(table.cells):
            raise UsageError(f"{table.path} has names of columns but no row: give it data, or leave it out")
    roles = pd.DataFrame({name: pd.concat([_to_texts(table, name) for table in tables], ignore_index=True)
                          for name in reading.role_columns})  # fmt: skip
    column = reading.client_column
    names = [table.path.stem for table in tables]
    roles[""] = roles[column] if column else np.repeat(names, [len(table.cells) for table in tables])
    by_file = reading.domains is not None and not column  # then the files are those of the chosen clients, in order
    known = sort_names(roles[column].dropna().unique()) if column else names if by_file else sort_names(names)
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
    starts = np.cumsum([0, *(len(table.cells) for table in tables)])
    made = TableRows(tables=tables, starts=starts, roles=roles, read=np.flatnonzero(read), names=chosen)
    for name in reading.role_columns:
        missing = roles[name].isna().to_numpy() & (read | (name == column))
        if missing.any():
            where = made.locate(np.flatnonzero(missing))
            raise UsageError(f"{where}: no value in column {name!r}: fill it in, or leave the rows out")
    return made


def _to_texts(table: Table, name: str) -> pd.Series[str]:
    """Return the cells of a column as texts, None where they are missing; numbers with decimal points."""
    cells = table.cells.column(name)
    if is_text(cells.type):
        clean = clean_texts(cells)
        cells = pc.replace_substring_regex(clean, _COMMA, r"\1.\2") if table.decimal == "," else clean
    texts: pd.Series[str] = cells.to_pandas(integer_object_nulls=True).astype(object)
    return texts.map({value: clean_name(str(value)) for value in texts.dropna().unique()})


# Reading


def can_read(source: object) -> bool:
    """Return whether ``source`` is a ``.csv``, ``.tsv`` or ``.parquet`` file or a directory with one."""
    return isinstance(source, Path) and bool(find_tables(source))


def read(source: Path, reading: ReadOptions) -> Source:
    """Return the clients of the table at ``source``, or of the tables in that directory.

    Raises :class:`UsageError` if the data cannot be used, naming file, column, client or rows.
    """
    files, column = find_tables(source), reading.client_column
    if reading.schema is not None and column and column not in read_table(files[0]).names:
        reading, column = replace(reading, client_column=None), None
    if column is None:
        if len(files) == 1 and reading.schema is None:
            raise UsageError(
                f"{files[0]} is a single table: say which column holds the client of each row ({{}}), or give a "
                f"directory with a file for each client; {_describe_candidates(read_table(files[0]).names, CLIENTS)}",
                Ref("client_column"),
            )
        by_stem: dict[str, Path] = {}
        for file in files:
            if by_stem.setdefault(file.stem, file) != file:
                raise UsageError(f"{by_stem[file.stem]} and {file} are both of client {file.stem!r}: keep one")
        files = [by_stem[name] for name in choose_clients(by_stem, reading)] if reading.domains else files
    name = source.resolve().name if source.is_dir() else source.resolve().stem
    beside = sorted(source.iterdir()) if source.is_dir() else []
    unread = join_some(file.name for file in beside if _may_hold_rows(file, reading))
    fault = f"{unread} in {source} may hold rows, and is left out: write {', '.join(SUFFIXES)}"
    return replace(read_tables(list(map(read_table, files)), name, reading), faults=(fault,) if unread else ())


def _may_hold_rows(file: Path, reading: ReadOptions) -> bool:
    """Return whether a file, which is not read, may be a table: by its name, or a text by its line of names."""
    if file.is_dir() or file.name[:1] in "._" or is_table(file):
        return False
    if file.suffix.lower() not in TEXTS:
        return file.suffix.lower() in UNREAD
    with _explain_errors(file), open_regular(file) as opened:
        cells = re.split(r"[,;\t|]", opened.readline(1 << 16).decode("latin-1").replace('"', ""))
    return len(cells) > 1 and {cell.strip() for cell in cells}.issuperset(reading.targets)


def read_tables(tables: Sequence[Table], name: str, reading: ReadOptions) -> Source:
    """Return the clients of ``tables`` as the data ``name``; refuse tables with other columns."""
    _refuse_other_columns(tables, reading)
    _check_roles(tables, reading)
    reading, notices = _adopt_split(tables, reading)
    features = _choose_features(tables[0], reading)
    rows = _find_rows(tables, reading)
    task = reading.task or CLASSIFICATION
    y, classes, class_names = _read_targets(rows, task, reading, notices)
    theirs = {column.name: column for column in reading.schema.columns} if reading.schema else {}
    joined = f"{reading.schema.name!r}, the data that it joins" if reading.schema else ""
    client = rows.roles[""].to_numpy()[rows.read]
    columns, values = list[Column](), list[Numbers]()
    for done, feature in enumerate(features, 1):
        seen = _read_cells(feature, rows, theirs.get(feature))
        if column := theirs.get(feature):
            numbers, said = match_column(column, seen, joined)
        else:
            seen, said = _merge_texts(seen, client)
            column, more = infer_column(seen)
            numbers, said = seen.read_values(column), [*said, *filter(None, [more])]
        notices += said
        values.append(numbers)
        columns.append(_describe_numbers(column, numbers, seen))
        if reading.progress:
            reading.progress("columns", done, len(features))
    pa.default_memory_pool().release_unused()
    pairs = zip(columns, values, strict=True)
    if constant := [repr(column.name) for column, own in pairs if np.fmin.reduce(own) == np.fmax.reduce(own)]:
        notices.append(f"the same in all rows, so nothing can be learned from it: {join_some(constant)}")
    places = {name: np.flatnonzero(client == name) for name in rows.names}
    return Source(
        name=name, rows=_list_rows(rows, places, reading),
        arrays=tuple(Array(where=f"client {name!r}", y=y[torch.from_numpy(here)]) for name, here in places.items()),
        decode=partial(_prepare_clients, rows, places, tuple(columns), values, reading),
        task=task, classes=classes, class_names=class_names, notices=tuple(notices),
        note=f"{{samples}} rows of {{clients}} clients, {len(columns)} columns",
    )  # fmt: skip


def _prepare_clients(
    rows: TableRows, places: Mapping[str, Ints], columns: tuple[Column, ...], values: Sequence[Numbers],
    reading: ReadOptions, divide: Divide,
) -> Decoded:  # fmt: skip
    """Return the features of each client's rows, float32 ``[N, D]``, filled and scaled by its training rows."""
    made = dict[str, PreparedRows]()
    trained = np.split(divide(()) == "train", np.cumsum([len(here) for here in places.values()])[:-1])
    for (client, here), training in zip(places.items(), trained, strict=True):
        x = np.concatenate([spread(own[here], column) for own, column in zip(values, columns, strict=True)], axis=1)
        if reading.missing == "refuse" and np.isnan(x).any():
            raise _refuse_missing(client, x, columns)
        made[client] = prepare_rows(
            x, np.flatnonzero(training), columns, scaled=reading.scaling == "client",
            locate=partial(_locate_row, rows, here),
        )  # fmt: skip
    empty = dict.fromkeys(name for each in made.values() for name in each.empty)
    lacking = {name: join_some(repr(client) for client in made if name in made[client].empty) for name in empty}
    filled = join_some(f"{client} {each.filled}" for client, each in made.items() if each.filled)
    coarse = join_some(dict.fromkeys(repr(name) for each in made.values() for name in each.coarse))
    imputed = "missing values imputed from each client's own training rows (median, or most frequent category): "
    notices = (
        *(f"column {name!r} has no value in the training rows of {clients}: it is 0 in all their rows"
          for name, clients in lacking.items()),
        *([imputed + filled] if filled else []),
        *([LOST.format(coarse)] if coarse else []),
    )  # fmt: skip
    return Decoded(
        stores=[torch.from_numpy(each.x) for each in made.values()], columns=columns, notices=notices,
        scalings=[each.scaling for each in made.values()],
    )  # fmt: skip


def _locate_row(rows: TableRows, here: Ints, row: int) -> str:
    return rows.locate(rows.read[here[[row]]])


def read_rows(path: Path, columns: Sequence[Column], other: str) -> Numbers:
    """Return a table's rows as ``columns`` of ``other``, float64 ``[N, D]`` with NaN for missing values.

    Further columns are ignored. Raises :class:`UsageError` for a table without one of the columns or without rows, and
    for cells that do not fit.
    """
    table = read_table(path)
    if lacking := [column.name for column in columns if column.name not in table.names]:
        raise UsageError(
            f"{path} has no column {', '.join(map(repr, lacking))}: give every column, with empty cells where a value "
            f"is missing; its columns are {', '.join(table.names)}"
        )
    rows, model = _find_rows([table], ReadOptions()), f"the model {other!r}"
    cells = ((column, _read_cells(column.name, rows, column)) for column in columns)
    return np.concatenate([spread(match_column(column, seen, model)[0], column) for column, seen in cells], axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRows:
    """A client's rows as inputs ``x [N, D]``, float32, and how they were prepared.

    ``filled``: number of values that were missing. ``empty``: columns without a value in the training rows, 0 in all.
    ``coarse``: columns whose differences float32 does not hold.
    """

    x: NDArray[np.float32]
    filled: int
    empty: list[str]
    coarse: list[str]
    scaling: FeatureScaling


def prepare_rows(
    raw: NDArray[np.floating], train: Any, columns: Sequence[Column], *, scaled: bool = True,
    locate: Callable[[int], str] = "row {}".format,
) -> PreparedRows:  # fmt: skip
    """Fill and (if ``scaled``) scale one client's rows ``raw [N, D]``, only by its training rows.

    A missing number becomes the median, a text the most frequent category (the first in a tie), and a column without
    values in the training rows 0 in all rows. Numbers are standardized in float64 (divided by N, as scikit-learn's
    StandardScaler; a deviation of 0 becomes 1). ``locate``: function that names a row, for values far from all others
    of their column.
    """
    x, fill, mean, std = np.empty(raw.shape, np.float32), *np.zeros((2, raw.shape[1])), np.ones(raw.shape[1])
    filled, empty, far, coarse = 0, list[str](), list[str](), list[str]()
    for column, span in feature_slices(columns):
        values = raw[:, span]
        absent = np.isnan(values[:, 0])
        known = values[train][~absent[train]]
        if column.categories is None:
            far += [f"{column.name!r} {text[:-1]}, {locate(row)})" for text, row in find_outlying(values[:, 0])]
        if not len(known):
            x[:, span], std[span] = 0, np.inf
            empty.append(column.name)
            continue
        often = np.arange(column.width) == known.sum(axis=0, dtype=np.float64).argmax()
        fill[span] = np.median(known) if column.categories is None else often
        values = np.where(absent[:, None], fill[span], values)
        filled += int(absent.sum())
        if scaled and column.categories is None:
            own = values[train, 0] - values[0, 0]  # exactly 0 if all are equal
            mean[span], std[span] = values[0, 0] + own.mean(), own.std() or 1
            values = (values - mean[span]) / std[span]
        x[:, span] = values
        coarse += [column.name] if _loses_digits(values[:, 0], x[:, span][:, 0]) else []
    digests = digest_each(np.ascontiguousarray(raw)) if len(raw) else np.empty((0, 2), np.uint64)
    scaling = FeatureScaling(fill=fill, mean=mean, std=std, far=tuple(far), digests=digests)
    return PreparedRows(x=x, filled=filled, empty=empty, coarse=coarse, scaling=scaling)


def _loses_digits(values: NDArray[np.floating], rounded: NDArray[np.float32]) -> bool:
    """Return whether half of the different ``values [N]`` are one with another in float32."""
    low, high = np.quantile(values, [0.25, 0.75]) if len(values) else (0, 0)
    if high - low > 1e4 * np.spacing(np.abs(rounded).max(initial=0)):
        return False
    return 2 * len(np.unique(rounded)) < len(np.unique(values)) + 1


def _list_rows(rows: TableRows, places: Mapping[str, Ints], reading: ReadOptions) -> Rows:
    """Return the rows of the clients, whose numbers among those that are read are ``places``."""
    order = rows.read[np.concatenate(list(places.values()))]
    held, split, group = rows.roles.iloc[order], DRAWN, None
    if reading.split_column:
        words = held[reading.split_column]
        split = words.str.lower().map(SIDES).to_numpy()
        if len(odd := np.sort(order[pd.isna(split)])):
            raise UsageError(
                f"{rows.locate(odd)}: {rows.roles[reading.split_column][odd[0]]!r} in column "
                f"{reading.split_column!r}, the split of rows; allowed are {', '.join(SIDES)}"
            )
    if reading.groups:
        group = held[reading.groups].astype(str).to_numpy()
    counts = list(map(len, places.values()))
    listed = Rows.of(held[""], 0, len(order), split=split, group=group, place=np.concatenate([*map(np.arange, counts)]))
    return replace(listed, array=np.repeat(np.arange(len(counts)), counts))


def _refuse_missing(client: str, x: Numbers, columns: Sequence[Column]) -> UsageError:
    missing = ((column.name, int(np.isnan(x[:, span.start]).sum())) for column, span in feature_slices(columns))
    name, count = next(pair for pair in missing if pair[1])
    return UsageError(
        f"client {client!r} has no value of {name!r} in {count} of {len(x)} rows: fill them in, leave the column out "
        "({}), or have them imputed from the client's training rows ({})",
        Ref(ignore_columns=name),
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


def _check_roles(tables: Sequence[Table], reading: ReadOptions) -> None:
    """Raise :class:`UsageError` unless each column with a role is in the tables, with one role and plain values."""
    names, path, roles = tables[0].names, tables[0].path, reading.role_columns
    if reading.target is None:
        raise UsageError(
            f"{path}: say which column holds the label ({{}}); {_describe_candidates(names, TARGETS)}", Ref("target")
        )
    for name, count in Counter(roles + [name for name in reading.ignored if name in roles]).items():
        if name not in names and reading.schema:
            raise UsageError(
                f"{path} has no column {name!r} of {reading.schema.name!r}, the data that it joins: rename a column; "
                f"columns are {', '.join(names)}"
            )
        if len(names) == 1:
            raise UsageError(f"{path} has one column, {names[0]!r}: separate columns by commas or tabs")
        if name not in names:
            raise unknown_name("column", name, names)
        if count > 1:
            raise UsageError(
                f"column {name!r} is named for {count} purposes: target, client, split, group and ignored columns "
                "differ"
            )
        for table in tables:
            if pa.types.is_nested(kind := table.cells.schema.field(name).type):
                raise UsageError(f"{table.path}: column {name!r} holds {kind}: give it one value a row")


def _adopt_split(tables: Sequence[Table], reading: ReadOptions) -> tuple[ReadOptions, list[str]]:
    """Return ``reading`` with a column that is called split, if none is named, and notices of tables and such columns.

    Raises :class:`UsageError` if a column that is called split has words for it and others.
    """
    notices = [notice for table in tables for notice in table.notices]
    for name in tables[0].names if reading.split_column is None else ():
        called, taken = name.strip().lower() == "split", name in (*reading.role_columns, *reading.ignored)
        words = set() if taken else _list_words(name, tables, whole=called)
        sides = {SIDES.get(word) for word in words}
        if called and words and None not in sides:
            notices.append(Information(f"column {name!r} assigns rows to training, validation and testing"))
            return replace(reading, split_column=name), notices
        if called and sides > {"train", None}:
            raise UsageError(
                f"column {name!r} holds {', '.join(map(repr, sorted(words)[:3]))}: the split of rows is one of "
                f"{', '.join(SIDES)}; write these, rename the column, or leave it out ({{}})",
                Ref(ignore_columns=name),
            )
        if not taken and (called or (None not in sides and sides >= {"train", "test"})):
            notices.append(
                f"column {name!r} is an input, and assigns no rows to training and testing: split_column does"
            )
    return reading, notices


def _list_words(name: str, tables: Sequence[Table], *, whole: bool) -> set[str]:
    """Return the texts of a column in lower case; none unless ``whole`` or the first is a word for a split."""
    columns = [table.cells.column(name) for table in tables]
    if not all(is_text(column.type) for column in columns):
        return set()
    first = next((str(cell).strip().lower() for cell in columns[0][:100] if cell.is_valid), "")
    texts = [clean_texts(column).unique().to_pylist() for column in columns] if whole or first in SIDES else []
    return {text.lower() for text in chain(*texts) if text}


def _describe_candidates(names: Sequence[str], usual: Sequence[str]) -> str:
    likely = [name for name in names if name.lower() in usual]
    return (f"perhaps {likely[0]!r}; " if likely else "") + f"columns are {', '.join(names)}"


def _choose_features(table: Table, reading: ReadOptions) -> list[str]:
    """Return the names of the inputs, in the order of the data that these join; raise :class:`UsageError` if odd."""
    others = [*reading.role_columns, *reading.ignored]
    features = [name for name in table.names if name not in others]
    if not features:
        raise UsageError(f"{table.path} has no column except {', '.join(others)}: a table needs features")
    only = features if reading.schema is None or reading.schema.only is None else reading.schema.only
    if lacking := [name for name in only if name not in features]:
        raise UsageError(f"{table.path} has no column {lacking[0]!r} for inputs: columns are {', '.join(features)}")
    features = [name for name in features if name in only]
    if not reading.schema or not reading.schema.columns:
        return features
    theirs = [column.name for column in reading.schema.columns]
    lacking = [repr(name) for name in theirs if name not in features]
    further = [repr(name) for name in features if name not in theirs]
    if lacking or further:
        said = [f"has no {', '.join(lacking)}"] * bool(lacking) + [f"has {', '.join(further)} besides"] * bool(further)
        raise UsageError(
            f"{table.path} does not have the columns of {reading.schema.name!r}, the data that it joins: it "
            f"{' and '.join(said)}. Name columns alike, leave out what is too much, and add what is missing (empty "
            "where it was not measured)"
        )
    return theirs


# Targets


def _read_targets(
    rows: TableRows, task: Task, reading: ReadOptions, notices: list[str]
) -> tuple[torch.Tensor, int, tuple[str, ...]]:
    """Return the target of each row that is read, the number of classes, labels or targets, and their names.

    Adds a remark to ``notices`` on numbers in other forms, and on those whose differences float32 does not hold.
    """
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
        seen = _read_cells(name, rows)
        if len(words := np.union1d(seen.odd, seen.find(CODES))):
            raise UsageError(
                f"target {name!r} is {seen.list_texts(words)[0]!r} in some rows, no number, which {task} needs: "
                "correct it, or name another column ({})",
                Ref("target"),
            )
        read.append(seen.read_values(Column(name=name, unit=_find_unit(seen))))
        notices += filter(None, [_describe_numerals(seen)])
        notices += [LOST.format(repr(name))] if _loses_digits(read[-1], read[-1].astype(np.float32)) else []
    y = task.read_targets(np.stack(read, axis=1), (), "the table")
    outputs = task.count_outputs([y])
    return y, outputs, tuple(reading.targets)[-outputs:]


def _refuse_codes(rows: TableRows, target: str, values: Sequence[str]) -> None:
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
    """Return the number in a text, exactly if it is whole; None if it is none."""
    if not PLAIN.fullmatch(value):
        return None
    digits = re.fullmatch("[+-]?[0-9]+", value)
    return int(value) if digits else int(float(value)) if float(value).is_integer() else float(value)


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
    numbers = [_to_number(value) for value in values]
    meaning: Sequence[Any] = values if None in numbers else numbers
    for value, number in zip(values, meaning, strict=True):
        if isinstance(number, float):
            raise UsageError(
                f"target {target!r} is {value} in some rows, not a whole number, and no class: group its values into "
                "classes, name another column ({}), or learn numbers ({})",
                Ref("target"),
                Ref(task="regression"),
            )
    distinct = sorted(set(meaning))
    classes = max(len(distinct), least or 0)
    if set(meaning) <= set(range(classes)):
        return classes, list(meaning), ()
    unseen = [f"unseen {k}" for k in range(len(distinct), classes)]
    return classes, [distinct.index(value) for value in meaning], (*map(str, distinct), *unseen)
