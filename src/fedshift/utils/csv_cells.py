"""Cells of text in CSV files, which spreadsheet programs would otherwise read as formulas (CWE-1236).

Text that begins like a formula gets a leading apostrophe; numbers never do. The escape can be reversed.
"""

from __future__ import annotations

import re

import pandas as pd

_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def escape_cell(text: str) -> str:
    """Return ``text`` with a leading apostrophe if a spreadsheet program might run it as a formula."""
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def unescape_cell(text: str) -> str:
    """Return the original of ``text``, the inverse of :func:`escape_cell`."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def escape_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return ``table`` with all text escaped: cells, row names and column names."""
    made = table.map(_escape_text)
    names = [_escape_text(name) for name in table.index.names]
    made.index, made.columns = table.index.map(_escape_text), table.columns.map(_escape_text)
    made.index.names = names
    return made


def _escape_text(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_escape_text, value))
    return escape_cell(value) if isinstance(value, str) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
