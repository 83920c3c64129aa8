"""HTML of all pages: templates, matplotlib's SVG as inline elements, and image samples as PNG in data URLs."""

from __future__ import annotations

import base64
import re
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.image import imsave

from ..utils.version import __version__
from .formatting import to_latex, to_markdown
from .style import GRID, INK

MAX_SIDE = 96  # pixels of one sample's longer side
_GAP = 2


def render_template(name: str, /, **values: Any) -> str:
    """Return the HTML of template ``name`` of the packages ``report`` and ``reproduce``; all values are escaped."""
    template = _make_environment().get_template(name)
    return template.render(version=__version__, latex=to_latex, markdown=to_markdown, **values)


@cache
def _make_environment() -> Environment:
    return Environment(
        loader=ChoiceLoader([PackageLoader("fedshift", "report"), PackageLoader("fedshift", "reproduce")]),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def embed_svg(svg: str, prefix: str, description: str) -> Markup:
    """Return ``svg`` for use inside HTML: ids prefixed, no namespaces or links, ink and grid in the page's colors."""
    text = svg[svg.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r' (?:xmlns(?::\w+)?|version)="[^"]*"', "", text)
    text = re.sub(r'^<svg width="[^"]*" height="[^"]*"', "<svg", text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text.replace("xlink:href", "href"))
    text = text.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1))


def encode_strip(images: np.ndarray) -> tuple[str, int, int]:
    """Return images ``uint8 [n, H, W, C]`` side by side as a PNG data URL, with its width and height in pixels.

    Images larger than 96 pixels are reduced by a whole factor, each pixel the mean of its block.
    """
    factor = -(-max(images.shape[1:3]) // MAX_SIDE)
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
