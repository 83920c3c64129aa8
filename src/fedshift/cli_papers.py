"""The command ``fedshift reproduce``: the papers' tables and figures, run here and put beside what is printed there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table as Grid

from .base.errors import FedshiftError, UsageError
from .base.files import write_atomically
from .config import DataSpec
from .launch import display, interruptible, say, wide

if TYPE_CHECKING:
    from .papers.recipe import Way
    from .papers.reproduce import Finished
    from .papers.tables import Table


def reproduce(
    table: str | None = None,
    *,
    all: Annotated[bool, Parameter(negative=())] = False,
    present: Annotated[bool, Parameter(negative=())] = False,
    hours: float | None = None,
    light: Annotated[bool, Parameter(negative=())] = False,
    seeds: int = 1,
    scale: float = 1.0,
    version: str | None = None,
    root: Path | None = None,
    out: Path = Path("reproduced"),
) -> int:
    """Run tables and figures of the papers beside what they print; without a name, list all and what each takes.

    Parameters
    ----------
    table
        Which, for example fedbn/table11.
    all
        All that have a recipe, those that take least first.
    present
        With --all, leave out those whose data are not here, nor others that stand in for them.
    hours
        With --all, the time for all together on this machine: each is run with the share of its rounds that fits.
    light
        Train small networks in place of the papers', for a look in a small part of the time; outputs say so.
    seeds
        Seeds of each run; 3 or more give standard deviations.
    scale
        Share of the rounds to run, for a quick look.
    version
        Version of the paper where it has several, v1 or final; without it the last.
    root
        Directory of the data; without it the one that FEDSHIFT_DATA names, else data.
    out
        Directory of the runs, which tables share, of the results and of the page.

    """
    from .papers.recipe import Way
    from .papers.tables import table as found
    from .sources import root_of

    if (present or hours is not None) and not all:
        raise UsageError("--present and --hours belong to --all: give it too, or leave them out")
    if hours is not None and (hours <= 0 or scale < 1):
        raise UsageError(f"--hours {hours:g} chooses the share of the rounds: give more than 0, and no --scale")
    if table and all:
        raise UsageError(f"--all runs every table: leave {table} out, or --all")
    way = Way(root=root_of(DataSpec(root=str(root) if root else None)).resolve(), scale=scale, seeds=seeds, light=light)
    if not table and not all:
        return _list(way, out)
    return _run([found(table)] if table else _wanted(way, present), way, version, hours, out)


def _list(way: Way, out: Path) -> int:
    from .papers.estimate import Estimates
    from .papers.plan import plans_of
    from .papers.recipe import plain, present, stand_in
    from .papers.reproduce import last_verdicts, left
    from .papers.tables import tables

    estimates, console, grid = Estimates(), Console(stderr=True), Grid(box=None)
    for title in ("table or figure", "what", "data", "networks and methods", "runs", "time here", "last result"):
        grid.add_column(title, overflow="fold")
    notes: dict[str, int] = {}
    with console.status("timing a step of each network"):
        for key, table in tables().items():
            plans = [plan for _, plan in plans_of(table, way)]
            asked = [spec for plan in plans for spec in plan.asked]
            specs = list(dict.fromkeys(spec for plan in plans for spec in plan.specs))
            where = []
            for data in dict.fromkeys(spec.data for spec in asked):
                stand = stand_in(data, way.root)
                if present(data, way.root):
                    where.append(f"{plain(data)}: here")
                elif stand:
                    where.append(f"{plain(data)}: stand-in {notes.setdefault(stand.note, len(notes) + 1)}")
                else:
                    where.append(f"{plain(data)}: missing")
            models = dict.fromkeys(spec.model for spec in asked)
            methods = dict.fromkeys(spec.method.partition("(")[0] for spec in asked)
            needs = f"{', '.join(models)}: {', '.join(methods)}" if asked else ""
            try:
                spent = _time(estimates.of(left(specs, out))) if specs else ""
            except UsageError as error:
                spent = f"cannot run: {error}"
            last = "; ".join(last_verdicts(table, out))
            grid.add_row(key, table.title, "\n".join(where), needs, str(len(specs)), spent, last)
    wide().print(grid)
    for note, number in notes.items():
        say(Console(), f"stand-in {number}: {note}")
    return 0


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _wanted(way: Way, present: bool) -> list[Table]:
    """All tables with a recipe, of which those without data are left out, or refused."""
    from .papers.plan import plans_of, runnable
    from .papers.tables import table

    found, lacking = [], {}
    for key in runnable():
        plans = [plan for _, plan in plans_of(table(key), way)]
        missing = [name for plan in plans for name in plan.missing]
        if missing and not any(plan.specs for plan in plans):
            lacking[key] = missing[0]
        else:
            found.append(table(key))
    if lacking and not present:
        said = ", ".join(f"{key} needs {data}" for key, data in lacking.items())
        raise UsageError(f"{said}, which is not under {way.root}: add --present to leave these out")
    return found


def _run(wanted: Sequence[Table], way: Way, version: str | None, hours: float | None, out: Path) -> int:
    from .papers.budget import Budget
    from .papers.page import write
    from .papers.reproduce import finish

    console, failed, page = Console(), [], None
    with interruptible(console) as stop, Budget(hours, stop) as budget, display(console) as observer:
        if len(wanted) > 1:
            say(console, f"{len(wanted)} tables and figures, those that take least first; steps are timed.")
            wanted = budget.ordered(wanted, way, out)
        for number, table in enumerate(wanted):
            chosen = budget.fitting(table, way, out, len(wanted) - number)
            try:
                done = finish(table, chosen, out, version=version, observer=observer, stop=stop)
            except FedshiftError as error:
                if len(wanted) == 1:
                    raise
                failed.append(f"{table.key}: {error}")
                say(console, f"Failed: {failed[-1]}")
                continue
            if done is None:
                why = "Time is up" if budget.over else "Stopped"
                say(console, f"{why}. What was done is kept; go on with the same command.")
                return 0 if budget.over else 130
            _show(table, done, out, console)
            page = write(out)
    if page:
        say(console, f"Page: {page}")
    for line in failed:
        say(console, f"Failed: {line}")
    return 1 if failed else 0


def _show(table: Table, done: Finished, out: Path, console: Console) -> None:
    """Print what came out of a table, and write it as Markdown and LaTeX."""
    from .papers.tables import PAPERS
    from .papers.verdict import side_by_side
    from .report.text import latex, markdown, terminal

    text = wide()
    say(console, f"{PAPERS[table.paper]}, {table.name}: {table.title}")
    content: dict[str, list[str]] = {"md": [], "tex": []}
    for made in done.compared:
        notes = [f"{'Data' if made.own else 'Stand-in'}: {note}." for note in made.notes]
        shown = side_by_side(made)
        text.print(terminal(shown))
        for line in (*notes, made.summary):
            say(console, line)
        content["md"] += [markdown(shown), *(f"{line}\n" for line in (*notes, made.summary))]
        content["tex"] += [*(f"% {line}" for line in (*notes, made.summary)), latex(shown)]
    for drawn in done.drawn:
        say(console, f"Drawn: {out / 'results' / table.paper / drawn.picture.name}.svg")
        if drawn.numbers:
            text.print(terminal(drawn.numbers))
            content["md"] += [markdown(drawn.numbers)]
            content["tex"] += [latex(drawn.numbers)]
    for note in dict.fromkeys(done.notes):
        say(console, f"Stand-in: {note}.")
        content["md"] += [f"Stand-in: {note}.\n"]
        content["tex"] += [f"% Stand-in: {note}."]
    for kind, parts in content.items():
        write_atomically(out / "results" / table.paper / f"{table.name}.{kind}", "\n".join(parts).encode())
