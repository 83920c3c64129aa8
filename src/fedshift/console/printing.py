"""The console on which everything is printed: text reaches a terminal without control and escape sequences.

Text may come from another machine, from names of files or from a run directory of someone else. Rich adds styles and
cursor movements afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich import console
from rich.segment import Segment
from typing_extensions import override

from ..utils.printable import strip_controls


class Console(console.Console):
    """Rich's console, which shows of any text only what can be shown."""

    @override
    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else strip_controls(text), style, control)
