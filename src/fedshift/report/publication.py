"""Publication of a run's results: tables on the terminal; tables, figures and the page in the run directory."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..results.schema import RunSummary
from ..results.summary import holds_run, read_summary
from ..utils.errors import FedshiftError
from ..utils.files import write_atomically
from .claims import collect_claims, describe_baseline, describe_ranking, tabulate_claims
from .figures import save_figures
from .formatting import to_csv, to_terminal, write_table
from .page import collect_tables, write_page
from .progress import describe_partial, find_reached_rounds, is_even
from .tables import ONE_BY_ONE, accuracy_table, list_shortfalls


def print_lines(console: Console, *lines: str) -> None:
    """Print ``lines`` literally, without markup, highlights or breaks."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def publish_summary(summary: RunSummary, directory: Path, console: Console) -> None:
    """Print the tables of ``summary``, and write tables, figures and page into ``directory``."""
    if not (summary.rows["moment"] == "loaded").any():
        console.print("No round was evaluated yet, so there is nothing to report.")
        return
    claims, partial = collect_claims(summary), describe_partial(summary)
    tables, folder = collect_tables(summary, claims), directory / "tables"
    if partial:
        print_lines(console, partial)
    for name in ("metric", "trained", "differences", "target", "concordance"):
        if table := tables.get(name):
            print_lines(console, table.caption)
            console.print(to_terminal(table.text))
            write_table(folder, table.file, table.text, table.frame, table.caption)
    if "differences" not in tables:
        write_atomically(folder / "differences.csv", to_csv(tabulate_claims(claims), partial).encode())
    if len(summary.clients) > ONE_BY_ONE:
        print_lines(console, f"Each client is in {folder / summary.metric}.csv.")
    if (summary.rows["split"] == "validation").any():
        validation = accuracy_table(summary, split="validation")
        write_atomically(folder / "validation.csv", to_csv(validation, partial).encode())
        means = validation.iloc[len(summary.clients)].unstack()["mean"]
        values = ", ".join(f"{method} {100 * means[method]:.2f}" for method in validation.columns.unique("method"))
        if is_even(find_reached_rounds(summary)):
            print_lines(console, f"Validation, macro: {values}. Choose by these.")
    sentences = [*describe_baseline(summary, claims), *describe_ranking(summary, claims), *list_shortfalls(summary)]
    print_lines(console, *dict.fromkeys(sentences))
    save_figures(summary, directory / "figures")
    write_page(summary, directory / "report.html")
    print_lines(console, f"Page: {directory / 'report.html'}")


def publish_run(directory: Path, console: Console) -> None:
    """Publish what the run in ``directory`` has left so far, if it has begun."""
    if holds_run(directory):
        publish_summary(read_summary(directory), directory, console)


def publish_safely(directory: Path, console: Console) -> FedshiftError | OSError | None:
    """Publish a run that may have failed already; return the error that prevented it, if any."""
    try:
        publish_run(directory, console)
    except (FedshiftError, OSError) as error:
        return error
    return None
