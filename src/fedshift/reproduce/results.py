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

from ..config.spec import RunSpec
from ..experiments.run_queue import read_outcome
from ..utils.files import write_atomically
from .measurements import FinishedRuns, run_folder
from .planning import TablePlan
from .published_tables import Block, Table
from .recipes import ReproductionOptions, base_name, load_recipes
from .verdict import ReproducedBlock


def to_record(way: ReproductionOptions) -> dict[str, Any]:
    """``way`` as it is kept with a result."""
    return {**asdict(way), "root": str(way.root)}


def options_from_record(record: Mapping[str, Any]) -> ReproductionOptions | None:
    """How the result was made whose record this is; None where an earlier fedshift made it, which did not say."""
    way = record.get("way")
    return ReproductionOptions(**{**way, "root": Path(way["root"])}) if way else None


def pending_runs(specs: Sequence[RunSpec], place: Path) -> list[RunSpec]:
    """Those of ``specs`` that have not been run to the end in ``place``."""
    return [spec for spec in specs if read_outcome(run_folder(spec, place), {}) is None]


def completed_part(plan: TablePlan, place: Path) -> TablePlan:
    """``plan`` without the cells and points of runs that have not ended in ``place``."""
    lacking = set(pending_runs(plan.specs, place))
    panels = (
        replace(panel, points=tuple(point for point in panel.points if point[1] not in lacking))
        for panel in plan.panels
    )
    return replace(
        plan,
        cells=tuple(cell for cell in plan.cells if lacking.isdisjoint(cell.specs)),
        panels=tuple(new for new, old in zip(panels, plan.panels, strict=True) if new.points or not old.points),
    )


def record_start(table: Table, block: Block, way: ReproductionOptions, plan: TablePlan, place: Path) -> None:
    """Keep in which way ``block`` is run, unless there is a result of it."""
    if not read_record(table, block, place):
        nothing = ReproducedBlock(
            table=table, block=block, scale=way.scale, seeds=way.seeds, values={}, shown=plan.shown,
            missing=plan.missing, part=_describe_part(plan, place),
        )  # fmt: skip
        _write_record(nothing, way, place)


def compare_block(
    table: Table, block: Block, way: ReproductionOptions, plan: TablePlan, place: Path
) -> ReproducedBlock:
    """The ended runs of ``plan`` in ``place`` beside ``block``; kept there for the list and the page."""
    runs, cells = FinishedRuns(place), completed_part(plan, place).cells
    made = ReproducedBlock(
        table=table, block=block, scale=way.scale, seeds=way.seeds, values=runs.measure_cells(table, cells),
        notes=(*plan.notes, *_describe_fewer(runs.count_training_samples(cells))), shown=plan.shown, own=not plan.notes,
        missing=plan.missing, part=_describe_part(plan, place), grid=runs.grids(table, cells),
    )  # fmt: skip
    _write_record(made, way, place)
    return made


def read_record(table: Table, block: Block, place: Path) -> Mapping[str, Any]:
    """What is kept of ``block`` in ``place``, empty where it was not begun there."""
    path = _record_path(table, block, place)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_results(table: Table, place: Path) -> list[ReproducedBlock]:
    """What :func:`compare_block` left of ``table`` in ``place``, block by block; none that has no number yet."""
    found = []
    for block in table.blocks:
        content = read_record(table, block, place)
        if content and (content["cells"] or not content.get("part")):
            values = {
                (cell["row"], cell["column"]): tuple(math.nan if value is None else value for value in cell["values"])
                for cell in content["cells"]
            }
            grid = {(cell["row"], cell["column"]): cell.get("grid", 0.0) for cell in content["cells"]}
            facts = {name: content[name] for name in ("scale", "seeds", "shown", "own")}
            facts |= {name: tuple(content.get(name, ())) for name in ("notes", "missing")}
            facts |= {"table": table, "block": block, "values": values, "part": content.get("part", ""), "grid": grid}
            found.append(ReproducedBlock(**facts))
    return found


def read_verdicts(table: Table, place: Path) -> list[str]:
    """What came of the last runs of the table's blocks, as far as there were some in ``place``."""
    return [
        f"{f'{made.block.version}: ' if made.block.version else ''}{made.verdict} (scale {made.scale:.2g})"
        for made in read_results(table, place)
    ]


def _describe_part(plan: TablePlan, place: Path) -> str:
    """How many of the runs of ``plan`` have ended in ``place``, empty where all have."""
    lacking = len(pending_runs(plan.specs, place))
    return f"{len(plan.specs) - lacking} of {len(plan.specs)} runs" if lacking else ""


def _write_record(made: ReproducedBlock, way: ReproductionOptions, place: Path) -> None:
    content = {
        "verdict": made.verdict, "scale": made.scale, "seeds": made.seeds, "notes": list(made.notes),
        "missing": list(made.missing), "shown": dict(made.shown), "own": made.own, "part": made.part,
        "way": to_record(way),
        "cells": [
            {
                "row": row, "column": column, "values": [None if math.isnan(value) else value for value in values],
                "grid": made.grid.get((row, column), 0.0),
            }
            for (row, column), values in sorted(made.values.items())
        ],
    }  # fmt: skip
    path = _record_path(made.table, made.block, place)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def _describe_fewer(sizes: Mapping[str, int]) -> list[str]:
    """A word on data sets of which fewer samples are here than were published."""
    known = load_recipes().get("published", {})
    published = {data: known.get(data, known.get(base_name(data), 0)) for data in sizes}
    return [
        f"{size:,} training samples of {base_name(data)}'s {published[data]:,}"
        for data, size in sizes.items()
        if size < published[data]
    ]


def _record_path(table: Table, block: Block, place: Path) -> Path:
    return place / "results" / table.paper / f"{table.name}-{table.blocks.index(block)}.json"
