"""The papers' figures drawn from runs: curves over rounds or over a setting, and bars by client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..analysis.statistics import mean_and_std
from ..report.curves import TRAIN_LOSS, CurvePoint, format_setting, plot_by_round, plot_by_setting
from ..report.figures import FigurePanel, to_svg
from ..report.formatting import MISSING, TextTable, make_table
from ..report.style import add_legend, figure_settings, make_panel, make_styles
from ..report.tables import metric_history, seed_table
from ..representations.figures import draw_panels
from ..results.summary import read_summary
from ..theory.checks import compute_toy
from ..theory.figures import draw_toy_panels
from ..utils.checked_json import read_checked, write_checked
from ..utils.files import write_atomically
from .measurements import load_features, run_folder
from .planning import PanelPlan, TablePlan
from .published_tables import Table
from .recipes import ReproductionOptions
from .results import REMOVE, completed_part, to_record


@dataclass(frozen=True, kw_only=True, eq=False)
class ReproducedFigure:
    """A reproduced ``picture``, and the ``numbers`` at the ends of its lines, if it has any."""

    picture: FigurePanel
    numbers: TextTable | None = None


def draw_figures(
    table: Table, plan: TablePlan, options: ReproductionOptions, directory: Path
) -> list[ReproducedFigure]:
    """Draw the panels of ``plan`` from its finished runs in ``directory``, and write them there as SVG and PNG."""
    folder = directory / "results" / table.paper
    folder.mkdir(parents=True, exist_ok=True)
    panels = completed_part(plan, directory).panels
    figures = [figure for panel in panels for figure in _draw_panel(table, panel, directory)]
    pictures = [figure.picture for figure in figures]
    for picture in pictures:
        with figure_settings():
            if plan.notes:
                picture.figure.suptitle("stand-in", fontsize=8)
            picture.figure.savefig(folder / f"{picture.name}.png", dpi=200, metadata={"Software": None})
        write_atomically(folder / f"{picture.name}.svg", to_svg(picture.figure).encode())
    record = {
        "scale": options.scale, "seeds": options.seeds, "notes": list(plan.notes), "missing": list(plan.missing),
        "ended": panels == plan.panels, "way": to_record(options),
        "pictures": [{"name": picture.name, "description": picture.description} for picture in pictures],
    }  # fmt: skip
    write_checked(_record_path(table, directory), record)
    return figures


def load_figures(table: Table, directory: Path) -> dict[str, Any] | None:
    """Return the record that :func:`draw_figures` stored for ``table``: scale, seeds, notes and pictures with SVG.

    Raises :class:`FedshiftError` if it is damaged.
    """
    if not _record_path(table, directory).exists():
        return None
    record = read_checked(_record_path(table, directory), REMOVE)
    for picture in record["pictures"]:
        path = directory / "results" / table.paper / f"{picture['name']}.svg"
        picture["svg"] = path.read_text(encoding="utf-8")
    return record


def _record_path(table: Table, directory: Path) -> Path:
    return directory / "results" / table.paper / f"{table.name}-pictures.json"


def _draw_panel(table: Table, panel: PanelPlan, directory: Path) -> Iterator[ReproducedFigure]:
    if panel.x in ("theory", "features"):
        for picture in _draw_pictures(panel, directory):
            if picture.name.startswith(panel.y):
                yield ReproducedFigure(picture=replace(picture, name=f"{panel.name}-{picture.name}"))
        return
    points = [CurvePoint(keys, read_summary(run_folder(spec, directory))) for keys, spec in panel.points]
    points = [point for point in points if (point.summary.rows["moment"] == "loaded").any()]
    if not points:  # all runs diverged before they were measured
        return
    if panel.x == "round":
        figure = plot_by_round(points, panel.y, panel=panel.by)
    elif panel.x == "client":
        figure = _draw_bars(points, panel.y)
    else:
        figure = plot_by_setting(points, panel.x, panel.y, panel=panel.by)
    numbers = _final_values(points, panel.y)
    ends = "; ".join(f"{name.text}: {value.text}" for name, value in numbers.rows)
    description = f"{table.title}. {panel.y.replace('_', ' ')} against {panel.x}, at the end {ends}."
    picture = FigurePanel(name=panel.name, figure=figure, description=description)
    yield ReproducedFigure(picture=picture, numbers=numbers)


def _draw_pictures(panel: PanelPlan, directory: Path) -> Iterable[FigurePanel]:
    """Return figures of the theory's toy example, or of the representations in the runs, all methods side by side."""
    if panel.x == "theory":
        with figure_settings():
            return list(draw_toy_panels(compute_toy(0)))
    runs = [run for _, spec in panel.points if (run := load_features(spec, directory))]
    if not runs:  # all runs diverged
        return ()
    return draw_panels(replace(runs[0], drawn={name: data for run in runs for name, data in run.drawn.items()}))


def _draw_bars(points: Sequence[CurvePoint], metric: str) -> Figure:
    """Draw the final ``metric`` of each client, with a bar for each point; error bars are one std over seeds."""
    clients = list(points[0].summary.clients)
    styles = make_styles(_label(point) for point in points)
    with figure_settings():
        figure, axes = make_panel("", "", f"{metric.replace('_', ' ')} (%)")
        handles = {}
        width = 0.8 / len(points)
        for number, (point, (label, style)) in enumerate(zip(points, styles.items(), strict=True)):
            values = 100 * seed_table(point.summary, metric).loc[clients]
            means, stds = np.array([mean_and_std(row.dropna()) for _, row in values.iterrows()]).T
            x = np.arange(len(clients)) + (number - (len(points) - 1) / 2) * width
            errors = np.where(np.isnan(stds), 0.0, stds)
            handles[label] = axes.bar(x, means, width, color=style.color, hatch=style.hatch, yerr=errors)
        axes.set_xticks(range(len(clients)), clients)
        axes.grid(visible=False, axis="x")
        add_legend(figure, handles, "")
    return figure


def _final_values(points: Sequence[CurvePoint], metric: str) -> TextTable:
    """Return a table of the final macro metric of each point's runs."""
    rows = []
    for point in points:
        if metric == TRAIN_LOSS:
            losses = metric_history(point.summary, "loss", model=None, split="train", moment="trained")
            last = losses[losses["round"] == losses["round"].max()].groupby("seed")["value"].mean()
        else:
            last = (1 if metric == "loss" else 100) * seed_table(point.summary, metric).loc["macro"]
        mean, std = mean_and_std(last.dropna())
        text = MISSING if math.isnan(mean) else f"{mean:.4g}" + ("" if math.isnan(std) else f" ({std:.2g})")
        rows.append((_label(point), text))
    return make_table(("", f"{metric.replace('_', ' ')} at the end"), rows)


def _label(point: CurvePoint) -> str:
    keys = dict(point.keys)
    name = str(keys.pop("method", ""))
    return ", ".join(filter(None, [name, *(f"{key} {format_setting(key, value)}" for key, value in keys.items())]))
