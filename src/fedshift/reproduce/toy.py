"""FedBN's toy example (Li et al. 2021, arXiv:2102.07623, figures 1 and 2): f_w(x) = cos(w x) on two clients.

Inputs are ``x = deviation * z`` with content z ~ N(0, 1); BatchNorm, simplified, divides x by its deviation on the
client. The paper does not specify whether labels depend on content or on the input. Figure 1 needs ``cos(z) + noise``:
the clients' best w differ, and agree once x is normalized. Figure 2 needs ``cos(x) + noise`` with the model
``cos(w gamma x / deviation)``: the best gamma is each client's own deviation, and an averaged gamma fits neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import BoundaryNorm
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ..data.datasets.synthetic import CLIENTS, cosines
from ..report.figures import FigurePanel
from ..report.style import INK, PAPER, add_legend, make_panel

Floats = NDArray[np.float64]
W, GAMMA = np.linspace(0, 3, 301), np.linspace(0, 4, 301)
_LOOKS = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"))  # color, marker and line
_ERRORS = (0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.6)  # contours of figure 2, closer together where the model is good


class ToyLosses(NamedTuple):
    """Mean squared errors of both clients: ``raw`` and ``normalized`` [2, W], ``surfaces`` [2, GAMMA, W].

    ``scales`` [2, GAMMA] are the surfaces at the labels' w, 1.
    """

    raw: Floats
    normalized: Floats
    surfaces: Floats
    scales: Floats


def compute_toy(seed: int) -> ToyLosses:
    """Compute the losses on 500 samples of each client, for every ``W`` and ``GAMMA``."""
    products = np.linspace(0, W[-1] * GAMMA[-1], 1204)  # the loss depends only on w gamma
    rows = []
    by_content, by_input = (cosines(labels=labels, seed=seed).clients for labels in ("content", "input"))
    for content, other in zip(by_content, by_input, strict=True):
        x, y = content.train.x[:, 0].double().numpy(), content.train.y[:, 0].numpy()
        along = _compute_losses(products, x / x.std(), other.train.y[:, 0].numpy())
        surface = np.interp(np.outer(GAMMA, W), products, along)
        rows.append(
            (_compute_losses(W, x, y), _compute_losses(W, x / x.std(), y), surface, surface[:, W.searchsorted(1)])
        )
    return ToyLosses(*map(np.stack, zip(*rows, strict=True)))


def _compute_losses(w: Floats, x: Floats, y: Floats) -> Floats:
    losses: Floats = np.square(np.cos(np.outer(w, x)) - y).mean(axis=1)
    return losses


def compare_with_mean(grid: Floats, losses: Floats) -> tuple[Floats, float, Floats]:
    """Return each client's best value on ``grid`` for its row of ``losses``, their mean, and the losses at the mean."""
    best = grid[losses.argmin(axis=1)]
    mean = float(best.mean())
    return best, mean, np.array([np.interp(mean, grid, row) for row in losses])


def draw_toy_panels(toy: ToyLosses) -> Iterator[FigurePanel]:
    """Draw figures 1 (both clients' losses over w, raw and normalized) and 2 (the second client's over w and gamma)."""
    top = 1.05 * max(toy.raw.max(), toy.normalized.max())
    yield _draw_frequencies("toy-raw", "Toy: as each client sees x", toy.raw, top)
    yield _draw_frequencies("toy-normalized", "Toy: x normalized on each client", toy.normalized, top)
    yield _draw_surface(toy)


def _draw_frequencies(name: str, title: str, losses: Floats, top: float) -> FigurePanel:
    figure, axes = make_panel(title, "w", "mean squared error")
    handles: dict[str, Any] = {}
    best, mean, left = compare_with_mean(W, losses)
    axes.axvline(mean, color=INK, linewidth=0.8, linestyle=":")
    for client, (deviation, (color, marker, dashes)) in enumerate(zip(CLIENTS.values(), _LOOKS, strict=True)):
        (line,) = axes.plot(W, losses[client], color=color, linestyle=dashes)
        handles[f"client with deviation {deviation:g}"] = line
        axes.plot(best[client], losses[client].min(), color=color, marker=marker)
        axes.plot(mean, left[client], color=PAPER, marker=marker, markeredgecolor=color)
    axes.set_ylim(-0.04, top)
    handles["mean of both best w"] = Line2D([], [], color=INK, linestyle=":", linewidth=0.8)
    add_legend(figure, handles, "marks: at the best w, hollow: at the mean")
    text = f"{title}: best w {best[0]:.2f} and {best[1]:.2f}; losses at their mean {left[0]:.3f}, {left[1]:.3f}."
    return FigurePanel(name=name, figure=figure, description=text)


def _draw_surface(toy: ToyLosses) -> FigurePanel:
    best, mean, (_, averaged) = compare_with_mean(GAMMA, toy.scales)
    figure, axes = make_panel(f"Toy: client with deviation {CLIENTS['wide']:g}", "w", "gamma")
    grid = W[::3], GAMMA[::3], toy.surfaces[1, ::3, ::3]  # a smaller file
    shown = axes.contourf(*grid, levels=_ERRORS, norm=BoundaryNorm(_ERRORS, 256), cmap="cividis")
    axes.contour(*grid, levels=_ERRORS, colors="white", linewidths=0.5)
    figure.colorbar(shown, ax=axes, label="mean squared error", ticks=_ERRORS, format="%g")
    axes.grid(visible=False)
    pairs, handles = ((best[1], toy.scales[1].min()), (mean, averaged)), {}
    for name, (gamma, left), (_, marker, _) in zip(("own", "averaged"), pairs, _LOOKS, strict=True):
        (line,) = axes.plot(1, gamma, marker, color=PAPER, markersize=8, markeredgecolor=INK)
        handles[f"{name} gamma {gamma:.2f}: error {left:.3f}"] = line
    add_legend(figure, handles, "at w = 1, that of both clients and of their mean")
    (own, least), _ = pairs
    text = (
        f"Error of one client over w and gamma. At the true w it is {least:.3f} with the client's own gamma {own:.2f} "
        f"and {averaged:.3f} with both clients' mean {mean:.2f}."
    )
    return FigurePanel(name="toy-surface", figure=figure, description=text)
