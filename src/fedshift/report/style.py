"""How figures look: matplotlib's settings, the empty panel, its legend, and one color, marker and line style a method.

Colors are Okabe and Ito's, "Color Universal Design" (2008), told apart under all common forms of color blindness; their
yellow is left out because it vanishes on white. Markers and line styles differ too, so that print needs no color.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from warnings import catch_warnings, filterwarnings

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..results.schema import RunSummary

INK, GRID = "#1f2733", "#d9dee6"  # the page replaces both by its own colors
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", INK, "#e69f00", "#56b4e9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")
_DASHES = ("-", "--", "-.", ":")
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
    "svg.hashsalt": "fedshift",
}


@dataclass(frozen=True, kw_only=True)
class MethodStyle:
    """Color, marker, line style and hatch of one method; ``number`` is its place in the study."""

    number: int
    color: str
    marker: str
    dashes: str
    hatch: str

    @property
    def line(self) -> dict[str, Any]:
        """Keyword arguments of a line of this method."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.dashes}


def method_styles(study: RunSummary) -> dict[str, MethodStyle]:
    """Each method's look: the same in every figure; no two of the first 28 share color and line style."""
    return make_styles(study.methods)


def make_styles(names: Iterable[str]) -> dict[str, MethodStyle]:
    """A look for each of ``names``, by its place among them."""
    return {
        name: MethodStyle(
            number=number,
            color=_COLORS[number % len(_COLORS)],
            marker=_MARKERS[number % len(_MARKERS)],
            dashes=_DASHES[number % len(_DASHES)],
            hatch="" if number < len(_COLORS) else "//////",
        )
        for number, name in enumerate(names)
    }


@contextmanager
def figure_settings() -> Iterator[None]:
    """The settings above, for making and for saving figures; names in any script pass without a font warning."""
    with mpl.rc_context(_SETTINGS), catch_warnings():
        filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def make_panel(title: str, x_label: str, y_label: str, height: float = 3.0) -> tuple[Figure, Axes]:
    """An empty panel, 4 inches wide and ``height`` inches high."""
    figure = Figure(figsize=(4, height), layout="constrained")
    axes = figure.subplots()
    axes.set(title=shorten(title, 40), xlabel=x_label, ylabel=y_label)
    return figure, axes


def add_legend(figure: Figure, handles: Mapping[str, Any], title: str) -> None:
    """A legend below the panel, which grows by its height; ``title`` says what bands and error bars are."""
    names = [shorten(name, 44) for name in handles]
    columns = max(1, min(len(names), 60 // (max(map(len, names), default=1) + 8)))
    figure.set_figheight(figure.get_figheight() + 0.16 * (1 - (-len(names) // columns)) + 0.1)
    figure.legend(list(handles.values()), names, loc="outside lower center", ncols=columns, title=title)


def legend_entry(look: MethodStyle) -> Line2D:
    """A method's entry in a legend of lines."""
    return Line2D([], [], **look.line)


def shorten(text: str, length: int) -> str:
    """``text`` on one line, cut to ``length`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"
