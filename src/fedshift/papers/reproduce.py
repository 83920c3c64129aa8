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

from ..base.errors import UsageError
from ..build import experiment_of
from ..config import RunSpec
from ..experiment import Observer
from ..series import Part, go_through
from .measures import run_folder
from .pictures import Drawn, draw, drawn_before
from .plan import Plan, drawn, planned, plans_of
from .recipe import Way
from .results import begin, compared, left, record, there, way_of
from .tables import Block, Table
from .verdict import Reproduced, remarks


@dataclass(kw_only=True)
class Finished:
    """A table that was run: its blocks ``compared``, its panels ``drawn``, and ``remarks`` on data of the latter."""

    compared: list[Reproduced] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    remarks: tuple[str, ...] = ()

    def add(self, table: Table, block: Block | None, way: Way, plan: Plan, place: Path) -> None:
        """Add what the ended runs of ``plan`` in ``place`` make of ``block``, or of the panels (None)."""
        if block:
            self.compared.append(compared(table, block, way, plan, place))
        else:
            self.drawn += draw(table, plan, way, place)
            self.remarks = tuple(remarks(plan.notes, plan.missing))


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
        raise UsageError(
            f"{table.key} needs {' and '.join(missing)}, not to be found under {way.root}: `fedshift data list` says "
            "where to get data"
        )
    for block, plan in plans:
        if block:
            begin(table, block, way, plan, place)
        elif not drawn_before(table, place):
            draw(table, replace(plan, panels=()), way, place)
    made = Finished()
    for block, plan in plans:
        if not _run(left(plan.specs, place), place, observer or Observer(), stop or Event()):
            return None
        made.add(table, block, way, plan, place)
    return made


def remade(table: Table, place: Path) -> Finished | None:
    """What :func:`finish` makes of ``table``, made again from the runs that have ended in ``place``, without training.

    None where none of them has ended, and where less would come out than is there, since its data have gone or an
    earlier fedshift made it.
    """
    plans: list[tuple[Block | None, Way, Plan]] = []
    for block in (*table.blocks, None):
        found = record(table, block, place) if block else drawn_before(table, place)
        if found:
            way = way_of(found)
            if way is None:
                return None
            plan = planned(table, block, way) if block else drawn(table, way)
            now = there(plan, place)
            if not _covers(now, found):
                return None
            if now.cells or now.panels:
                plans.append((block, way, plan))
    made = Finished()
    for block, way, plan in plans:
        made.add(table, block, way, plan, place)
    return made if plans else None


def _covers(plan: Plan, found: Mapping[str, Any]) -> bool:
    """Whether ``plan`` has the cells, or the panels, of the result whose record was ``found``."""
    cells = {(cell.row, cell.column) for cell in plan.cells}
    names = tuple(panel.name for panel in plan.panels)
    return all((cell["row"], cell["column"]) in cells for cell in found.get("cells", ())) and all(
        picture["name"].startswith(names) for picture in found.get("pictures", ())
    )


def _run(specs: Sequence[RunSpec], place: Path, observer: Observer, stop: Event) -> bool:
    """Run ``specs``, each in its directory in ``place``; False where ``stop`` came first."""

    def say(number: int, _: Part) -> None:
        spec = specs[number - 1]
        observer.notice(
            f"run {number} of {len(specs)}: {spec.method} on {spec.data}, {spec.model}, {spec.rounds} rounds"
        )

    parts = [Part(folder=run_folder(spec, place), experiment=partial(experiment_of, spec)) for spec in specs]
    return go_through(parts, observer=observer, stop=stop, begin=say)
