"""Columns and labels of tables that lie at several sites, brought together as one process does that reads them all.

To a model the place of an input says what it is. So all sites have the same columns, of which each says the names and,
of a column of text, the categories: their sorted union is what each site's table is then read by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...data.files.table_schema import MOST_CATEGORIES, Column, feature_offsets
from ...data.files.tables import format_list
from ...utils.errors import FedshiftError, UsageError

ColumnDescriptions = Sequence[Mapping[str, Any]]
"""Columns as they travel: a ``name`` each, and ``categories``, None for numbers."""


def parse_columns(told: ColumnDescriptions) -> tuple[Column, ...]:
    """Columns from what came; raises ``KeyError``, ``TypeError`` or ``AttributeError`` where it is something else."""
    return tuple(
        Column(name=str(c["name"]), categories=None if c["categories"] is None else tuple(map(str, c["categories"])))
        for c in told
    )


def is_possible(columns: Sequence[Column], shape: tuple[int, ...]) -> bool:
    """Whether samples of ``shape`` can be rows of these columns; without columns they are no rows."""
    lists = [column.categories for column in columns if column.categories is not None]
    sound = all(0 < len(some) <= MOST_CATEGORIES and len(set(some)) == len(some) for some in lists)
    names = [column.name for column in columns]
    return not columns or (sound and len(set(names)) == len(names) and shape == (feature_offsets(columns)[-1],))


def require_repeating(columns: Iterable[Column], rows: int) -> None:
    """Raise :class:`UsageError` where a list of categories would tell of single rows, of which a site has ``rows``."""
    for column in columns:
        if column.categories is not None and 2 * len(column.categories) > rows:
            raise UsageError(
                f"column {column.name!r} holds text, {len(column.categories)} different ones in {rows} rows, and the "
                "list of them would leave this site: group them, make them numbers, or leave the column out"
            )


def merge_columns(sites: Mapping[str, Sequence[Column]]) -> tuple[Column, ...]:
    """The columns of all ``sites``, by the site's name: in the order of the first, with the categories of all.

    Raises :class:`FedshiftError` naming two sites and the column in which they differ, by name or by kind, and where
    categories become too many.
    """
    (first, columns), *others = sites.items()
    for other, theirs in others:
        for one, have, two, want in ((other, theirs, first, columns), (first, columns, other, theirs)):
            lacking = {column.name for column in want} - {column.name for column in have}
            if lacking:
                raise FedshiftError(
                    f"{one!r} has no column {format_list(map(repr, sorted(lacking)))}, which {two!r} has: tables of all "
                    "sites need the same columns, by name (empty where something was not measured)"
                )
        kinds = {column.name: column.categories is None for column in theirs}
        for column in columns:
            if kinds[column.name] != (column.categories is None):
                text, number = (first, other) if kinds[column.name] else (other, first)
                raise FedshiftError(
                    f"column {column.name!r} holds text at {text!r}, but numbers (or nothing) at {number!r}: give it "
                    "one kind at all sites, or leave it out at all"
                )
    return tuple(_add_categories(column, sites.values()) for column in columns)


def _add_categories(column: Column, sites: Iterable[Sequence[Column]]) -> Column:
    if column.categories is None:
        return column
    lists = {c.categories or () for site in sites for c in site if c.name == column.name}
    if len(lists) == 1:
        return column
    found = sorted({value for some in lists for value in some})
    if len(found) > MOST_CATEGORIES:
        raise FedshiftError(
            f"column {column.name!r} holds text with {len(found)} different values at all sites together, more than "
            f"{MOST_CATEGORIES}: call the same thing alike at all sites, or leave the column out at all"
        )
    return Column(name=column.name, categories=tuple(found))
