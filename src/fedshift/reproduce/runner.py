"""Execution of tables: each is run, compared with the paper's and drawn.

Each run is saved in a directory when it finishes, so that interrupted tables continue and a run shared by tables is
executed only once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from typing_extensions import override

from ..config.spec import DataSpec, RunSpec
from ..diagnosis.checked_experiment import make_checked
from ..experiments.callbacks import Callback, Callbacks
from ..experiments.run_queue import QueuedRun, run_pending
from ..utils.errors import UsageError
from .figures import ReproducedFigure, draw_figures, load_figures
from .measurements import run_folder
from .planning import TablePlan, make_plans, plan_block, plan_panels
from .published_tables import Block, Table
from .recipes import ReproductionOptions
from .results import compare_block, completed_part, pending_runs, read_record, record_start
from .verdict import ReproducedBlock, list_remarks


@dataclass(kw_only=True)
class FinishedTable:
    """A finished table: its ``blocks``, its ``figures``, and ``remarks`` on the figures' data."""

    blocks: list[ReproducedBlock] = field(default_factory=list)
    figures: list[ReproducedFigure] = field(default_factory=list)
    remarks: tuple[str, ...] = ()

    def add(
        self, table: Table, block: Block | None, options: ReproductionOptions, plan: TablePlan, directory: Path
    ) -> None:
        """Add the finished runs of ``plan`` in ``directory`` as ``block``, or as figures (None)."""
        if block:
            self.blocks.append(compare_block(table, block, options, plan, directory))
        else:
            self.figures += draw_figures(table, plan, options, directory)
            self.remarks = tuple(list_remarks(plan.notes, plan.missing))


def run_table(
    table: Table,
    options: ReproductionOptions,
    directory: Path,
    *,
    version: str | None = None,
    callback: Callback | None = None,
    stop: Event | None = None,
) -> FinishedTable | None:
    """Run the missing runs of ``table`` in ``directory``, compare and draw; return None if stopped before the end.

    A run whose training diverges keeps the numbers of the previous round. Errors in the data of all runs are reported,
    or refused, before the first run. Raises :class:`UsageError` if the data are missing, and the errors of running
    experiments.
    """
    plans = list(make_plans(table, options, version))
    missing = dict.fromkeys(name for _, plan in plans for name in plan.missing)
    if missing and not any(plan.specs for _, plan in plans):
        raise UsageError(
            f"{table.key} needs {' and '.join(missing)}, not to be found under {options.root}: `fedshift data list` "
            "says where to get data"
        )
    callback = callback or Callback()
    lines = _check_data((spec for _, plan in plans for spec in plan.specs), directory)
    for line in lines:
        callback.on_notice(line)
    for block, plan in plans:
        if block:
            record_start(table, block, options, plan, directory)
        elif not load_figures(table, directory):
            draw_figures(table, replace(plan, panels=()), options, directory)
    finished = FinishedTable()
    for block, plan in plans:
        if not _run(pending_runs(plan.specs, directory), directory, _Unrepeated(callback, lines), stop or Event()):
            return None
        finished.add(table, block, options, plan, directory)
    return finished


def rebuild(table: Table, directory: Path) -> FinishedTable | None:
    """Rebuild the result of :func:`run_table` from the finished runs in ``directory``, without training.

    Returns None if no run has finished, or if the result would be smaller than the stored one because its data are
    gone.
    """
    finished = FinishedTable()
    plans: list[tuple[Block | None, ReproductionOptions, TablePlan]] = []
    for block in (*table.blocks, None):
        if record := read_record(table, block, directory) if block else load_figures(table, directory):
            options = ReproductionOptions(**{**record["way"], "root": Path(record["way"]["root"])})
            plan = plan_block(table, block, options) if block else plan_panels(table, options)
            completed = completed_part(plan, directory)
            if not _is_covered(completed, record):
                return None
            if completed.cells or completed.panels:
                plans.append((block, options, plan))
    for block, options, plan in plans:
        finished.add(table, block, options, plan, directory)
    return finished if plans else None


def _is_covered(plan: TablePlan, record: Mapping[str, Any]) -> bool:
    """Return whether ``plan`` has all cells or panels of the stored ``record``."""
    cells = {(cell.row, cell.column) for cell in plan.cells}
    names = tuple(panel.name for panel in plan.panels)
    return all((cell["row"], cell["column"]) in cells for cell in record.get("cells", ())) and all(
        picture["name"].startswith(names) for picture in record.get("pictures", ())
    )


def _check_data(specs: Iterable[RunSpec], directory: Path) -> tuple[str, ...]:
    """Return the notices about the data of ``specs`` that have not finished; shared data are read once.

    Raises :class:`UsageError` if errors are to be refused.
    """
    names = ("data", *(each.name for each in fields(DataSpec)))
    alike = {tuple(getattr(spec, name) for name in names): spec for spec in pending_runs(list(specs), directory)}
    return tuple(dict.fromkeys(line for spec in alike.values() for line in make_checked(spec).data.notices))


class _Unrepeated(Callbacks):
    """A callback that skips notices that were ``said`` before."""

    def __init__(self, callback: Callback, said: Collection[str]) -> None:
        super().__init__(callback)
        self._said = said

    @override
    def on_notice(self, text: str) -> None:
        if text not in self._said:
            super().on_notice(text)


def _run(specs: Sequence[RunSpec], directory: Path, callback: Callback, stop: Event) -> bool:
    """Run ``specs``, each in its folder of ``directory``; return False if ``stop`` was set before the end."""

    def announce(number: int, _: QueuedRun) -> None:
        spec = specs[number - 1]
        callback.on_notice(
            f"run {number} of {len(specs)}: {spec.method} on {spec.data}, {spec.model}, {spec.rounds} rounds"
        )

    queue = [QueuedRun(folder=run_folder(spec, directory), experiment=partial(make_checked, spec)) for spec in specs]
    return run_pending(queue, callback=callback, stop=stop, begin=announce)
