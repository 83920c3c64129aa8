"""HTML of all pages: templates, matplotlib's SVG as inline elements, and image samples as PNG in data URLs."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from functools import cache, partial
from io import BytesIO
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.image import imsave

from ..results.schema import PICTURED
from ..utils.version import __version__
from ..utils.words import is_information, join_some
from .figures import FigurePanel, to_svg
from .formatting import to_latex, to_markdown, turn_if_wide
from .style import GRID, INK, PAPER, MethodStyle, figure_settings, remove_legend

MAX_SIDE = 96  # pixels of one sample's longer side
MOST_POINTS = 400
"""Maximum number of values in a figure that respond to the pointer."""
WIDTH = 120
"""Characters in a line of a table, beyond which its columns become rows if it is then narrower."""
_GAP = 2


def render_template(name: str, /, **values: Any) -> str:
    """Return the HTML of template ``name`` of the packages ``report`` and ``reproduce``; all values are escaped."""
    template = _make_environment().get_template(name)
    made: dict[str, Any] = {"latex": to_latex, "markdown": to_markdown, "embed": embed_panel, "draw": draw_legend_entry}
    made["narrow"] = partial(turn_if_wide, width=WIDTH)
    return template.render(version=__version__, **made, **values)


@cache
def _make_environment() -> Environment:
    made = Environment(
        loader=ChoiceLoader([PackageLoader("fedshift", "report"), PackageLoader("fedshift", "reproduce")]),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.tests["information"] = is_information
    return made


def embed_svg(svg: str, prefix: str, description: str) -> Markup:
    """Return ``svg`` for use inside HTML: ids prefixed, no namespaces or links, in the page's ink, grid and paper."""
    text = svg[svg.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r' (?:xmlns(?::\w+)?|version)="[^"]*"', "", text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text.replace("xlink:href", "href"))
    text = text.replace(INK, "currentColor").replace(GRID, "var(--grid)").replace(PAPER, "var(--card)")
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1))


def embed_panel(panel: FigurePanel) -> Markup:
    """Return the figure of ``panel`` for use inside HTML; pointing at a plotted value shows it, without a script.

    If ``panel`` has a note, its legend is omitted, since the page explains all figures together.
    """
    figure = panel.figure
    if panel.note:
        remove_legend(figure)
    svg = embed_svg(to_svg(figure), panel.name, panel.description)
    axes, scale = figure.axes[0], 72 / figure.dpi
    width, height = 72 * figure.get_figwidth(), 72 * figure.get_figheight()
    tips = []
    for across, up, text in panel.points[:MOST_POINTS]:
        x, y = axes.transData.transform((across, up)) * scale
        anchor, shift = ("end", -6) if x > width / 2 else ("start", 6)
        tips.append(
            f'<g class="point"><circle cx="{x:.1f}" cy="{height - y:.1f}" r="6"/><text x="{x + shift:.1f}" '
            f'y="{max(10.0, height - y - 6):.1f}" text-anchor="{anchor}">{escape(text)}</text></g>'
        )
    return Markup(str(svg).replace("</svg>", f"{''.join(tips)}</svg>"))


def draw_legend_entry(style: MethodStyle) -> Markup:
    """Return a small drawing of a method's line and marker, for the legend of a page."""
    figure = Figure(figsize=(0.5, 0.18))
    with figure_settings():
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.plot([0, 1, 2], [0, 0, 0], **style.line, markevery=[1])
        axes.set(xlim=(0, 2), ylim=(-1, 1))
    return embed_svg(to_svg(figure), f"legend-{style.number}", "")


def describe_pictures(split: str, clients: Iterable[str]) -> str:
    """Return the line of a page on whose samples it shows, so that no one passes it on unawares; none: empty."""
    names = list(dict.fromkeys(clients))
    return f"This page holds pictures of {split} samples of {join_some(names, shown=PICTURED)}." if names else ""


def encode_strip(images: np.ndarray, most: int = MAX_SIDE) -> tuple[str, int, int]:
    """Return images ``uint8 [n, H, W, C]`` side by side as a PNG data URL, with its width and height in pixels.

    Images larger than ``most`` pixels are reduced by a whole factor, each pixel the mean of its block.
    """
    factor = -(-max(images.shape[1:3]) // most)
    n, height, width = len(images), images.shape[1] // factor, images.shape[2] // factor
    blocks = images[:, : height * factor, : width * factor].reshape(n, height, factor, width, factor, -1)
    small = blocks.mean(axis=(2, 4)).round().astype(np.uint8)
    strip = np.zeros((height, n * (width + _GAP) - _GAP, 4), np.uint8)
    for number, image in enumerate(small):
        left = number * (width + _GAP)
        strip[:, left : left + width, :3], strip[:, left : left + width, 3] = image, 255
    buffer = BytesIO()
    imsave(buffer, strip, format="png")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    return url, strip.shape[1], strip.shape[0]
