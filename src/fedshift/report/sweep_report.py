"""A sweep made public: one table of all combinations, rounds and bytes to a target, curves, and one page.

Rows are the combinations, columns the methods; a cell is the macro test metric at the reported round, mean (std) over
seeds. CSV holds the same at full scale, a line for each combination and method. Where validation data are held out,
another table has each method at the combination that is best for it there, so that a sweep over the learning rate
compares methods that are tuned alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure
from rich.console import Console

from ..analysis.statistics import mean_and_std
from ..utils.files import write_atomically
from ..utils.version import __version__
from .curves import TRAIN_LOSS, CurvePoint, final_metric, format_setting, plot_by_round, plot_by_setting
from .figures import save_each, to_svg
from .formatting import (
    BOLD,
    TextCell,
    TextTable,
    flatten,
    metric_cells,
    spread_note,
    to_latex,
    to_markdown,
    to_terminal,
)
from .inline_images import embed_svg
from .publication import render_forms
from .tables import accuracy_table, list_shortfalls, seed_table
from .target_metric import format_rounds, format_traffic, target_table, target_title

CLAIMS = (
    "Which methods are told apart is on the page of each comparison, corrected for its own pairs, not for the number "
    "of combinations."
)
PANELS = 9
"""Values of a setting up to which each has a panel."""


@dataclass(frozen=True, kw_only=True)
class SweepResults:
    """The combinations of a sweep that were evaluated, which all compare the same methods; there is one at least.

    ``folders``: the directory of each, within the sweep's.
    """

    points: tuple[CurvePoint, ...]
    folders: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The swept settings."""
        return tuple(self.points[0].keys)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods, in the order of the columns."""
        return tuple(self.points[0].study.methods)

    @property
    def caption(self) -> str:
        """What the table of the metric shows."""
        study = self.points[0].study
        over = f"mean (std) over {len(study.seeds)} seeds" if len(study.seeds) > 1 else "one seed"
        return f"Macro test {study.metric_name} in percent, {over}, {study.select} round"


def publish_sweep(grid: SweepResults, directory: Path, console: Console, config: object) -> None:
    """Print the tables of ``grid``, and write tables, figures and ``sweep.html`` into ``directory``.

    ``config``: the sweep's settings, for the page.
    """
    tables, figures = sweep_tables(grid), sweep_figures(grid)
    for title, table in tables.values():
        console.print(title, markup=False, highlight=False, soft_wrap=True)
        console.print(to_terminal(table))
    remarks = sweep_remarks(grid)
    for line in remarks:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    (directory / "tables").mkdir(exist_ok=True)
    frame = sweep_frame(grid)
    for name, (_, table) in tables.items():
        for file, content in render_forms(name, frame, table):
            if name == "sweep" or not file.endswith(".csv"):
                write_atomically(directory / "tables" / file, content.encode())
    save_each(figures, directory / "figures")
    environment = Environment(
        loader=PackageLoader("fedshift", "report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template("grid.html.j2").render(
        name=grid.points[0].study.name,
        keys=grid.keys,
        methods=grid.methods,
        tables=tables,
        figures={
            name: embed_svg(to_svg(figure), name, _describe_figure(name, grid)) for name, figure in figures.items()
        },
        remarks=remarks,
        folders=grid.folders,
        config=flatten(config),
        version=__version__,
        latex=to_latex,
        markdown=to_markdown,
    )
    write_atomically(directory / "sweep.html", page.encode())
    console.print(f"Page: {directory / 'sweep.html'}", markup=False, highlight=False, soft_wrap=True)


def sweep_frame(grid: SweepResults) -> pd.DataFrame:
    """One row for each combination and method: macro mean and std, and rounds and bytes to the target, if there is one.

    The index holds the swept settings and the method; shares and bytes are at full scale.
    """
    rows = []
    for point in grid.points:
        study = point.study
        macro = final_metric(study)
        counted = None if study.target_metric is None else target_table(study, study.target_metric)
        for method in grid.methods:
            mean, std = mean_and_std(macro[method])
            row = {key: format_setting(key, value) for key, value in point.keys.items()} | {"method": method}
            more = {} if counted is None else counted.loc[method].to_dict()
            rows.append(row | {"mean": mean, "std": std, "seeds": int(macro[method].notna().sum())} | more)
    return pd.DataFrame(rows).set_index([*grid.keys, "method"])


def sweep_tables(grid: SweepResults) -> dict[str, tuple[str, TextTable]]:
    """Tables by file name, each with its caption: ``sweep``, and with a target ``rounds`` and ``bytes``."""
    metric = [
        metric_cells(accuracy_table(point.study), point.study.metric, one_by_one=False).rows[0][1:]
        for point in grid.points
    ]
    made = {"sweep": (grid.caption, _table(grid, metric))}
    study = grid.points[0].study
    if chosen := best_on_validation(grid):
        made["chosen"] = "Each method where its validation data are best, in percent", _chosen_table(grid, chosen)
    if study.target_metric is None:
        return made
    counted = [target_table(point.study, study.target_metric) for point in grid.points]
    shown: dict[str, tuple[str, Callable[[pd.Series], str]]] = {
        "rounds": ("Rounds", format_rounds),
        "bytes": ("Bytes (all clients, down and up)", format_traffic),
    }
    for name, (what, text) in shown.items():
        cells = [
            tuple(TextCell(text=_mark_partial(text(row), row)) for _, row in table.iterrows()) for table in counted
        ]
        made[name] = target_title(study, study.target_metric, what), _table(grid, cells)
    return made


def best_on_validation(grid: SweepResults) -> dict[str, int]:
    """The combination, by its place, at which each method's macro validation metric is best, mean over seeds.

    Nothing where a combination has no validation data, or where there is one alone to choose from. A method that no
    combination has measured under all of its seeds is left out, and so are combinations that diverged under a seed.
    """
    studies = [point.study for point in grid.points]
    if len(studies) < 2 or not all((study.rows["split"] == "validation").any() for study in studies):
        return {}
    macro = [seed_table(study, split="validation").loc["macro"] for study in studies]
    found = {}
    for method in grid.methods:
        means = np.array([table[method].mean(skipna=False) for table in macro], dtype=float)
        if np.isfinite(means).any():
            found[method] = int(np.nanargmax(means))
    return found


def _chosen_table(grid: SweepResults, chosen: Mapping[str, int]) -> TextTable:
    rows = []
    for method, place in chosen.items():
        point = grid.points[place]
        metric = point.study.metric
        cells = [
            metric_cells(accuracy_table(point.study, split=split)[[method]], metric, one_by_one=False).rows[0][1]
            for split in ("validation", "test")
        ]
        values = [TextCell(text=format_setting(key, value)) for key, value in point.keys.items()]
        rows.append((TextCell(text=method), *values, *(TextCell(text=cell.text) for cell in cells)))
    return TextTable(header=("method", *grid.keys, "validation", "test"), rows=tuple(rows))


def _at_the_end(grid: SweepResults) -> Iterator[str]:
    """Say which methods are best at the least or largest value of a number swept: there may be a better one beyond."""
    chosen = best_on_validation(grid)
    for key in grid.keys:
        values = [point.keys[key] for point in grid.points]
        numbers = [value for value in values if isinstance(value, float)]
        if len(numbers) < len(values) or len(set(numbers)) < 2:
            continue
        for end, bound in (("smallest", min(numbers)), ("largest", max(numbers))):
            if methods := [method for method, place in chosen.items() if numbers[place] == bound]:
                yield (
                    f"{', '.join(methods)}: best on validation data at the {end} {key} of the sweep, "
                    f"{format_setting(key, bound)}; one beyond it may be better."
                )


def sweep_figures(grid: SweepResults) -> dict[str, Figure]:
    """Figures by file name: the metric over rounds, the training loss, and the metric against each swept setting."""
    metric = grid.points[0].study.metric
    values = {key: len({format_setting(key, point.keys[key]) for point in grid.points}) for key in grid.keys}
    apart = [key for key in grid.keys if 1 < values[key] <= PANELS]
    first = apart[0] if len(apart) > 1 else None
    made = {"rounds": plot_by_round(grid.points, metric, panel=first)}
    if any((point.study.rows["moment"] == "trained").any() for point in grid.points):
        made["training-loss"] = plot_by_round(grid.points, TRAIN_LOSS, panel=first)
    for key in grid.keys:
        other = next((name for name in apart if name != key), None)
        made[f"over-{key.replace('_', '-')}"] = plot_by_setting(grid.points, key, metric, panel=other)
    return made


def sweep_remarks(grid: SweepResults) -> list[str]:
    """What a reader must know of single combinations, each under its name, and of values chosen at a sweep's end."""
    single = [
        f"{folder}: {line}"
        for folder, point in zip(grid.folders, grid.points, strict=True)
        for line in list_shortfalls(point.study)
    ]
    return [*single, *_at_the_end(grid)]


def _table(grid: SweepResults, cells: Sequence[tuple[TextCell, ...]]) -> TextTable:
    rows = [
        (*(TextCell(text=format_setting(key, value)) for key, value in point.keys.items()), *row)
        for point, row in zip(grid.points, cells, strict=True)
    ]
    note = spread_note(len(grid.points[0].study.seeds))
    if any(cell.best for row in rows for cell in row):
        note = f"{note} {BOLD} {CLAIMS}"
    return TextTable(header=(*grid.keys, *grid.methods), rows=tuple(rows), note=note)


def _mark_partial(text: str, row: pd.Series) -> str:
    """``text``, and of how many seeds it tells where those are not all."""
    return text if row["reached"] in (0, row["seeds"]) else f"{text}; {row['reached']:.0f} of {row['seeds']:.0f} seeds"


def _describe_figure(name: str, grid: SweepResults) -> str:
    """The figure in words, for those who do not see it; its numbers are in the table."""
    what = {"rounds": "over rounds", "training-loss": "training loss over rounds"}.get(name, name.replace("-", " "))
    return f"{grid.caption}: {what}, a line for each combination and method."
