"""Every file of printed values is whole, and names what fedshift has: a schema for each paper."""

import re
import tomllib
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import pytest

from fedshift import reproduce
from fedshift.cli.data import find_card
from fedshift.data.sources import DATASETS, SPLIT_CHANGES
from fedshift.methods import METHODS
from fedshift.models import MODELS

VALUES = Path(reproduce.__file__).parent / "values"
FILES = {f"{path.parent.name}/{path.stem}": path for path in sorted(VALUES.glob("*/*.toml"))}
HEAD = {"title": str, "where": str, "data": str, "model": str, "metric": str, "unit": str, "seeds": int, "note": str}
FIGURE = {"drawn": str, "claims": list}
BLOCK = {"version": str, "page": int, "columns": list, "by": str, "rows": list}
ROW = {"method": str, "cells": list}
CELL = re.compile(r"-?\d+(\.\d+)?( \(\d+(\.\d+)?\))?")


@dataclass(frozen=True)
class Paper:
    """What a paper's files may hold beside what all hold: heads, blocks and rows; ``needed``: what each row holds."""

    tables: set[str]
    figures: set[str]
    where: str
    head: dict[str, type] = field(default_factory=dict)
    block: dict[str, type] = field(default_factory=dict)
    row: dict[str, type] = field(default_factory=dict)
    needed: frozenset[str] = frozenset()


PAPERS = {
    "fedbn": Paper(
        tables={"table1", *(f"table{number}" for number in range(11, 18))},
        figures={f"figure{number}" for number in (1, 2, 3, 4, 5, 7, 8, 9)},
        where=r"section \d(\.\d)?|appendix [A-G](\.\d)?",
        head={"versions": list, "values_in": list},
        block={"data": str, "model": str, "samples": list},
        row={"paper_name": str, "batch_size": int, "epochs": int, "client": str},
    ),
    "fedmmb": Paper(
        tables={f"table{number}" for number in range(2, 6)},
        figures={f"figure{number}" for number in range(1, 5)},
        where=r"section 4\.[123]",
        row={
            "paper_name": str, "lr": float, "batch_size": int, "data": str, "model": str, "metric": str, "part": str,
            "split": str, "clients": int, "batches": int, "epochs": int,
        },
        needed=frozenset({"paper_name", "lr", "batch_size"}),
    ),
    "fedfa": Paper(tables={"office"}, figures=set(), where=r"the repository's README\.md .*"),
    "flamby": Paper(
        tables={"heart", "tcga-brca"}, figures=set(), where=r"the repository's flamby/results .*",
        row={"paper_name": str, "participation": str}, needed=frozenset({"paper_name"}),
    ),
    "fedwon": Paper(
        tables={f"table{number}" for number in (*range(1, 5), *range(11, 23))},
        figures={f"figure{number}" for number in (3, 4, 5, 6, 10, 11, 12, 13, 14)},
        where=r"(section|appendix) [\w.]+",
        block={"data": str, "model": str},
        row={
            "paper_name": str, "lr": float, "batch_size": int, "epochs": int, "clients": int, "fraction": float,
            "split": str, "unseen": str, "wsconv": bool, "agc": bool, "seeds": int,
        },
    ),
}  # fmt: skip


def read(name):
    return tomllib.loads(FILES[name].read_text(encoding="utf-8"))


def assert_typed(found, needed, allowed):
    known = {**needed, **allowed}
    assert needed.keys() <= found.keys() <= known.keys()
    assert {key: type(value) for key, value in found.items()} == {key: known[key] for key in found}


def test_there_is_a_file_for_every_table_and_figure():
    for paper, asked in PAPERS.items():
        assert {name.partition("/")[2] for name in FILES if name.startswith(paper)} == asked.tables | asked.figures


DIGESTS = {
    "fedbn": "2ab6cb9c91018ff0",
    "fedfa": "91cb6cbdf55953fb",
    "fedmmb": "01159874d70ba23b",
    "fedwon": "1f15653e22bf10fd",
    "flamby": "c66ba76442da84eb",
}
"""Of each paper's files as they were compared with the paper, number by number and with what its text says of them."""


@pytest.mark.parametrize("paper", DIGESTS)
def test_no_value_has_changed_since_it_was_compared_with_the_paper(paper):
    content = b"".join(FILES[name].read_bytes() for name in sorted(FILES) if name.startswith(f"{paper}/"))
    assert blake2b(content, digest_size=8).hexdigest() == DIGESTS[paper]


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_whole_and_names_what_fedshift_has(name):
    paper, said = PAPERS[name.partition("/")[0]], read(name)
    is_figure = "/figure" in name
    assert_typed(said, HEAD, {**FIGURE, "values": list, **paper.head})
    assert re.fullmatch(paper.where, said["where"])
    assert all(said[key].strip() == said[key] != "" for key in ("title", "metric", "note"))
    assert is_figure == bool(said.get("claims")) == bool(said.get("drawn"))
    assert is_figure or "values" in said
    for block in said.get("values", ()):
        assert_typed(block, BLOCK, paper.block)
        check_block(paper, said, block)
    for part in (said, *said.get("values", ())):
        for key, catalog in (("data", DATASETS), ("model", MODELS)):
            assert part.get(key, "") in ("", "toy") or catalog.find(part[key])


def check_block(paper, said, block):
    columns = block["columns"]
    assert len(columns) == len(set(columns)) == len(block.get("samples", columns))
    settings = [tuple((key, row[key]) for key in sorted(row.keys() - {"cells", "paper_name"})) for row in block["rows"]]
    assert len(set(settings)) == len(settings) > 0
    if block["by"] == "client":
        data = block.get("data") or said["data"]
        clients = {"global", "local"} if data == "toy" else {*find_card(data).clients}
        assert {*columns} - {"average", "global", "local"} in (clients, set())
    elif block["by"] == "split":
        assert all(SPLIT_CHANGES.parse_all(column) for column in columns)
    for row in block["rows"]:
        assert_typed(row, {key: {**ROW, **paper.row}[key] for key in (*ROW, *paper.needed)}, paper.row)
        assert METHODS.find(row["method"])
        assert row.get("paper_name") != row["method"]
        assert len(row["cells"]) == len(columns)
        assert any(row["cells"])
        assert all(cell == "" or CELL.fullmatch(cell) for cell in row["cells"])
        for key, catalog in (("data", DATASETS), ("model", MODELS)):
            assert key not in row or catalog.find(row[key])
        if "split" in row:
            SPLIT_CHANGES.parse_all(row["split"])
