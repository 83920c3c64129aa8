"""Tables run and put beside the papers': ours, theirs, the difference, and what follows.

Runs are kept one by one in a directory, so that what was interrupted goes on and what two tables share is run once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from ..config.spec import RunSpec
from ..experiments.experiment import Observer
from ..experiments.factory import make_experiment
from ..experiments.run_queue import QueuedRun, run_pending
from ..utils.errors import UsageError
from .figures import ReproducedFigure, draw_figures, load_figures
from .measurements import run_folder
from .planning import TablePlan, make_plans, plan_block, plan_panels
from .published_tables import Block, Table
from .recipes import ReproductionOptions
from .results import compare_block, completed_part, options_from_record, pending_runs, read_record, record_start
from .verdict import ReproducedBlock, remarks


@dataclass(kw_only=True)
class FinishedTable:
    """A table that was run: its blocks ``compared``, its panels ``drawn``, and ``remarks`` on data of the latter."""

    compared: list[ReproducedBlock] = field(default_factory=list)
    drawn: list[ReproducedFigure] = field(default_factory=list)
    remarks: tuple[str, ...] = ()

    def add(self, table: Table, block: Block | None, way: ReproductionOptions, plan: TablePlan, place: Path) -> None:
        """Add what the ended runs of ``plan`` in ``place`` make of ``block``, or of the panels (None)."""
        if block:
            self.compared.append(compare_block(table, block, way, plan, place))
        else:
            self.drawn += draw_figures(table, plan, way, place)
            self.remarks = tuple(remarks(plan.notes, plan.missing))


def run_table(
    table: Table,
    way: ReproductionOptions,
    place: Path,
    *,
    version: str | None = None,
    observer: Observer | None = None,
    stop: Event | None = None,
) -> FinishedTable | None:
    """Run what of ``table`` is not done yet in ``place``, compare and draw; None where ``stop`` came first.

    A run whose training diverges keeps the numbers of the round before. Raises :class:`UsageError` where the data are
    missing, and otherwise as running does.
    """
    plans = list(make_plans(table, way, version))
    missing = dict.fromkeys(name for _, plan in plans for name in plan.missing)
    if missing and not any(plan.specs for _, plan in plans):
        raise UsageError(
            f"{table.key} needs {' and '.join(missing)}, not to be found under {way.root}: `fedshift data list` says "
            "where to get data"
        )
    for block, plan in plans:
        if block:
            record_start(table, block, way, plan, place)
        elif not load_figures(table, place):
            draw_figures(table, replace(plan, panels=()), way, place)
    made = FinishedTable()
    for block, plan in plans:
        if not _run(pending_runs(plan.specs, place), place, observer or Observer(), stop or Event()):
            return None
        made.add(table, block, way, plan, place)
    return made


def rebuild(table: Table, place: Path) -> FinishedTable | None:
    """What :func:`run_table` makes of ``table``, made again from the runs that have ended in ``place``, without training.

    None where none of them has ended, and where less would come out than is there, since its data have gone or an
    earlier fedshift made it.
    """
    plans: list[tuple[Block | None, ReproductionOptions, TablePlan]] = []
    for block in (*table.blocks, None):
        found = read_record(table, block, place) if block else load_figures(table, place)
        if found:
            way = options_from_record(found)
            if way is None:
                return None
            plan = plan_block(table, block, way) if block else plan_panels(table, way)
            now = completed_part(plan, place)
            if not _is_covered(now, found):
                return None
            if now.cells or now.panels:
                plans.append((block, way, plan))
    made = FinishedTable()
    for block, way, plan in plans:
        made.add(table, block, way, plan, place)
    return made if plans else None


def _is_covered(plan: TablePlan, found: Mapping[str, Any]) -> bool:
    """Whether ``plan`` has the cells, or the panels, of the result whose record was ``found``."""
    cells = {(cell.row, cell.column) for cell in plan.cells}
    names = tuple(panel.name for panel in plan.panels)
    return all((cell["row"], cell["column"]) in cells for cell in found.get("cells", ())) and all(
        picture["name"].startswith(names) for picture in found.get("pictures", ())
    )


def _run(specs: Sequence[RunSpec], place: Path, observer: Observer, stop: Event) -> bool:
    """Run ``specs``, each in its directory in ``place``; False where ``stop`` came first."""

    def say(number: int, _: QueuedRun) -> None:
        spec = specs[number - 1]
        observer.notice(
            f"run {number} of {len(specs)}: {spec.method} on {spec.data}, {spec.model}, {spec.rounds} rounds"
        )

    parts = [QueuedRun(folder=run_folder(spec, place), experiment=partial(make_experiment, spec)) for spec in specs]
    return run_pending(parts, observer=observer, stop=stop, begin=say)
