"""Tables run and put beside the papers': ours, theirs, the difference, and what follows.

Runs are kept one by one in a directory, so that what was interrupted goes on and what two tables share is run once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from ..base.files import write_atomically
from ..build import experiment_of
from ..experiment import Observer, read_study
from ..report.tables import seed_table
from ..report.text import Cell as TextCell
from ..report.text import TextTable, signed
from .recipe import Cell, Plan, Way
from .tables import Block, Printed, Table

DONE = "done.json"
MARGIN = 2.0
"""Standard deviations of the difference within which two means count as the same."""


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """A block of a table: for each cell that was run, what the paper prints and what came out here."""

    table: Table
    block: Block
    way: Way
    ours: dict[tuple[int, int], Printed]
    notes: tuple[str, ...]

    def theirs(self, row: int, column: int) -> Printed | None:
        """What the paper prints there."""
        return self.block.rows[row][1][column]

    @property
    def same_order(self) -> bool | None:
        """Whether methods are in the paper's order, by their means over columns, wherever all else in rows is equal.

        None where no two rows can be compared.
        """
        groups: dict[str, list[int]] = {}
        for row in sorted({row for row, _ in self.ours}):
            keys = {key: value for key, value in self.block.rows[row][0].items() if key not in ("method", "lr")}
            groups.setdefault(repr(keys), []).append(row)
        compared = [rows for rows in groups.values() if len(rows) > 1]
        if not compared:
            return None
        return all(
            sorted(rows, key=lambda row: self._mean(row, theirs=False))
            == sorted(rows, key=lambda row: self._mean(row, theirs=True))
            for rows in compared
        )

    @property
    def within(self) -> tuple[int, int]:
        """Of the cells whose spread the paper prints, how many of ours are within it, and how many there are."""
        judged = [
            self.close(*where) for where in self.ours if (paper := self.theirs(*where)) and not math.isnan(paper.std)
        ]
        return sum(judged), len(judged)

    def close(self, row: int, column: int) -> bool:
        """Whether ours is within :data:`MARGIN` standard deviations of the paper's, both spreads taken together."""
        ours, paper = self.ours[row, column], self.theirs(row, column)
        if paper is None or math.isnan(paper.std):
            return False
        spread = math.hypot(paper.std, 0.0 if math.isnan(ours.std) else ours.std)
        return abs(ours.mean - paper.mean) <= MARGIN * spread

    @property
    def verdict(self) -> str:
        """One of: within the paper's spread, same order of methods, neither."""
        close, judged = self.within
        if judged and close == judged:
            return "within the paper's spread"
        if self.same_order:
            return "same order of methods"
        return "neither" if self.same_order is not None else "one method, outside the paper's spread"

    def _mean(self, row: int, *, theirs: bool) -> float:
        columns = [column for where, column in self.ours if where == row]
        values = [self.theirs(row, column) if theirs else self.ours[row, column] for column in columns]
        return sum(value.mean for value in values if value) / len(columns)


def reproduce(
    table: Table,
    block: Block,
    way: Way,
    plan: Plan,
    place: Path,
    *,
    observer: Callable[[Cell, int, int], Observer] = lambda *_: Observer(),
    stop: Event | None = None,
) -> Reproduced | None:
    """Run what ``plan`` makes of ``block`` of ``table``, in ``place``, and compare; None where ``stop`` came first.

    ``observer(cell, number, of)`` gives who hears of a run that starts. Raises as running does.
    """
    runs = {cell.run: cell for cell in plan.cells}
    for number, (name, cell) in enumerate(runs.items(), 1):
        folder = place / "runs" / name
        if not (folder / DONE).exists():
            experiment = experiment_of(cell.spec)
            resume = (folder / "config.toml").exists()
            if not experiment.run(folder, resume=resume, observer=observer(cell, number, len(runs)), stop=stop):
                return None
            write_atomically(folder / DONE, b"{}\n")
    ours = _measured(table, plan.cells, place)
    made = Reproduced(table=table, block=block, way=way, ours=ours, notes=plan.notes)
    _keep(made, place)
    return made


def _measured(table: Table, wanted: Sequence[Cell], place: Path) -> dict[tuple[int, int], Printed]:
    factor = 100.0 if table.unit == "percent" else 1.0
    found = {}
    studies = {}
    for cell in wanted:
        if cell.run not in studies:
            studies[cell.run] = seed_table(read_study(place / "runs" / cell.run), table.metric)
        values = studies[cell.run].loc["macro" if cell.client is None else cell.client].dropna() * factor
        numbers = values.to_numpy(dtype=float)
        spread = float(numbers.std(ddof=1)) if len(numbers) > 1 else math.nan
        found[cell.row, cell.column] = Printed(float(numbers.mean()), spread)
    return found


def _keep(made: Reproduced, place: Path) -> None:
    """Keep the numbers, for the list of tables."""
    content = {
        "verdict": made.verdict, "scale": made.way.scale, "seeds": made.way.seeds, "notes": list(made.notes),
        "cells": [
            {"row": row, "column": column, "mean": ours.mean, "std": None if math.isnan(ours.std) else ours.std}
            for (row, column), ours in sorted(made.ours.items())
        ],
    }  # fmt: skip
    path = _result(made.table, made.table.blocks.index(made.block), place)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def _result(table: Table, block: int, place: Path) -> Path:
    return place / "results" / table.paper / f"{table.name}-{block}.json"


def last_verdicts(table: Table, place: Path) -> list[str]:
    """What came of the last runs of the table's blocks, as far as there were some in ``place``."""
    found = []
    for number, block in enumerate(table.blocks):
        path = _result(table, number, place)
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            found.append(f"{f'{block.version}: ' if block.version else ''}{kept['verdict']} (scale {kept['scale']:g})")
    return found


def side_by_side(made: Reproduced) -> TextTable:
    """Each cell that was run: ours, the paper's, the difference, and whether it is within the paper's spread."""
    rows = []
    for (row, column), ours in sorted(made.ours.items()):
        paper = made.theirs(row, column)
        assert paper
        keys = made.block.rows[row][0]
        others = [f"{key} {value}" for key, value in keys.items() if key != "method"]
        name = f"{', '.join([str(keys['method']), *others])}: {made.block.columns[column]}"
        judged = "" if math.isnan(paper.std) else "within" if made.close(row, column) else "outside"
        texts = (name, _text(ours), _text(paper), signed(ours.mean - paper.mean), judged)
        rows.append(tuple(TextCell(text=text) for text in texts))
    return TextTable(header=("", "ours", "paper", "difference", "paper's spread"), rows=tuple(rows))


def _text(number: Printed) -> str:
    spread = "" if math.isnan(number.std) else f" ({number.std:.2f})"
    return f"{number.mean:.2f}{spread}"
