"""Figures of the papers drawn from runs here: curves over rounds or over a setting, and bars by client."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..analysis.statistics import mean_and_std
from ..report.curves import TRAIN_LOSS, CurvePoint, format_setting, plot_by_round, plot_by_setting
from ..report.figures import FigurePanel as Picture
from ..report.figures import to_svg
from ..report.formatting import MISSING, TextCell, TextTable
from ..report.style import add_legend, figure_settings, make_panel, make_styles
from ..report.tables import metric_history, seed_table
from ..representations.figures import draw_panels
from ..results.summary import read_summary
from ..theory.checks import compute_toy
from ..theory.figures import draw_toy_panels
from ..utils.files import write_atomically
from .measurements import load_features, run_folder
from .planning import PanelPlan, TablePlan
from .published_tables import Table
from .recipes import ReproductionOptions
from .results import completed_part, to_record

LOOKS = ("theory", "features")
"""What a panel has as ``x`` that is no curve: ``y`` is then how the pictures' names begin."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReproducedFigure:
    """A figure as it came out here: a ``picture``, and the ``numbers`` at the ends of its lines, if it has any."""

    picture: Picture
    numbers: TextTable | None = None


def draw_figures(table: Table, plan: TablePlan, way: ReproductionOptions, place: Path) -> list[ReproducedFigure]:
    """What ``plan``'s panels show, from its ended runs in ``place``; written there as SVG and PNG."""
    folder = place / "results" / table.paper
    folder.mkdir(parents=True, exist_ok=True)
    panels = completed_part(plan, place).panels
    made = [drawn for panel in panels for drawn in _draw_panel(table, panel, place)]
    for drawn in made:
        figure = drawn.picture.figure
        with figure_settings():
            if plan.notes:
                figure.suptitle("stand-in", fontsize=8)
            figure.savefig(folder / f"{drawn.picture.name}.png", dpi=200, metadata={"Software": None})
        write_atomically(folder / f"{drawn.picture.name}.svg", to_svg(figure).encode())
    facts = {
        "scale": way.scale, "seeds": way.seeds, "notes": list(plan.notes),
        "missing": list(plan.missing), "ended": panels == plan.panels,
        "way": to_record(way),
        "pictures": [{"name": drawn.picture.name, "description": drawn.picture.description} for drawn in made],
    }  # fmt: skip
    write_atomically(_figure_facts(table, place), (json.dumps(facts, indent=1) + "\n").encode())
    return made


def load_figures(table: Table, place: Path) -> dict[str, Any] | None:
    """What :func:`draw_figures` left of ``table`` in ``place``: scale, seeds, notes and pictures, each with its SVG."""
    if not _figure_facts(table, place).exists():
        return None
    facts: dict[str, Any] = json.loads(_figure_facts(table, place).read_text(encoding="utf-8"))
    for picture in facts["pictures"]:
        path = place / "results" / table.paper / f"{picture['name']}.svg"
        picture["svg"] = path.read_text(encoding="utf-8")
    return facts


def _figure_facts(table: Table, place: Path) -> Path:
    return place / "results" / table.paper / f"{table.name}-pictures.json"


def _draw_panel(table: Table, panel: PanelPlan, place: Path) -> Iterator[ReproducedFigure]:
    if panel.x in LOOKS:
        yield from (ReproducedFigure(picture=picture) for picture in _draw_looks(panel, place))
        return
    points = [CurvePoint(keys, read_summary(run_folder(spec, place))) for keys, spec in panel.points]
    points = [point for point in points if (point.study.rows["moment"] == "loaded").any()]
    if not points:  # all of them diverged before they were measured
        return
    if panel.x == "round":
        figure = plot_by_round(points, panel.y, panel=panel.by)
    elif panel.x == "client":
        figure = _draw_bars(points, panel.y)
    else:
        figure = plot_by_setting(points, panel.x, panel.y, panel=panel.by)
    numbers = _final_values(points, panel.y)
    ends = "; ".join(f"{row[0].text}: {row[1].text}" for row in numbers.rows)
    description = f"{table.title}. {panel.y.replace('_', ' ')} against {panel.x}, at the end {ends}."
    yield ReproducedFigure(picture=Picture(name=panel.name, figure=figure, description=description), numbers=numbers)


def _draw_looks(panel: PanelPlan, place: Path) -> Iterator[Picture]:
    """Pictures of the theory's toy, or of what the runs' networks hold, all methods side by side."""
    if panel.x == "theory":
        with figure_settings():
            found = iter([*draw_toy_panels(compute_toy(0))])
    else:
        runs = [run for _, spec in panel.points if (run := load_features(spec, place))]
        if not runs:  # all of them diverged
            return
        found = draw_panels(replace(runs[0], drawn={name: drawn for run in runs for name, drawn in run.drawn.items()}))
    for picture in found:
        if picture.name.startswith(panel.y):
            yield replace(picture, name=f"{panel.name}-{picture.name}")


def _draw_bars(points: Sequence[CurvePoint], metric: str) -> Figure:
    """``metric`` of each client at the end, a bar for each point; error bars are one std over seeds."""
    names = list(points[0].study.clients)
    looks = make_styles(_label(point) for point in points)
    with figure_settings():
        figure, axes = make_panel("", "", f"{metric.replace('_', ' ')} (%)")
        handles = {}
        width = 0.8 / len(points)
        for number, point in enumerate(points):
            values = 100 * seed_table(point.study, metric).loc[names]
            stats = [mean_and_std(row.dropna()) for _, row in values.iterrows()]
            x = np.arange(len(names)) + (number - (len(points) - 1) / 2) * width
            errors = [0.0 if math.isnan(std) else std for _, std in stats]
            look = looks[_label(point)]
            drawn = axes.bar(x, [mean for mean, _ in stats], width, color=look.color, hatch=look.hatch, yerr=errors)
            handles[_label(point)] = drawn
        axes.set_xticks(range(len(names)), names)
        axes.grid(visible=False, axis="x")
        add_legend(figure, handles, "")
    return figure


def _final_values(points: Sequence[CurvePoint], metric: str) -> TextTable:
    """The macro metric at the end of each point's runs."""
    rows = []
    for point in points:
        if metric == TRAIN_LOSS:
            losses = metric_history(point.study, "loss", model=None, split="train", moment="trained")
            last = losses[losses["round"] == losses["round"].max()].groupby("seed")["value"].mean()
        else:
            last = (1 if metric == "loss" else 100) * seed_table(point.study, metric).loc["macro"]
        mean, std = mean_and_std(last.dropna())
        text = MISSING if math.isnan(mean) else f"{mean:.4g}" + ("" if math.isnan(std) else f" ({std:.2g})")
        rows.append((TextCell(text=_label(point)), TextCell(text=text)))
    return TextTable(header=("", f"{metric.replace('_', ' ')} at the end"), rows=tuple(rows))


def _label(point: CurvePoint) -> str:
    keys = dict(point.keys)
    name = str(keys.pop("method", ""))
    return ", ".join(filter(None, [name, *(f"{key} {format_setting(key, value)}" for key, value in keys.items())]))
