"""Tables run and put beside the papers': ours, theirs, the difference, and what follows.

Runs are kept one by one in a directory, so that what was interrupted goes on and what two tables share is run once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from threading import Event
from typing import Any

from ..analysis.concordance import CONCORDANT
from ..base.errors import UsageError
from ..base.files import write_atomically
from ..build import experiment_of
from ..config import RunSpec
from ..engines.engine import Diverged
from ..experiment import Observer
from ..report.text import Cell as TextCell
from ..report.text import TextTable, signed
from .measures import Runs
from .pictures import Drawn, draw
from .plan import DISCORDANCE, FINAL, Plan, plans_of
from .recipe import Way, recipe_of, recipes, run_name
from .tables import Block, Printed, Table

DONE = "done.json"
MARGIN = 2.0
"""Standard deviations of the difference within which two means count as the same."""
APART = ("method", "lr", "agc", "seeds")
"""What rows may differ in to be compared, where a recipe does not say."""


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """A block of a table: for each cell that was run, what the paper prints and what came out here.

    ``scale`` and ``seeds`` say how it was run, ``notes`` what stood in for the paper's data and network, which are then
    not ``own``; ``shown`` is whose place other clients take.
    """

    table: Table
    block: Block
    scale: float
    seeds: int
    ours: Mapping[tuple[int, int], Printed]
    notes: tuple[str, ...] = ()
    shown: Mapping[str, str]
    own: bool = True

    def theirs(self, row: int, column: int) -> Printed | None:
        """What the paper prints there."""
        return self.block.rows[row][1][column]

    def measure(self, column: int) -> str:
        """What the column shows."""
        recipe = recipe_of(self.table) or {}
        return str(recipe.get("measures", {}).get(self.block.columns[column], FINAL))

    @property
    def order(self) -> tuple[int, int]:
        """Of the pairs of methods with all else in their rows equal, how many are in the paper's order, and all.

        Methods go by their means over columns. Pairs that the paper has level are not counted.
        """
        groups: dict[str, list[int]] = {}
        recipe = recipe_of(self.table) or {}
        for row in sorted({row for row, column in self.ours if self._ranks(column)}):
            keys = {**self.block.keys, **self.block.rows[row][0]}
            kept = recipe["within"] if "within" in recipe else [key for key in keys if key not in APART]
            kept = [*kept, *(("agc",) if "within" not in recipe else ())]
            groups.setdefault(repr([keys.get(key) for key in kept]), []).append(row)
        same = counted = 0
        for rows in groups.values():
            for one, other in combinations(rows, 2):
                columns = [column for column in range(len(self.block.columns)) if self._both(one, other, column)]
                theirs = self._mean(one, columns, theirs=True) - self._mean(other, columns, theirs=True)
                ours = self._mean(one, columns, theirs=False) - self._mean(other, columns, theirs=False)
                counted += theirs != 0
                same += theirs * ours > 0
        return same, counted

    @property
    def same_order(self) -> bool | None:
        """Whether all methods are in the paper's order; None where no two can be compared."""
        same, counted = self.order
        return same == counted if counted else None

    @property
    def within(self) -> tuple[int, int]:
        """Of the cells whose spread the paper prints, how many of ours are within it, and how many there are.

        On other data than the paper's, or with another network, there is none to be within.
        """
        if not self.own:
            return 0, 0
        judged = [
            self.close(*where) for where in self.ours if (paper := self.theirs(*where)) and not math.isnan(paper.std)
        ]
        return sum(judged), len(judged)

    @property
    def concordant(self) -> tuple[int, int]:
        """Of the discordances, how many are below FedMMB's threshold, and how many there are."""
        deltas = [number.mean for (_, column), number in self.ours.items() if self.measure(column) == DISCORDANCE]
        return sum(delta < CONCORDANT for delta in deltas), len(deltas)

    def close(self, row: int, column: int) -> bool:
        """Whether ours is within :data:`MARGIN` standard deviations of the paper's, both spreads taken together."""
        ours, paper = self.ours[row, column], self.theirs(row, column)
        if paper is None or math.isnan(paper.std):
            return False
        spread = math.hypot(paper.std, 0.0 if math.isnan(ours.std) else ours.std)
        return abs(ours.mean - paper.mean) <= MARGIN * spread

    @property
    def verdict(self) -> str:
        """One of: within the paper's spread, same order of methods, neither; or why none of them can be said."""
        close, judged = self.within
        below, deltas = self.concordant
        if judged and close == judged:
            return "within the paper's spread"
        if self.same_order:
            return "same order of methods"
        if deltas:
            return "concordant throughout" if below == deltas else f"concordant in {below} of {deltas}"
        return "neither" if self.same_order is not None else "nothing to compare"

    @property
    def summary(self) -> str:
        """How it was run and what came of it, in a sentence."""
        version = f"version {self.block.version}, " if self.block.version else ""
        share = f", {self.scale:.2g} of the rounds" if self.scale < 1 else ""
        (close, judged), (same, pairs), (below, deltas) = self.within, self.order, self.concordant
        said = [self.verdict]
        said += [f"{same} of {pairs} pairs of methods in the paper's order"] if pairs else []
        said += [f"{close} of {judged} cells within the paper's spread"] if judged else []
        said += [f"{below} of {deltas} discordances below {CONCORDANT:g}"] if deltas else []
        return f"Verdict ({version}{self.seeds} seed{'s' * (self.seeds > 1)}{share}): {'; '.join(said)}."

    def _ranks(self, column: int) -> bool:
        return self.measure(column) not in (DISCORDANCE, "rounds")

    def _both(self, one: int, other: int, column: int) -> bool:
        return (one, column) in self.ours and (other, column) in self.ours and self._ranks(column)

    def _mean(self, row: int, columns: Sequence[int], *, theirs: bool) -> float:
        values = [self.theirs(row, column) if theirs else self.ours[row, column] for column in columns]
        return sum(value.mean for value in values if value) / max(1, len(columns))


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A table that was run: its blocks ``compared``, its panels ``drawn``, and ``notes`` on data of the latter."""

    compared: list[Reproduced]
    drawn: list[Drawn]
    notes: tuple[str, ...]


def finish(
    table: Table,
    way: Way,
    place: Path,
    *,
    version: str | None = None,
    observer: Observer | None = None,
    stop: Event | None = None,
) -> Finished | None:
    """Run what of ``table`` is not done yet in ``place``, compare and draw; None where ``stop`` came first.

    A run whose training diverges keeps the numbers of the round before. Raises :class:`UsageError` where the data are
    missing, and otherwise as running does.
    """
    plans = list(plans_of(table, way, version))
    missing = dict.fromkeys(name for _, plan in plans for name in plan.missing)
    if missing and not any(plan.specs for _, plan in plans):
        needed = ", ".join(missing)
        raise UsageError(
            f"{table.key} needs {needed}, which is not under {way.root}: see `fedshift data show {needed}`"
        )
    notes = tuple(note for block, plan in plans if not block for note in plan.notes)
    made = Finished(compared=[], drawn=[], notes=notes)
    for block, plan in plans:
        if not _run(left(plan.specs, place), place, observer or Observer(), stop):
            return None
        if block:
            made.compared.append(compared(table, block, way, plan, place))
        else:
            made.drawn.extend(draw(table, plan, way, place))
    return made


def left(specs: Sequence[RunSpec], place: Path) -> list[RunSpec]:
    """Those of ``specs`` that have not been run to the end in ``place``."""
    return [spec for spec in specs if not (place / "runs" / run_name(spec) / DONE).exists()]


def _run(specs: Sequence[RunSpec], place: Path, observer: Observer, stop: Event | None) -> bool:
    """Run ``specs``, each in its directory in ``place``; False where ``stop`` came first."""
    for number, spec in enumerate(specs, 1):
        observer.notice(
            f"run {number} of {len(specs)}: {spec.method} on {spec.data}, {spec.model}, {spec.rounds} rounds"
        )
        folder = place / "runs" / run_name(spec)
        experiment = experiment_of(spec)
        resume = (folder / "config.toml").exists()
        try:
            if not experiment.run(folder, resume=resume, observer=observer, stop=stop):
                return False
            how: dict[str, str] = {}
        except Diverged as error:
            how = {"diverged": str(error)}
        write_atomically(folder / DONE, (json.dumps(how) + "\n").encode())
    return True


def compared(table: Table, block: Block, way: Way, plan: Plan, place: Path) -> Reproduced:
    """The finished runs of ``plan`` in ``place`` beside ``block``; kept there for the list and the page."""
    runs = Runs(place)
    made = Reproduced(
        table=table, block=block, scale=way.scale, seeds=way.seeds, ours=runs.numbers(table, plan.cells),
        notes=(*plan.notes, *_fewer(runs.trained_on(plan.cells))), shown=plan.shown, own=not plan.notes,
    )  # fmt: skip
    content = {
        "verdict": made.verdict, "scale": made.scale, "seeds": made.seeds, "notes": list(made.notes),
        "shown": dict(made.shown), "own": made.own,
        "cells": [
            {"row": row, "column": column, "mean": ours.mean, "std": None if math.isnan(ours.std) else ours.std}
            for (row, column), ours in sorted(made.ours.items())
        ],
    }  # fmt: skip
    path = _result(table, table.blocks.index(block), place)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return made


def kept(table: Table, place: Path) -> list[Reproduced]:
    """What :func:`compared` left of ``table`` in ``place``, block by block."""
    found = []
    for number, block in enumerate(table.blocks):
        path = _result(table, number, place)
        if path.exists():
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            ours = {
                (cell["row"], cell["column"]): Printed(cell["mean"], math.nan if cell["std"] is None else cell["std"])
                for cell in content["cells"]
            }
            found.append(
                Reproduced(
                    table=table,
                    block=block,
                    scale=content["scale"],
                    seeds=content["seeds"],
                    ours=ours,
                    notes=tuple(content["notes"]),
                    shown=content["shown"],
                    own=content["own"],
                )
            )
    return found


def _fewer(sizes: Mapping[str, int]) -> list[str]:
    """A word on data sets of which fewer samples are here than were published."""
    published = {data: recipes().get("published", {}).get(data.partition("(")[0], 0) for data in sizes}
    return [
        f"{size:,} training samples of {data.partition('(')[0]}'s {published[data]:,}"
        for data, size in sizes.items()
        if size < published[data]
    ]


def _result(table: Table, block: int, place: Path) -> Path:
    return place / "results" / table.paper / f"{table.name}-{block}.json"


def last_verdicts(table: Table, place: Path) -> list[str]:
    """What came of the last runs of the table's blocks, as far as there were some in ``place``."""
    return [
        f"{f'{made.block.version}: ' if made.block.version else ''}{made.verdict} (scale {made.scale:.2g})"
        for made in kept(table, place)
    ]


def side_by_side(made: Reproduced) -> TextTable:
    """Each cell that was run: ours, the paper's, the difference, and whether it is within the paper's spread."""
    rows = []
    judged = made.within[1] > 0
    for (row, column), ours in sorted(made.ours.items()):
        paper = made.theirs(row, column)
        assert paper
        keys, name = made.block.rows[row][0], made.block.columns[column]
        others = [f"{key} {value}" for key, value in keys.items() if key not in ("method", "seeds")]
        place = f"{name} (here {made.shown[name]})" if name in made.shown else name
        where = f"{', '.join([str(keys['method']), *others])}: {place}"
        said = "" if not judged or math.isnan(paper.std) else "within" if made.close(row, column) else "outside"
        texts = (where, _text(ours, paper), _text(paper, paper), _gap(ours, paper), *([said] if judged else []))
        rows.append(tuple(TextCell(text=text) for text in texts))
    header = ("", "ours", "paper", "difference", *(["paper's spread"] if judged else []))
    return TextTable(header=header, rows=tuple(rows))


def _digits(paper: Printed) -> int:
    """Digits after the point that tell the paper's number from others."""
    if paper.mean >= 1:
        return 2 if paper.mean <= 100 else 0
    return min(8, 3 - math.floor(math.log10(paper.mean))) if paper.mean > 0 else 4


def _text(number: Printed, paper: Printed) -> str:
    digits = _digits(paper)
    spread = "" if math.isnan(number.std) else f" ({number.std:.{digits}f})"
    return f"{number.mean:.{digits}f}{spread}"


def _gap(ours: Printed, paper: Printed) -> str:
    return signed(ours.mean - paper.mean, _digits(paper))
