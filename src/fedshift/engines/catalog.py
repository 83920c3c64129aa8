"""The engines that exist, by name."""

from __future__ import annotations

from collections.abc import Mapping

from . import loop

ENGINES: Mapping[str, loop.Engine] = {"loop": loop.train}
