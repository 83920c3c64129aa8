"""Execution of tables: each is run, compared with the paper's and drawn.

Each run is saved in a directory when it finishes, so that interrupted tables continue and a run shared by tables is
executed only once. Only one program at a time may use the directory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from threading import Event

from typing_extensions import override

from ..config.spec import DataSpec, RunSpec
from ..diagnosis.checked_experiment import make_checked
from ..experiments.callbacks import Callback, Callbacks
from ..experiments.run_queue import QueuedRun, run_pending
from ..results.run_directory import acquire_lock
from ..utils.errors import Ref, UsageError
from .figures import draw_panels
from .measurements import measure_cells
from .planning import TablePlan, make_plans
from .published_tables import Block, Table
from .recipes import ReproductionOptions
from .results import Result, pending_runs, read_result, run_folder, write_result


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


def run_table(
    table: Table,
    options: ReproductionOptions,
    directory: Path,
    *,
    callback: Callback | None = None,
    stop: Event | None = None,
) -> list[Result]:
    """Run the missing runs of ``table`` in ``directory`` until ``stop`` is set; return what all finished runs gave.

    A run whose training diverges keeps the numbers of the previous round. Errors in the data of all runs are reported,
    or refused, before the first run. Results are stored; if stopped, only those of which there were none.

    Raises :class:`UsageError` if the data are missing, and the errors of running experiments.
    """
    plans, stop = make_plans(table, options), stop or Event()
    missing = dict.fromkeys(name for _, plan in plans for name in plan.missing)
    if missing and not any(plan.specs for _, plan in plans):
        raise UsageError(
            f"{table.key} needs {' and '.join(missing)}, not to be found under {options.root}: `fedshift data list` "
            "says where to get data"
        )
    specs = pending_runs(dict.fromkeys(spec for _, plan in plans for spec in plan.specs), directory)
    callback, lines = callback or Callback(), _check_data(specs)
    for line in lines:
        callback.on_notice(line)
    ended = _run(specs, directory, _Unrepeated(callback, lines), stop)
    results = [_make_result(table, block, plan, options, directory) for block, plan in plans]
    for result in results:
        if ended or read_result(table, result.block, directory) is None:
            write_result(result, directory)
    return results


def _check_data(specs: Iterable[RunSpec]) -> tuple[str, ...]:
    """Return the notices about the data of ``specs``; shared data are read once.

    Raises :class:`UsageError` if errors are to be refused.
    """
    names = ("data", *(each.name for each in fields(DataSpec)))
    alike = {tuple(getattr(spec, name) for name in names): spec for spec in specs}
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


def _make_result(table: Table, block: Block, plan: TablePlan, options: ReproductionOptions, directory: Path) -> Result:
    """Measure and draw the finished runs of ``plan``."""
    pending = pending_runs(plan.specs, directory)
    result = Result(
        table=table, block=block, options=options, notes=plan.notes, missing=plan.missing, shown=plan.shown,
        own=not plan.notes,
        unfinished=f"{len(plan.specs) - len(pending)} of {len(plan.specs)} runs" if pending else "",
    )  # fmt: skip
    cells = [cell for cell in plan.cells if not set(cell.specs) & set(pending)]
    values, fewer = measure_cells(table, cells, directory)
    pictures: dict[str, str] = {}
    for panel in plan.panels:
        points = tuple(point for point in panel.points if point[1] not in pending)
        if points or not panel.points:
            mark = "stand-in" if plan.notes else ""
            pictures |= draw_panels(table, replace(panel, points=points), directory, mark=mark)
    return replace(result, values=values, notes=(*plan.notes, *fewer), pictures=pictures)
