"""Results of reproduced tables, stored in the directory of the runs: numbers, verdict and options of each block.

Only one program at a time may use the directory. ``results/<paper>/<table>-<block>.json`` is written without numbers
when a block is started, unless it has a result already, so that the results of an interrupted table can be shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config.spec import RunSpec
from ..experiments.run_queue import read_outcome
from ..results.run_directory import LOCK, OWNER, acquire_lock
from ..utils.checked_json import read_checked, write_checked
from ..utils.errors import Ref, UsageError
from .measurements import FinishedRuns, run_folder
from .planning import TablePlan
from .published_tables import Block, Table
from .recipes import ReproductionOptions, base_name, load_recipes
from .verdict import ReproducedBlock

KNOWN = frozenset(("index.html", "results", "runs", LOCK, OWNER))
"""Names of the entries in such a directory."""
REMOVE = "remove it and give the same command again, which keeps the runs"
"""Remedy for a stored result that cannot be used."""


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Create ``directory`` if needed, and lock it against other programs inside the block.

    Raises :class:`UsageError` if it cannot be written, and :class:`FedshiftError` if another program has locked it.
    """
    try:
        lock = acquire_lock(directory)
    except OSError as error:
        raise UsageError(f"{{}}: {error.strerror}; give a directory that can be written", Ref(out=directory)) from error
    try:
        yield
    finally:
        lock.release()


def to_record(options: ReproductionOptions) -> dict[str, Any]:
    """Return ``options`` in the form stored with a result."""
    return {**asdict(options), "root": str(options.root)}


def pending_runs(specs: Sequence[RunSpec], directory: Path) -> list[RunSpec]:
    """Return the runs in ``specs`` that have not finished in ``directory``."""
    return [spec for spec in specs if read_outcome(run_folder(spec, directory), {}) is None]


def completed_part(plan: TablePlan, directory: Path) -> TablePlan:
    """Return ``plan`` without the cells and points whose runs have not finished in ``directory``."""
    pending = set(pending_runs(plan.specs, directory))
    panels = [
        replace(panel, points=tuple(point for point in panel.points if point[1] not in pending))
        for panel in plan.panels
    ]
    return replace(
        plan,
        cells=tuple(cell for cell in plan.cells if pending.isdisjoint(cell.specs)),
        panels=tuple(new for new, old in zip(panels, plan.panels, strict=True) if new.points or not old.points),
    )


def record_start(table: Table, block: Block, options: ReproductionOptions, plan: TablePlan, directory: Path) -> None:
    """Store the options for running ``block``, unless it has a result."""
    if not read_record(table, block, directory):
        empty = ReproducedBlock(
            table=table, block=block, scale=options.scale, seeds=options.seeds, values={}, shown=plan.shown,
            missing=plan.missing, part=_describe_part(plan, directory),
        )  # fmt: skip
        _write_record(empty, options, directory)


def compare_block(
    table: Table, block: Block, options: ReproductionOptions, plan: TablePlan, directory: Path
) -> ReproducedBlock:
    """Return ``block`` with values from the finished runs of ``plan`` in ``directory``, and store it there."""
    runs, cells = FinishedRuns(directory), completed_part(plan, directory).cells
    known = load_recipes().get("published", {})
    notes = list(plan.notes)
    for data, size in runs.count_training_samples(cells).items():
        if size < (published := known.get(data, known.get(base_name(data), 0))):
            notes.append(f"{size:,} training samples of {base_name(data)}'s {published:,}")
    reproduced = ReproducedBlock(
        table=table, block=block, scale=options.scale, seeds=options.seeds, values=runs.measure_cells(table, cells),
        notes=tuple(notes), shown=plan.shown, own=not plan.notes, missing=plan.missing,
        part=_describe_part(plan, directory), grid=runs.measure_grids(table, cells),
    )  # fmt: skip
    _write_record(reproduced, options, directory)
    return reproduced


def read_record(table: Table, block: Block, directory: Path) -> Mapping[str, Any]:
    """Return the stored record of ``block``; empty if it was not started in ``directory``.

    Raises :class:`FedshiftError` if it is damaged or has other rows or columns than the table.
    """
    path = _record_path(table, block, directory)
    record = read_checked(path, REMOVE) if path.exists() else {}
    for cell in record.get("cells", ()):
        if cell["row"] >= len(block.rows) or cell["column"] >= len(block.columns):
            raise UsageError(
                f"{path} has a number in row {cell['row'] + 1}, column {cell['column'] + 1} of a table of "
                f"{len(block.rows)} x {len(block.columns)}: another version of fedshift wrote it; {REMOVE}"
            )
    return record


def read_results(table: Table, directory: Path) -> list[ReproducedBlock]:
    """Return the blocks of ``table`` that :func:`compare_block` stored with at least one number."""
    blocks = []
    for block in table.blocks:
        record = read_record(table, block, directory)
        if record and (record["cells"] or not record["part"]):
            cells = {(cell["row"], cell["column"]): cell for cell in record["cells"]}
            fields: dict[str, Any] = {name: record[name] for name in ("scale", "seeds", "shown", "own", "part")}
            fields |= {name: tuple(record[name]) for name in ("notes", "missing")}
            values = {
                key: tuple(math.nan if value is None else value for value in cell["values"])
                for key, cell in cells.items()
            }
            grid = {key: cell["grid"] for key, cell in cells.items()}
            blocks.append(ReproducedBlock(table=table, block=block, values=values, grid=grid, **fields))
    return blocks


def read_verdicts(table: Table, directory: Path) -> list[str]:
    """Return the verdicts for the table's blocks that have results in ``directory``."""
    return [
        f"{f'{result.block.version}: ' if result.block.version else ''}{result.verdict} (scale {result.scale:.2g})"
        for result in read_results(table, directory)
    ]


def _describe_part(plan: TablePlan, directory: Path) -> str:
    """Return in words how many runs of ``plan`` have finished in ``directory``; empty if all have."""
    pending = len(pending_runs(plan.specs, directory))
    return f"{len(plan.specs) - pending} of {len(plan.specs)} runs" if pending else ""


def _write_record(block: ReproducedBlock, options: ReproductionOptions, directory: Path) -> None:
    record = {
        "verdict": block.verdict, "scale": block.scale, "seeds": block.seeds, "notes": list(block.notes),
        "missing": list(block.missing), "shown": dict(block.shown), "own": block.own, "part": block.part,
        "way": to_record(options),
        "cells": [
            {
                "row": row, "column": column, "values": [None if math.isnan(value) else value for value in values],
                "grid": block.grid.get((row, column), 0.0),
            }
            for (row, column), values in sorted(block.values.items())
        ],
    }  # fmt: skip
    path = _record_path(block.table, block.block, directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_checked(path, record)


def _record_path(table: Table, block: Block, directory: Path) -> Path:
    return directory / "results" / table.paper / f"{table.name}-{table.blocks.index(block)}.json"
