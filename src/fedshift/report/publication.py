"""Publication of a run's results: tables on the terminal; tables, figures and the page in the run directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..results.schema import RunSummary, name_file
from ..results.summary import holds_run, read_summary
from ..utils.errors import FedshiftError, Ref, UsageError
from ..utils.files import write_atomically
from .cases import tabulate_cases
from .figures import save_figures
from .formatting import TextTable, fit_width, to_csv, to_terminal
from .page import make_report, write_page


def print_lines(console: Console, *lines: str) -> None:
    """Print ``lines`` literally, without markup, highlights or breaks."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_parts(console: Console, parts: Iterable[str | TextTable]) -> None:
    """Print sentences, one line each, and tables."""
    for part in parts:
        if isinstance(part, str):
            print_lines(console, part)
            continue
        for table in fit_width(part, console.width):
            console.print(to_terminal(table))


def is_tested(summary: RunSummary) -> bool:
    """Return whether models were measured on test data; a search measures only validation data."""
    return bool(((summary.rows["moment"] == "loaded") & (summary.rows["split"] == "test")).any())


def list_parts(summary: RunSummary, values: object = "table()") -> Iterator[str | TextTable]:
    """Yield the sentences and tables of ``summary`` that the terminal shows; ``values``: see :func:`make_report`."""
    if is_tested(summary):
        yield from make_report(summary, values=values, whole=False).list_parts()
    else:
        yield "No round was evaluated yet, so there is nothing to report."


def publish_summary(summary: RunSummary, directory: Path, console: Console, figures: bool = False) -> None:
    """Print the tables of ``summary``, and write tables and page into ``directory``, with ``figures`` also these.

    Figures that were written before are written again, so that none is older than the page.
    """
    print_parts(console, list_parts(summary, directory / "tables" / f"{name_file(summary.metric)}.csv"))
    if not is_tested(summary):
        return
    report = make_report(summary)
    report.write_tables(directory / "tables")
    if figures or (directory / "figures").is_dir():  # before the page, which takes their legends away
        save_figures(summary, directory / "figures", report.panels)
    for path in () if summary.samples else (directory / "figures").glob("samples.*"):  # of an earlier report
        path.unlink()
    print_lines(console, f"Page: {write_page(summary, directory / 'report.html', report)}")


def publish_run(
    directory: Path,
    console: Console,
    margin: float | None = None,
    *,
    cases: bool = False,
    figures: bool = False,
    pictures: bool = True,
) -> None:
    """Publish the results so far of the run in ``directory``, if it has begun.

    Args:
        directory: run directory.
        console: terminal for the tables.
        margin: loss of a client that tables may exclude; None: the run's.
        cases: whether to write the results of single test samples.
        figures: whether to write figures as files.
        pictures: whether to show images of samples that the run kept.

    Raises:
        UsageError: the run was begun with another margin, or ``cases`` are not here.

    """
    if not holds_run(directory):
        return
    summary = read_summary(directory)
    if margin is not None and summary.margin not in (None, margin):
        raise UsageError(
            f"{{}}: {directory} was begun with the margin {summary.margin:g}, and a margin must not be chosen once "
            "results are known: leave it out",
            Ref(margin=margin),
        )
    summary = summary if margin is None else replace(summary, margin=margin)
    summary = summary if pictures else replace(summary, samples={}, read_pictures=lambda *_: None)
    publish_summary(summary, directory, console, figures)
    if cases:
        frame, path = tabulate_cases(summary), directory / "tables" / "cases.csv"
        if frame.empty:
            raise UsageError(
                f"{{}}: {directory} has no results of single test samples: sites keep them, and a trial has them when "
                "it has ended",
                Ref(cases=True),
            )
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, to_csv(frame.set_index("method")).encode())
        print_lines(console, f"Cases: {path}")


def publish_safely(directory: Path, console: Console) -> FedshiftError | OSError | None:
    """Publish a run that may have failed already; return the error that prevented it, if any."""
    try:
        publish_run(directory, console)
    except (FedshiftError, OSError) as error:
        return error
    return None
