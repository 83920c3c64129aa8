"""Settings of data as readers need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from ...config.spec import DataSpec
from ...tasks import TASKS, Classification
from ...utils.files import cache_directory
from ..patches import parse_size
from ..schema import Layout

Progress = Callable[[str, int, int], None]
"""Callback that receives ``(what is read, done, total)``."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions(DataSpec):
    """Settings of data, with facts that only a caller knows; each reader uses those that apply to it.

    ``task`` is a :class:`~fedshift.tasks.Task`, or None: classification, or segmentation if there are masks.

    Attributes:
        differing: Height and width of images of different sizes; None: as ``image_size``.
        schema: Layout of the data that these clients join, whose columns are used to read tables; a single file is then
            one client, and so is a directory of class folders or parts.
        cache: Directory for decoded images; None: the user's cache directory.
        progress: Callback for progress.

    """

    differing: tuple[int, int] | None = None
    schema: Layout | None = None
    cache: Path | None = None
    progress: Progress | None = None

    @classmethod
    def from_spec(cls, spec: DataSpec, **facts: Any) -> Self:
        """Return the settings of ``spec``, with ``facts`` by name, among them a task as it is to be."""
        own = {field.name: getattr(spec, field.name) for field in fields(DataSpec)}
        return cls(**(own | facts))

    def __post_init__(self) -> None:
        if self.task is not None:
            object.__setattr__(self, "task", TASKS.parse(self.task))

    @property
    def changed(self) -> frozenset[str]:
        """Names of the options that differ from their defaults."""
        return frozenset(field.name for field in fields(self) if getattr(self, field.name) != field.default)

    @property
    def patch_size(self) -> tuple[int, ...]:
        """Voxels of a patch, slices before rows before columns, one number for all axes; empty: samples are whole."""
        return parse_size(self.patch)

    @property
    def targets(self) -> list[str]:
        """Names of a table's target columns; for classification there is one, whose name may contain commas."""
        if self.target is None or self.task is None or isinstance(self.task, Classification):
            return [] if self.target is None else [self.target]
        return [name.strip() for name in self.target.split(",")]

    @property
    def ignored(self) -> list[str]:
        """Names of a table's columns that are left out."""
        return [name.strip() for name in (self.ignore_columns or "").split(",") if name.strip()]

    @property
    def role_columns(self) -> list[str]:
        """Names of a table's columns that are not features, target first."""
        columns = (*self.targets, self.client_column, self.split_column, self.groups)
        return [name for name in columns if name is not None]

    @property
    def cache_directory(self) -> Path:
        """Directory for decoded images: ``cache``, else ``FEDSHIFT_CACHE``, else the user's cache directory."""
        return self.cache or cache_directory()
