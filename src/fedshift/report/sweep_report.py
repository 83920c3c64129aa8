"""Publication of a sweep: one table of all combinations, rounds and bytes to a target, curves, and one page.

Rows are the combinations, columns the methods; a cell is the macro test metric at the reported round, mean (std) over
seeds. The CSV file has the same values unscaled, a line for each combination and method. If validation data are held
out, another table has each method at its best combination on them, so that a sweep over the learning rate compares
methods that are equally tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from ..analysis.statistics import mean_and_std
from ..results.schema import is_lower_better
from ..utils.files import write_atomically
from .curves import (
    TRAIN_LOSS,
    CurvePoint,
    final_metric,
    format_setting,
    make_round_panels,
    make_setting_panels,
    plot_by_round,
    plot_by_setting,
)
from .figures import FigurePanel, save_each
from .formatting import (
    BOLD,
    MISSING,
    TextCell,
    TextTable,
    difference_unit,
    explain_spread,
    format_metric_table,
    make_table,
)
from .html import render_template
from .lag import describe_moment
from .origin import find_changed
from .page import list_settings
from .progress import describe_partial, find_reached_rounds, is_even
from .publication import print_lines, print_parts
from .report import PAGE, Report, ReportTable
from .style import DASHES, INK, MethodStyle, make_styles
from .tables import accuracy_table, describe_round, describe_seeds, list_shortfalls, seed_table
from .target_metric import describe_target, format_rounds, format_traffic, target_table

CLAIMS = "Intervals on the page of each combination do not allow for the number of combinations."
SHADES = 6
"""Number of shades of a heat map."""
CHOSEN = "\N{BLACK DIAMOND SUIT} "
"""Mark of the combination that is best on validation data."""
PANELS = 9
"""Largest number of values of a setting that each get a panel."""


@dataclass(frozen=True, kw_only=True)
class SweepResults:
    """The evaluated combinations of a sweep, at least one, which all compare the same methods.

    Points have the same BatchNorm statistics (:func:`~fedshift.report.lag.share_statistics`).
    ``folders``: the directory of each, relative to the sweep's. ``missing``: the directories of combinations that were
    not evaluated yet.
    """

    points: tuple[CurvePoint, ...]
    folders: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def partial(self) -> str:
        """The first line of tables if some runs have not reached the last round; empty otherwise."""
        lines = (
            f"{folder}: {line.removeprefix('PARTIAL: ')}"
            for folder, point in zip(self.folders, self.points, strict=True)
            if (line := describe_partial(point.summary))
        )
        parts = [*lines, *(f"{folder}: not evaluated yet." for folder in self.missing)]
        return f"PARTIAL: {' '.join(parts)}" if parts else ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The swept settings."""
        return tuple(self.points[0].keys)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods, in the order of the columns."""
        return tuple(self.points[0].summary.methods)

    @property
    def validated(self) -> bool:
        """Return whether all combinations were measured on validation data."""
        return all((point.summary.rows["split"] == "validation").any() for point in self.points)

    def describe(self, index: int) -> str:
        """Return the settings of one combination in words."""
        return ", ".join(f"{key}={format_setting(key, value)}" for key, value in self.points[index].keys.items())

    @property
    def caption(self) -> str:
        """Caption of the metric's table, with the statistics of BatchNorm if they lag."""
        summary = self.points[0].summary
        named = max((describe_moment(point.summary, None) for point in self.points), key=len)  # of all, or empty
        measure = f"{summary.metric_name} in {summary.metric_unit}{named}"
        return f"Macro test {measure}, {describe_seeds(summary)}, {describe_round(summary)}"


def publish_sweep(sweep: SweepResults, directory: Path, console: Console, config: Mapping[str, Any]) -> None:
    """Print the tables of ``sweep``, and write tables, figures and ``sweep.html`` into ``directory``.

    ``config``: the sweep's settings, which the page lists.
    """
    report = make_sweep_report(sweep, config)
    print_parts(console, report.list_parts())
    report.write_tables(directory / "tables")
    save_each(sweep_figures(sweep), directory / "figures")
    write_atomically(directory / "sweep.html", _render_page(sweep, report).encode())
    print_lines(console, f"Page: {directory / 'sweep.html'}")


def make_sweep_report(sweep: SweepResults, config: Mapping[str, Any]) -> Report:
    """Return the report of ``sweep``, whose settings are ``config``."""
    remarks = tuple(sweep_remarks(sweep))
    settings = (
        *list_settings("changed", "Settings of the sweep other than the defaults", find_changed(config)),
        *list_settings("config", "Settings of the sweep", config),
    )
    tables = (*sweep_tables(sweep), *_list_heat_maps(sweep), *settings)
    return Report(tables=tables, partial=sweep.partial, notices=remarks, sentences=remarks)


def _render_page(sweep: SweepResults, report: Report) -> str:
    chosen = {} if sweep.partial else best_on_validation(sweep)
    lines, settings = _find_line_settings(sweep.points)
    return render_template(
        "sweep.html.j2",
        sweep=sweep,
        summary=sweep.points[0].summary,
        report=report,
        best=[f"{method} at {sweep.describe(index)}" for method, index in chosen.items()],
        groups=list(_group_panels(sweep)),
        styles={name: replace(style, dashes=DASHES[0]) for name, style in make_styles(sweep.methods).items()},
        line_styles={
            text: MethodStyle(number=100 + number, color=INK, marker="", dashes=dashes, hatch="")
            for number, (text, dashes) in enumerate(zip(settings, cycle(DASHES)))
        },
        line_keys=lines,
    )


def _list_heat_maps(sweep: SweepResults) -> Iterator[ReportTable]:
    maps = {} if sweep.partial else make_heat_maps(sweep)
    for number, (method, text) in enumerate(maps.items(), start=1):
        yield ReportTable(
            file=f"heat-{number}", caption=method, text=text, section="heat", places=(PAGE,), kind="numbers heat"
        )


def _group_panels(sweep: SweepResults) -> Iterator[tuple[str, list[FigurePanel]]]:
    """Yield the page's figures by title: the same curves as in the files, a figure for each panel."""
    points, varied, metric = sweep.points, _find_varied(sweep.points), sweep.points[0].summary.metric
    panel, what = _choose_panel(points), sweep.points[0].summary.metric_name
    yield f"Macro test {what} over rounds", make_round_panels(points, metric, "rounds", panel=panel)
    if any((point.summary.rows["moment"] == "trained").any() for point in points):
        yield "Training loss over rounds", make_round_panels(points, TRAIN_LOSS, "training-loss", panel=panel)
    for key in sweep.keys:
        other = next((name for name in varied if name != key), None)
        name = f"over-{key.replace('_', '-')}"
        yield f"Macro test {what} against {key}", make_setting_panels(points, key, metric, name, panel=other)


def make_heat_maps(sweep: SweepResults) -> dict[str, TextTable]:
    """Return a shaded table per method if exactly two settings vary: the macro metric of each pair of values.

    Values are those of validation data, so that nobody chooses by test data; without validation data, of test data. All
    tables share one scale, on which stronger shading is better. A diamond marks the pair that is best on validation
    data.
    """
    varied = [key for key in sweep.keys if len({format_setting(key, point.keys[key]) for point in sweep.points}) > 1]
    if len(varied) != 2:
        return {}
    down, across = varied
    unit = difference_unit(sweep.points[0].summary.metric)
    split = "validation" if sweep.validated else "test"
    means = [
        {m: mean_and_std(macro[m])[0] for m in sweep.methods}
        for macro in (seed_table(p.summary, split=split).loc["macro"] for p in sweep.points)
    ]
    known = [value for row in means for value in row.values() if np.isfinite(value)]
    worst, best = min(known, default=0.0), max(known, default=0.0)
    if is_lower_better(sweep.points[0].summary.metric):
        worst, best = best, worst
    places = {tuple(format_setting(k, p.keys[k]) for k in varied): number for number, p in enumerate(sweep.points)}
    rows, columns = ([*dict.fromkeys(place[axis] for place in places)] for axis in (0, 1))
    chosen = best_on_validation(sweep)

    def fill(method: str, place: tuple[str, str]) -> TextCell:
        number = places.get(place)
        if number is None or not np.isfinite(value := means[number][method]):
            return TextCell(text=MISSING)
        shade = round((SHADES - 1) * (value - worst) / (best - worst)) if best != worst else 0
        mark = CHOSEN if chosen.get(method) == number else ""
        return TextCell(text=f"{mark}{unit.format(value)}", tone=f"shade-{shade}")

    header = (f"{down} \\ {across}", *columns)
    return {
        method: make_table(header, [(row, *(fill(method, (row, column)) for column in columns)) for row in rows])
        for method in sweep.methods
    }


def sweep_frame(sweep: SweepResults) -> pd.DataFrame:
    """Return one row for each combination and method: macro mean and std, and rounds and bytes to a target.

    The index holds the swept settings and the method; shares and bytes are at full scale.
    """
    rows = []
    for point in sweep.points:
        summary = point.summary
        macro = final_metric(summary)
        targets = None if summary.target_metric is None else target_table(summary, summary.target_metric)
        for method in sweep.methods:
            mean, std = mean_and_std(macro[method])
            row: dict[str, Any] = {key: format_setting(key, value) for key, value in point.keys.items()} | {
                "method": method
            }
            row |= {"mean": mean, "std": std, "seeds": int(macro[method].notna().sum())}
            rows.append(row if targets is None else row | targets.loc[method].to_dict())
    return pd.DataFrame(rows).set_index([*sweep.keys, "method"])


def sweep_tables(sweep: SweepResults) -> Iterator[ReportTable]:
    """Yield the tables of the metric and, if applicable, of the choice, and of rounds and bytes to a target."""
    summary = sweep.points[0].summary
    metric = [
        format_metric_table(
            accuracy_table(point.summary),
            point.summary.metric,
            one_by_one=False,
            even=is_even(find_reached_rounds(point.summary)),
        ).rows[0][1:]
        for point in sweep.points
    ]
    text, frame = _make_table(sweep, metric), sweep_frame(sweep)
    yield ReportTable(file="sweep", caption=sweep.caption, text=text, frame=frame)
    if not sweep.partial and (chosen := best_on_validation(sweep)):
        caption = f"Each method where its validation data are best, in {summary.metric_unit}"
        yield ReportTable(file="chosen", caption=caption, text=_chosen_table(sweep, chosen), section="chosen")
    if summary.target_metric is None:
        return
    targets = [target_table(point.summary, summary.target_metric) for point in sweep.points]
    quantities: dict[str, tuple[str, Callable[[pd.Series], str]]] = {
        "rounds": ("Rounds", partial(format_rounds, ended=not sweep.partial)),
        "bytes": ("Bytes (all clients, down and up)", partial(format_traffic, ended=not sweep.partial)),
    }
    for name, (quantity, write) in quantities.items():
        cells = ([_mark_partial(write(row), row) for _, row in table.iterrows()] for table in targets)
        caption = describe_target(summary, summary.target_metric, quantity)
        yield ReportTable(file=name, caption=caption, text=_make_table(sweep, cells), section="targets")


def best_on_validation(sweep: SweepResults) -> dict[str, int]:
    """Return the index of the combination with the best macro validation metric of each method, averaged over seeds.

    Empty if a combination has no validation data, or is the only one. Methods that no combination measured for all of
    its seeds are excluded, as are combinations that diverged with a seed.
    """
    summaries = [point.summary for point in sweep.points]
    if len(summaries) < 2 or not sweep.validated:
        return {}
    macro = [seed_table(summary, split="validation").loc["macro"] for summary in summaries]
    best = {}
    for method in sweep.methods:
        means = np.array([table[method].mean(skipna=False) for table in macro], dtype=float)
        if np.isfinite(means).any():
            low = is_lower_better(summaries[0].metric)
            best[method] = int(np.nanargmin(means) if low else np.nanargmax(means))
    return best


def _chosen_table(sweep: SweepResults, chosen: Mapping[str, int]) -> TextTable:
    rows = []
    for method, index in chosen.items():
        keys, summary = sweep.points[index].keys, sweep.points[index].summary
        frames = (accuracy_table(summary, split=split)[[method]] for split in ("validation", "test"))
        cells = (format_metric_table(frame, summary.metric, one_by_one=False).rows[0][1].text for frame in frames)
        rows.append((method, *(format_setting(key, value) for key, value in keys.items()), *cells))
    return make_table(("method", *sweep.keys, "validation", "test"), rows)


def _list_boundary_optima(sweep: SweepResults) -> Iterator[str]:
    """Yield a sentence if methods are best at a number's smallest or largest value: values beyond may be better."""
    chosen = best_on_validation(sweep)
    for key in sweep.keys:
        values = [point.keys[key] for point in sweep.points]
        numbers = [value for value in values if isinstance(value, float)]
        if len(numbers) < len(values) or len(set(numbers)) < 2:
            continue
        for end, bound in (("smallest", min(numbers)), ("largest", max(numbers))):
            if methods := [method for method, index in chosen.items() if numbers[index] == bound]:
                yield (
                    f"{', '.join(methods)}: best on validation data at the {end} {key} of the sweep, "
                    f"{format_setting(key, bound)}; one beyond it may be better."
                )


def sweep_figures(sweep: SweepResults) -> dict[str, Figure]:
    """Return figures by file name: the metric over rounds, the training loss, and the metric against each setting."""
    figures, varied = plot_rounds(sweep.points), _find_varied(sweep.points)
    for key in sweep.keys:
        other = next((name for name in varied if name != key), None)
        metric = sweep.points[0].summary.metric
        figures[f"over-{key.replace('_', '-')}"] = plot_by_setting(sweep.points, key, metric, panel=other)
    return figures


def plot_rounds(points: Sequence[CurvePoint]) -> dict[str, Figure]:
    """Return the metric and the training loss over rounds, by file name, with panels where several settings differ."""
    panel = _choose_panel(points)
    figures = {"rounds": plot_by_round(points, points[0].summary.metric, panel=panel)}
    if any((point.summary.rows["moment"] == "trained").any() for point in points):
        figures["training-loss"] = plot_by_round(points, TRAIN_LOSS, panel=panel)
    return figures


def _choose_panel(points: Sequence[CurvePoint]) -> str | None:
    """Return the setting with one panel per value: the one with most values; None if line styles are enough."""
    varied = {key: len({format_setting(key, point.keys[key]) for point in points}) for key in _find_varied(points)}
    if not varied or (len(varied) == 1 and max(varied.values()) <= len(DASHES)):
        return None
    return max(varied, key=varied.__getitem__)


def _find_line_settings(points: Sequence[CurvePoint]) -> tuple[list[str], list[str]]:
    """Return the settings that line styles of curves over rounds represent, and the combinations of their values."""
    panel = _choose_panel(points)
    keys = [
        key
        for key in points[0].keys
        if key != panel and len({format_setting(key, point.keys[key]) for point in points}) > 1
    ]
    texts = (", ".join(f"{key}={format_setting(key, point.keys[key])}" for key in keys) for point in points)
    return keys, list(dict.fromkeys(texts)) if keys else []


def _find_varied(points: Sequence[CurvePoint]) -> list[str]:
    """Return the settings whose values differ, and are few enough for a panel each."""
    values = {key: len({format_setting(key, point.keys[key]) for point in points}) for key in points[0].keys}
    return [key for key, number in values.items() if 1 < number <= PANELS]


def sweep_remarks(sweep: SweepResults) -> list[str]:
    """Return sentences about the limits of single combinations, by name, and about optima at a sweep's boundary."""
    single = [
        f"{folder}: {line}"
        for folder, point in zip(sweep.folders, sweep.points, strict=True)
        for line in list_shortfalls(point.summary)
    ]
    return [*single, *(() if sweep.partial else _list_boundary_optima(sweep))]


def _make_table(sweep: SweepResults, cells: Iterable[Iterable[str | TextCell]]) -> TextTable:
    rows = [
        [*(format_setting(key, value) for key, value in point.keys.items()), *row]
        for point, row in zip(sweep.points, cells, strict=True)
    ]
    note = explain_spread(len(sweep.points[0].summary.seeds))
    if any(isinstance(cell, TextCell) and cell.best for row in rows for cell in row):
        note = f"{note} {BOLD} {CLAIMS}"
    return make_table((*sweep.keys, *sweep.methods), rows, note=note)


def _mark_partial(text: str, row: pd.Series) -> str:
    """Return ``text``, with the number of seeds that it covers if not all."""
    return text if row["reached"] in (0, row["seeds"]) else f"{text}; {row['reached']:.0f} of {row['seeds']:.0f} seeds"
