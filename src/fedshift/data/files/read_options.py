"""How a person's own files are read: what a directory of images, arrays or tables leaves open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...utils.files import cache_directory
from ..federation import Federation

Progress = Callable[[str, int, int], None]
"""Hears ``(what is read, done, of how many)``."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Choices for reading a directory; each reader takes those that concern it.

    ``domains``: clients to read, in this order; None: all, by name. ``classes``: number of classes; None: as found.
    ``image_size``: height and width in pixels; None: as the files are, which must then be of one size. ``on_unreadable``: what
    becomes of a file that cannot be read. ``test_fraction``: share of a client's samples for testing where the files
    hold no such split. ``client_column``, ``target``, ``split_column`` (train, validation or test), ``group_column``
    (samples of one group, such as a patient, stay on one side): columns of a table. ``missing`` values are imputed on
    the client's own training part or refused. ``scaling`` of numeric columns by the client's own training part, or
    none. ``like``: the federation to which these clients come, by whose columns tables are read; a single file is then
    one client. ``cache``: where decoded images are kept; None: the user's cache directory.
    """

    domains: tuple[str, ...] | None = None
    classes: int | None = None
    image_size: int | None = None
    on_unreadable: Literal["refuse", "skip"] = "refuse"
    test_fraction: float = 0.2
    client_column: str | None = None
    target: str | None = None
    split_column: str | None = None
    group_column: str | None = None
    missing: Literal["impute", "refuse"] = "impute"
    scaling: Literal["client", "none"] = "client"
    like: Federation | None = None
    cache: Path | None = None
    progress: Progress | None = None

    @property
    def cache_directory(self) -> Path:
        """Where decoded images are kept: ``cache``, else ``FEDSHIFT_CACHE``, else the user's cache directory."""
        return self.cache or cache_directory()
