"""A study made public: tables on the terminal; tables, figures and the page in the run directory."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.console import Console

from ..results.schema import RunSummary
from ..results.summary import read_summary
from ..utils.errors import FedshiftError
from ..utils.files import write_atomically
from .claims import claims, differences, readings
from .concordance import concordance_cells, concordance_table, concordance_title
from .figures import save_figures
from .formatting import TextTable, difference_cells, metric_cells, to_csv, to_latex, to_markdown, to_terminal
from .page import write_page
from .rankings import ranking_sentences
from .tables import AFTER_WORK, ONE_BY_ONE, accuracy_table, list_shortfalls, measures_trained
from .target_metric import target_cells, target_table, target_title


def render_forms(name: str, table: pd.DataFrame, cells: TextTable) -> list[tuple[str, str]]:
    """File names and contents of a table as CSV, Markdown and LaTeX."""
    return [(f"{name}.csv", to_csv(table)), (f"{name}.md", to_markdown(cells)), (f"{name}.tex", to_latex(cells))]


def publish_summary(study: RunSummary, directory: Path, console: Console) -> None:
    """Print the tables of ``study``, and write tables, figures and page into ``directory``."""
    if not (study.rows["moment"] == "loaded").any():
        console.print("No round was evaluated yet, so there is nothing to report.")
        return
    accuracy, made = accuracy_table(study), claims(study)
    gaps = differences(made)
    many = len(study.clients) > ONE_BY_ONE
    cells = metric_cells(accuracy, study.metric, one_by_one=not many)
    held_out = (study.rows["split"] == "validation").any()
    over = f"{len(study.seeds)} seeds" if len(study.seeds) > 1 else "one seed"
    console.print(f"Test {study.metric_name} in percent, mean (std) over {over}, {study.select} round")
    console.print(to_terminal(cells))
    trained = accuracy_table(study, moment="trained") if measures_trained(study) else None
    trained_cells = None if trained is None else metric_cells(trained, study.metric, one_by_one=not many)
    if trained_cells is not None:
        console.print(f"The same {AFTER_WORK}", markup=False)
        console.print(to_terminal(trained_cells))
    if many:
        where = directory / "tables" / f"{study.metric}.csv"
        console.print(f"Each client is in {where}.", markup=False, highlight=False, soft_wrap=True)
    validation = accuracy_table(study, split="validation") if held_out else None
    if validation is not None:
        means = validation.iloc[len(study.clients)].unstack()["mean"]
        said = ", ".join(f"{method} {100 * means[method]:.2f}" for method in accuracy.columns.unique("method"))
        console.print(f"Validation, macro: {said}. Choose by these.", markup=False, highlight=False, soft_wrap=True)
    if len(gaps):
        baseline = gaps["baseline"].iloc[0]
        console.print(f"Macro {study.metric_name} minus {baseline}'s, in points", markup=False)
        console.print(to_terminal(difference_cells(gaps, study.metric)))
    for line in dict.fromkeys([*readings(study, made), *ranking_sentences(study, made), *list_shortfalls(study)]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    to_target = None if study.target_metric is None else target_table(study, study.target_metric)
    if to_target is not None and study.target_metric is not None:
        console.print(target_title(study, study.target_metric), markup=False, highlight=False, soft_wrap=True)
        console.print(to_terminal(target_cells(to_target)))
    concordance = concordance_table(study)
    if len(concordance):
        console.print(concordance_title(study, concordance), markup=False, highlight=False, soft_wrap=True)
        near = concordance_cells(concordance, made.concordance)
        console.print(to_terminal(near))
    tables = directory / "tables"
    tables.mkdir(exist_ok=True)
    for name, content in (
        *render_forms(study.metric, accuracy, cells),
        *(
            render_forms(f"{study.metric}-trained", trained, trained_cells)
            if trained is not None and trained_cells
            else []
        ),
        *(
            render_forms("differences", gaps, difference_cells(gaps, study.metric))
            if len(gaps)
            else [("differences.csv", to_csv(gaps))]
        ),
        *([("validation.csv", to_csv(validation))] if validation is not None else []),
        *(render_forms("target", to_target, target_cells(to_target)) if to_target is not None else []),
        *(render_forms("concordance", concordance, near) if len(concordance) else []),
    ):
        write_atomically(tables / name, content.encode())
    save_figures(study, directory / "figures")
    write_page(study, directory / "report.html")
    console.print(f"Page: {directory / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


def publish_run(directory: Path, console: Console) -> None:
    """Publish what the run in ``directory`` has left so far, if it has begun."""
    if (directory / "study.json").exists():
        publish_summary(read_summary(directory), directory, console)


def publish_safely(directory: Path, console: Console) -> FedshiftError | OSError | None:
    """Publish a run that may have failed already; return the error that prevented it, if any."""
    try:
        publish_run(directory, console)
    except (FedshiftError, OSError) as error:
        return error
    return None
