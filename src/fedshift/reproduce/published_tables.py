"""Published tables and figures of the papers, read from data files.

``values/<paper>/<name>.toml`` contains the printed numbers, with their digits as printed, ``page`` and ``version``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..utils.errors import unknown_name

VALUES = Path(__file__).with_name("values")
PAPERS = {
    "fedbn": "FedBN (Li et al. 2021, arXiv:2102.07623)",
    "fedmmb": "FedSMB and FedMMB (Nasirigerdeh et al., arXiv:2011.07006)",
    "fedwon": "FedWon (Zhuang and Lyu 2024, arXiv:2306.05879)",
    "fedfa": "FedFA (Zhou and Konukoglu 2023, arXiv:2301.12995)",
    "flamby": "FLamby (Ogier du Terrail et al. 2022, arXiv:2210.04620)",
}


@dataclass(frozen=True)
class PublishedValue:
    """A printed number: mean, standard deviation (if any), and ``unit``, the value of a 1 in its last digit."""

    mean: float
    std: float = math.nan
    unit: float = 0.0

    @staticmethod
    def of(text: str) -> PublishedValue | None:
        """Return the value of ``"62.87 (1.49)"`` or ``"62.87"``; None for ``""``."""
        if not text:
            return None
        mean, _, std = text.partition(" (")
        unit = 10.0 ** -len(mean.partition(".")[2])
        return PublishedValue(float(mean), float(std.removesuffix(")")) if std else math.nan, unit)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of a table: the kind of its ``columns`` (``by``), and rows of keys and numbers.

    ``keys`` apply to all rows. Each row has its own keys (including ``method``) and one number per column.
    """

    version: str
    page: int
    by: str
    columns: tuple[str, ...]
    keys: Mapping[str, Any]
    rows: tuple[tuple[Mapping[str, Any], tuple[PublishedValue | None, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table or figure of a paper; ``drawn`` describes a figure whose numbers are not printed."""

    paper: str
    name: str
    title: str
    where: str
    metric: str
    unit: str
    seeds: int
    note: str
    drawn: str
    claims: tuple[str, ...]
    blocks: tuple[Block, ...]

    @property
    def key(self) -> str:
        """Name on the command line: ``fedbn/table11``."""
        return f"{self.paper}/{self.name}"


@cache
def load_tables() -> Mapping[str, Table]:
    """Return all tables by key, grouped by paper, in the order of their numbers."""
    paths = ((paper, path) for paper in PAPERS for path in sorted((VALUES / paper).glob("*.toml"), key=_sort_key))
    return {table.key: table for table in (_read_table(paper, path) for paper, path in paths)}


def find_table(key: str) -> Table:
    """Return the table or figure with this key. Raises :class:`UsageError` naming the closest key if there is none."""
    if key not in load_tables():
        of_paper = [other for other in load_tables() if other.partition("/")[0] == key.partition("/")[0]]
        raise unknown_name("table or figure", key, of_paper or load_tables())
    return load_tables()[key]


def _sort_key(path: Path) -> tuple[bool, int]:
    name = path.stem
    return name.startswith("figure"), int("0" + "".join(filter(str.isdecimal, name)))


def _read_table(paper: str, path: Path) -> Table:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    shared = {key: content[key] for key in ("data", "model") if content.get(key)}
    blocks = tuple(_read_block(shared, values) for values in content.get("values", ()))
    return Table(
        paper=paper, name=path.stem, title=content["title"], where=content.get("where", ""),
        metric=content.get("metric", "accuracy"), unit=content.get("unit", ""), seeds=content.get("seeds", 0),
        note=" ".join(content.get("note", "").split()), drawn=" ".join(content.get("drawn", "").split()),
        claims=tuple(content.get("claims", ())), blocks=blocks,
    )  # fmt: skip


def _read_block(shared: Mapping[str, Any], values: Mapping[str, Any]) -> Block:
    fields = {"version", "page", "columns", "by", "rows"}
    rows = []
    for row in values["rows"]:
        keys = {key: value for key, value in row.items() if key not in ("cells", "paper_name")}
        rows.append((keys, tuple(map(PublishedValue.of, row["cells"]))))
    return Block(
        version=values["version"], page=values["page"], by=values["by"], columns=tuple(values["columns"]),
        keys={**shared, **{key: value for key, value in values.items() if key not in fields}}, rows=tuple(rows),
    )  # fmt: skip
