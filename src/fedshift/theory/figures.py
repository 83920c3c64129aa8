"""Figures of ``fedshift theory``, in the reports' style."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from ..report.figures import FigurePanel, save_each
from ..report.style import INK, PAPER, MethodStyle, add_legend, figure_settings, make_legend_entry, make_panel
from . import TheoryResults
from .checks import DEVIATIONS, METHODS, TRUE, ToyExample

_LOOKS = tuple(
    MethodStyle(number=number, color=color, marker=marker, dashes=dashes, hatch="")
    for number, (color, marker, dashes) in enumerate(
        (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", "-."))
    )
)

_ERRORS = (0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.6)
"""Mean squared errors where figure 2 changes its color: closer together where the model is good."""


def save_panels(found: TheoryResults, directory: Path) -> list[Path]:
    """Write every figure as SVG and PNG; return the paths."""
    return save_each({panel.name: panel.figure for panel in draw_panels(found)}, directory)


def draw_panels(found: TheoryResults) -> list[FigurePanel]:
    """Draw every figure, with a description."""
    with figure_settings():
        return [
            _draw_corollary(found),
            _draw_closing(found),
            _draw_training(found),
            _draw_widths(found),
            *draw_toy_panels(found.toy),
        ]


def _draw_corollary(found: TheoryResults) -> FigurePanel:
    pairs = found.corollary.magnitude
    count = len(pairs)
    figure, axes = make_panel("Corollary 4.6", "lambda_min of G_inf (FedAvg)", "lambda_min of G*_inf (FedBN)")
    axes.scatter(pairs[:, 0], pairs[:, 1], s=4, color=_LOOKS[0].color, alpha=0.5, linewidth=0, rasterized=count > 2000)
    ends = [pairs.min(), pairs.max()]
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    _set_log_axes(axes, "xy")
    below = found.corollary.count_violations(pairs)
    dot = Line2D([], [], color=_LOOKS[0].color, marker="o", linestyle="")
    handles = {f"{count:,} random federations": dot, "equal": Line2D([], [], color=INK, linewidth=0.8)}
    add_legend(figure, handles, f"{below} below the line")
    return FigurePanel(
        name="corollary",
        figure=figure,
        description=f"Least eigenvalue of FedBN's expected Gram matrix against FedAvg's in {count:,} random "
        f"federations: {below} of them are below the diagonal.",
    )


def _draw_closing(found: TheoryResults) -> FigurePanel:
    turned = found.closing
    figure, axes = make_panel(
        "An input turns towards another", "angle to another client's input (radians)", "lambda_min"
    )
    handles = {}
    for name, values, look in (
        ("FedBN, S proportional", turned.local, _LOOKS[2]),
        ("FedAvg, S of other shape", turned.different, _LOOKS[1]),
        ("FedAvg, S proportional", turned.full, _LOOKS[0]),
    ):
        axes.plot(turned.angle, values, **look.line, markevery=(look.number, 4))
        handles[name] = make_legend_entry(look)
    _set_log_axes(axes, "xy")
    add_legend(figure, handles, "both clients' other inputs stay")
    description = (
        f"As an input of one client turns to within {turned.angle[-1]:g} radians of one of another, FedAvg's least "
        f"eigenvalue falls to {turned.full[-1]:.1e} where covariances are proportional and to "
        f"{turned.different[-1]:.1e} where they are not; FedBN's stays at {turned.local[-1]:.1e}."
    )
    return FigurePanel(name="parallel", figure=figure, description=description)


def _draw_training(found: TheoryResults) -> FigurePanel:
    figure, axes = make_panel(
        f"Training, {found.setting.width} neurons", "step", "squared residual, share of the start"
    )
    handles: dict[str, Any] = {}
    steps = np.arange(found.setting.steps + 1)
    every = max(1, len(steps) // 8)
    for course, look in zip(found.courses, _LOOKS, strict=True):
        axes.plot(steps, course.predicted, color=look.color, linewidth=1)
        axes.plot(steps, course.measured, color=look.color, marker=look.marker, linestyle="", markevery=every)
        handles[course.method] = Line2D([], [], color=look.color, marker=look.marker)
    for course, look in zip(found.courses[:2], _LOOKS, strict=False):
        axes.plot(steps, course.guarantee, color=look.color, linestyle=":", linewidth=1)
    handles["guaranteed"] = Line2D([], [], color=INK, linestyle=":", linewidth=1)
    _set_log_axes(axes, "y")
    add_legend(figure, handles, "marks: measured, lines: predicted from the start")
    ends = "; ".join(f"{course.method} {course.measured[-1]:.1e}" for course in found.courses)
    return FigurePanel(
        name="training",
        figure=figure,
        description=f"Share of the squared residual over {found.setting.steps} steps of gradient descent, measured and "
        f"predicted from Lambda at the start. At the end: {ends}.",
    )


def _draw_widths(found: TheoryResults) -> FigurePanel:
    figure, axes = make_panel("Wider networks follow the prediction", "neurons", "largest gap, share of the residual")
    neurons = [width.neurons for width in found.widths]
    handles = {}
    for method, look in zip(METHODS, _LOOKS, strict=True):
        axes.plot(neurons, [width.error[method] for width in found.widths], **look.line)
        handles[method] = make_legend_entry(look)
    _set_log_axes(axes, "xy")
    axes.set_xticks(neurons, [str(count) for count in neurons])
    add_legend(figure, handles, "")
    ends = "; ".join(f"{method} {found.widths[-1].error[method]:.1e}" for method in METHODS)
    return FigurePanel(
        name="widths",
        figure=figure,
        description=f"Largest gap between measured and predicted residual. With {neurons[-1]} neurons: {ends}.",
    )


def draw_toy_panels(seen: ToyExample) -> Iterator[FigurePanel]:
    """Draw FedBN's figures 1 (both clients' losses over w, raw and normalized) and 2 (one client's over w, gamma)."""
    for name, title, losses in (
        ("toy-raw", "Toy: as each client sees x", seen.raw),
        ("toy-normalized", "Toy: x normalized on each client", seen.normalized),
    ):
        figure, axes = make_panel(title, "w", "mean squared error")
        handles: dict[str, Any] = {}
        for deviation, row, look in zip(DEVIATIONS, losses, _LOOKS, strict=False):
            (handles[f"client with deviation {deviation:g}"],) = axes.plot(seen.w, row, **look.line | {"marker": ""})
        best, mean, left = seen.best_frequencies(losses)
        axes.axvline(mean, color=INK, linewidth=0.8, linestyle=":")
        for row, best_w, at_mean, look in zip(losses, best, left, _LOOKS, strict=False):
            axes.plot(best_w, row.min(), color=look.color, marker=look.marker)
            axes.plot(mean, at_mean, color=PAPER, marker=look.marker, markeredgecolor=look.color)
        axes.set_ylim(-0.04, 1.05 * max(seen.raw.max(), seen.normalized.max()))  # the same in both
        handles["mean of both best w"] = Line2D([], [], color=INK, linestyle=":", linewidth=0.8)
        add_legend(figure, handles, "marks: at the best w, hollow: at the mean")
        description = (
            f"{title}: best w {best[0]:.2f} and {best[1]:.2f}; losses at their mean {left[0]:.3f}, {left[1]:.3f}."
        )
        yield FigurePanel(name=name, figure=figure, description=description)
    best, mean, own, averaged = seen.best_scales()
    figure, axes = make_panel(f"Toy: client with deviation {DEVIATIONS[1]:g}", "w", "gamma")
    coarse = slice(None, None, 3)  # a smaller file
    grid = seen.w[coarse], seen.gamma[coarse], seen.surfaces[1][coarse, coarse]
    shown = axes.contourf(*grid, levels=_ERRORS, norm=BoundaryNorm(_ERRORS, 256), cmap="cividis")
    axes.contour(*grid, levels=_ERRORS, colors="white", linewidths=0.5)
    figure.colorbar(shown, ax=axes, label="mean squared error", ticks=_ERRORS, format="%g")
    axes.grid(visible=False)
    handles = {}
    for name, gamma, left, look in (
        ("own gamma", best[1], own[1], _LOOKS[0]),
        ("averaged gamma", mean, averaged[1], _LOOKS[1]),
    ):
        axes.plot(TRUE, gamma, color=PAPER, marker=look.marker, markersize=8, markeredgecolor=INK, linestyle="")
        handles[f"{name} {gamma:.2f}: error {left:.3f}"] = Line2D(
            [], [], color=PAPER, marker=look.marker, markeredgecolor=INK, linestyle=""
        )
    add_legend(figure, handles, f"at w = {TRUE:g}, that of both clients and of their mean")
    yield FigurePanel(
        name="toy-surface",
        figure=figure,
        description=f"Error of one client over w and gamma. At the true w it is {own[1]:.3f} with the client's own "
        f"gamma {best[1]:.2f} and {averaged[1]:.3f} with both clients' mean {mean:.2f}.",
    )


def _set_log_axes(axes: Axes, which: str) -> None:
    """Make axes ("x", "y" or "xy") logarithmic with plain numbers: the reports' style never renders mathematics."""
    for letter in which:
        axes.set(**{f"{letter}scale": "log"})
        axis = axes.xaxis if letter == "x" else axes.yaxis
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
