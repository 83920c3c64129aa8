"""Figures: small panels, about 4 x 3 inches each, legible on a phone and in a column of a paper.

Lines are means over seeds and bands run from the lowest to the highest seed; error bars are one sample standard
deviation over seeds. Test data are the personal model's, just after aggregation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..analysis.statistics import mean_and_std
from ..results.run_directory import to_file_name
from ..results.schema import PICTURED, RunSummary, is_share, name_file
from .clinical import bin_calibration, find_positive, name_classes, tabulate_benefit
from .differences import MEAN, compare_methods, list_references
from .formatting import difference_unit, format_bytes, format_mean, format_signed
from .progress import describe_partial
from .style import (
    INK,
    PAPER,
    add_legend,
    figure_settings,
    label_rows,
    make_legend_entry,
    make_panel,
    make_style,
    make_styles,
    plot_band,
    shorten,
)
from .survival import THIRDS, estimate_thirds
from .tables import ONE_BY_ONE, QUANTILES, accuracy_table, find_reported_rounds, metric_history

LOW = 0.05
"""Quantile over many clients that is plotted over rounds."""
TENTHS, SPREAD = 10, (0.1, 0.9)
"""Number of parts by target, and quantiles of errors, in the figure of residuals."""
_RISKS = dict(zip(THIRDS, (0, 2, 1), strict=True))
"""Looks of curves by predicted risk: blue, green, orange."""
PARTIAL = "PARTIAL: "
"""Beginning of the title of a figure that compares runs, some of them unfinished."""
_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True, kw_only=True)
class FigurePanel:
    """A figure with its file name and a description for screen readers.

    ``points``: plotted values, each as position in the data's coordinates and text. ``note``: what lines, bands and
    markers mean; given if the legend names the methods, so that a page can replace all legends by one.
    """

    name: str
    figure: Figure
    description: str
    points: Sequence[tuple[float, float, str]] = ()
    note: str = ""


def make_figures(summary: RunSummary, panels: Iterable[FigurePanel] | None = None) -> dict[str, Figure]:
    """Return every figure that the summary has data for, by file name; ``samples`` shows images of each client.

    ``panels``: those of :func:`make_panels`, if they are drawn already.
    """
    figures = {panel.name: panel.figure for panel in (make_panels(summary) if panels is None else panels)}
    return figures | {"samples": _draw_samples(summary)} if summary.samples else figures


def save_figures(summary: RunSummary, directory: Path, panels: Iterable[FigurePanel] | None = None) -> list[Path]:
    """Write every figure as :func:`save_each` does, with the same bytes for the same records; return the paths.

    ``panels``: as for :func:`make_figures`.
    """
    return save_each(make_figures(summary, panels), directory)


def save_each(figures: Mapping[str, Figure], directory: Path) -> list[Path]:
    """Write each figure under its name, as SVG, as PNG at 200 dpi, and as PDF for a paper; return the paths.

    The PDF of a single panel has no title, since papers have captions, unless the title marks it as partial.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        vector, bitmap, printed = (directory / f"{name}.{kind}" for kind in ("svg", "png", "pdf"))
        vector.write_text(to_svg(figure, background="white", dpi=200), encoding="utf-8")
        with figure_settings():
            figure.savefig(bitmap, dpi=200, metadata={"Software": None})
            _save_pdf(figure, printed)
        paths += [vector, bitmap, printed]
    return paths


def _save_pdf(figure: Figure, path: Path) -> None:
    titles = {axes: axes.get_title(loc="left") for axes in figure.axes if len(figure.axes) == 1}
    for axes in (axes for axes, title in titles.items() if not title.startswith(PARTIAL)):
        axes.set_title("", loc="left")
    figure.savefig(path, dpi=200, metadata=dict.fromkeys(("CreationDate", "Creator", "Producer")))
    for axes, title in titles.items():
        axes.set_title(title, loc="left")


def to_svg(figure: Figure, background: str = "none", dpi: float | Literal["figure"] = "figure") -> str:
    """Return the figure as SVG without a date, its text as text; ``dpi`` applies to images in it."""
    buffer = StringIO()
    with figure_settings():
        figure.savefig(buffer, format="svg", facecolor=background, dpi=dpi, metadata=_METADATA)
    return buffer.getvalue()


def make_panels(summary: RunSummary, *, curves_only: bool = False) -> list[FigurePanel]:
    """Return all panels: macro accuracy, differences, training loss, traffic, one for each client, and bars for all.

    Beyond :data:`~fedshift.report.tables.ONE_BY_ONE` clients, the last two show the distribution instead. Where a
    method pools all data (see ``report.concordance``), the macro test loss is drawn too. ``curves_only``: only panels
    over rounds, which compare methods round by round however far each got.
    """
    with figure_settings():
        return list(_make_panels(summary, curves_only))


def _make_panels(summary: RunSummary, curves_only: bool) -> Iterator[FigurePanel]:
    tested = metric_history(summary)
    trained = metric_history(summary, "loss", model=None, split="train", moment="trained")
    many, mark = len(summary.clients) > ONE_BY_ONE, PARTIAL if describe_partial(summary) else ""
    clients = [] if many else list(summary.clients)[:PICTURED]
    label, metric = f"test {summary.metric_label}", name_files(summary)
    if len(tested):
        yield _draw_curves(
            summary, f"{metric}-macro", "Mean over clients (macro)", _macro(tested), label, summary.scale
        )
        yield from () if curves_only else _draw_differences(summary)
    if len(trained):
        axis = summary.training_loss_label
        yield _draw_curves(summary, "training-loss", "Training loss (macro)", _macro(trained), axis)
    if any(method.pooled for method in summary.methods.values()) and len(tested):
        loss = _macro(metric_history(summary, "loss"))
        yield _draw_curves(summary, "test-loss", "Test loss (macro)", loss, f"test loss ({summary.loss_unit})")
    if len(tested) and len(summary.traffic) and not curves_only:
        yield _draw_traffic(summary, _macro(tested), mark)
    for number, client in enumerate(clients, start=1):
        rows = tested[tested["client"] == client]
        if len(rows):
            slug = re.sub(r"[^a-z0-9]+", "-", client.lower()).strip("-")[:40]
            name = f"{metric}-client-{number:02d}-{slug}".rstrip("-")
            yield _draw_curves(summary, name, client, rows, label, summary.scale)
    if len(tested) and many:
        low = tested.groupby(["method", "seed", "round"])["value"].quantile(LOW).reset_index()
        yield _draw_curves(
            summary, f"{metric}-low", f"{100 * LOW:g} % quantile over clients", low, label, summary.scale
        )
    if len(tested) and not curves_only:
        bars = [*clients, "macro"]
        yield _draw_distribution(summary, mark) if many else _draw_bars(summary, bars, mark)
        yield from _draw_calibration(summary)
        yield from _draw_residuals(summary)
        yield from _draw_benefit(summary)
        yield from _draw_survival(summary)


def name_files(summary: RunSummary) -> str:
    """Return the beginning of the names of figures of the summary's metric: ``balanced-accuracy``."""
    return name_file(summary.metric).replace("_", "-")


def _draw_samples(summary: RunSummary) -> Figure:
    clients = list(summary.samples.items())[:PICTURED]
    columns = max(len(images) for _, images in clients)
    with figure_settings():
        figure = Figure(figsize=(4, 0.48 * len(clients)), layout="constrained")
        grid = figure.subplots(len(clients), columns, squeeze=False)
        for row, (client, images) in zip(grid, clients, strict=True):
            row[0].text(
                -0.15, 0.5, shorten(client, 14), transform=row[0].transAxes, ha="right", va="center", fontsize=8
            )
            for axes, image in zip_longest(row, images):
                axes.set_axis_off()
                if image is not None:
                    axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
    return figure


def _macro(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.groupby(["method", "seed", "round"])["value"].mean().reset_index()


def _draw_curves(
    summary: RunSummary, name: str, title: str, rows: pd.DataFrame, label: str, scale: float = 1
) -> FigurePanel:
    figure, axes = make_panel(title, "round", label)
    handles: dict[str, Any] = {}
    ends, points, spec = [], [], ".2f" if scale > 1 else None
    for method, style in make_styles(summary.methods).items():
        values = scale * rows.loc[rows["method"] == method].groupby("round")["value"].agg(["mean", "min", "max"])
        if values.empty:
            continue
        handles[method] = make_legend_entry(style)
        plot_band(axes, style, values)
        ends.append(f"{method} {format_mean(values['mean'].iloc[-1], number=spec)} after round {values.index[-1]}")
        means = zip(values.index.tolist(), values["mean"].tolist(), strict=True)
        points += [(at, mean, f"{method}, round {at}: {format_mean(mean, number=spec)}") for at, mean in means]
    spread = (
        f"line: mean, band: lowest to highest of {len(summary.seeds)} seeds" if len(summary.seeds) > 1 else "one seed"
    )
    add_legend(figure, handles, spread)
    caption = f"{title}: {label} over rounds ({spread})."
    description = f"{caption} {'; '.join(ends)}."
    return FigurePanel(name=name, figure=figure, description=description, points=points, note=spread)


def _draw_differences(summary: RunSummary) -> Iterator[FigurePanel]:
    """Draw the macro difference of each method to the baseline with its interval, where there are intervals."""
    baseline = list_references(summary.methods, summary.compare_with)[0]
    rows = compare_methods(summary, baseline).dropna(subset=["low", "high"])
    table = rows[rows.index.get_level_values("client") == MEAN].droplevel("client")
    if table.empty:
        return
    unit = difference_unit(summary.metric, numbers=summary.of_numbers)
    label = fill(f"macro {summary.metric_name} above {shorten(baseline, 30)} ({unit.name})", 44, break_on_hyphens=False)
    figure, axes = make_panel("Difference to the baseline", label, "", 1.0 + 0.24 * len(table))
    styles = make_styles(summary.methods)
    for row, (method, gap) in enumerate(table.iterrows()):
        style = styles[str(method)]
        axes.hlines(row, *(summary.scale * gap[end] for end in ("low", "high")), color=style.color, linewidth=1.6)
        axes.plot(summary.scale * gap["difference"], row, **style.line | {"markersize": 6.5})
    axes.axvline(0, color=INK, linewidth=0.8)
    label_rows(axes, table.index.tolist(), 20, 0.4)
    caption = f"Macro {summary.metric_name} above {baseline} in {unit.name}: mean over seeds, line: 95 % interval."
    ends = "; ".join(f"{method} {unit.format_signed(value)}" for method, value in table["difference"].items())
    points = [
        (summary.scale * gap["difference"], row, f"{method}: {unit.format_interval(gap['low'], gap['high'])}")
        for row, (method, gap) in enumerate(table.to_dict("index").items())
    ]
    yield FigurePanel(name="difference", figure=figure, description=f"{caption} {ends}.", points=points)


def _draw_traffic(summary: RunSummary, macro: pd.DataFrame, mark: str) -> FigurePanel:
    """Draw macro accuracy against the bytes exchanged up to that round; a large marker is the reported round."""
    unit = difference_unit(summary.metric)
    figure, axes = make_panel(
        f"{mark}{summary.metric_name[0].upper()}{summary.metric_name[1:]} against traffic",
        "bytes exchanged, all clients",
        f"macro test {summary.metric_label}",
    )
    traffic = summary.traffic.sort_values("round")
    moved = (traffic["down"] + traffic["up"]).groupby([traffic["method"], traffic["seed"]]).cumsum()
    rows = macro.merge(traffic.assign(moved=moved), on=["method", "seed", "round"])
    reported = rows.join(find_reported_rounds(summary).rename("reported"), on=["method", "seed"])
    reported = reported[reported["round"] == reported["reported"]]
    handles: dict[str, Any] = {}
    ends, points = [], []
    for method, style in make_styles(summary.methods).items():
        values = rows.loc[rows["method"] == method].groupby("round")[["moved", "value"]].mean()
        marked = reported[reported["method"] == method]
        if marked.empty:
            continue
        (mean, std), moved_mean = mean_and_std(summary.scale * marked["value"]), float(marked["moved"].mean())
        axes.plot(values["moved"], summary.scale * values["value"], **style.line | {"markersize": 2.5, "linewidth": 1})
        axes.errorbar(moved_mean, mean, None if math.isnan(std) else std, color=style.color, capsize=2, linewidth=1)
        axes.plot(moved_mean, mean, **style.line | {"markersize": 7, "markeredgecolor": PAPER}, zorder=3)
        points += [
            (
                moved,
                summary.scale * share,
                f"{method}, round {number}: {unit.format(share)} after {format_bytes(moved)}",
            )
            for number, moved, share in values.itertuples()
        ]
        handles[method] = make_legend_entry(style)
        ends.append(f"{method} {format_mean(mean, number=unit.spec)} at {format_bytes(moved_mean)}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: format_bytes(count)))
    spread = "large marker: reported round"
    if len(summary.seeds) > 1:
        spread = f"line: mean over seeds; {spread}, ± std"
    add_legend(figure, handles, spread)
    caption = f"Macro test {summary.metric_name} against the bytes that all clients exchanged ({spread})."
    description = f"{caption} {'; '.join(ends)}."
    return FigurePanel(name="traffic", figure=figure, description=description, points=points, note=spread)


def _draw_bars(summary: RunSummary, names: list[str], mark: str) -> FigurePanel:
    """Draw accuracy at the reported round: one group of bars for each client and the mean over clients."""
    table, styles = summary.scale * accuracy_table(summary), make_styles(summary.methods)
    spec = difference_unit(summary.metric).spec
    rows = [*range(len(names) - 1), len(summary.clients)]  # macro is the row below all clients
    thick = 0.8 / len(styles)
    height = max(1.8, len(names) * (0.3 + 0.06 * len(styles)))
    points: list[tuple[float, float, str]] = []
    figure, axes = make_panel(f"{mark}At the reported round", f"test {summary.metric_label}", "", height)
    handles: dict[str, Any] = {}
    for method, style in styles.items():
        where = [row - 0.4 + thick * (style.number + 0.5) for row in range(len(names))]
        means, stds = (table[method][kind].iloc[rows] for kind in ("mean", "std"))
        fill: dict[str, Any] = {"facecolor": style.color, "hatch": style.hatch, "edgecolor": PAPER, "linewidth": 0}
        handles[method] = axes.barh(where, means.fillna(0), thick, **fill)
        points += [
            (mean, at, f"{method}, {name}: {format_mean(mean, std, spec)}")
            for at, name, mean, std in zip(where, names, means, stds, strict=True)
            if not math.isnan(mean)
        ]
        axes.hlines(where, means - stds, means + stds, color=INK, linewidth=0.8)
    label_rows(axes, names, 14, 0.45)
    if is_share(summary.metric) and points:
        bars = table.iloc[rows]
        ends_CM = bars.xs("mean", axis=1, level="statistic") + bars.xs("std", axis=1, level="statistic").fillna(0)
        axes.set_xlim(
            0, min(100, max(1, 1.05 * float(np.nanmax(ends_CM.to_numpy()))))
        )  # from 0, as lengths are compared
    spread = "bar: mean, line: ± std over seeds" if len(summary.seeds) > 1 else "one seed"
    add_legend(figure, handles, spread)
    macro = table.xs("mean", axis=1, level="statistic").iloc[rows[-1]]
    ends = "; ".join(f"{method} {format_mean(value, number=spec)}" for method, value in macro.items())
    caption = f"Test {summary.metric_name} of each client at the reported round ({spread})."
    description = f"{caption} Macro: {ends}."
    return FigurePanel(
        name=f"{name_files(summary)}-bars", figure=figure, description=description, points=points, note=spread
    )


def _draw_distribution(summary: RunSummary, mark: str) -> FigurePanel:
    """Draw the distribution of many clients' accuracies at the reported round, a row for each method."""
    table = summary.scale * accuracy_table(summary).iloc[len(summary.clients) :].xs("mean", axis=1, level="statistic")
    figure, axes = make_panel(
        f"{mark}Clients at the reported round",
        f"test {summary.metric_label}",
        "",
        1.3 + 0.3 * len(table.T),
    )
    for row, (method, style) in enumerate(make_styles(summary.methods).items()):
        low, lower, median, upper, high = table.loc[list(QUANTILES), method]
        axes.hlines(row, low, high, color=style.color, linewidth=1.4)
        axes.hlines(row, lower, upper, color=style.color, linewidth=7, alpha=0.5)
        axes.plot(median, row, "|", color=INK, markersize=10, markeredgewidth=1.6)
        axes.plot(table.loc[["worst client", "best client"], method], [row, row], ".", color=style.color)
    label_rows(axes, table.columns.tolist(), 20)
    if is_share(summary.metric):
        axes.set_xlim(-2, 102)
    handles = {
        "worst and best client": Line2D([], [], linestyle="", marker=".", color=INK),
        "5 to 95 % of clients": Line2D([], [], color=INK, linewidth=1.4),
        "25 to 75 %": Line2D([], [], color=INK, linewidth=7, alpha=0.5),
        "median": Line2D([], [], linestyle="", marker="|", color=INK, markersize=10, markeredgewidth=1.6),
    }
    spec = difference_unit(summary.metric).spec
    over = "means over seeds" if len(summary.seeds) > 1 else "one seed"
    add_legend(figure, handles, f"{len(summary.clients):,} clients, {over}")
    ends = "; ".join(
        "{} from {} to {}, median {}".format(
            method, *(format_mean(row[name], number=spec) for name in ("worst client", "best client", "median"))
        )
        for method, row in table.items()
    )
    caption = f"Test {summary.metric_name} of {len(summary.clients):,} clients at the reported round ({over})."
    return FigurePanel(name=f"{name_files(summary)}-clients", figure=figure, description=f"{caption} {ends}.")


def _draw_calibration(summary: RunSummary) -> Iterator[FigurePanel]:
    """Draw the share of positive samples by their score, where results of single samples are recorded."""
    positive = find_positive(summary, None)
    what = "highest score" if positive is None else f"score of {name_classes(summary)[positive]}"
    share = "share that is right" if positive is None else "share that is positive"
    figure, axes = make_panel("Calibration", f"{what} (mean of a bin)", share)
    handles: dict[str, Any] = {}
    points: list[tuple[float, float, str]] = []
    for method, style in make_styles(summary.methods).items():
        bins = bin_calibration(summary, method, positive)
        if bins.empty:
            continue
        binned = list(bins[["score", "share", "count"]].dropna().itertuples(index=False, name=None))
        axes.plot(bins["score"].dropna(), bins["share"].dropna(), **style.line | {"markersize": 4})
        handles[method] = make_legend_entry(style)
        points += [(x, y, f"{method}: {y:.2f} of {n:,} where the score is {x:.2f}") for x, y, n in binned]
    if not handles:
        return
    axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    note = "straight line: scores that are probabilities"
    add_legend(figure, handles, note)
    description = (
        f"{share.capitalize()} by {what}, test samples of all clients and seeds ({note}): {', '.join(handles)}."
    )
    yield FigurePanel(name="calibration", figure=figure, description=description, points=points, note=note)


def _draw_residuals(summary: RunSummary) -> Iterator[FigurePanel]:
    """Draw errors of the first target by its value, where errors of single samples are recorded."""
    reported = find_reported_rounds(summary)
    figure, axes = make_panel("Residuals", "target (mean of a tenth of the samples)", "prediction minus target")
    handles: dict[str, Any] = {}
    points: list[tuple[float, float, str]] = []
    for method, style in make_styles(summary.methods).items():
        cases = [summary.read_cases(method, seed) for seed in summary.seeds if (method, seed) in reported.index]
        held = [
            np.stack([records["target"][:, 0], records["error"][:, 0]])
            for each in cases
            if each is not None
            for (_, model), records in each.records.items()
            if model == "personal" and "error" in records
        ]
        if not held:
            continue
        target_N, error_N = np.concatenate(held, axis=1)
        parts = np.array_split(np.argsort(target_N, kind="stable"), min(TENTHS, len(target_N)))
        binned = [(float(target_N[part].mean()), float(error_N[part].mean())) for part in parts]
        low, high = zip(*(np.quantile(error_N[part], SPREAD) for part in parts), strict=True)
        at, mean = zip(*binned, strict=True)
        axes.plot(at, mean, **style.line | {"markersize": 4})
        axes.fill_between(at, low, high, color=style.color, alpha=0.14, linewidth=0)
        handles[method] = make_legend_entry(style)
        points += [(x, y, f"{method}: {format_signed(y, 3)} at {x:.4g}") for x, y in binned]
    if not handles:
        return
    axes.axhline(0, color=INK, linewidth=0.8)
    note = "lines: mean errors of tenths of the samples; bands: 80 % of the errors"
    add_legend(figure, handles, note)
    description = f"Errors by target, test samples of all clients and seeds ({note}): {', '.join(handles)}."
    yield FigurePanel(name="residuals", figure=figure, description=description, points=points, note=note)


def _draw_benefit(summary: RunSummary) -> Iterator[FigurePanel]:
    """Draw the decision curve of a task of two classes."""
    positive = find_positive(summary, None)
    tables = {} if positive is None else {name: tabulate_benefit(summary, name, positive) for name in summary.methods}
    tables = {name: table for name, table in tables.items() if len(table)}
    if not tables:
        return
    figure, axes = make_panel("Decision curve", "threshold probability", "net benefit")
    handles: dict[str, Any] = {}
    points: list[tuple[float, float, str]] = []
    styles = make_styles(summary.methods)
    for method, table in tables.items():
        axes.plot(table.index, table["method"], **styles[method].line | {"marker": "", "linewidth": 1.4})
        handles[method] = make_legend_entry(styles[method])
        marked = list(zip(table.index.tolist(), table["method"].tolist(), strict=True))[9::10]
        points += [(at, benefit, f"{method}, {at:g}: {benefit:.3f}") for at, benefit in marked]
    every = next(iter(tables.values()))["all"]
    axes.plot(every.index, every, color=INK, linewidth=0.8, linestyle="--")
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(xlim=(0, 1), ylim=(-0.05, max(0.05, 1.1 * float(every.max()))))
    note = "dashed: all called positive, at 0: none"
    add_legend(figure, handles, note)
    description = f"Net benefit by threshold probability, test samples of all clients ({note}): {', '.join(handles)}."
    yield FigurePanel(name="decision-curve", figure=figure, description=description, points=points, note=note)


def _draw_survival(summary: RunSummary) -> Iterator[FigurePanel]:
    """Draw Kaplan-Meier curves of thirds of the test patients by predicted risk, a panel for each method."""
    for method in summary.methods:
        curves = estimate_thirds(summary, method)
        if not curves:
            continue
        figure, axes = make_panel(f"Survival: {method}", "time", "share without an event")
        handles: dict[str, Any] = {}
        points: list[tuple[float, float, str]] = []
        for name, curve in curves.items():
            style = make_style(0, _RISKS[name])
            time = [0.0, *curve.index]
            share, low, high = ([1.0, *curve[name]] for name in ("share", "low", "high"))
            line = style.line | {"marker": ""}
            axes.step(time, share, where="post", **line)
            axes.fill_between(time, low, high, step="post", color=style.color, alpha=0.14, linewidth=0)
            handles[name] = Line2D([], [], **line)
            marked = curve[["share", "at_risk"]].itertuples(name=None)
            points += [(at, value, f"{name}, {at:g}: {100 * value:.1f} % of {n:,} at risk") for at, value, n in marked]
        axes.set(xlim=(0, None), ylim=(0, 1.02))
        note = "test patients in thirds by predicted risk; bands: 95 % intervals"
        add_legend(figure, handles, note)
        slug = to_file_name(method)
        description = f"Kaplan-Meier curves of {method}: {note}."
        yield FigurePanel(name=f"survival-{slug}", figure=figure, description=description, points=points)
