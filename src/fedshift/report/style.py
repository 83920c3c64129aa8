"""Style of figures: matplotlib's settings, the empty panel, its legend, and each method's color, marker and line style.

Colors are Okabe and Ito's, "Color Universal Design" (2008), distinct under all common forms of color blindness; their
yellow is omitted because it vanishes on white. Five more follow, the farthest from all before them in CIELAB, also as
deuteranopes and protanopes see them (Machado et al. 2009, doi:10.1109/TVCG.2009.113). Markers and line styles differ
too, so that print needs no color.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any
from warnings import catch_warnings, filterwarnings

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

INK, GRID, PAPER = "#1f2733", "#d9dee6", "#fefefe"  # pages replace them by their own colors
BLUE = "#0072b2"
_COLORS = (
    BLUE, "#d55e00", "#009e73", "#cc79a7", INK, "#e69f00", "#56b4e9", "#6611ff", "#bb2233", "#5577ff",
    "#aabb66", "#665566",
)  # fmt: skip
WITH_COLOR = ("fedavg", "fedbn", "single", "gn", "silobn", "fedwon", "fedprox", "centralized")
"""Methods that always have the first colors, in this order."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "p")
DASHES = ("-", "--", "-.", ":")
_SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "fedshift",
}


@dataclass(frozen=True, kw_only=True)
class MethodStyle:
    """Color, marker, line style and hatch of one method; ``number`` is its index in the figure."""

    number: int
    color: str
    marker: str
    dashes: str
    hatch: str

    @property
    def line(self) -> dict[str, Any]:
        """Keyword arguments for a line of this method."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.dashes}


def make_styles(names: Iterable[str]) -> dict[str, MethodStyle]:
    """Return a style for each of ``names``; no two of the first 48 share color and line style.

    The first of ``names`` that begins with one of :data:`WITH_COLOR` has the color of that method, on every page; the
    others have the next free ones.
    """
    listed = list(dict.fromkeys(names))
    first = {re.split(r"\W", name)[0]: name for name in reversed(listed)}
    looks = {first[method]: look for look, method in enumerate(WITH_COLOR) if method in first}
    others = [name for name in listed if name not in looks]
    colors, own = len(_COLORS), len(WITH_COLOR)
    order = chain(range(own, colors), range(own), range(colors, colors + len(listed)))
    looks |= zip(others, [look for look in order if look not in looks.values()], strict=False)
    return {name: make_style(number, looks[name]) for number, name in enumerate(listed)}


def make_style(number: int, look: int) -> MethodStyle:
    """Return the style of the method at index ``number`` of a figure with the colors, markers and lines of ``look``."""
    return MethodStyle(
        number=number,
        color=_COLORS[look % len(_COLORS)],
        marker=MARKERS[look % len(MARKERS)],
        dashes=DASHES[(look + look // len(_COLORS)) % len(DASHES)],
        hatch="" if look < len(_COLORS) else "//////",
    )


@contextmanager
def figure_settings() -> Iterator[None]:
    """Apply the settings above while figures are drawn or saved, without warnings on scripts that the font lacks."""
    with mpl.rc_context(_SETTINGS), catch_warnings():
        filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def make_panel(title: str, x_label: str, y_label: str, height: float = 3.0) -> tuple[Figure, Axes]:
    """Return an empty panel, 4 inches wide and ``height`` inches high."""
    figure = Figure(figsize=(4, height), layout="constrained")
    axes = figure.subplots()
    axes.set(title=shorten(title, 40), xlabel=x_label, ylabel=y_label)
    return figure, axes


def add_legend(figure: Figure, handles: Mapping[str, Any], title: str) -> None:
    """Add a legend below the panel, which grows by its height; ``title`` explains bands and error bars."""
    names = [shorten(name, 44) for name in handles]
    columns = max(1, min(len(names), 60 // (max(map(len, names), default=1) + 8)))
    figure.set_figheight(figure.get_figheight() + 0.16 * (1 - (-len(names) // columns)) + 0.1)
    figure.legend(list(handles.values()), names, loc="outside lower center", ncols=columns, title=title)


def remove_legend(figure: Figure) -> None:
    """Remove the legend that :func:`add_legend` added, and its height."""
    (legend,) = figure.legends
    rows = -(-len(legend.get_texts()) // legend._ncols)  # type: ignore[attr-defined]
    figure.set_figheight(figure.get_figheight() - 0.16 * (1 + rows) - 0.1)
    legend.remove()


def make_legend_entry(style: MethodStyle) -> Line2D:
    """Return a method's entry in a legend of lines."""
    return Line2D([], [], **style.line)


def label_rows(axes: Axes, names: Sequence[str], length: int, margin: float = 0.5) -> None:
    """Label the rows 0, 1, ... of a horizontal chart with ``names``, cut to ``length``, from top to bottom."""
    axes.set_yticks(range(len(names)), [shorten(name, length) for name in names])
    axes.set_ylim(len(names) - margin, margin - 1)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def shorten(text: str, length: int) -> str:
    """Return ``text`` on one line, of at most ``length`` characters: its beginning and its end, which may differ."""
    text, tail = " ".join(text.split()), (length - 1) // 2
    return text if len(text) <= length else f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def plot_band(axes: Axes, style: MethodStyle, values: pd.DataFrame) -> None:
    """Plot ``values`` by round: columns mean as a line, and min to max as a band or, of a single round, a bar."""
    rounds = values.index.to_numpy()
    every = max(1, len(rounds) // 7)
    axes.plot(rounds, values["mean"], **style.line, markevery=(style.number % every, every))
    if len(rounds) > 1:
        axes.fill_between(rounds, values["min"], values["max"], color=style.color, alpha=0.14, linewidth=0)
    else:
        axes.vlines(rounds, values["min"], values["max"], color=style.color)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
