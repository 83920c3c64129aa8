"""Columns of a table as float32 features: a number is one feature, text is one feature a category (one-hot).

Missing values and scale are each client's own affair: both follow from the client's training part alone, so that no
statistic leaves a client and none comes from its test samples. What clients must agree on are the columns and, for a
column of text, the list of categories: it is the sorted union of those that any client has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...utils.errors import UsageError

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "NULL", "null")
"""Text that means that there is no value; spaces around text are dropped first."""
MOST_CATEGORIES = 50
BLOCK = 1 << 18
"""Values that are scaled at a time."""

_DATE = re.compile(r"\d{4}[-/.]\d\d?[-/.]\d\d?([T ].*)?|\d\d?[-/.]\d\d?[-/.]\d{2,4}([T ].*)?")

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class ColumnContents:
    """What is known of a column so far: some file types it as numbers (``typed``) or as categories (``declared``).

    ``values``: up to 51 different ones of its texts; ``odd``: one that is no number.
    """

    typed: bool = False
    declared: bool = False
    values: frozenset[str] = frozenset()
    odd: str | None = None

    def look(self, cells: pa.Array) -> ColumnContents:
        """What is known after ``cells`` of text, a further part of the column."""
        values, odd = self.values, self.odd
        if len(values) <= MOST_CATEGORIES:
            found = pc.unique(clean_texts(cells)).drop_null().to_pylist()
            values = frozenset(sorted(values.union(found))[: MOST_CATEGORIES + 1])
        if odd is None and not _are_numbers(cells):
            odd = next(value for value in clean_texts(cells).to_pylist() if not _are_numbers(pa.array([value])))
        return replace(self, values=values, odd=odd)


@dataclass(frozen=True, kw_only=True)
class Column:
    """How a column becomes features: ``categories``, one feature each, in this order; None: a number."""

    name: str
    categories: tuple[str, ...] | None = None

    @property
    def width(self) -> int:
        """Number of features."""
        return 1 if self.categories is None else len(self.categories)

    def fill(self, cells: pa.Array, out: Floats) -> None:
        """Write ``cells`` [B] into ``out`` [B, width]; every feature of a missing value is NaN."""
        if self.categories is None:
            with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused as such
                out[:, 0] = parse_numbers(cells)
            return
        place = pc.index_in(clean_texts(cells), value_set=pa.array(self.categories)).fill_null(-1).to_numpy()
        out[:] = place[:, None] == np.arange(self.width)
        out[place < 0] = np.nan


def is_text(kind: Any) -> bool:
    """Whether cells of this Arrow type are texts (a dictionary, pandas' category, always counts as such)."""
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_dictionary)
    return any(test(kind) for test in tests)


def is_number(kind: Any) -> bool:
    """Whether cells of this Arrow type are numbers or truth values (or all missing)."""
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean, pa.types.is_null)
    return any(test(kind) for test in tests)


def clean_texts(cells: pa.Array) -> pa.Array:
    """Cells of text without the spaces around them; those in :data:`MISSING` are null."""
    trimmed = pc.utf8_trim_whitespace(_to_strings(cells))
    return pc.if_else(pc.is_in(trimmed, value_set=pa.array(MISSING)), pa.scalar(None, pa.string()), trimmed)


def parse_numbers(cells: pa.Array) -> NDArray[np.float64]:
    """Cells as float64 [B], missing ones NaN, true 1 and false 0; raises ``pa.ArrowInvalid`` for other text."""
    if not is_text(cells.type):
        return _to_float64(cells)
    for form in (_to_strings, clean_texts):  # most often the first will do, and the second takes longer
        with suppress(pa.ArrowInvalid):
            return _to_float64(form(cells))
    plain, lower = clean_texts(cells), pc.utf8_lower(clean_texts(cells))
    return _to_float64(pc.if_else(pc.equal(lower, "true"), "1", pc.if_else(pc.equal(lower, "false"), "0", plain)))


def _to_strings(cells: pa.Array) -> pa.Array:
    return (cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells).cast(pa.string())


def _to_float64(cells: pa.Array) -> NDArray[np.float64]:
    values: NDArray[np.float64] = cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values


def infer_column(name: str, seen: ColumnContents) -> tuple[Column, str]:
    """How the column is encoded, and a notice (or nothing); :class:`UsageError` where it cannot be a feature."""
    if not seen.values or (seen.odd is None and not seen.declared):
        return Column(name=name), ""
    found = sorted(seen.values)
    odd = found[0] if seen.odd is None else seen.odd
    if seen.typed:
        raise UsageError(
            f"column {name!r} holds numbers in one file and text such as {odd!r} in another: give it one type"
        )
    if all(_DATE.fullmatch(value) for value in found):
        raise date_column_error(name, f"such as {found[0]!r}")
    if len(found) > MOST_CATEGORIES:
        raise UsageError(
            f"column {name!r} holds text such as {odd!r} and more than {MOST_CATEGORIES} different values, so it is an "
            "identifier, free text, or numbers with a slip among them: correct it, or leave it out of the table"
        )
    mixed = not seen.declared and any(_are_numbers(pa.array([value])) for value in found)
    notice = f"column {name!r} has numbers and text such as {odd!r}: it is read as {len(found)} categories"
    return Column(name=name, categories=tuple(found)), notice if mixed else ""


def date_column_error(name: str, what: str) -> UsageError:
    """The error for a column of dates or times; ``what`` shows it."""
    return UsageError(
        f"column {name!r} holds dates or times ({what}), which have no scale: make it a number, such as the age or the "
        "days since an event, or leave it out of the table"
    )


def _are_numbers(cells: pa.Array) -> bool:
    try:
        parse_numbers(cells)
    except pa.ArrowInvalid:
        return False
    return True


def feature_offsets(columns: Sequence[Column]) -> list[int]:
    """The first feature of each column, and at the end the number of features."""
    return [0, *np.cumsum([column.width for column in columns]).tolist()]


def impute(x: Floats, train: int, columns: Sequence[Column]) -> tuple[int, list[str]]:
    """Fill what is missing in one client's ``x`` [N, D], of which the first ``train`` rows are for training.

    A number becomes the median of the training rows, a text their most frequent category (the first of equals). A
    column of which they have no value becomes 0 in all N rows. Gives how many values were filled, and the names of
    the columns that became 0.
    """
    filled, empty = 0, []
    for column, first in zip(columns, feature_offsets(columns), strict=False):
        part = x[:, first : first + column.width]
        absent = np.isnan(part[:, 0])
        if not absent.any():
            continue
        known = part[:train][~absent[:train]]
        if len(known) == 0:
            part[:] = 0
            empty.append(column.name)
            continue
        if column.categories is None:
            part[absent] = np.median(known)
        else:
            part[absent] = np.arange(column.width) == known.sum(axis=0, dtype=np.float64).argmax()
        filled += int(absent.sum())
    return filled, empty


def scale(x: Floats, train: int, features: Sequence[int]) -> None:
    """Subtract from these features of one client's ``x`` [N, D] their mean in the first ``train`` rows, for training.

    Then divide by their standard deviation there (over N, as scikit-learn's StandardScaler; where it is 0, by 1).
    """
    blocks = [slice(at, at + max(1, BLOCK // x.shape[1])) for at in range(0, len(x), max(1, BLOCK // x.shape[1]))]
    origin = x[0, features].astype(np.float64)  # differences from a value are exactly 0 where all are equal to it

    def mean(power: int, center: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = [((x[:train][block][:, features] - center) ** power).sum(axis=0) for block in blocks]
        return np.asarray(np.sum(sums, axis=0) / train)

    center = origin + mean(1, origin)
    deviation = np.sqrt(mean(2, center))
    deviation[deviation == 0] = 1
    for block in blocks:
        x[block, features] = (x[block][:, features] - center) / deviation
