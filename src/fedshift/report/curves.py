"""Curves of runs that differ in their settings, over rounds and over a setting.

Curves show macro metrics of the personal model, just after aggregation: means over seeds, in percent (loss: nats).
FedBN (arXiv:2102.07623) plots local epochs and batch sizes in its figures 7 and 8, FedWon (arXiv:2306.05879) batch
sizes, client fractions and clipping thresholds in its figures 4, 11 and 14.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from ..analysis.statistics import mean_and_std
from ..results.schema import RunSummary, is_share, metric_unit, name_metric
from ..utils.errors import UsageError, unknown_name
from .figures import FigurePanel
from .formatting import format_mean
from .style import (
    DASHES,
    MARKERS,
    MethodStyle,
    add_legend,
    figure_settings,
    make_legend_entry,
    make_panel,
    make_styles,
    plot_band,
    shorten,
)
from .tables import metric_history, seed_table

TRAIN_LOSS = "train_loss"
"""Name of the training loss as a metric; it is measured during local work."""
COLUMNS = 3
"""Largest number of panels side by side."""
FAR = 100
"""Minimum ratio of the largest to the smallest loss for a logarithmic axis."""
WIDE = 10
"""Minimum ratio of the largest to the smallest value of a setting for a logarithmic axis."""


@dataclass(frozen=True)
class CurvePoint:
    """One of several runs: ``keys`` are the settings in which it differs, ``summary`` has its results.

    A summary of several methods yields a line for each, distinguished by the key ``method``, which is added here.
    """

    keys: Mapping[str, object]
    summary: RunSummary


def plot_by_round(
    points: Sequence[CurvePoint], metric: str, *, panel: str | None = None, split: str = "test"
) -> Figure:
    """Plot macro ``metric`` over communication rounds: a line for each point and method, bands over seeds.

    ``metric`` is one of the runs' metrics on ``split``, or ``train_loss``. ``panel`` is the key
    whose values get a panel each. Raises :class:`UsageError` for an unknown metric or key, and without runs.
    """
    return _draw_by_round(points, metric, panel, split, separate=False).add_legends()[0]


def plot_by_setting(points: Sequence[CurvePoint], key: str, metric: str, *, panel: str | None = None) -> Figure:
    """Plot the final macro test ``metric`` against ``key``: a line for each combination of the other keys.

    Numbers have a continuous axis, logarithmic if they are powers of two times the smallest or span a factor of ten;
    batch size 0 is labeled "full", to the right. Other values have equal distances. Error bars are one sample
    standard deviation over seeds. For ``metric``, ``panel`` and errors, see :func:`plot_by_round`.
    """
    return _draw_by_setting(points, key, metric, panel, separate=False).add_legends()[0]


def make_round_panels(
    points: Sequence[CurvePoint], metric: str, name: str, *, panel: str | None = None
) -> list[FigurePanel]:
    """Return the panels of :func:`plot_by_round` as figures of equal scale, whose names begin with ``name``."""
    return _draw_by_round(points, metric, panel, "test", separate=True).describe(name)


def make_setting_panels(
    points: Sequence[CurvePoint], key: str, metric: str, name: str, *, panel: str | None = None
) -> list[FigurePanel]:
    """Return the panels of :func:`plot_by_setting` as figures of equal scale, whose names begin with ``name``."""
    return _draw_by_setting(points, key, metric, panel, separate=True).describe(name)


def _draw_by_round(
    points: Sequence[CurvePoint], metric: str, panel: str | None, split: str, *, separate: bool
) -> _Panels:
    lines = list(_make_lines(points))
    with figure_settings():
        spread = "mean, band: lowest to highest"
        panels = _Panels(lines, panel, "round", _axis_label(metric, split, points), spread, separate=separate)
        means: list[float] = []
        for axes, style, line in panels.lines:
            rows = _history(line.summary, metric, split)
            macro = rows[rows["method"] == line.method].groupby(["seed", "round"])["value"].mean().dropna()
            values = _metric_scale(metric) * macro.groupby("round").agg(["mean", "min", "max"])
            if not values.empty:
                means += values["mean"].tolist()
                plot_band(axes, style, values)
                name = panels.names[style.number]
                panels.points[axes] += [
                    (at, mean, f"{name}, round {at}: {format_mean(mean, number=_number_format(metric))}")
                    for at, mean in zip(values.index.tolist(), values["mean"].tolist(), strict=True)
                ]
        if metric in ("loss", TRAIN_LOSS) and means and 0 < min(means) * FAR < max(means) < math.inf:
            for axes in panels.axes:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.yaxis.set_minor_formatter(NullFormatter())
        return panels


def _draw_by_setting(
    points: Sequence[CurvePoint], key: str, metric: str, panel: str | None, *, separate: bool
) -> _Panels:
    lines = list(_make_lines(points))
    ticks, continuous = _place_ticks(key, _values(lines, key))
    final = {id(point.summary): final_metric(point.summary, metric) for point in points}
    with figure_settings():
        label = _axis_label(metric, "test", points)
        panels = _Panels(lines, panel, key.replace("_", " "), label, "mean, line: ± std", x_key=key, separate=separate)
        curves: dict[tuple[Axes, int], list[tuple[float, float, float]]] = {}
        for axes, style, line in panels.lines:
            mean, std = mean_and_std(_metric_scale(metric) * final[id(line.summary)].loc[line.method])
            offset = 0.0 if continuous else 0.5 * ((style.number + 0.5) / len(panels.styles) - 0.5)
            text = format_setting(key, line.keys[key])
            x = ticks[text] + offset
            curves.setdefault((axes, style.number), []).append((x, mean, std))
            if not math.isnan(mean):
                label = f"{panels.names[style.number]}, {key}={text}: {format_mean(mean, std, _number_format(metric))}"
                panels.points[axes].append((x, mean, label))
        styles = {style.number: style for style in panels.styles.values()}
        for (axes, number), curve in curves.items():
            x_N, means, stds = np.array(sorted(curve)).T
            line_style = styles[number].line | ({} if continuous else {"linestyle": ""})
            axes.errorbar(x_N, means, np.nan_to_num(stds), capsize=2, elinewidth=1, **line_style)
        for axes in panels.axes:
            axes.set_xticks(list(ticks.values()), [shorten(name, 16) for name in ticks])
        return panels


def format_setting(key: str, value: object) -> str:
    """Return a setting's value as figures and tables print it."""
    if key == "batch_size" and value == 0:
        return "full"
    if key == "participation" and value == 1:  # 1 client, or 1.0, all
        return str(value)
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class _Line:
    """One method of one point, with all the keys that distinguish it."""

    keys: Mapping[str, object]
    summary: RunSummary
    method: str


def _make_lines(points: Sequence[CurvePoint]) -> Iterator[_Line]:
    for point in points:
        for method in point.summary.methods:
            has_key = "method" in point.keys and len(point.summary.methods) == 1
            yield _Line(point.keys if has_key else {**point.keys, "method": method}, point.summary, method)


def _values(lines: Sequence[_Line], key: str) -> list[object]:
    """Return the values of ``key`` in order of appearance."""
    lacking = [line for line in lines if key not in line.keys]
    if lacking or not lines:
        raise unknown_name("key", key, lacking[0].keys if lacking else ())
    return list(dict.fromkeys(line.keys[key] for line in lines))


def _history(summary: RunSummary, metric: str, split: str) -> pd.DataFrame:
    if metric == TRAIN_LOSS:
        return metric_history(summary, "loss", model=None, split="train", moment="trained")
    return metric_history(summary, metric, split=split)


def final_metric(summary: RunSummary, metric: str | None = None) -> pd.Series:
    """Return the macro test ``metric`` at the reported round: a series over (method, seed)."""
    table = seed_table(summary, metric)
    return pd.Series(table.loc["macro"], index=table.columns, dtype=float)


def _number_format(metric: str) -> str | None:
    return ".2f" if _metric_scale(metric) > 1 else None


def _metric_scale(metric: str) -> float:
    return 1.0 if metric == TRAIN_LOSS else metric_unit(metric)[0]


def _axis_label(metric: str, split: str, points: Sequence[CurvePoint]) -> str:
    if metric == TRAIN_LOSS:
        labels = {point.summary.training_loss_label for point in points}
        return labels.pop() if len(labels) == 1 else "training loss"
    known = dict.fromkeys(name for point in points for name in point.summary.metrics)
    if known and metric not in known:
        raise unknown_name("metric", metric, (*known, TRAIN_LOSS))
    unit = metric_unit(metric, numbers=any(point.summary.of_numbers for point in points))[2]
    return f"macro {split} {name_metric(metric)} ({'%' if is_share(metric) else unit})"


def _place_ticks(key: str, values: Sequence[object]) -> tuple[dict[str, float], bool]:
    """Return the axis position of each value by its text, in axis order, and whether the values are numbers."""
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values):
        return {format_setting(key, value): float(index) for index, value in enumerate(values)}, False
    full = key == "batch_size" and 0.0 in numbers
    ordered = sorted(number for number in numbers if number or not full)
    powers = bool(ordered) and ordered[0] > 0 and all(math.log2(n / ordered[0]).is_integer() for n in ordered)
    logarithmic = powers or bool(ordered and ordered[0] > 0 and ordered[-1] / ordered[0] >= WIDE)
    positions = [math.log2(number) if logarithmic else number for number in ordered]
    if full:
        gap = (positions[-1] - positions[0]) / (len(positions) - 1) if len(positions) > 1 else 1.0
        positions.append(positions[-1] + gap if positions else 0.0)
    names = {float(value): format_setting(key, value) for value in values if isinstance(value, int | float)}
    return dict(zip((names[number] for number in [*ordered, *[0.0] * full]), positions, strict=True)), True


class _Panels:
    """Panels for each value of a key, in one figure or ``separate``; ``lines`` holds axes, style and data of each line.

    ``points`` are the plotted values of each panel.
    """

    def __init__(
        self, lines: Sequence[_Line], panel: str | None, x_label: str, y_label: str, spread: str,
        *, x_key: str | None = None, separate: bool = False,
    ) -> None:  # fmt: skip
        if not lines:
            raise UsageError("there are no runs to draw curves of")
        values: list[object] = _values(lines, panel) if panel else [None]
        visible = (panel, x_key)
        names = [_name_line(line, lines, visible) for line in lines]
        self.styles = _style_lines(lines, names, visible)
        self.names = list(self.styles)
        titles = [f"{panel}: {format_setting(panel, value)}" if panel else "" for value in values]
        if separate:
            empty = [make_panel(title, x_label, y_label) for title in titles]
            self.figures, self.axes = [figure for figure, _ in empty], [axes for _, axes in empty]
        else:
            figure, self.axes = _divide_figure(titles, x_label, y_label)
            self.figures = [figure]
        self.points: dict[Axes, list[tuple[float, float, str]]] = {axes: [] for axes in self.axes}
        self.lines: list[tuple[Axes, MethodStyle, _Line]] = [
            (self.axes[values.index(line.keys[panel]) if panel else 0], self.styles[name], line)
            for line, name in zip(lines, names, strict=True)
        ]
        seeds = max(len(line.summary.seeds) for line in lines)
        self._spread = f"{spread} of {seeds} seeds" if seeds > 1 else "one seed"

    def add_legends(self) -> list[Figure]:
        """Return the figures with their legend, which explains lines and spread; their vertical axes are equal."""
        handles = {name: make_legend_entry(style) for name, style in self.styles.items()}
        if len(self.figures) > 1:
            limits = [axes.get_ylim() for axes in self.axes]
            for axes in self.axes:
                axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        for figure in self.figures:
            add_legend(figure, handles, self._spread)
        return self.figures

    def describe(self, name: str) -> list[FigurePanel]:
        """Return a panel for each figure, with its plotted values."""
        with figure_settings():
            figures = self.add_legends()
        panels = []
        for number, (figure, axes) in enumerate(zip(figures, self.axes, strict=True), start=1):
            title = axes.get_title(loc="left")
            what = f"{axes.get_ylabel()} against {axes.get_xlabel()}{f', {title}' if title else ''}"
            ends = {text.split(": ")[0].rpartition(", ")[0]: text for _, _, text in self.points[axes]}
            description = f"{what} ({self._spread}). {'; '.join(ends.values())}."
            full = f"{name}-{number}" if len(figures) > 1 else name
            points = self.points[axes]
            panels.append(
                FigurePanel(name=full, figure=figure, description=description, points=points, note=self._spread)
            )
        return panels


def _divide_figure(titles: Sequence[str], x_label: str, y_label: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each title, whose vertical axes are shared, and the axes of the panels."""
    columns = min(COLUMNS, len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(4 if columns == 1 else 3 * columns, 3 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for spare in grid[len(titles) :]:
        spare.set_axis_off()
    axes: list[Axes] = list(grid[: len(titles)])
    for each, title in zip(axes, titles, strict=True):
        each.set(xlabel=x_label, title=shorten(title, 40))
    for each in axes[::columns]:
        each.set_ylabel(y_label)
    return figure, axes


def _style_lines(
    lines: Sequence[_Line], names: Sequence[str], visible: Collection[str | None]
) -> dict[str, MethodStyle]:
    """Return each line's style by name: colors identify methods, line styles other settings."""
    colors = make_styles(dict.fromkeys(str(line.keys.get("method", line.method)) for line in lines))
    settings: dict[str, str] = {}
    styles: dict[str, MethodStyle] = {}
    for name, line in zip(names, lines, strict=True):
        setting = repr({key: value for key, value in line.keys.items() if key not in (*visible, "method")})
        dashes = settings.setdefault(setting, DASHES[len(settings) % len(DASHES)])
        color = colors[str(line.keys.get("method", line.method))].color
        number = len(styles)
        marker = MARKERS[number % len(MARKERS)]
        styles.setdefault(name, MethodStyle(number=number, color=color, marker=marker, dashes=dashes, hatch=""))
    return styles


def _name_line(line: _Line, lines: Sequence[_Line], visible: Collection[str | None]) -> str:
    """Return the settings that distinguish a line from the others, except those ``visible`` on panels or the axis."""
    parts = {
        key: format_setting(key, value)
        for key, value in line.keys.items()
        if key not in visible and any(other.keys.get(key) != value for other in lines)
    }
    method = [parts.pop("method")] if "method" in parts else []
    return ", ".join([*method, *(f"{key}={text}" for key, text in parts.items())]) or str(
        line.keys.get("method", line.method)
    )
