"""Runs that differ in their settings: curves over rounds and over a setting.

Curves are macro figures of the personal model, just after aggregation: means over seeds, in percent (loss: nats).
FedBN (arXiv:2102.07623) has such for local epochs and batch sizes in its figures 7 and 8, FedWon (arXiv:2306.05879) for
batch sizes, client fractions and thresholds of clipping in its figures 4, 11 and 14.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from ..analysis.statistics import mean_and_std
from ..results.schema import METRICS, RunSummary
from ..utils.errors import UsageError, unknown_name
from .style import MethodStyle, add_legend, figure_settings, legend_entry, make_styles, shorten
from .tables import metric_history, seed_table
from .target_metric import find_best as find_best
from .target_metric import find_reached as find_reached

TRAIN_LOSS = "train_loss"
"""The name here of the training loss, which is measured during local work."""
ACROSS = 3
"""Panels side by side at most."""
FAR = 100
"""Ratio of the largest to the smallest loss from which its axis is logarithmic."""
WIDE = 10
"""Ratio of the largest to the smallest value of a setting from which its axis is logarithmic."""


@dataclass(frozen=True)
class CurvePoint:
    """A run among others: ``keys`` are the settings in which it differs, ``study`` is what it left.

    A study of several methods stands for a line of each; they are told apart by the key ``method``, added here.
    """

    keys: Mapping[str, object]
    study: RunSummary


def plot_by_round(
    points: Sequence[CurvePoint], metric: str, *, panel: str | None = None, split: str = "test"
) -> Figure:
    """Macro ``metric`` over communication rounds: a line for each point and method, bands over seeds.

    ``metric`` is one of :data:`~fedshift.results.schema.METRICS` on ``split``, or ``train_loss``. ``panel`` is the key whose
    values get a panel each. Raises :class:`UsageError` where the metric or the key is unknown, or nothing was measured.
    """
    lines = list(_make_lines(points))
    with figure_settings():
        drawn = _Panels(lines, panel, "round", _axis_label(metric, split))
        shown: list[float] = []
        for axes, look, line in drawn:
            rows = _history(line.study, metric, split)
            macro = rows[rows["method"] == line.method].groupby(["seed", "round"])["value"].mean().dropna()
            values = _metric_scale(metric) * macro.groupby("round").agg(["mean", "min", "max"])
            if values.empty:
                continue
            shown += values["mean"].tolist()
            rounds = values.index.to_numpy()
            every = max(1, len(rounds) // 7)
            axes.plot(rounds, values["mean"], **look.line, markevery=(look.number % every, every))
            axes.fill_between(rounds, values["min"], values["max"], color=look.color, alpha=0.14, linewidth=0)
        for axes in drawn.axes:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
        if metric in ("loss", TRAIN_LOSS) and shown and 0 < min(shown) * FAR < max(shown) < math.inf:
            for axes in drawn.axes:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.yaxis.set_minor_formatter(NullFormatter())
        return drawn.finish("mean, band: lowest to highest")


def plot_by_setting(points: Sequence[CurvePoint], key: str, metric: str, *, panel: str | None = None) -> Figure:
    """Final macro test ``metric`` against the values of ``key``: a line for each combination of the other keys.

    Values that are numbers lie where they belong, on a logarithmic axis where they are powers of two times the smallest
    or span a factor of ten; batch size 0 reads "full" and lies to the right. Others stand side by side. Error bars are
    one sample standard deviation over seeds. ``metric``, ``panel`` and what is raised as in :func:`plot_by_round`.
    """
    lines = list(_make_lines(points))
    values = _values(lines, key)
    places, continuous = _axis_positions(key, values)
    ends = {id(point.study): final_metric(point.study, metric) for point in points}
    with figure_settings():
        drawn = _Panels(lines, panel, key.replace("_", " "), _axis_label(metric, "test"), along=key)
        found: dict[tuple[Axes, int], list[tuple[float, float, float]]] = {}
        for axes, look, line in drawn:
            mean, std = mean_and_std(_metric_scale(metric) * ends[id(line.study)].loc[line.method])
            aside = 0.0 if continuous else 0.5 * ((look.number + 0.5) / len(drawn.looks) - 0.5)
            place = places[format_setting(key, line.keys[key])] + aside
            found.setdefault((axes, look.number), []).append((place, mean, std))
        styles = {look.number: look for look in drawn.looks.values()}
        for (axes, number), spots in found.items():
            x, means, stds = np.array(sorted(spots)).T
            style = styles[number].line | ({} if continuous else {"linestyle": ""})
            axes.errorbar(x, means, np.nan_to_num(stds), capsize=2, elinewidth=1, **style)
        for axes in drawn.axes:
            axes.set_xticks(list(places.values()), [shorten(name, 16) for name in places])
        return drawn.finish("mean, line: ± std")


def format_setting(key: str, value: object) -> str:
    """A setting's value as figures and tables say it."""
    if key == "batch_size" and value == 0:
        return "full"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class _Line:
    """One method of one point, with all the keys that tell it from the others."""

    keys: Mapping[str, object]
    study: RunSummary
    method: str


def _make_lines(points: Sequence[CurvePoint]) -> Iterator[_Line]:
    for point in points:
        for method in point.study.methods:
            named = "method" in point.keys and len(point.study.methods) == 1
            yield _Line(point.keys if named else {**point.keys, "method": method}, point.study, method)


def _values(lines: Sequence[_Line], key: str) -> list[object]:
    """The values of ``key``, in the order met."""
    lacking = [line for line in lines if key not in line.keys]
    if lacking or not lines:
        raise unknown_name("key", key, lacking[0].keys if lacking else ())
    return list(dict.fromkeys(line.keys[key] for line in lines))


def _history(study: RunSummary, metric: str, split: str) -> pd.DataFrame:
    if metric == TRAIN_LOSS:
        return metric_history(study, "loss", model=None, split="train", moment="trained")
    return metric_history(study, metric, split=split)


def final_metric(study: RunSummary, metric: str | None = None) -> pd.Series:
    """Macro test ``metric`` at the reported round: a series over (method, seed)."""
    table = seed_table(study, metric)
    return pd.Series(table.loc["macro"], index=table.columns, dtype=float)


def _metric_scale(metric: str) -> float:
    return 1.0 if metric in ("loss", TRAIN_LOSS) else 100.0


def _axis_label(metric: str, split: str) -> str:
    if metric == TRAIN_LOSS:
        return "training loss (nats)"
    if metric not in METRICS:
        raise unknown_name("metric", metric, (*METRICS, TRAIN_LOSS))
    return f"macro {split} {METRICS[metric]} ({'nats' if metric == 'loss' else '%'})"


def _axis_positions(key: str, values: Sequence[object]) -> tuple[dict[str, float], bool]:
    """Where on the axis each value stands, by its text in that order; and whether they are numbers."""
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values):
        return {format_setting(key, value): float(place) for place, value in enumerate(values)}, False
    full = key == "batch_size" and 0.0 in numbers
    ordered = sorted(number for number in numbers if number or not full)
    powers = bool(ordered) and ordered[0] > 0 and all(math.log2(n / ordered[0]).is_integer() for n in ordered)
    logarithmic = powers or bool(ordered and ordered[0] > 0 and ordered[-1] / ordered[0] >= WIDE)
    spots = [math.log2(number) if logarithmic else number for number in ordered]
    if full:
        gap = (spots[-1] - spots[0]) / (len(spots) - 1) if len(spots) > 1 else 1.0
        spots.append(spots[-1] + gap if spots else 0.0)
    names = {float(value): format_setting(key, value) for value in values if isinstance(value, int | float)}
    return dict(zip((names[number] for number in [*ordered, *[0.0] * full]), spots, strict=True)), True


class _Panels:
    """A figure with a panel for each value of a key, lines alike in all of them; iterating gives each line's place."""

    def __init__(
        self, lines: Sequence[_Line], panel: str | None, x_label: str, y_label: str, along: str | None = None
    ) -> None:
        if not lines:
            raise UsageError("there are no runs to draw curves of")
        values: list[object] = _values(lines, panel) if panel else [None]
        names = {id(line): self._name(line, lines, panel, along) for line in lines}
        self.looks = make_styles(dict.fromkeys(names.values()))
        across = min(ACROSS, len(values))
        down = -(-len(values) // across)
        self.figure = Figure(figsize=(4 if across == 1 else 3 * across, 3 * down), layout="constrained")
        grid = self.figure.subplots(down, across, squeeze=False, sharey=True).ravel()
        self.axes: list[Axes] = list(grid[: len(values)])
        for spare in grid[len(values) :]:
            spare.set_axis_off()
        for axes, value in zip(self.axes, values, strict=True):
            axes.set(xlabel=x_label, title=shorten(f"{panel}: {format_setting(panel, value)}", 40) if panel else "")
        for axes in self.axes[::across]:
            axes.set_ylabel(y_label)
        self.placed = [
            (self.axes[values.index(line.keys[panel]) if panel else 0], self.looks[names[id(line)]], line)
            for line in lines
        ]
        self.seeds = max(len(line.study.seeds) for line in lines)

    def __iter__(self) -> Iterator[tuple[Axes, MethodStyle, _Line]]:
        return iter(self.placed)

    def finish(self, spread: str) -> Figure:
        """The figure with its legend, which says that lines are means and what the ``spread`` is."""
        handles = {name: legend_entry(look) for name, look in self.looks.items()}
        add_legend(self.figure, handles, f"{spread} of {self.seeds} seeds" if self.seeds > 1 else "one seed")
        return self.figure

    @staticmethod
    def _name(line: _Line, lines: Sequence[_Line], *shown: str | None) -> str:
        """What tells a line from the others, less what the panel or the axis shows."""
        varying = [
            name
            for name, value in line.keys.items()
            if name not in shown and any(other.keys.get(name) != value for other in lines)
        ]
        parts = [format_setting(name, line.keys[name]) if name == "method" else f"{name}={format_setting(name, line.keys[name])}"
                 for name in sorted(varying, key=lambda name: name != "method")]  # fmt: skip
        return ", ".join(parts) or str(line.keys.get("method", line.method))
