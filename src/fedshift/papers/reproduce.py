"""Tables run and put beside the papers': ours, theirs, the difference, and what follows.

Runs are kept one by one in a directory, so that what was interrupted goes on and what two tables share is run once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from ..base.errors import UsageError
from ..base.files import write_atomically
from ..build import experiment_of
from ..config import RunSpec
from ..engines.engine import Diverged
from ..experiment import Observer
from .measures import Runs
from .pictures import Drawn, draw
from .plan import Plan, plans_of
from .recipe import Way, plain, recipes, run_name
from .tables import Block, Table
from .verdict import Reproduced

DONE = "done.json"


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
        table=table, block=block, scale=way.scale, seeds=way.seeds, values=runs.numbers(table, plan.cells),
        notes=(*plan.notes, *_fewer(runs.trained_on(plan.cells))), shown=plan.shown, own=not plan.notes,
    )  # fmt: skip
    content = {
        "verdict": made.verdict, "scale": made.scale, "seeds": made.seeds, "notes": list(made.notes),
        "shown": dict(made.shown), "own": made.own,
        "cells": [
            {"row": row, "column": column, "values": [None if math.isnan(value) else value for value in values]}
            for (row, column), values in sorted(made.values.items())
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
            values = {
                (cell["row"], cell["column"]): tuple(math.nan if value is None else value for value in cell["values"])
                for cell in content["cells"]
            }
            facts = {name: content[name] for name in ("scale", "seeds", "shown", "own")}
            made = Reproduced(table=table, block=block, values=values, notes=tuple(content["notes"]), **facts)
            found.append(made)
    return found


def _fewer(sizes: Mapping[str, int]) -> list[str]:
    """A word on data sets of which fewer samples are here than were published."""
    known = recipes().get("published", {})
    published = {data: known.get(data, known.get(plain(data), 0)) for data in sizes}
    return [
        f"{size:,} training samples of {plain(data)}'s {published[data]:,}"
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
