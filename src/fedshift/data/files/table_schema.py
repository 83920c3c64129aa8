"""Tables of clients that come to others: read by the others' columns, in their order, with their categories.

To a model that is trained, the place of an input says what it is. So columns are found by name, and what the others
have no place for is refused rather than put in a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ...utils.errors import UsageError
from ..federation import Federation
from .read_options import ReadOptions
from .table_columns import Column, ColumnContents
from .table_files import TableFile, open_table


def without_client_column(files: Sequence[Path], reading: ReadOptions) -> ReadOptions:
    """``reading`` without its client column where clients come to others in ``files`` without one: each is a client."""
    column = reading.client_column
    if reading.like is None or column is None or not files or column in open_table(files[0]).types:
        return reading
    return replace(reading, client_column=None)


def order_features(table: TableFile, features: Sequence[str], others: Federation) -> list[str]:
    """The names ``features`` in the order of the columns of ``others``; as they are where these are not known.

    Raises :class:`UsageError` naming every column of theirs that ``table`` has not, and every further one that it has.
    """
    theirs = [column.name for column in others.columns]
    if not theirs or sorted(theirs) == sorted(features):
        return theirs or list(features)
    lacking, further = _describe_missing(theirs, features), _describe_missing(features, theirs)
    said = [f"has no {lacking}"] * bool(lacking) + [f"has {further} besides"] * bool(further)
    raise UsageError(
        f"{table.path} does not have the columns of {others.name!r}, the data that it joins: it {' and '.join(said)}. "
        "Name columns alike, leave out what is too much, and add what is missing (empty where it was not measured)"
    )


def _describe_missing(names: Iterable[str], others: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names if name not in others)


def adopt_column(column: Column, seen: ColumnContents, others: Federation) -> Column:
    """``column`` of ``others``, for cells of which ``seen`` is known; :class:`UsageError` where they do not fit it."""
    have = f"column {column.name!r} holds"
    if column.categories is None:
        if seen.odd is not None:
            raise UsageError(
                f"{have} text such as {seen.odd!r}, but numbers in {others.name!r}, the data that it joins: make it "
                "numbers, empty where there is none"
            )
        return column
    listed = ", ".join(column.categories)
    if seen.typed:
        raise UsageError(
            f"{have} numbers, but text in {others.name!r}, the data that it joins: give one of {listed}, as text"
        )
    unknown = sorted(seen.values.difference(column.categories))
    if unknown:
        few = ", ".join(map(repr, unknown[:8]))
        raise UsageError(
            f"{have} {few}, but its categories in {others.name!r}, the data that it joins, are {listed}: call it one "
            "of them, or leave the cells empty"
        )
    return column
