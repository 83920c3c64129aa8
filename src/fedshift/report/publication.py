"""Publication of a run's results: tables on the terminal; tables, figures and the page in the run directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..results.schema import RunSummary, name_file
from ..results.summary import holds_run, read_summary
from ..utils.errors import FedshiftError, Ref, UsageError
from ..utils.files import write_atomically
from .claims import Claims, collect_claims, describe_baseline, describe_needed_seeds, describe_ranking, tabulate_claims
from .clinical import list_clinical_tables
from .figures import save_figures
from .formatting import TextTable, fit_width, to_csv, to_terminal, write_table
from .page import ReportTable, collect_crossed, collect_tables, write_page
from .progress import describe_partial, find_reached_rounds, is_even
from .sites import describe_clients
from .tables import ONE_BY_ONE, accuracy_table, list_shortfalls, tabulate_history

SHOWN = ("metric", "trained", "differences", "clients-single", "clients-fedavg", "target", "concordance")
"""Tables that the terminal shows, in order."""


def print_lines(console: Console, *lines: str) -> None:
    """Print ``lines`` literally, without markup, highlights or breaks."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def is_tested(summary: RunSummary) -> bool:
    """Return whether models were measured on test data; a search measures only validation data."""
    return bool(((summary.rows["moment"] == "loaded") & (summary.rows["split"] == "test")).any())


def list_parts(summary: RunSummary, whole: object) -> Iterator[str | TextTable]:
    """Yield the sentences and tables of ``summary`` that the terminal shows, in order.

    ``whole``: place of each client's values, which a table of many clients omits.
    """
    if not is_tested(summary):
        yield "No round was evaluated yet, so there is nothing to report."
        return
    claims = collect_claims(summary)
    yield from _list_results(summary, claims, collect_tables(summary, claims), whole)


def _list_results(
    summary: RunSummary, claims: Claims, tables: Mapping[str, ReportTable], whole: object
) -> Iterator[str | TextTable]:
    if partial := describe_partial(summary):
        yield partial
    for table in (tables[name] for name in SHOWN if name in tables):
        yield from (table.caption, table.text)
    if len(summary.clients) > ONE_BY_ONE:
        yield f"Each client is in {whole}."
    if (summary.rows["split"] == "validation").any() and is_even(find_reached_rounds(summary)):
        validation = accuracy_table(summary, split="validation")
        means = validation.iloc[len(summary.clients)].unstack()["mean"]
        values = ", ".join(
            f"{method} {summary.scale * means[method]:.2f}" for method in validation.columns.unique("method")
        )
        yield f"Validation, macro: {values}. Choose by these."
    yield from dict.fromkeys(
        (
            *describe_baseline(summary, claims),
            *describe_ranking(summary, claims),
            *describe_needed_seeds(summary, claims),
            *describe_clients(summary),
            *list_shortfalls(summary),
        )
    )


def print_parts(console: Console, parts: Iterable[str | TextTable]) -> None:
    """Print sentences, one line each, and tables."""
    for part in parts:
        if isinstance(part, str):
            print_lines(console, part)
            continue
        for table in fit_width(part, console.width):
            console.print(to_terminal(table))


def publish_summary(summary: RunSummary, directory: Path, console: Console) -> None:
    """Print the tables of ``summary``, and write tables, figures and page into ``directory``."""
    if not is_tested(summary):
        print_parts(console, list_parts(summary, directory))
        return
    claims, partial = collect_claims(summary), describe_partial(summary)
    tables, folder = collect_tables(summary, claims), directory / "tables"
    print_parts(console, _list_results(summary, claims, tables, folder / f"{name_file(summary.metric)}.csv"))
    for table in (tables[name] for name in SHOWN if name in tables):
        write_table(folder, table.file, table.text, table.frame, table.caption)
    for table in collect_crossed(summary):
        write_table(folder, table.file, table.text, table.frame, table.caption)
    for name, (caption, frame, text) in list_clinical_tables(summary).items():
        write_table(folder, name, replace(text, partial=partial), frame, caption)
    if "differences" not in tables:
        write_atomically(folder / "differences.csv", to_csv(tabulate_claims(claims), partial).encode())
    if (summary.rows["split"] == "validation").any():
        validation = accuracy_table(summary, split="validation")
        write_atomically(folder / "validation.csv", to_csv(validation, partial).encode())
    history = tabulate_history(summary)
    write_atomically(
        folder / f"history-{name_file(summary.metric)}.csv", to_csv(history.set_index("method"), partial).encode()
    )
    save_figures(summary, directory / "figures")
    write_page(summary, directory / "report.html")
    print_lines(console, f"Page: {directory / 'report.html'}")


def publish_run(directory: Path, console: Console, margin: float | None = None) -> None:
    """Publish the results so far of the run in ``directory``, if it has begun.

    ``margin``: loss of a client that tables may exclude; None: the run's. Raises :class:`UsageError` if it has another.
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
    publish_summary(summary if margin is None else replace(summary, margin=margin), directory, console)


def publish_safely(directory: Path, console: Console) -> FedshiftError | OSError | None:
    """Publish a run that may have failed already; return the error that prevented it, if any."""
    try:
        publish_run(directory, console)
    except (FedshiftError, OSError) as error:
        return error
    return None
