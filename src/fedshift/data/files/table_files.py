"""Files of tables (CSV, TSV, Parquet), read a batch of rows at a time, so that no file is ever held whole.

Cells of CSV and TSV come as text (RFC 4180, UTF-8); those of Parquet as the types that the file declares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from ...utils.errors import UsageError
from .table_columns import MISSING

SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*SEPARATORS, ".parquet")
BLOCK = 1 << 18
"""Bytes of text that are parsed at a time (more where lines are long); Arrow reads some 32 times as many ahead."""
CELLS = 1 << 17
"""Values in a batch."""


def find_tables(path: Path) -> list[Path]:
    """The tables at ``path``, by name: the file itself, or those directly in the directory."""
    return [file for file in sorted(path.iterdir() if path.is_dir() else [path]) if is_table(file)]


def is_table(file: Path) -> bool:
    """Whether this is a file whose name ends as one of :data:`SUFFIXES` (and does not begin with a dot or _)."""
    return file.suffix.lower() in SUFFIXES and not file.name.startswith((".", "_")) and file.is_file()


@dataclass(frozen=True, kw_only=True, eq=False)
class TableFile:
    """A file with the types of its columns by name, in the file's order."""

    path: Path
    types: dict[str, Any]

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """These columns, in this order, a batch of rows at a time; :class:`UsageError` naming a damaged file."""
        return (batch for _, batch in self.pieces(columns, together=len(columns)))

    def pieces(self, columns: Sequence[str], together: int = 8) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The first row of, and some rows of some of these columns, until each value has come once.

        Of Parquet, which stores columns one after another, ``together`` are read at a time: each that is open takes
        memory of its own.
        """
        with _explain_errors(self.path):
            if self.path.suffix.lower() in SEPARATORS:
                options = pa.csv.ConvertOptions(
                    include_columns=columns, column_types=self.types, null_values=MISSING, strings_can_be_null=True
                )
                yield from _number_batches(_join_batches(_open_text(self.path, options)))
                return
            with pq.ParquetFile(self.path, buffer_size=1 << 16, pre_buffer=False) as file:
                for at in range(0, len(columns), together):
                    names = list(columns[at : at + together])
                    batches = file.iter_batches(max(1, CELLS // len(names)), columns=names)
                    yield from _number_batches(batch.select(names) for batch in batches)


def _join_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches, of :data:`CELLS` values or more."""
    parts: list[pa.RecordBatch] = []
    for batch in batches:
        parts.append(batch)
        if sum(part.num_rows for part in parts) * batch.num_columns >= CELLS:
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
    """The file with its columns, or :class:`UsageError` naming it where it cannot be read or names no columns."""
    with _explain_errors(path):
        text = path.suffix.lower() in SEPARATORS
        schema = _open_text(path).schema if text else pq.read_schema(path)
        names = schema.names  # decoded here
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"{path} has two columns {twice[0]!r}: names must differ; rename one")
    for place, name in enumerate(names, start=1):
        if not name.strip() or name.startswith(("Unnamed: ", "__index_level_")):
            raise UsageError(
                f"{path}: column {place} has no name ({name!r}), and is probably the number of the row: "
                "write the table without it (in pandas index=False), or name it"
            )
    if text and len(names) == 1 and ";" in names[0]:
        raise UsageError(f"{path} has semicolons between its columns ({names[0]}): write it with commas")
    return TableFile(path=path, types={name: pa.string() if text else schema.field(name).type for name in names})


def _open_text(path: Path, options: pa.csv.ConvertOptions | None = None) -> pa.csv.CSVStreamingReader:
    with path.open("rb") as file:
        names = len(file.readline(1 << 24))
    return pa.csv.open_csv(
        path,
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=max(BLOCK, 16 * names)),
        parse_options=pa.csv.ParseOptions(delimiter=SEPARATORS[path.suffix.lower()], newlines_in_values=True),
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
