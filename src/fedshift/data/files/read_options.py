"""Options for reading user files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from ...tasks import Classification, Task
from ...tasks.classification import MOST_CLASSES
from ...utils.errors import Ref, UsageError
from ...utils.files import cache_directory
from ..schema import Layout

Progress = Callable[[str, int, int], None]
"""Callback that receives ``(what is read, done, total)``."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options for reading a directory; each reader uses those that apply to it.

    Attributes:
        domains: Clients to read, in this order, as :func:`~fedshift.data.partition.match_names`; None: all, by name.
        classes: Number of classes; None: as found.
        image_size: Height and width in pixels; None: unchanged, then all images must have the same size.
        differing: Height and width of images of different sizes; None: as ``image_size``.
        on_unreadable: For a file that cannot be read, ``refuse`` raises an error and ``skip`` skips it.
        test_fraction: Fraction of a client's samples used for testing if the files define no split.
        client_column: Table column with the client.
        target: Table column with the label; for several labels or numbers, columns separated by commas.
        task: The prediction task; None: classification, or segmentation if there are masks.
        split_column: Table column with train, validation or test.
        ignore_columns: Table columns that are no features, separated by commas.
        groups: Groups (such as the samples of one patient) that stay together: a table's column, a pattern of file
            names or a table of files (:mod:`fedshift.data.groups`), or the name of arrays next to x and y.
        window: Values ``LOW,HIGH`` of medical images that become -1 and 1; None: each image's percentiles.
        spacing: Millimeters between voxels to which medical images are resampled, ``columns,rows,slices`` or one number
            for all axes; ``median``: the median over the files; None: files keep their voxels.
        patch: Voxels of the patches that training cuts, slices before rows before columns, one number for all axes, so
            that images with masks may differ in size; empty: samples are whole.
        missing: ``impute`` fills missing values from the client's training rows, ``refuse`` raises an error.
        scaling: ``client`` standardizes numeric columns with the client's training rows.
        schema: Layout of the data that these clients join, whose columns are used to read tables; a single file is then
            one client, and so is a directory of class folders or parts.
        cache: Directory for decoded images; None: the user's cache directory.
        progress: Callback for progress.

    """

    domains: str | tuple[str, ...] | None = None
    classes: int | None = None
    image_size: int | None = None
    differing: tuple[int, int] | None = None
    on_unreadable: Literal["refuse", "skip"] = "refuse"
    test_fraction: float = 0.2
    client_column: str | None = None
    target: str | None = None
    task: Task | None = None
    split_column: str | None = None
    ignore_columns: str | None = None
    groups: str | None = None
    window: str | None = None
    spacing: str | None = None
    patch: tuple[int, ...] = ()
    missing: Literal["impute", "refuse"] = "impute"
    scaling: Literal["client", "none"] = "client"
    schema: Layout | None = None
    cache: Path | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.classes is not None and not 1 <= self.classes <= MOST_CLASSES:
            raise UsageError(f"{{}}: give a number from 1 to {MOST_CLASSES}", Ref(classes=self.classes))

    @property
    def changed(self) -> frozenset[str]:
        """Names of the options that differ from their defaults."""
        return frozenset(each.name for each in fields(self) if getattr(self, each.name) != each.default)

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
