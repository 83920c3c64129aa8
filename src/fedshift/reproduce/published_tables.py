"""Published tables and figures of the papers, read from data files.

``values/<paper>/<name>.toml`` contains the printed numbers, with their digits as printed, ``page`` and ``version``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..utils.errors import unknown_name

VALUES = Path(__file__).with_name("values")
PAPERS = {
    "fedbn": "FedBN (Li et al. 2021, arXiv:2102.07623)",
    "fedmmb": "FedSMB and FedMMB (Nasirigerdeh et al., arXiv:2011.07006)",
    "fedwon": "FedWon (Zhuang and Lyu 2024, arXiv:2306.05879)",
    "fedfa": "FedFA (Zhou and Konukoglu 2023, arXiv:2301.12995)",
    "flamby": "FLamby (Ogier du Terrail et al. 2022, arXiv:2210.04620)",
}


class PublishedValue(NamedTuple):
    """A printed number: mean, standard deviation (if any), and ``unit``, the value of a 1 in its last digit."""

    mean: float
    std: float = math.nan
    unit: float = 0.0


def parse_value(text: str) -> PublishedValue | None:
    """Return the value of ``"62.87 (1.49)"`` or ``"62.87"``; None for ``""``."""
    if not text:
        return None
    mean, _, std = text.removesuffix(")").partition(" (")
    return PublishedValue(float(mean), float(std or "nan"), 10.0 ** -len(mean.partition(".")[2]))


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of a table: the kind of its ``columns`` (``by``), and rows of keys and numbers.

    ``keys`` apply to all rows. Each row has its own keys (including ``method``) and one number per column.
    """

    version: str
    by: str
    columns: tuple[str, ...]
    keys: Mapping[str, Any]
    rows: tuple[tuple[Mapping[str, Any], tuple[PublishedValue | None, ...]], ...]

    @property
    def keyed(self) -> list[Mapping[str, Any]]:
        """All keys of each row."""
        return [{**self.keys, **keys} for keys, _ in self.rows]


PICTURES = Block(version="", by="", columns=(), keys={}, rows=())
"""In place of a block: the pictures of a figure."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table or figure of a paper; ``drawn`` describes a figure whose numbers are not printed."""

    paper: str
    name: str
    title: str
    where: str = ""
    metric: str = "accuracy"
    unit: str = ""
    seeds: int = 0
    note: str = ""
    drawn: str = ""
    claims: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()

    @property
    def key(self) -> str:
        """Name on the command line: ``fedbn/table11``."""
        return f"{self.paper}/{self.name}"


@cache
def load_tables() -> Mapping[str, Table]:
    """Return all tables by key, grouped by paper, in the order of their numbers."""
    paths = [path for paper in PAPERS for path in sorted((VALUES / paper).glob("*.toml"), key=_sort_key)]
    return {table.key: table for table in map(_read_table, paths)}


def find_table(key: str) -> Table:
    """Return the table or figure with this key. Raises :class:`UsageError` naming the closest key if there is none."""
    if key not in load_tables():
        of_paper = [other for other in load_tables() if other.partition("/")[0] == key.partition("/")[0]]
        raise unknown_name("table or figure", key, of_paper or load_tables())
    return load_tables()[key]


def _sort_key(path: Path) -> tuple[bool, int]:
    return path.stem.startswith("figure"), int("0" + "".join(filter(str.isdecimal, path.stem)))


def _read_table(path: Path) -> Table:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    shared = {key: content[key] for key in ("data", "model") if content.get(key)}
    known = {each.name for each in fields(Table)}
    facts: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in content.items() if key in known}
    facts |= {key: " ".join(value.split()) for key, value in facts.items() if isinstance(value, str)}
    return Table(
        paper=path.parent.name, name=path.stem, blocks=tuple(_read_block(shared, v) for v in content.get("values", ())),
        **facts,
    )  # fmt: skip


def _read_block(shared: Mapping[str, Any], values: Mapping[str, Any]) -> Block:
    keys = {key: value for key, value in values.items() if key not in ("version", "page", "columns", "by", "rows")}
    rows = []
    for row in values["rows"]:
        cells = tuple(map(parse_value, row["cells"]))
        rows.append(({key: value for key, value in row.items() if key not in ("cells", "paper_name")}, cells))
    return Block(
        version=values["version"], by=values["by"], columns=tuple(values["columns"]), keys={**shared, **keys},
        rows=tuple(rows),
    )  # fmt: skip
