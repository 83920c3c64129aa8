"""Pictures like FedWon's figures 12 and 13: BatchNorm statistics by channel, and feature maps side by side.

Both show the first seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ..analysis.similarity import Reals
from ..report.figures import FigurePanel
from ..report.style import BLUE, INK, figure_settings, shorten
from ..results.run_directory import to_file_name
from .comparison import RepresentationComparison

SIDE = 3
"""Number of rows and of columns of maps for one convolution."""
_CELL = 1.15  # inches
_GAP = 2  # pixels between maps


def draw_panels(found: RepresentationComparison) -> Iterator[FigurePanel]:
    """Draw a picture of maps for each client, if samples are images, and of statistics for each BatchNorm layer."""
    with figure_settings():
        for number, (client, image) in enumerate(found.images.items(), start=1):
            if any(drawn.maps.get(client) for drawn in found.drawn.values()):
                yield _draw_maps(found, client, f"maps-{number:02d}-{to_file_name(client)[:40]}".rstrip("-"), image)
        layers = dict.fromkeys(layer for drawn in found.drawn.values() for layer in drawn.statistics)
        files = [to_file_name(layer) for layer in layers]
        for number, (layer, file) in enumerate(zip(layers, files, strict=True), start=1):
            yield _draw_statistics(found, layer, file if files.count(file) == 1 else f"{number:02d}-{file}")


def _draw_maps(found: RepresentationComparison, client: str, name: str, image: NDArray[np.generic]) -> FigurePanel:
    rows = {method: drawn.maps[client] for method, drawn in found.drawn.items() if drawn.maps.get(client)}
    layers = list(dict.fromkeys(layer for maps in rows.values() for layer in maps))
    size = (1.0 + _CELL * (1 + len(layers)), 0.45 + _CELL * len(rows))
    figure, grid = _make_grid(f"Feature maps for {shorten(client, 42)}", size, len(rows), 1 + len(layers))
    for axes, title in zip(grid[0], ("test image", *layers), strict=True):
        axes.set_title(shorten(title, 18), fontsize=8, fontweight="normal", loc="center")
    for line, (method, maps) in zip(grid, rows.items(), strict=True):
        line[0].text(-0.1, 0.5, shorten(method, 16), transform=line[0].transAxes, ha="right", va="center")
        line[0].imshow(_to_picture(image), cmap="gray", vmin=0, vmax=1, interpolation="none")
        for axes, layer in zip(line, ("", *layers), strict=True):
            axes.set_axis_off()
            if layer in maps:
                axes.imshow(tile_maps(maps[layer]), cmap="cividis", interpolation="none")
    description = (
        f"The first feature maps of {', '.join(layers)} for a test image of {client}, by its model under "
        f"{', '.join(rows)}. Each map is scaled from its least to its greatest value."
    )
    return FigurePanel(name=name, figure=figure, description=description)


def _make_grid(title: str, size: tuple[float, float], rows: int, columns: int) -> tuple[Figure, NDArray[np.object_]]:
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, x=0.02, ha="left", fontsize=9, fontweight="bold")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _to_picture(image: NDArray[np.generic]) -> NDArray[np.float64]:
    """Convert an image ``[C, H, W]`` to 0..1 for matplotlib, using its first channel unless there are three.

    8-bit pixels keep their scale; floating-point pixels are scaled from their minimum to their maximum.
    """
    scaled = image.astype(np.float64) / 255 if image.dtype == np.uint8 else _rescale(image)
    return scaled.transpose(1, 2, 0) if len(scaled) == 3 else scaled[0]


def tile_maps(maps: Reals) -> NDArray[np.float64]:
    """Tile the first maps of ``[C, H, W]`` in :data:`SIDE` rows and columns, each scaled to 0..1, with NaN between."""
    count, high, wide = min(len(maps), SIDE**2), *maps.shape[1:]
    tiles = np.full((SIDE * (high + _GAP) - _GAP, SIDE * (wide + _GAP) - _GAP), np.nan)
    for number in range(count):
        top, left = (high + _GAP) * (number // SIDE), (wide + _GAP) * (number % SIDE)
        tiles[top : top + high, left : left + wide] = _rescale(maps[number])
    return tiles


def _rescale(values: NDArray[np.generic]) -> NDArray[np.float64]:
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    scaled: NDArray[np.float64] = (numbers - low) / ((high - low) or 1.0)
    return scaled


def _draw_statistics(found: RepresentationComparison, layer: str, file: str) -> FigurePanel:
    """Draw a row of panels for each method: the first client's statistics against the second's and the server's."""
    rows = {method: drawn for method, drawn in found.drawn.items() if layer in drawn.statistics}
    first, *second = found.clients[:2]
    against = [*second, "server"]
    size = (0.9 + 3.2 * len(against), 0.7 + 1.6 * len(rows))
    figure, grid = _make_grid(f"Running statistics of {shorten(layer, 30)}", size, len(rows), 2 * len(against))
    for line, (method, drawn) in zip(grid, rows.items(), strict=True):
        server, clients = drawn.statistics[layer]
        others = [*(clients[name] for name in second), server]
        panels = [
            (kind, name, other) for kind in ("mean", "variance") for name, other in zip(against, others, strict=True)
        ]
        for axes, (kind, name, other) in zip(line, panels, strict=True):
            _draw_dots(axes, getattr(clients[first], kind), getattr(other, kind))
            axes.set_title(f"{kind}, {shorten(name, 12)}", fontsize=8, fontweight="normal")
        line[0].set_ylabel(shorten(method, 16), fontweight="bold")
    figure.supxlabel(f"across: {shorten(first, 20)}; upwards: the other; a dot: a channel; line: equal", fontsize=8)
    compared = f"{first} against {' and '.join(against)}"
    description = f"Running means and variances of {layer} by channel under {', '.join(rows)}: {compared}."
    return FigurePanel(name=f"batchnorm-{file}", figure=figure, description=description)


def _draw_dots(axes: Axes, x: Reals, y: Reals) -> None:
    low, high = min(x.min(), y.min()), max(x.max(), y.max())
    margin = 0.06 * (high - low or 1.0)
    ends = (low - margin, high + margin)
    axes.plot(ends, ends, color=INK, linewidth=0.6)
    axes.scatter(x, y, s=6, color=BLUE, alpha=0.7, linewidth=0)
    axes.set(xlim=ends, ylim=ends, aspect="equal")
    axes.locator_params(nbins=3)
