"""Charts of clients' data: sheets of their images, their classes, and the features in which they differ most.

Up to :data:`NAMED` clients are labeled by name; more are sorted so that similar ones are adjacent, and many share a
line. The features have the largest f = (std of the clients' means) / (std within clients), Cohen (1988),
"Statistical Power Analysis for the Behavioral Sciences", equation 8.2.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

from .style import BLUE, GRID, figure_settings, shorten

NAMED = 24
"""Largest number of clients, or classes, that are labeled one by one."""
COLUMNS = 12
"""Largest number of images side by side; up to this number of classes, each class has a column."""
LINES = 150
"""Largest number of lines in a chart of many clients."""
FEATURES = 9

_SHADES = LinearSegmentedColormap.from_list("shades", ["#ffffff", "#cfe3f1", "#6fb0d8", BLUE, "#00344f"])
_CELL, _LEFT, _GAP = 0.46, 1.25, 0.3  # inches: an image with its margin, the clients' names; in cells: between clients


def pick_samples(y: NDArray[np.int64], *, per_class: int, total: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return indices of at most ``total`` samples of labels ``y`` ``[N]``, at most ``per_class`` of each, by class.

    Classes are represented evenly: none has two more than another that has samples left.
    """
    labels, y = np.unique(y, return_inverse=True)
    priority = rng.permutation(len(labels))  # of classes, if there is no room for all
    order = rng.permutation(len(y))
    rank = pd.Series(y[order]).groupby(y[order]).cumcount().to_numpy()  # within its class
    even = np.lexsort((priority[y[order]], rank))
    selected = order[even[rank[even] < per_class]][:total]
    return selected[np.argsort(y[selected], kind="stable")]


def contact_sheet(
    images: Mapping[str, NDArray[np.uint8]],
    labels: Mapping[str, Sequence[str]],
    classes: Sequence[str],
    title: str,
) -> Figure:
    """Return a figure with a block for each client of its ``images``, uint8 ``[n, H, W, C]`` with C 1 or 3.

    ``labels`` has one of ``classes`` for each image. Up to :data:`COLUMNS` classes have a column each; beyond, labels
    are printed above the images. Without ``classes``, ``labels`` are empty texts.
    """
    aligned = 0 < len(classes) <= COLUMNS
    columns = len(classes) if aligned else COLUMNS
    cells = {
        client: _arrange_by_class(labels[client], classes)
        if aligned
        else [divmod(n, columns) for n in range(len(stack))]
        for client, stack in images.items()
    }
    heads = max(map(len, classes), default=0) if aligned else 0
    slanted, caption = heads > 7, 0.3 if len(classes) > COLUMNS else 0.0
    rows = {client: 1 + max((row for row, _ in used), default=0) for client, used in cells.items()}
    high = sum(rows.values()) * (1 + caption) + _GAP * (len(rows) - 1)
    top = 0.35 + (0.045 * min(heads, 16) + 0.05 if slanted else 0.2 if aligned else 0.0)
    width, height = _LEFT + columns * _CELL + (0.5 if slanted else 0.1), top + high * _CELL + 0.1
    with figure_settings():
        figure = Figure(figsize=(width, height))
        figure.text(0.1 / width, 1 - 0.1 / height, shorten(title, 70), va="top", fontsize=9, fontweight="bold")
        axes = figure.add_axes((_LEFT / width, 0.1 / height, columns * _CELL / width, high * _CELL / height))
        for column, name in enumerate(classes if aligned else ()):
            turned: dict[str, Any] = {"rotation": 40, "ha": "left"} if slanted else {"ha": "center"}
            axes.text(column + (0.35 if slanted else 0.5), -0.12, shorten(name, 16), va="bottom", **turned)
        y = 0.0
        for client, stack in images.items():
            tall = rows[client] * (1 + caption)
            axes.text(-0.2, y + tall / 2, shorten(client, 18), ha="right", va="center", fontweight="bold")
            for column in sorted(set(range(columns if aligned else 0)) - {column for _, column in cells[client]}):
                axes.text(column + 0.5, y + 0.5, "none", ha="center", va="center", fontsize=6, color="#8a93a0")
            for image, (row, column), label in zip(stack, cells[client], labels[client], strict=True):
                bottom = y + (row + 1) * (1 + caption)
                _draw_image(axes, image, column, bottom)
                if not aligned:
                    axes.text(column + 0.5, bottom - 0.97, shorten(label, 10), ha="center", va="bottom", fontsize=5.5)
            y += tall + _GAP
        axes.set(xlim=(0, columns), ylim=(high, 0))
        axes.set_axis_off()
    return figure


def _arrange_by_class(labels: Sequence[str], classes: Sequence[str]) -> list[tuple[int, int]]:
    """Return row and column of each image: a column for each class, filled from the top."""
    filled = Counter[str]()
    cells = []
    for label in labels:
        cells.append((filled[label], list(classes).index(label)))
        filled[label] += 1
    return cells


def _draw_image(axes: Axes, image: NDArray[np.uint8], column: int, bottom: float) -> None:
    """Draw the image in its cell, a square of side 1 with a margin, in its proportions."""
    high, wide = (side / max(image.shape[:2]) * 0.46 for side in image.shape[:2])
    middle = bottom - 0.5
    left, top = column + 0.5 - wide, middle - high
    extent = (left, left + 2 * wide, top + 2 * high, top)
    axes.imshow(
        image[..., 0] if image.shape[2] == 1 else image, cmap="gray", vmin=0, vmax=255, extent=extent, aspect="auto"
    )
    axes.add_patch(Rectangle((left, top), 2 * wide, 2 * high, fill=False, edgecolor=GRID, linewidth=0.5))


def class_chart(counts: pd.DataFrame, title: str, unit: str = "samples") -> Figure:
    """Return a chart of the samples of each class (columns) that each client (rows) has.

    Up to :data:`NAMED` clients and classes are bubbles whose areas are the counts; more are shades of the share of the
    client's samples, as are counts in another ``unit`` (pixels).
    """
    with figure_settings():
        bubbles = max(counts.shape) <= NAMED and unit == "samples"
        return _draw_bubbles(counts, title) if bubbles else _draw_shares(counts, title, unit)


def _draw_bubbles(counts: pd.DataFrame, title: str) -> Figure:
    clients, classes = counts.shape
    side = min(0.42, 5.2 / classes)  # of a cell, inches
    figure, axes, totals = _add_side_panel(counts, title, side * classes, max(side, 0.24) * clients)
    biggest = int(counts.to_numpy().max())
    diameter = 72 * 0.84 * side  # points, of the biggest count

    def area(count: Any) -> Any:
        return diameter**2 * np.asarray(count) / max(biggest, 1)

    rows, columns = np.nonzero(counts.to_numpy())
    axes.scatter(columns, rows, s=area(counts.to_numpy()[rows, columns]), color=BLUE, linewidth=0)
    axes.set(xlim=(-0.5, classes - 0.5), ylim=(clients - 0.5, -0.5))
    _name_axis(axes, counts)
    totals.barh(range(clients), counts.sum(axis=1), height=0.6, color=GRID)
    for row, total in enumerate(counts.sum(axis=1)):
        totals.text(0, row, f" {total:,}", va="center")
    sizes = sorted({size for share in (0.6, 0.2, 0.05) if (size := int(float(f"{share * biggest:.0e}")))})
    dots = [Line2D([], [], ls="", marker="o", color=BLUE, markeredgewidth=0, ms=area(size) ** 0.5) for size in sizes]
    figure.legend(
        dots, [f"{size:,}" for size in sizes], loc="outside lower center", ncols=len(sizes), title="samples of a class",
        handleheight=diameter / 8, handlelength=diameter / 8,
    )  # fmt: skip
    return figure


def _draw_shares(counts: pd.DataFrame, title: str, unit: str) -> Figure:
    clients, classes = counts.shape
    named = clients <= NAMED
    table = counts
    if not named:  # sorted by main class, and by its share
        values = counts.to_numpy()
        share_N = values.max(axis=1) / np.maximum(values.sum(axis=1), 1)
        table = counts.iloc[np.lexsort((-share_N, values.argmax(axis=1)))]
    lines = np.array_split(np.arange(clients), min(clients, LINES))
    total_N = table.sum(axis=1).to_numpy()
    share_NC = table.to_numpy() / np.maximum(total_N, 1)[:, None]
    share_LC = np.stack([share_NC[line].mean(axis=0) for line in lines])
    width, height = min(5.2, 0.3 * classes + 1), 0.24 * clients if named else 3.6
    figure, axes, totals = _add_side_panel(counts, title, width, height, unit)
    extent = (-0.5, classes - 0.5, clients - 0.5, -0.5)
    shades = axes.imshow(share_LC, cmap=_SHADES, norm=PowerNorm(0.5, 0, 1), extent=extent, aspect="auto")
    shades.set_interpolation("nearest")
    axes.grid(visible=False)
    _name_axis(axes, table)
    middle = np.array([line.mean() for line in lines])
    if named:
        totals.barh(middle, total_N, height=0.6, color=GRID)
        for row, total in enumerate(total_N):
            totals.text(0, row, f" {total:,}", va="center")
    else:
        axes.set_ylabel(f"{clients:,} clients, sorted by their main class")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        totals.tick_params(bottom=True, labelbottom=True)
        totals.xaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
        totals.fill_betweenx(
            middle, 0, [total_N[line].mean() for line in lines], color=BLUE, alpha=0.35, lw=0, step="mid"
        )
        totals.set_xlim(left=0)
    bar = figure.colorbar(shades, ax=axes, location="bottom", shrink=0.7, aspect=30, ticks=[0, 0.05, 0.2, 0.5, 1])
    bar.ax.xaxis.set_major_formatter(PercentFormatter(1))
    bar.outline.set_visible(False)
    mean = f" (a line: mean of {round(clients / len(lines))} clients)" if len(lines) < clients else ""
    bar.set_label(f"share of the client's {unit}{mean}")
    return figure


def _add_side_panel(
    counts: pd.DataFrame, title: str, width: float, height: float, unit: str = "samples"
) -> tuple[Figure, Axes, Axes]:
    """Return a panel of about ``width`` x ``height`` inches, and a panel next to it for the clients' samples."""
    margin = 0.25 + (0.07 * max(len(shorten(str(name), 18)) for name in counts.index) if len(counts) <= NAMED else 0.6)
    heads = max(len(shorten(str(name), 16)) for name in counts.columns) if counts.shape[1] <= NAMED else 1
    below = 1.65 + (0.045 * heads if heads > 3 else 0)
    figure = Figure(figsize=(max(margin + width + 1.0, 3.4), height + below), layout="constrained")
    axes, totals = figure.subplots(1, 2, sharey=True, width_ratios=(width, 0.9))
    figure.suptitle(shorten(title, 60), x=0.02, ha="left", fontsize=9, fontweight="bold")
    totals.set_title(unit, fontweight="normal", fontsize=8)
    totals.grid(visible=False)
    totals.spines[:].set_visible(False)
    totals.tick_params(left=False, bottom=False, labelbottom=False)
    return figure, axes, totals


def _name_axis(axes: Axes, counts: pd.DataFrame) -> None:
    """Label clients and classes where there is room for them."""
    axes.set_xlabel("class")
    axes.tick_params(length=0)
    if len(counts) <= NAMED:
        axes.set_yticks(range(len(counts)), [shorten(str(name), 18) for name in counts.index])
    if counts.shape[1] <= NAMED:
        names = [shorten(str(name), 16) for name in counts.columns]
        turned: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(names)), names, **(turned if max(map(len, names)) > 3 else {}))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))


def feature_chart(means: pd.DataFrame, stds: pd.DataFrame, title: str) -> Figure:
    """Return a chart of each client's (rows) mean and std of the features (columns) in which clients differ most.

    Clients beyond :data:`NAMED` are lines: their means in ascending order, and a band of one standard deviation.
    """
    effects = effect_size(means, stds)
    features = effects.sort_values(ascending=False, kind="stable").index[:FEATURES]
    named, across = len(means) <= NAMED, min(3, len(features))
    down = -(-len(features) // across)
    panel = 0.55 + 0.15 * len(means) if named else 1.6
    with figure_settings():
        figure = Figure(figsize=(1.0 + 2.0 * across, 0.4 + down * panel + 0.4), layout="constrained")
        figure.suptitle(shorten(title, 70), x=0.02, ha="left", fontsize=9, fontweight="bold")
        grid = figure.subplots(down, across, squeeze=False, sharey=named)
        for axes, name in zip(grid.flat, features, strict=False):
            axes.set_title(f"{shorten(str(name), 20)}  (f = {effects[name]:.2f})", fontweight="normal")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
            if named:
                rows = range(len(means))
                axes.errorbar(means[name], rows, xerr=stds[name], ls="", marker="o", color=BLUE, elinewidth=1.1)
                axes.set_yticks(rows, [shorten(str(client), 18) for client in means.index])
                axes.set_ylim(len(means) - 0.5, -0.5)
                axes.tick_params(axis="y", length=0)
            else:
                order = means[name].argsort()
                mean, std = means[name].iloc[order].to_numpy(), stds[name].iloc[order].to_numpy()
                axes.plot(mean, color=BLUE)
                axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
                axes.fill_between(range(len(mean)), mean - std, mean + std, color=BLUE, alpha=0.14, linewidth=0)
        for axes in grid.flat[len(features) :]:
            axes.set_axis_off()
        marks = "dot: mean" if named else f"line: means of {len(means):,} clients, ascending"
        figure.supxlabel(f"{marks}; ± standard deviation within the client; f: spread of the means over it", fontsize=8)
    return figure


def effect_size(means: pd.DataFrame, stds: pd.DataFrame) -> pd.Series:
    """Return Cohen's f of each feature: standard deviation of the clients' means over the pooled one within clients."""
    between, within = means.std(ddof=0), np.sqrt((stds**2).mean())
    f: pd.Series = (between / within).where(between > 0, 0.0)
    return f
