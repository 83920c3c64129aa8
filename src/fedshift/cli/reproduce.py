"""The command ``fedshift reproduce``: the papers' tables and figures, run here and compared with the printed values."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from rich.table import Table as Grid

from ..config.spec import DataSpec
from ..console.printing import Console
from ..console.terminal import announce_cache, catch_interrupts, make_console, print_line, show_progress
from ..utils.errors import FedshiftError, UsageError, as_flag
from ..utils.files import require_writable, write_atomically
from .run import find_kind, use_threads

if TYPE_CHECKING:
    from ..reproduce.planning import TablePlan
    from ..reproduce.published_tables import Table
    from ..reproduce.recipes import ReproductionOptions
    from ..reproduce.results import Result


def reproduce(
    table: str | None = None,
    *,
    all: Annotated[bool, Parameter(negative=())] = False,
    present: Annotated[bool, Parameter(negative=())] = False,
    light: Annotated[bool, Parameter(negative=())] = False,
    seeds: int = 1,
    scale: float = 1.0,
    root: Path | None = None,
    on_data_error: Literal["refuse", "warn", "ignore"] | None = None,
    out: Path = Path("reproduced"),
) -> int:
    """Reproduce the papers' tables and figures and compare values; without a name, list them.

    Args:
        table: Table or figure, for example fedbn/table11.
        all: Run all tables and figures.
        present: With --all, skip those whose data are missing and have no stand-in here.
        light: Train small networks in place of the papers', for a quick look; outputs say so.
        seeds: Number of seeds of each run; 5 or more decide an order of methods.
        scale: Fraction of the rounds to run, for a quick look.
        root: Directory of the data; by default the directory in FEDSHIFT_DATA, or data.
        on_data_error: Treatment of errors that `fedshift data check` finds, before training: refuse to start, warn in
            one line, or ignore, without checking; by default warn.
        out: Directory of the runs, which tables share, and of the results and the page.

    """
    from ..data.sources import data_root
    from ..reproduce.published_tables import find_table
    from ..reproduce.recipes import ReproductionOptions
    from ..reproduce.runner import lock_directory

    if present and not all:
        raise UsageError("--present belongs to --all: give it too, or leave it out")
    if table and all:
        raise UsageError(f"--all runs every table: leave {table} out, or --all")
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
    wanted = [find_table(table)] if table else _select_tables(way, present)
    require_writable(out)
    with lock_directory(out):
        return _run(wanted, way, out)


def _require_own_directory(out: Path) -> None:
    """Raise :class:`UsageError` if ``out`` contains anything but reproduced tables."""
    from ..reproduce.results import KNOWN

    kind = find_kind(out) if out.is_dir() else None
    others = out.is_dir() and {path.name for path in out.iterdir()} - KNOWN
    if (out.exists() and not out.is_dir()) or kind not in (None, "reproduce") or (kind is None and others):
        raise UsageError(f"--out {out} holds something else: give a directory of runs of tables, or a new one")


def _print_list(way: ReproductionOptions, out: Path) -> int:
    from rich.text import Text

    from ..reproduce.comparison import describe_verdict
    from ..reproduce.planning import make_plans
    from ..reproduce.published_tables import load_tables
    from ..reproduce.results import pending_runs, read_results

    grid = Grid(box=None, padding=(0, 2, 1, 0))
    for title in ("table or figure", "runs", "to do"):
        grid.add_column(title, no_wrap=True, justify="left" if title == "table or figure" else "right")
    grid.add_column("what", overflow="fold")
    notes: dict[str, int] = {}
    for key, table in load_tables().items():
        plans = [plan for _, plan in make_plans(table, way)]
        specs = list(dict.fromkeys(spec for plan in plans for spec in plan.specs))
        last = [
            f"last: {result.block.version}{': ' * bool(result.block.version)}{describe_verdict(result)[0]} (scale "
            f"{result.options.scale:.2g})"
            for result in read_results(table, out)
        ]
        todo = len(pending_runs(specs, out))
        lines = Text("\n".join([table.title, *_list_needs(plans, notes), *last]))
        grid.add_row(key, str(len(specs) or ""), str(todo or "done") if specs else "", lines)
    make_console().print(grid)
    for note, number in notes.items():
        print_line(Console(), f"stand-in {number}: {note}")
    return 0


def _list_needs(plans: Sequence[TablePlan], notes: dict[str, int]) -> list[str]:
    """Return lines on the data, networks and methods of runs; stand-ins are numbered in ``notes``."""
    specs = dict.fromkeys(spec for plan in plans for spec in plan.specs)
    numbers = dict.fromkeys(notes.setdefault(note, len(notes) + 1) for plan in plans for note in plan.notes)
    data = [f"{name}: missing" for name in dict.fromkeys(name for plan in plans for name in plan.missing)]
    data += [f"stand-in {number}" for number in numbers]
    models = dict.fromkeys(spec.model for spec in specs)
    methods = dict.fromkeys(re.sub(r"\([^()]*\)|\+fedavg", "", spec.method) for spec in specs)
    needed = [f"{', '.join(models)}: {', '.join(methods)}"] if specs else []
    return [*(["; ".join(data)] if data else []), *needed]


def _select_tables(way: ReproductionOptions, present: bool) -> list[Table]:
    """Return all tables; tables without data are skipped (``present``) or refused."""
    from ..reproduce.planning import make_plans
    from ..reproduce.published_tables import load_tables

    tables, lacking = [], {}
    for key, table in load_tables().items():
        plans = [plan for _, plan in make_plans(table, way)]
        missing = [name for plan in plans for name in plan.missing]
        if missing and not any(plan.specs for plan in plans):
            lacking[key] = missing[0]
        else:
            tables.append(table)
    if lacking and not present:
        said = ", ".join(f"{key} needs {data}" for key, data in lacking.items())
        raise UsageError(f"{said}, which is not under {way.root}: add --present to leave these out")
    return tables


def _run(wanted: Sequence[Table], way: ReproductionOptions, out: Path) -> int:
    from ..reproduce.page import write_results_page
    from ..reproduce.runner import run_table

    console, failed, page = Console(), [], None
    with catch_interrupts(console) as stop, ExitStack() as shown:
        shown.enter_context(announce_cache(console))
        callback = shown.enter_context(show_progress(console))
        for table in wanted:
            try:
                results = run_table(table, way, out, callback=callback, stop=stop)
            except FedshiftError as error:
                if len(wanted) == 1:
                    raise
                failed.append(f"{table.key}: {error.render(as_flag)}")
                print_line(console, f"Failed: {failed[-1]}")
                continue
            if stop.is_set():
                print_line(console, "Stopped. Completed work is saved; continue with the same command.")
                return 130
            _publish_table(table, results, out, console)
            page = write_results_page(out)
    if page:
        print_line(console, f"Page: {page}")
    for line in failed:
        print_line(console, f"Failed: {line}")
    return 1 if failed else 0


def rebuild_papers(place: Path, console: Console) -> None:
    """Publish the results in ``place`` again."""
    from ..reproduce.page import write_results_page
    from ..reproduce.published_tables import load_tables
    from ..reproduce.results import read_results
    from ..reproduce.runner import lock_directory

    with lock_directory(place):
        for table in load_tables().values():
            if results := read_results(table, place):
                _publish_table(table, results, place, console)
        print_line(console, f"Page: {write_results_page(place)}")


def _publish_table(table: Table, results: Sequence[Result], out: Path, console: Console) -> None:
    """Print the results of a table, and write them as Markdown and LaTeX."""
    from ..report.formatting import escape_latex, to_latex, to_markdown, to_terminal
    from ..reproduce.comparison import compare_values, describe_verdict
    from ..reproduce.published_tables import PAPERS

    title = f"{PAPERS[table.paper]}, {table.name}: {table.title}"
    print_line(console, title)
    markdown, latex = [f"**{title}**\n"], [f"% {title}"]

    def put(line: str) -> None:
        print_line(console, line)
        markdown.append(f"{line}\n")
        latex.append(f"\\par{{\\footnotesize {escape_latex(line)}}}\n")

    for line in dict.fromkeys(remark for result in results for remark in result.remarks):
        put(line)
    for result in results:
        if result.values:
            shown = compare_values(result)
            make_console().print(to_terminal(shown))
            markdown.append(to_markdown(shown))
            latex.append(to_latex(shown))
        for name, description in result.pictures.items():
            put(f"{out / 'results' / table.paper / name}.svg: {description}")
        put(describe_verdict(result)[1])
    for kind, blocks in (("md", markdown), ("tex", latex)):
        write_atomically(out / "results" / table.paper / f"{table.name}.{kind}", "\n".join(blocks).encode())
