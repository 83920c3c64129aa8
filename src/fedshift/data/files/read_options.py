"""Options for reading user files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...tasks import Classification, Task
from ...utils.files import cache_directory
from ..federation import Federation

Progress = Callable[[str, int, int], None]
"""Callback that receives ``(what is read, done, in all)``."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options for reading a directory; each reader uses those that apply to it.

    Attributes:
        domains: Clients to read, in this order; None: all, by name.
        classes: Number of classes; None: as found.
        image_size: Height and width in pixels; None: unchanged, in which case all images must have one size.
        on_unreadable: ``refuse`` raises an error for a file that cannot be read, ``skip`` leaves it out.
        test_fraction: Share of a client's samples for testing where the files define no split.
        client_column: Column of a table that holds the client.
        target: Column of a table that holds the label; of several labels or numbers, columns with commas between.
        task: What is predicted; None: classes, or masks where there are some.
        split_column: Column of a table that holds train, validation or test.
        group_column: Column of a table whose groups (such as the samples of one patient) stay on one side.
        missing: ``impute`` fills missing values from the client's training rows, ``refuse`` raises an error.
        scaling: ``client`` standardizes numeric columns by the client's training rows.
        like: Federation that these clients join, by whose columns tables are read; a single file is then one client,
            and so is a directory of class folders or parts.
        cache: Directory of decoded images; None: the user's cache directory.
        progress: Callback for progress.

    """

    domains: tuple[str, ...] | None = None
    classes: int | None = None
    image_size: int | None = None
    on_unreadable: Literal["refuse", "skip"] = "refuse"
    test_fraction: float = 0.2
    client_column: str | None = None
    target: str | None = None
    task: Task | None = None
    split_column: str | None = None
    group_column: str | None = None
    missing: Literal["impute", "refuse"] = "impute"
    scaling: Literal["client", "none"] = "client"
    like: Federation | None = None
    cache: Path | None = None
    progress: Progress | None = None

    @property
    def targets(self) -> list[str]:
        """Names of a table's columns that hold targets; of classes there is one, which may have commas in its name."""
        if self.target is None or self.task is None or isinstance(self.task, Classification):
            return [] if self.target is None else [self.target]
        return [name.strip() for name in self.target.split(",")]

    @property
    def role_columns(self) -> list[str]:
        """Names of a table's columns that are no features, the target first."""
        columns = (*self.targets, self.client_column, self.split_column, self.group_column)
        return [name for name in columns if name is not None]

    @property
    def cache_directory(self) -> Path:
        """Directory of decoded images: ``cache``, else ``FEDSHIFT_CACHE``, else the user's cache directory."""
        return self.cache or cache_directory()
