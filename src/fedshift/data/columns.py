"""Columns of a table: a number is one feature, text is one feature per category (one-hot)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from ..utils.errors import UsageError

MISSING = ("", "?", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null")
"""Texts that mark a missing value, after surrounding spaces are removed."""
CODES = (
    "-", "--", ".", "..", "na", "n.a.", "nil", "none", "unk", "unknown", "missing", "not available", "not done",
    "not measured",
)  # fmt: skip
"""Texts, in lower case, that mark a missing value among numbers; among other texts they are categories."""
TRUTHS = {"true": 1, "false": 0}
"""Numbers that texts in lower case stand for in columns of 0 and 1 and in targets."""
Holds = Literal["numbers", "0 and 1", "True and False"]
"""Kinds of values in a column of numbers: any numbers, only 0 and 1, or also True and False for them."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """Encoding of a column: one feature per category of ``categories``, in this order; None for a number.

    ``holds``: numbers that occur, as True and False are numbers only among 0 and 1.
    """

    name: str
    categories: tuple[str, ...] | None = None
    holds: Holds = field(default="numbers", compare=False)

    def __str__(self) -> str:
        return repr(self.name) if self.categories is None else f"{self.name!r} ({', '.join(self.categories)})"

    @property
    def width(self) -> int:
        """Number of features."""
        return 1 if self.categories is None else len(self.categories)

    def encode(self, value: Any) -> list[float]:
        """Return a cell's features, NaN if it is missing; raise :class:`UsageError` for an invalid value."""
        text = str(value).strip()
        if value is None or value != value or text in MISSING:
            return [float("nan")] * self.width
        if self.categories is None:
            if text.lower() in CODES:
                return [float("nan")]
            if text.lower() in TRUTHS and self.holds != "numbers":
                return [float(TRUTHS[text.lower()])]
            try:
                return [float(value)]
            except (TypeError, ValueError) as error:
                raise UsageError(f"column {self.name!r} holds numbers, not {value!r}: give a number or None") from error
        if text not in self.categories:
            raise UsageError(
                f"column {self.name!r} holds one of {', '.join(self.categories)}, not {value!r}: give one of them, or "
                "None where it is missing"
            )
        return [float(text == category) for category in self.categories]


def feature_offsets(columns: Sequence[Column]) -> list[int]:
    """Return the index of each column's first feature, followed by the number of features."""
    return list(accumulate((column.width for column in columns), initial=0))


def feature_slices(columns: Sequence[Column]) -> Iterator[tuple[Column, slice]]:
    """Yield each column with the slice of its features."""
    offsets = feature_offsets(columns)
    return zip(columns, map(slice, offsets, offsets[1:]), strict=True)
