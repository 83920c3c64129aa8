"""What came of a table's blocks, kept in the directory of the runs: numbers, verdict, and the way in which it was run.

``results/<paper>/<table>-<block>.json`` is written empty as a block is begun, unless a result is there, so that what an
interrupted table has can be shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..base.files import write_atomically
from ..config import RunSpec
from ..series import ending
from .measures import Runs, run_folder
from .plan import Plan
from .recipe import Way, plain, recipes
from .tables import Block, Table
from .verdict import Reproduced


def written(way: Way) -> dict[str, Any]:
    """``way`` as it is kept with a result."""
    return {**asdict(way), "root": str(way.root)}


def way_of(record: Mapping[str, Any]) -> Way | None:
    """How the result was made whose record this is; None where an earlier fedshift made it, which did not say."""
    way = record.get("way")
    return Way(**{**way, "root": Path(way["root"])}) if way else None


def left(specs: Sequence[RunSpec], place: Path) -> list[RunSpec]:
    """Those of ``specs`` that have not been run to the end in ``place``."""
    return [spec for spec in specs if ending(run_folder(spec, place), {}) is None]


def there(plan: Plan, place: Path) -> Plan:
    """``plan`` without the cells and points of runs that have not ended in ``place``."""
    lacking = set(left(plan.specs, place))
    panels = (
        replace(panel, points=tuple(point for point in panel.points if point[1] not in lacking))
        for panel in plan.panels
    )
    return replace(
        plan,
        cells=tuple(cell for cell in plan.cells if lacking.isdisjoint(cell.specs)),
        panels=tuple(new for new, old in zip(panels, plan.panels, strict=True) if new.points or not old.points),
    )


def begin(table: Table, block: Block, way: Way, plan: Plan, place: Path) -> None:
    """Keep in which way ``block`` is run, unless there is a result of it."""
    if not record(table, block, place):
        nothing = Reproduced(
            table=table, block=block, scale=way.scale, seeds=way.seeds, values={}, shown=plan.shown,
            missing=plan.missing, part=_part(plan, place),
        )  # fmt: skip
        _keep(nothing, way, place)


def compared(table: Table, block: Block, way: Way, plan: Plan, place: Path) -> Reproduced:
    """The ended runs of ``plan`` in ``place`` beside ``block``; kept there for the list and the page."""
    runs, cells = Runs(place), there(plan, place).cells
    made = Reproduced(
        table=table, block=block, scale=way.scale, seeds=way.seeds, values=runs.numbers(table, cells),
        notes=(*plan.notes, *_fewer(runs.trained_on(cells))), shown=plan.shown, own=not plan.notes,
        missing=plan.missing, part=_part(plan, place), grid=runs.grids(table, cells),
    )  # fmt: skip
    _keep(made, way, place)
    return made


def record(table: Table, block: Block, place: Path) -> Mapping[str, Any]:
    """What is kept of ``block`` in ``place``, empty where it was not begun there."""
    path = _file(table, block, place)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def kept(table: Table, place: Path) -> list[Reproduced]:
    """What :func:`compared` left of ``table`` in ``place``, block by block; none that has no number yet."""
    found = []
    for block in table.blocks:
        content = record(table, block, place)
        if content and (content["cells"] or not content.get("part")):
            values = {
                (cell["row"], cell["column"]): tuple(math.nan if value is None else value for value in cell["values"])
                for cell in content["cells"]
            }
            grid = {(cell["row"], cell["column"]): cell.get("grid", 0.0) for cell in content["cells"]}
            facts = {name: content[name] for name in ("scale", "seeds", "shown", "own")}
            facts |= {name: tuple(content.get(name, ())) for name in ("notes", "missing")}
            facts |= {"table": table, "block": block, "values": values, "part": content.get("part", ""), "grid": grid}
            found.append(Reproduced(**facts))
    return found


def last_verdicts(table: Table, place: Path) -> list[str]:
    """What came of the last runs of the table's blocks, as far as there were some in ``place``."""
    return [
        f"{f'{made.block.version}: ' if made.block.version else ''}{made.verdict} (scale {made.scale:.2g})"
        for made in kept(table, place)
    ]


def _part(plan: Plan, place: Path) -> str:
    """How many of the runs of ``plan`` have ended in ``place``, empty where all have."""
    lacking = len(left(plan.specs, place))
    return f"{len(plan.specs) - lacking} of {len(plan.specs)} runs" if lacking else ""


def _keep(made: Reproduced, way: Way, place: Path) -> None:
    content = {
        "verdict": made.verdict, "scale": made.scale, "seeds": made.seeds, "notes": list(made.notes),
        "missing": list(made.missing), "shown": dict(made.shown), "own": made.own, "part": made.part,
        "way": written(way),
        "cells": [
            {
                "row": row, "column": column, "values": [None if math.isnan(value) else value for value in values],
                "grid": made.grid.get((row, column), 0.0),
            }
            for (row, column), values in sorted(made.values.items())
        ],
    }  # fmt: skip
    path = _file(made.table, made.block, place)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def _fewer(sizes: Mapping[str, int]) -> list[str]:
    """A word on data sets of which fewer samples are here than were published."""
    known = recipes().get("published", {})
    published = {data: known.get(data, known.get(plain(data), 0)) for data in sizes}
    return [
        f"{size:,} training samples of {plain(data)}'s {published[data]:,}"
        for data, size in sizes.items()
        if size < published[data]
    ]


def _file(table: Table, block: Block, place: Path) -> Path:
    return place / "results" / table.paper / f"{table.name}-{table.blocks.index(block)}.json"
