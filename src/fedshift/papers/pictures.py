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
from ..base.files import write_atomically
from ..features.pictures import panels
from ..report.curves import TRAIN_LOSS, Point, by_round, by_setting, said
from ..report.figures import Panel as Picture
from ..report.figures import svg
from ..report.style import canvas, drawing, legend, looks_of
from ..report.tables import history, seed_table
from ..report.text import MISSING, Cell, TextTable
from ..study import read_study
from ..theory.pictures import toy_panels
from ..theory.toy import toy
from .measures import features_of, run_folder
from .plan import Panel, Plan
from .recipe import Way
from .results import there, written
from .tables import Table

LOOKS = ("theory", "features")
"""What a panel has as ``x`` that is no curve: ``y`` is then how the pictures' names begin."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """A figure as it came out here: a ``picture``, and the ``numbers`` at the ends of its lines, if it has any."""

    picture: Picture
    numbers: TextTable | None = None


def draw(table: Table, plan: Plan, way: Way, place: Path) -> list[Drawn]:
    """What ``plan``'s panels show, from its ended runs in ``place``; written there as SVG and PNG."""
    folder = place / "results" / table.paper
    folder.mkdir(parents=True, exist_ok=True)
    panels = there(plan, place).panels
    made = [drawn for panel in panels for drawn in _drawn(table, panel, place)]
    for drawn in made:
        figure = drawn.picture.figure
        with drawing():
            if plan.notes:
                figure.suptitle("stand-in", fontsize=8)
            figure.savefig(folder / f"{drawn.picture.name}.png", dpi=200, metadata={"Software": None})
        write_atomically(folder / f"{drawn.picture.name}.svg", svg(figure).encode())
    facts = {
        "scale": way.scale, "seeds": way.seeds, "notes": list(plan.notes),
        "missing": list(plan.missing), "ended": panels == plan.panels,
        "way": written(way),
        "pictures": [{"name": drawn.picture.name, "description": drawn.picture.description} for drawn in made],
    }  # fmt: skip
    write_atomically(_facts(table, place), (json.dumps(facts, indent=1) + "\n").encode())
    return made


def drawn_before(table: Table, place: Path) -> dict[str, Any] | None:
    """What :func:`draw` left of ``table`` in ``place``: scale, seeds, notes and pictures, each with its SVG."""
    if not _facts(table, place).exists():
        return None
    facts: dict[str, Any] = json.loads(_facts(table, place).read_text(encoding="utf-8"))
    for picture in facts["pictures"]:
        path = place / "results" / table.paper / f"{picture['name']}.svg"
        picture["svg"] = path.read_text(encoding="utf-8")
    return facts


def _facts(table: Table, place: Path) -> Path:
    return place / "results" / table.paper / f"{table.name}-pictures.json"


def _drawn(table: Table, panel: Panel, place: Path) -> Iterator[Drawn]:
    if panel.x in LOOKS:
        yield from (Drawn(picture=picture) for picture in _looked(panel, place))
        return
    points = [Point(keys, read_study(run_folder(spec, place))) for keys, spec in panel.points]
    points = [point for point in points if (point.study.rows["moment"] == "loaded").any()]
    if not points:  # all of them diverged before they were measured
        return
    if panel.x == "round":
        figure = by_round(points, panel.y, panel=panel.by)
    elif panel.x == "client":
        figure = _bars(points, panel.y)
    else:
        figure = by_setting(points, panel.x, panel.y, panel=panel.by)
    numbers = _ends(points, panel.y)
    ends = "; ".join(f"{row[0].text}: {row[1].text}" for row in numbers.rows)
    description = f"{table.title}. {panel.y.replace('_', ' ')} against {panel.x}, at the end {ends}."
    yield Drawn(picture=Picture(name=panel.name, figure=figure, description=description), numbers=numbers)


def _looked(panel: Panel, place: Path) -> Iterator[Picture]:
    """Pictures of the theory's toy, or of what the runs' networks hold, all methods side by side."""
    if panel.x == "theory":
        with drawing():
            found = iter([*toy_panels(toy(0))])
    else:
        runs = [run for _, spec in panel.points if (run := features_of(spec, place))]
        if not runs:  # all of them diverged
            return
        found = panels(replace(runs[0], drawn={name: drawn for run in runs for name, drawn in run.drawn.items()}))
    for picture in found:
        if picture.name.startswith(panel.y):
            yield replace(picture, name=f"{panel.name}-{picture.name}")


def _bars(points: Sequence[Point], metric: str) -> Figure:
    """``metric`` of each client at the end, a bar for each point; error bars are one std over seeds."""
    names = list(points[0].study.clients)
    looks = looks_of(_label(point) for point in points)
    with drawing():
        figure, axes = canvas("", "", f"{metric.replace('_', ' ')} (%)")
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
        legend(figure, handles, "")
    return figure


def _ends(points: Sequence[Point], metric: str) -> TextTable:
    """The macro metric at the end of each point's runs."""
    rows = []
    for point in points:
        if metric == TRAIN_LOSS:
            losses = history(point.study, "loss", model=None, split="train", moment="trained")
            last = losses[losses["round"] == losses["round"].max()].groupby("seed")["value"].mean()
        else:
            last = (1 if metric == "loss" else 100) * seed_table(point.study, metric).loc["macro"]
        mean, std = mean_and_std(last.dropna())
        text = MISSING if math.isnan(mean) else f"{mean:.4g}" + ("" if math.isnan(std) else f" ({std:.2g})")
        rows.append((Cell(text=_label(point)), Cell(text=text)))
    return TextTable(header=("", f"{metric.replace('_', ' ')} at the end"), rows=tuple(rows))


def _label(point: Point) -> str:
    keys = dict(point.keys)
    name = str(keys.pop("method", ""))
    return ", ".join(filter(None, [name, *(f"{key} {said(key, value)}" for key, value in keys.items())]))
