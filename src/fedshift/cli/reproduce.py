"""The command ``fedshift reproduce``: the papers' tables and figures, run here and compared with the printed values."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from rich.table import Table as Grid

from ..config.spec import DataSpec
from ..console.printing import Console
from ..console.terminal import announce_cache, catch_interrupts, make_console, print_line, show_loading, show_progress
from ..utils.errors import FedshiftError, UsageError, as_flag
from ..utils.files import require_writable, write_atomically
from ..utils.words import format_time
from .run import find_kind, use_threads

if TYPE_CHECKING:
    from ..config.spec import RunSpec
    from ..data.files.read_options import Progress
    from ..report.formatting import TextTable
    from ..reproduce.planning import TablePlan
    from ..reproduce.published_tables import Table
    from ..reproduce.recipes import ReproductionOptions
    from ..reproduce.runner import FinishedTable


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
    on_data_error: Literal["refuse", "warn", "ignore"] | None = None,
    out: Path = Path("reproduced"),
) -> int:
    """Reproduce the papers' tables and figures and compare values; without a name, list them with their costs.

    Args:
        table: Table or figure, for example fedbn/table11.
        all: Run all that have a recipe, the shortest first.
        present: With --all, skip those whose data are missing and have no stand-in here.
        hours: With --all, the total time on this machine: each runs the fraction of its rounds that fits.
        light: Train small networks in place of the papers', for a quick look; outputs say so.
        seeds: Number of seeds of each run; 3 or more give standard deviations.
        scale: Fraction of the rounds to run, for a quick look.
        version: Version of the paper if it has several, v1 or final; by default the last.
        root: Directory of the data; by default the directory in FEDSHIFT_DATA, or data.
        on_data_error: Treatment of errors that `fedshift data check` finds, before training: refuse to start, warn in
            one line, or ignore, without checking; by default warn.
        out: Directory of the runs, which tables share, and of the results and the page.

    """
    from ..data.sources import data_root
    from ..reproduce.planning import select_blocks
    from ..reproduce.published_tables import find_table as found
    from ..reproduce.recipes import ReproductionOptions
    from ..reproduce.results import lock_directory

    if (present or hours is not None) and not all:
        raise UsageError("--present and --hours belong to --all: give it too, or leave them out")
    if hours is not None and (not 0 < hours < math.inf or scale < 1):
        raise UsageError(f"--hours {hours:g} chooses the share of the rounds: give more than 0, and no --scale")
    if table and all:
        raise UsageError(f"--all runs every table: leave {table} out, or --all")
    if version and not table:
        raise UsageError(f"--version {version} is one of a single table: name the table, or leave it out")
    data = data_root(DataSpec(root=str(root) if root else None))
    named = "--root " if root else "FEDSHIFT_DATA=" if os.environ.get("FEDSHIFT_DATA") else ""
    if named and not data.is_dir():
        raise UsageError(
            f"{named}{data}: there is no such directory; give the directory of the data, or leave the option out"
        )
    _require_own_directory(out)
    use_threads(None)
    way = ReproductionOptions(root=data.resolve(), scale=scale, seeds=seeds, light=light, on_data_error=on_data_error)
    if not table and not all:
        return _print_list(way, out)
    wanted = [found(table)] if table else _select_tables(way, present)
    if version:
        select_blocks(wanted[0], version)  # raises before anything is made if there is none
    require_writable(out)
    with lock_directory(out):
        return _run(wanted, way, version, hours, out)


def _require_own_directory(out: Path) -> None:
    """Raise :class:`UsageError` if ``out`` contains anything but reproduced tables."""
    from ..reproduce.results import KNOWN

    kind = find_kind(out) if out.is_dir() else None
    others = out.is_dir() and {path.name for path in out.iterdir()} - KNOWN
    if (out.exists() and not out.is_dir()) or kind not in (None, "reproduce") or (kind is None and others):
        raise UsageError(f"--out {out} holds something else: give a directory of runs of tables, or a new one")


def _print_list(way: ReproductionOptions, out: Path) -> int:
    from rich.text import Text

    from ..reproduce.planning import make_plans
    from ..reproduce.published_tables import load_tables
    from ..reproduce.results import pending_runs, read_verdicts
    from ..reproduce.time_estimates import TIMING, TimeEstimates

    estimates, grid = TimeEstimates(), Grid(box=None, padding=(0, 2, 1, 0))
    for title in ("table or figure", "runs", "time here"):
        grid.add_column(title, no_wrap=True, justify="left" if title == "table or figure" else "right")
    grid.add_column("what", overflow="fold")
    notes: dict[str, int] = {}
    with _show_progress(Console(stderr=True)) as progress:
        plans = {key: [plan for _, plan in make_plans(table, way)] for key, table in load_tables().items()}
        specs = {key: list(dict.fromkeys(spec for plan in of for spec in plan.specs)) for key, of in plans.items()}
        todo = {key: pending_runs(runs, out) for key, runs in specs.items()}
        estimates.gather_sizes(itertools.chain.from_iterable(todo.values()), progress)
        for done, (key, table) in enumerate(load_tables().items()):
            progress(TIMING, done, len(todo))
            asked = list(dict.fromkeys(spec for plan in plans[key] for spec in plan.asked))
            lines = [
                table.title,
                *_list_needs(asked, plans[key], way, notes),
                *(f"last: {said}" for said in read_verdicts(table, out)),
            ]
            try:
                spent = format_time(estimates.estimate(todo[key])) if todo[key] else "done" if specs[key] else ""
            except UsageError as error:
                spent = "?"
                lines.append(f"cannot run: {error.render(as_flag)}")
            grid.add_row(key, str(len(specs[key])) if asked else "", spent, Text("\n".join(lines)))
    make_console().print(grid)
    for note, number in notes.items():
        print_line(Console(), f"stand-in {number}: {note}")
    return 0


@contextmanager
def _show_progress(console: Console) -> Iterator[Progress]:
    """Yield a progress callback: a bar on a terminal, elsewhere a plain line for each tenth."""
    said = set()

    def line(what: str, done: int, total: int) -> None:
        if (tenth := (what, 10 * done // total)) not in said:
            said.add(tenth)
            print_line(console, f"{what}: {done} of {total}")

    with show_loading(console) as bar:
        yield bar if console.is_terminal else line


def _list_needs(
    asked: Sequence[RunSpec], plans: Sequence[TablePlan], way: ReproductionOptions, notes: dict[str, int]
) -> list[str]:
    """Return lines on the data, networks and methods of runs; stand-ins are numbered in ``notes``."""
    from ..reproduce.recipes import base_name, is_present

    where = []
    for data in dict.fromkeys(spec.data for spec in asked):
        found = dict.fromkeys(plan.stood[base_name(data)] for plan in plans if base_name(data) in plan.stood)
        numbers = " and ".join(str(notes.setdefault(note, len(notes) + 1)) for note in found)
        said = "here" if is_present(data, way.root) else f"stand-in {numbers}" if found else "missing"
        where.append(f"{base_name(data)}: {said}")
    models = dict.fromkeys(spec.model for spec in asked)
    methods = dict.fromkeys(re.sub(r"\([^()]*\)|\+fedavg", "", spec.method) for spec in asked)
    return ["; ".join(dict.fromkeys(where)), f"{', '.join(models)}: {', '.join(methods)}"] if asked else []


def _select_tables(way: ReproductionOptions, present: bool) -> list[Table]:
    """Return all tables with a recipe; tables without data are skipped (``present``) or refused."""
    from ..reproduce.planning import list_runnable, make_plans
    from ..reproduce.published_tables import find_table

    found, lacking = [], {}
    for key in list_runnable():
        plans = [plan for _, plan in make_plans(find_table(key), way)]
        missing = [name for plan in plans for name in plan.missing]
        if missing and not any(plan.specs for plan in plans):
            lacking[key] = missing[0]
        else:
            found.append(find_table(key))
    if lacking and not present:
        said = ", ".join(f"{key} needs {data}" for key, data in lacking.items())
        raise UsageError(f"{said}, which is not under {way.root}: add --present to leave these out")
    return found


def _run(wanted: Sequence[Table], way: ReproductionOptions, version: str | None, hours: float | None, out: Path) -> int:
    from ..reproduce.page import write_results_page
    from ..reproduce.runner import run_table
    from ..reproduce.time_estimates import TimeBudget

    console, failed, page = Console(), [], None
    with catch_interrupts(console) as stop, TimeBudget(hours, stop) as budget, ExitStack() as shown:
        if len(wanted) > 1:
            print_line(console, f"{len(wanted)} tables and figures, those that take least first; steps are timed.")
            with _show_progress(Console(stderr=True)) as progress:
                wanted = budget.order_by_time(wanted, way, out, progress)
        shown.enter_context(announce_cache(console))
        callback = shown.enter_context(show_progress(console))
        for number, table in enumerate(wanted):
            chosen = budget.fit_scale(table, way, out, len(wanted) - number)
            done = None
            try:
                if not stop.is_set():
                    done = run_table(table, chosen, out, version=version, callback=callback, stop=stop)
            except FedshiftError as error:
                if len(wanted) == 1:
                    raise
                failed.append(f"{table.key}: {error.render(as_flag)}")
                print_line(console, f"Failed: {failed[-1]}")
                continue
            if done is None:
                why = "Time is up" if budget.over else "Stopped"
                print_line(console, f"{why}. Completed work is saved; continue with the same command.")
                return int(bool(failed)) if budget.over else 130
            _publish_table(table, done, out, console)
            page = write_results_page(out)
    if page:
        print_line(console, f"Page: {page}")
    for line in failed:
        print_line(console, f"Failed: {line}")
    return 1 if failed else 0


def rebuild_papers(place: Path, console: Console) -> None:
    """Publish each table begun in ``place`` again, from the runs that have ended."""
    from ..reproduce.page import write_results_page
    from ..reproduce.published_tables import load_tables
    from ..reproduce.results import lock_directory
    from ..reproduce.runner import rebuild

    with lock_directory(place):
        for table in load_tables().values():
            if done := rebuild(table, place):
                _publish_table(table, done, place, console)
        print_line(console, f"Page: {write_results_page(place)}")


def _publish_table(table: Table, done: FinishedTable, out: Path, console: Console) -> None:
    """Print the results of a table, and write them as Markdown and LaTeX."""
    from ..report.formatting import escape_latex, to_latex, to_markdown, to_terminal
    from ..reproduce.published_tables import PAPERS
    from ..reproduce.verdict import compare_values

    text = make_console()
    title = f"{PAPERS[table.paper]}, {table.name}: {table.title}"
    print_line(console, title)
    content = {"md": [f"**{title}**\n"], "tex": [f"% {title}"]}

    def put(shown: TextTable | None, lines: Sequence[str]) -> None:
        if shown:
            text.print(to_terminal(shown))
            content["md"].append(to_markdown(shown))
            content["tex"].append(to_latex(shown))
        for line in lines:
            print_line(console, line)
            content["md"].append(f"{line}\n")
            content["tex"].append(f"\\par{{\\footnotesize {escape_latex(line)}}}\n")

    for block in done.blocks:
        put(compare_values(block), [*block.remarks, block.summary])
    for figure in done.figures:
        print_line(console, f"Drawn: {out / 'results' / table.paper / figure.picture.name}.svg")
        put(figure.numbers, [])
    put(None, done.remarks)
    for kind, parts in content.items():
        write_atomically(out / "results" / table.paper / f"{table.name}.{kind}", "\n".join(parts).encode())
