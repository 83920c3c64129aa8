"""The command ``fedshift reproduce``: the papers' tables and figures, run here and put beside what is printed there."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table as Grid

from .base.errors import FedshiftError, UsageError
from .base.files import write_atomically
from .config import DataSpec
from .launch import announced_cache, contents, display, interruptible, loading, say, use_threads, wide

if TYPE_CHECKING:
    from .config import RunSpec
    from .data.files.reading import Progress
    from .papers.plan import Plan
    from .papers.recipe import Way
    from .papers.reproduce import Finished
    from .papers.tables import Table
    from .report.text import TextTable


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
    from .papers.place import held
    from .papers.plan import blocks_of
    from .papers.recipe import Way
    from .papers.tables import table as found
    from .sources import root_of

    if (present or hours is not None) and not all:
        raise UsageError("--present and --hours belong to --all: give it too, or leave them out")
    if hours is not None and (not 0 < hours < math.inf or scale < 1):
        raise UsageError(f"--hours {hours:g} chooses the share of the rounds: give more than 0, and no --scale")
    if table and all:
        raise UsageError(f"--all runs every table: leave {table} out, or --all")
    if version and not table:
        raise UsageError(f"--version {version} is one of a single table: name the table, or leave it out")
    data = root_of(DataSpec(root=str(root) if root else None))
    named = "--root " if root else "FEDSHIFT_DATA=" if os.environ.get("FEDSHIFT_DATA") else ""
    if named and not data.is_dir():
        raise UsageError(f"{named}{data}: there is no such directory; give that of the data, or leave it out")
    _refuse(out)
    use_threads(None)
    way = Way(root=data.resolve(), scale=scale, seeds=seeds, light=light)
    if not table and not all:
        return _list(way, out)
    wanted = [found(table)] if table else _wanted(way, present)
    if version:
        blocks_of(wanted[0], version)  # refused before anything is made where there is none
    with held(out):
        return _run(wanted, way, version, hours, out)


def _refuse(out: Path) -> None:
    """Raise :class:`UsageError` where ``out`` holds other things than tables that were run."""
    from .papers.place import KNOWN

    kind = contents(out) if out.is_dir() else None
    others = out.is_dir() and {path.name for path in out.iterdir()} - KNOWN
    if (out.exists() and not out.is_dir()) or kind not in (None, "reproduce") or (kind is None and others):
        raise UsageError(f"--out {out} holds something else: give a directory of runs of tables, or a new one")


def _list(way: Way, out: Path) -> int:
    from rich.text import Text

    from .papers.estimate import TIMING, Estimates
    from .papers.plan import plans_of
    from .papers.results import last_verdicts, left
    from .papers.tables import tables

    estimates, grid = Estimates(), Grid(box=None, padding=(0, 2, 1, 0))
    for title in ("table or figure", "runs", "time here"):
        grid.add_column(title, no_wrap=True, justify="left" if title == "table or figure" else "right")
    grid.add_column("what", overflow="fold")
    notes: dict[str, int] = {}
    with _counted(Console(stderr=True)) as progress:
        plans = {key: [plan for _, plan in plans_of(table, way)] for key, table in tables().items()}
        specs = {key: list(dict.fromkeys(spec for plan in of for spec in plan.specs)) for key, of in plans.items()}
        todo = {key: left(runs, out) for key, runs in specs.items()}
        estimates.look_at(itertools.chain.from_iterable(todo.values()), progress)
        for done, (key, table) in enumerate(tables().items()):
            progress(TIMING, done, len(todo))
            asked = list(dict.fromkeys(spec for plan in plans[key] for spec in plan.asked))
            lines = [
                table.title,
                *_needs(asked, plans[key], way, notes),
                *(f"last: {said}" for said in last_verdicts(table, out)),
            ]
            try:
                spent = _time(estimates.of(todo[key])) if todo[key] else "done" if specs[key] else ""
            except UsageError as error:
                spent = "?"
                lines.append(f"cannot run: {error}")
            grid.add_row(key, str(len(specs[key])) if asked else "", spent, Text("\n".join(lines)))
    wide().print(grid)
    for note, number in notes.items():
        say(Console(), f"stand-in {number}: {note}")
    return 0


@contextmanager
def _counted(console: Console) -> Iterator[Progress]:
    """Progress of what takes up to a minute: a bar on a terminal, elsewhere a plain line for each tenth of it."""
    said = set()

    def line(what: str, done: int, total: int) -> None:
        if (tenth := (what, 10 * done // total)) not in said:
            said.add(tenth)
            say(console, f"{what}: {done} of {total}")

    with loading(console) as bar:
        yield bar if console.is_terminal else line


def _needs(asked: Sequence[RunSpec], plans: Sequence[Plan], way: Way, notes: dict[str, int]) -> list[str]:
    """Lines on the data, networks and methods of runs; what stands in is numbered in ``notes``."""
    from .papers.recipe import plain, present

    where = []
    for data in dict.fromkeys(spec.data for spec in asked):
        found = dict.fromkeys(plan.stood[plain(data)] for plan in plans if plain(data) in plan.stood)
        numbers = " and ".join(str(notes.setdefault(note, len(notes) + 1)) for note in found)
        said = "here" if present(data, way.root) else f"stand-in {numbers}" if found else "missing"
        where.append(f"{plain(data)}: {said}")
    models = dict.fromkeys(spec.model for spec in asked)
    methods = dict.fromkeys(re.sub(r"\([^()]*\)|\+fedavg", "", spec.method) for spec in asked)
    return ["; ".join(dict.fromkeys(where)), f"{', '.join(models)}: {', '.join(methods)}"] if asked else []


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
    with interruptible(console) as stop, Budget(hours, stop) as budget, ExitStack() as shown:
        if len(wanted) > 1:
            say(console, f"{len(wanted)} tables and figures, those that take least first; steps are timed.")
            with _counted(Console(stderr=True)) as progress:
                wanted = budget.ordered(wanted, way, out, progress)
        shown.enter_context(announced_cache(console))
        observer = shown.enter_context(display(console))
        for number, table in enumerate(wanted):
            chosen = budget.fitting(table, way, out, len(wanted) - number)
            done = None
            try:
                if not stop.is_set():
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
                return int(bool(failed)) if budget.over else 130
            _show(table, done, out, console)
            page = write(out)
    if page:
        say(console, f"Page: {page}")
    for line in failed:
        say(console, f"Failed: {line}")
    return 1 if failed else 0


def remake_papers(place: Path, console: Console) -> None:
    """Show and write again what the ended runs in ``place`` make of each table that was begun there."""
    from .papers.page import write
    from .papers.place import held
    from .papers.reproduce import remade
    from .papers.tables import tables

    with held(place):
        for table in tables().values():
            if done := remade(table, place):
                _show(table, done, place, console)
        say(console, f"Page: {write(place)}")


def _show(table: Table, done: Finished, out: Path, console: Console) -> None:
    """Print what came out of a table, and write it as Markdown and LaTeX."""
    from .papers.tables import PAPERS
    from .papers.verdict import side_by_side
    from .report.text import escape_latex, latex, markdown, terminal

    text = wide()
    title = f"{PAPERS[table.paper]}, {table.name}: {table.title}"
    say(console, title)
    content = {"md": [f"**{title}**\n"], "tex": [f"% {title}"]}

    def put(shown: TextTable | None, lines: Sequence[str]) -> None:
        if shown:
            text.print(terminal(shown))
            content["md"].append(markdown(shown))
            content["tex"].append(latex(shown))
        for line in lines:
            say(console, line)
            content["md"].append(f"{line}\n")
            content["tex"].append(f"\\par{{\\footnotesize {escape_latex(line)}}}\n")

    for made in done.compared:
        put(side_by_side(made), [*made.remarks, made.summary])
    for drawn in done.drawn:
        say(console, f"Drawn: {out / 'results' / table.paper / drawn.picture.name}.svg")
        put(drawn.numbers, [])
    put(None, done.remarks)
    for kind, parts in content.items():
        write_atomically(out / "results" / table.paper / f"{table.name}.{kind}", "\n".join(parts).encode())
