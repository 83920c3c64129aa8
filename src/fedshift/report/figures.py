"""Figures: small panels, about 4 x 3 inches each, so that they stay legible on a phone and in a column of a paper.

Lines are means over seeds and bands run from the lowest to the highest seed; error bars are one sample standard
deviation over seeds. Test data are the personal model's, just after aggregation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..analysis.statistics import mean_and_std
from ..results.schema import PICTURED, RunSummary
from .claims import difference_table
from .formatting import format_bytes, format_signed
from .style import INK, add_legend, figure_settings, legend_entry, make_panel, method_styles, shorten
from .tables import ONE_BY_ONE, QUANTILES, accuracy_table, find_reported_rounds, metric_history

LOW = 0.05
"""Share of many clients that are worse off than the quantile that is followed over rounds."""
_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True, kw_only=True)
class FigurePanel:
    """One figure with its file name and, for those who do not see it, a description."""

    name: str
    figure: Figure
    description: str


def make_figures(study: RunSummary) -> dict[str, Figure]:
    """Every figure that the study has data for, by file name; ``samples`` shows a few images of each client."""
    made = {panel.name: panel.figure for panel in make_panels(study)}
    return made | {"samples": _draw_samples(study)} if study.samples else made


def save_figures(study: RunSummary, directory: Path) -> list[Path]:
    """Write every figure as SVG (the same bytes for the same records) and as PNG at 200 dpi; return the paths."""
    return save_each(make_figures(study), directory)


def save_each(figures: Mapping[str, Figure], directory: Path) -> list[Path]:
    """Write each figure under its name, as SVG and as PNG at 200 dpi; return the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        vector, bitmap = directory / f"{name}.svg", directory / f"{name}.png"
        vector.write_text(to_svg(figure, background="white", dpi=200), encoding="utf-8")
        with figure_settings():
            figure.savefig(bitmap, dpi=200, metadata={"Software": None})
        paths += [vector, bitmap]
    return paths


def to_svg(figure: Figure, background: str = "none", dpi: float | Literal["figure"] = "figure") -> str:
    """The figure as SVG text, without date; text stays text; ``dpi``: of images in it."""
    buffer = StringIO()
    with figure_settings():
        figure.savefig(buffer, format="svg", facecolor=background, dpi=dpi, metadata=_METADATA)
    return buffer.getvalue()


def make_panels(study: RunSummary) -> list[FigurePanel]:
    """All panels: macro accuracy, differences, training loss, traffic, one for each client, and bars for all.

    Of more than :data:`~fedshift.report.tables.ONE_BY_ONE` clients, the last two show the distribution instead. Where a
    method pools all data (see ``report.concordance``), the macro test loss is drawn too.
    """
    with figure_settings():
        return list(_make_panels(study))


def _make_panels(study: RunSummary) -> Iterator[FigurePanel]:
    tested = metric_history(study)
    trained = metric_history(study, "loss", model=None, split="train", moment="trained")
    many = len(study.clients) > ONE_BY_ONE
    clients = [] if many else list(study.clients)[:PICTURED]
    if len(tested):
        yield _draw_curves(
            study, "accuracy-macro", "Mean over clients (macro)", _macro(tested), f"test {study.metric_name} (%)", 100
        )
        yield from _draw_differences(study)
    if len(trained):
        yield _draw_curves(study, "training-loss", "Training loss (macro)", _macro(trained), "cross-entropy (nats)", 1)
    if any(facts.pooled for facts in study.methods.values()) and len(tested):
        yield _draw_curves(
            study, "test-loss", "Test loss (macro)", _macro(metric_history(study, "loss")), "test loss (nats)", 1
        )
    if len(tested) and len(study.traffic):
        yield _draw_exchange(study, _macro(tested))
    for number, client in enumerate(clients, start=1):
        rows = tested[tested["client"] == client]
        if len(rows):
            slug = re.sub(r"[^a-z0-9]+", "-", client.lower()).strip("-")[:40]
            name = f"accuracy-client-{number:02d}-{slug}".rstrip("-")
            yield _draw_curves(study, name, client, rows, f"test {study.metric_name} (%)", 100)
    if len(tested) and many:
        low = tested.groupby(["method", "seed", "round"])["value"].quantile(LOW).reset_index()
        title = f"{100 * LOW:g} % quantile over clients"
        yield _draw_curves(study, "accuracy-low", title, low, f"test {study.metric_name} (%)", 100)
        yield _draw_spread(study)
    elif len(tested):
        yield _draw_bars(study, [*clients, "macro"])


def _draw_samples(study: RunSummary) -> Figure:
    shown = list(study.samples.items())[:PICTURED]
    across = max(len(images) for _, images in shown)
    with figure_settings():
        figure = Figure(figsize=(4, 0.48 * len(shown)), layout="constrained")
        grid = figure.subplots(len(shown), across, squeeze=False)
        for row, (client, images) in zip(grid, shown, strict=True):
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


def _draw_curves(study: RunSummary, name: str, title: str, rows: pd.DataFrame, label: str, scale: float) -> FigurePanel:
    figure, axes = make_panel(title, "round", label)
    handles: dict[str, Any] = {}
    ends = []
    for method, look in method_styles(study).items():
        values = scale * rows.loc[rows["method"] == method].groupby("round")["value"].agg(["mean", "min", "max"])
        if values.empty:
            continue
        rounds = values.index.to_numpy()
        handles[method] = legend_entry(look)
        every = max(1, len(rounds) // 7)
        axes.plot(rounds, values["mean"], **look.line, markevery=(look.number % every, every))
        if len(rounds) > 1:
            axes.fill_between(rounds, values["min"], values["max"], color=look.color, alpha=0.14, linewidth=0)
        else:
            axes.vlines(rounds, values["min"], values["max"], color=look.color)
        ends.append(f"{method} {values['mean'].iloc[-1]:.2f} after round {rounds[-1]}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    spread = f"line: mean, band: lowest to highest of {len(study.seeds)} seeds" if len(study.seeds) > 1 else "one seed"
    add_legend(figure, handles, spread)
    caption = f"{title}: {label} over rounds ({spread})."
    return FigurePanel(name=name, figure=figure, description=f"{caption} {'; '.join(ends)}.")


def _draw_differences(study: RunSummary) -> Iterator[FigurePanel]:
    """Macro difference of each method to the baseline with its interval, where there are three seeds or more."""
    table = difference_table(study).dropna(subset=["low", "high"])
    if table.empty:
        return
    baseline, level = table["baseline"].iloc[0], f"{100 * table['level'].iloc[0]:g}%"
    label = f"macro {study.metric_name} above {shorten(baseline, 20)} (points)"
    figure, axes = make_panel("Difference to the baseline", label, "", 1.0 + 0.24 * len(table))
    styles = method_styles(study)
    for row, (method, found) in enumerate(table.iterrows()):
        look = styles[str(method)]
        axes.hlines(row, 100 * found["low"], 100 * found["high"], color=look.color, linewidth=1.6)
        axes.plot(100 * found["difference"], row, **look.line | {"markersize": 6.5})
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(table)), [shorten(str(method), 20) for method in table.index])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(len(table) - 0.4, -0.6)
    caption = f"Macro {study.metric_name} above {baseline} in points: mean over paired seeds, line: {level} interval."
    ends = "; ".join(f"{method} {format_signed(100 * value)}" for method, value in table["difference"].items())
    yield FigurePanel(name="difference", figure=figure, description=f"{caption} {ends}.")


def _draw_exchange(study: RunSummary, macro: pd.DataFrame) -> FigurePanel:
    """Macro accuracy against the bytes exchanged up to that round; a large marker at the reported round."""
    figure, axes = make_panel(
        f"{study.metric_name[0].upper()}{study.metric_name[1:]} against traffic",
        "bytes exchanged, all clients",
        f"macro test {study.metric_name} (%)",
    )
    traffic = study.traffic.sort_values("round")
    moved = (traffic["down"] + traffic["up"]).groupby([traffic["method"], traffic["seed"]]).cumsum()
    rows = macro.merge(traffic.assign(moved=moved), on=["method", "seed", "round"])
    chosen = rows.join(find_reported_rounds(study).rename("reported"), on=["method", "seed"])
    chosen = chosen[chosen["round"] == chosen["reported"]]
    handles: dict[str, Any] = {}
    ends = []
    for method, look in method_styles(study).items():
        values = rows.loc[rows["method"] == method].groupby("round")[["moved", "value"]].mean()
        marked = chosen[chosen["method"] == method]
        if marked.empty:
            continue
        (mean, std), moved_mean = mean_and_std(100 * marked["value"]), float(marked["moved"].mean())
        axes.plot(values["moved"], 100 * values["value"], **look.line | {"marker": "", "linewidth": 1})
        axes.errorbar(moved_mean, mean, None if math.isnan(std) else std, color=look.color, capsize=2, linewidth=1)
        axes.plot(moved_mean, mean, **look.line | {"markersize": 6.5})
        handles[method] = legend_entry(look)
        ends.append(f"{method} {mean:.2f} at {format_bytes(moved_mean)}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: format_bytes(count)))
    spread = (
        "line: mean over seeds; marker: reported round, ± std" if len(study.seeds) > 1 else "marker: reported round"
    )
    add_legend(figure, handles, spread)
    caption = f"Macro test {study.metric_name} against the bytes that all clients exchanged ({spread})."
    return FigurePanel(name="traffic", figure=figure, description=f"{caption} {'; '.join(ends)}.")


def _draw_bars(study: RunSummary, names: list[str]) -> FigurePanel:
    """Accuracy at the reported round: one group of bars for each client and the mean over clients."""
    table, styles = 100 * accuracy_table(study), method_styles(study)
    position = [*range(len(names) - 1), len(study.clients)]  # macro is the row below all clients
    thick = 0.8 / len(styles)
    height = max(1.8, len(names) * (0.3 + 0.06 * len(styles)))
    figure, axes = make_panel("At the reported round", f"test {study.metric_name} (%)", "", height)
    handles: dict[str, Any] = {}
    for method, look in styles.items():
        where = [row - 0.4 + thick * (look.number + 0.5) for row in range(len(names))]
        means, stds = (table[method][kind].iloc[position] for kind in ("mean", "std"))
        fill: dict[str, Any] = {"facecolor": look.color, "hatch": look.hatch, "edgecolor": "white", "linewidth": 0}
        handles[method] = axes.barh(where, means.fillna(0), thick, **fill)
        axes.hlines(where, means - stds, means + stds, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(names)), [shorten(name, 14) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set(xlim=(0, 100), ylim=(len(names) - 0.45, -0.55))
    spread = "bar: mean, line: ± std over seeds" if len(study.seeds) > 1 else "one seed"
    add_legend(figure, handles, spread)
    macro = table.xs("mean", axis=1, level="statistic").iloc[position[-1]]
    ends = "; ".join(f"{method} {value:.2f}" for method, value in macro.items())
    caption = f"Test {study.metric_name} of each client at the reported round ({spread})."
    return FigurePanel(name="accuracy-bars", figure=figure, description=f"{caption} Macro: {ends}.")


def _draw_spread(study: RunSummary) -> FigurePanel:
    """The distribution of many clients' accuracies at the reported round, a row for each method."""
    table = 100 * accuracy_table(study).iloc[len(study.clients) :].xs("mean", axis=1, level="statistic")
    figure, axes = make_panel(
        "Clients at the reported round", f"test {study.metric_name} (%)", "", 1.3 + 0.3 * len(table.T)
    )
    for row, (method, look) in enumerate(method_styles(study).items()):
        low, lower, median, upper, high = table.loc[list(QUANTILES), method]
        axes.hlines(row, low, high, color=look.color, linewidth=1.4)
        axes.hlines(row, lower, upper, color=look.color, linewidth=7, alpha=0.5)
        axes.plot(median, row, "|", color=INK, markersize=10, markeredgewidth=1.6)
        axes.plot(table.loc[["worst client", "best client"], method], [row, row], ".", color=look.color)
    axes.set_yticks(range(len(table.T)), [shorten(str(method), 20) for method in table.columns])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set(xlim=(-2, 102), ylim=(len(table.T) - 0.5, -0.5))
    handles = {
        "worst and best client": Line2D([], [], linestyle="", marker=".", color=INK),
        "5 to 95 % of clients": Line2D([], [], color=INK, linewidth=1.4),
        "25 to 75 %": Line2D([], [], color=INK, linewidth=7, alpha=0.5),
        "median": Line2D([], [], linestyle="", marker="|", color=INK, markersize=10, markeredgewidth=1.6),
    }
    over = "means over seeds" if len(study.seeds) > 1 else "one seed"
    add_legend(figure, handles, f"{len(study.clients):,} clients, {over}")
    ends = "; ".join(
        f"{method} from {found['worst client']:.2f} to {found['best client']:.2f}, median {found['median']:.2f}"
        for method, found in table.items()
    )
    caption = f"Test {study.metric_name} of {len(study.clients):,} clients at the reported round ({over})."
    return FigurePanel(name="accuracy-clients", figure=figure, description=f"{caption} {ends}.")
