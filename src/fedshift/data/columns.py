"""Columns of a table: a number is one feature, text is one feature per category (one-hot).

Numbers are read from texts by one rule for a whole column of a file: every text has the same unit (``5 mg``, ``12 %``,
``€ 5``) or none; one sign is the decimal point, and points, commas, apostrophes or spaces between groups of three
digits are left out; digits may be of any script. Texts that no rule reads are categories.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

from ..utils.errors import UsageError
from .identity import match_name

MISSING = ("", "?", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null")
"""Texts that mark a missing value, after surrounding spaces are removed."""
CODES = (
    "-", "--", ".", "..", "na", "n.a.", "nil", "none", "unk", "unknown", "missing", "not available", "not done",
    "not measured", "#div/0!", "#value!", "#ref!", "#name?", "#num!", "#null!",
)  # fmt: skip
"""Texts, in lower case, that mark a missing value among numbers; among other texts they are categories."""
TRUTHS = {"true": 1, "false": 0}
"""Numbers that texts in lower case mean in columns of 0 and 1 and in targets."""
Holds = Literal["numbers", "0 and 1", "True and False"]
"""Kinds of values in a column of numbers: any numbers, only 0 and 1, or also True and False for them."""
PLAIN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)
"""A number as programs write it."""
GROUPED = r"^\s*[+-]?[1-9]\d{0,2}\.\d{3}\s*$"
"""A number with one point that may stand between thousands, or be a decimal point."""

_SIGNS = dict(zip("\u2212\u2013\uff0d\uff0b\uff0e\uff0c\u066b\u066c\u2018\u2019\uff05\u00a0\u202f\u2009",
                  "---+.,.'''%   ", strict=True))  # fmt: skip
_NUMERAL = re.compile(
    r"(?P<sign>\(?[-+]?) ?(?P<before>[$€£¥]|USD|EUR|CHF|GBP)? ?(?P<inner>[-+]?)"
    r"(?P<digits>\d(?:[\d.,' ]*\d)?[.,]?|[.,]\d+)(?P<power>[eEdD][-+]?\d+)?(?P<last>-?)\)?"
    r"(?: ?(?P<after>%|‰|°[CF]?|[$€£¥])|(?: |(?=[^\W\d_]{2}))(?P<unit>[^\W\d_]+(?:/[^\W\d_]+)?[23²³]?))?"
)
_CODED = re.compile(r"(0x)?[\da-fA-F]+([ .\u2013-][\da-fA-F]+)*")
"""A range, a version, a telephone number or another code with digits."""
_MONTH = (
    r"(jan|feb|fév|mar|mär|apr|avr|abr|mai|may|jun|jul|juil|aug|aoû|ago|sept?|oct|okt|nov|dec|dez|déc|dic|ene)"
    r"(uary|uar|vier|ruary|ruar|rier|ch|s|z|il|e|i|in|y|let|ust|t|sto|o|ro|io|ember|embre|iembre|ober|obre)?\.?"
)
_DATES = re.compile(
    r"\d{4}[-/.]\d\d?[-/.]\d\d?([T ].*)?|\d\d?[-/.] ?\d\d?[-/.] ?\d{2,4}([T ].*)?"
    r"|(19|20)\d\d[-/](0?[1-9]|1[0-2])|(0?[1-9]|1[0-2])[-/](19|20)\d\d"
    r"|(19|20)\d\d-?W\d\d(-?\d)?|(19|20)\d\d[- ]?Q[1-4]|Q[1-4][- /]?(19|20)\d\d"
    rf"|([^\W\d_]+,? )?(\d\d?(st|nd|rd|th)?[. /-]*)?{_MONTH}[ /-]*(\d\d?(st|nd|rd|th)?,?[ -]+)?\d{{1,4}}([T ].*)?"
    rf"|\d\d?(st|nd|rd|th)?[. /-]+{_MONTH}|\d{{4}}[ /-]{_MONTH}[ /-]\d\d?",
    re.IGNORECASE,
)
_TIMES = re.compile(r"(\d+):[0-5]\d(:[0-5]\d([.,]\d+)?)?( ?[ap]\.?m\.?)?(z|[+-]\d\d:?\d\d)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Column:
    """Encoding of a column: one feature per category of ``categories``, in this order; None for a number.

    ``holds``: numbers that occur, as True and False are numbers only among 0 and 1. ``unit``: text after or before all
    numbers, such as ``mg``.
    """

    name: str
    categories: tuple[str, ...] | None = None
    holds: Holds = field(default="numbers", compare=False)
    unit: str = ""

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
            return [self._read_number(text, value)]
        known = match_name(text, self.categories)
        if known is None:
            raise UsageError(
                f"column {self.name!r} holds one of {', '.join(self.categories)}, not {value!r}: give one of them, or "
                "None where it is missing"
            )
        return [float(known == category) for category in self.categories]

    def _read_number(self, text: str, value: Any) -> float:
        if text.lower() in CODES:
            return float("nan")
        if text.lower() in TRUTHS and self.holds != "numbers":
            return float(TRUTHS[text.lower()])
        read = read_numerals([text]) if isinstance(value, str) else Numerals({text: float(value)})
        if text not in read.numbers or read.unit not in ("", self.unit):
            raise UsageError(
                f"column {self.name!r} holds numbers{self.unit and f' in {self.unit}'}, not {value!r}: give a number "
                "or None"
            )
        return read.numbers[text]


def feature_offsets(columns: Sequence[Column]) -> list[int]:
    """Return the index of each column's first feature, followed by the number of features."""
    return list(accumulate((column.width for column in columns), initial=0))


def feature_slices(columns: Sequence[Column]) -> Iterator[tuple[Column, slice]]:
    """Yield each column with the slice of its features."""
    offsets = feature_offsets(columns)
    return zip(columns, map(slice, offsets, offsets[1:]), strict=True)


@dataclass(frozen=True)
class Numerals:
    """The numbers of a column's texts.

    Attributes:
        numbers: Number of each text that has one.
        unit: Text after, or before, all numbers.
        doubt: Text that may be one of two numbers; empty if there is none.
        decimal: The decimal point of the file's other columns.

    """

    numbers: dict[str, float]
    unit: str = ""
    doubt: str = ""
    decimal: str = ""


def read_numerals(texts: Collection[str], decimal: Literal["", ".", ",", "?"] = "") -> Numerals:
    """Return the numbers that ``texts`` of one column and file are, all by one rule; else only the plain ones.

    ``decimal``: the decimal point of the file's other columns; empty: a point, and a comma as in this column; ``?``:
    not known.
    """
    plain = Numerals({text: float(text) for text in texts if PLAIN.fullmatch(text)}, decimal=decimal)
    if len(plain.numbers) == len(texts) and decimal not in (",", "?"):
        return plain
    parsed = {text: parts for text in texts if (parts := _parse(text))}
    units = {unit for _, _, _, unit in parsed.values()}
    if len(parsed) < len(texts) or len(units) > 1:
        return plain
    point, doubt = _choose_point({text: digits for text, (_, digits, _, _) in parsed.items()}, decimal)
    if not point:
        return replace(plain, doubt=doubt)
    numbers = {}
    for text, (sign, digits, power, _) in parsed.items():
        number = digits.replace("," if point == "." else ".", "").replace(point, ".")
        numbers[text] = float(f"{sign}{number}{power}")
    return Numerals(numbers, unit="".join(units), decimal=decimal)


def _parse(text: str) -> tuple[str, str, str, str] | None:
    """Return the sign, digits with points and commas, power and unit of a number; None if the text is none."""
    match = _NUMERAL.fullmatch(_simplify(text))
    digits = _join_groups(match["digits"]) if match else ""
    if not match or not digits or len(set(filter(None, match.group("before", "after", "unit")))) > 1:
        return None
    sign = "-" if re.search(r"[-(]", match["sign"] + match["inner"] + match["last"]) else ""
    power = re.sub("[dD]", "e", match["power"] or "")
    return sign, digits, power, match["before"] or match["after"] or match["unit"] or ""


def _simplify(text: str) -> str:
    """Return a text with the digits, signs and spaces of ASCII, without a spreadsheet's quotes."""
    if not text.isascii():
        text = "".join(str(unicodedata.decimal(each)) if each.isdecimal() else _SIGNS.get(each, each) for each in text)
    return re.sub(r"""^(?:="(.*)"|'([-+\d].*))$""", r"\1\2", text)


def _join_groups(digits: str) -> str:
    """Return digits without the spaces or apostrophes between groups of three; empty if others have them."""
    if not re.search("[ ']", digits):
        return digits
    return re.sub("[ ']", "", digits) if re.fullmatch(r"[1-9]\d{0,2}([ '])\d{3}(\1\d{3})*([.,]\d+)?", digits) else ""


def _choose_point(digits: Mapping[str, str], decimal: str) -> tuple[str, str]:
    """Return the decimal point of numbers by their texts, or an empty one and a text that leaves it in doubt."""
    points = {text: _find_point(number) for text, number in digits.items()}
    known = set(points.values()) & {".", ","}
    if "no number" in points.values():
        return "", ""
    if len(known) > 1:
        return "", next(text for text, point in points.items() if point == ",")
    doubts = [text for text, point in points.items() if point == "?"]
    if known or decimal in (".", ",") or not doubts:
        return next(iter(known), "," if decimal == "," else "."), ""
    doubts = [text for text in doubts if decimal == "?" or "," in digits[text]]
    return ("", doubts[0]) if doubts else (".", "")


def _find_point(number: str) -> str:
    """Return the decimal point of a number: empty if it has no point or comma, ``?`` if it may separate thousands."""
    signs = re.sub(r"\d", "", number)
    if len(signs) < 2:
        return "?" if re.fullmatch(r"[1-9]\d{0,2}[.,]\d{3}", number) else signs
    first, last = signs[0], signs[-1]
    if first == last:
        grouped, point = rf"[1-9]\d{{0,2}}(\{first}\d{{3}})+", {".": ",", ",": "."}[first]
    else:
        grouped, point = rf"[1-9]\d{{0,2}}(\{first}\d{{3}})+\{last}\d*", last
    return point if re.fullmatch(grouped, number) else "no number"


def are_dates(counts: Mapping[str, int]) -> bool:
    """Return whether most texts, with their ``counts``, are dates, also of a month or a week, or times of day."""
    dates = sum(count for text, count in counts.items() if _DATES.fullmatch(text))
    times = {text: match[1] for text in counts if (match := _TIMES.fullmatch(text))}
    if len(set(times.values())) > 1 or any(text.count(":") > 1 for text in times):  # 1:10 and 1:20 are dilutions
        dates += sum(counts[text] for text in times)
    return 2 * dates > sum(counts.values())


def may_measure(text: str) -> bool:
    """Return whether a text that no rule reads as a number may be a measurement, as ``>5``, ``5 mg`` or ``130/80``."""
    if _CODED.fullmatch(text):
        return False
    simple = _simplify(text)
    digits = sum(character.isdigit() for character in simple)
    return bool(
        _NUMERAL.fullmatch(simple)
        or (re.match(r"[<>≤≥~±=(+-]*\s*\d", simple) and 2 * digits >= len(simple.replace(" ", "")))
    )
