"""Sources of data before any sample is decoded: clients, splits, targets and groups of samples.

A reader finds its rows first, and decodes them once the training samples are known
(:func:`fedshift.data.assembly.assemble`), because only they decide which files are left out, and how values are scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config.spec import DataSpec
from ..nn.several_inputs import Inputs
from ..tasks import TASKS, Classification
from ..tasks.task import Task
from ..utils.errors import UsageError
from ..utils.files import cache_directory
from ..utils.random_streams import stream
from .columns import Column
from .decoding import Decoding
from .partition import match_names, split_stratified
from .patches import parse_size
from .preparation import Scaling
from .schema import Layout
from .stores import LazyStore

SPLITS = ("train", "validation", "test")
DRAWN = ""
"""Split of a sample for which the source names none, so that it is drawn: training or test."""
LOST = "lost"
"""Split of a sample that cannot be read."""

Progress = Callable[[str, int, int], None]
"""Callback that receives ``(what is read, done, total)``."""
Divide = Callable[[Collection[str]], NDArray[np.object_]]
"""Function that returns the split of each row, without the named files."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions(DataSpec):
    """Settings of data, with facts that only a caller knows; each reader uses those that apply to it.

    ``task`` is a :class:`~fedshift.tasks.Task`, or None: classification, or segmentation if there are masks.

    Attributes:
        size_if_mixed: Height and width of images of different sizes; None: as ``image_size``.
        schema: Layout of the data that these clients join, whose columns are used to read tables; a single file is then
            one client, and so is a directory of class folders or parts.
        cache: Directory for decoded images; None: the user's cache directory.
        progress: Callback for progress.

    """

    size_if_mixed: tuple[int, int] | None = None
    schema: Layout | None = None
    cache: Path | None = None
    progress: Progress | None = None

    @classmethod
    def from_spec(cls, spec: DataSpec, **facts: Any) -> Self:
        """Return the settings of ``spec``, with ``facts`` by name, such as the parsed task."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """A row for each sample of a source, as columns ``[N]``; names are objects, since those of files may be any bytes.

    They are arrays, and no table of pandas, so that thousands of small sources can be made at once.

    Attributes:
        client: Name of the client.
        split: One of :data:`SPLITS`, :data:`DRAWN` or :data:`LOST`.
        group: Group whose samples stay together; None: the sample has none.
        file: File of the sample; empty if samples are not files.
        array: Number of the array that holds the sample.
        place: Place in the array.

    """

    client: NDArray[np.object_]
    split: NDArray[np.object_]
    group: NDArray[np.object_]
    file: NDArray[np.object_]
    array: NDArray[np.int64]
    place: NDArray[np.int64]

    @classmethod
    def of(
        cls, client: Any, array: Any, count: int, *, split: Any = DRAWN, group: Any = None, file: Any = "",
        place: Any = None,
    ) -> Self:  # fmt: skip
        """Return ``count`` rows with one value for all in each column, or one for each; ``place`` None: in order."""
        group = None if group is not None and not len(group) else group
        texts = {"client": client, "split": split, "group": group, "file": file}
        columns = {name: np.empty(count, object) for name in texts}
        for name, given in texts.items():
            columns[name][:] = given if given is None or isinstance(given, str) else np.asarray(given, object)
        place = np.arange(count) if place is None else np.array(place, np.int64)
        return cls(**columns, array=np.full(count, array), place=place)

    @classmethod
    def join(cls, several: Sequence[Rows]) -> Self:
        """Return all rows of ``several``, in order."""
        return cls(**{f.name: np.concatenate([getattr(rows, f.name) for rows in several]) for f in fields(cls)})

    def __len__(self) -> int:
        return len(self.place)

    def take(self, index: NDArray[Any]) -> Rows:
        """Return the rows at ``index``, numbers or a mask."""
        return Rows(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def find(self, *names: str, among: NDArray[np.bool_] | None = None) -> dict[Any, NDArray[np.intp]]:
        """Return the numbers of the rows by their values in the columns ``names``, by first occurrence.

        ``among``: mask of the rows that count; None: all.
        """
        found: dict[Any, list[int]] = {}
        chosen = np.arange(len(self)) if among is None else np.flatnonzero(among)
        columns = [getattr(self, name)[chosen].tolist() for name in names]
        keys = columns[0] if len(names) == 1 else zip(*columns, strict=True)
        for row, key in zip(chosen.tolist(), keys, strict=True):
            found.setdefault(key, []).append(row)
        return {key: np.array(own) for key, own in found.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Array:
    """An array of samples that is to be decoded.

    Attributes:
        where: Its name in messages.
        y: Target of each sample ``[N, ...]``, in the form of the task.
        inputs: Layout of samples with several inputs; empty: a sample is one array.

    """

    where: str
    y: Tensor
    inputs: Inputs = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Decoded:
    """The samples of a source, in the order of its arrays.

    Attributes:
        stores: The samples of each array.
        scalings: The scaling of each array's samples; empty: pixels to [-1, 1].
        decodings: How the files of each array's samples are decoded; empty: samples are not files.
        true_sizes: Size of each sample of each array without padding, ``[N, axes]``; empty: they are not padded.
        lost: Files that cannot be used.
        columns: Encodings of a table's columns; empty for other data.
        notices: Remarks on how the samples were read.
        faults: Remarks on files that are left out.

    """

    stores: Sequence[Tensor | LazyStore]
    scalings: Sequence[Scaling] = ()
    decodings: Sequence[Decoding] = ()
    true_sizes: Sequence[NDArray[np.int64]] = ()
    lost: Collection[str] = ()
    columns: tuple[Column, ...] = ()
    notices: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """A source of data, as a reader found it.

    Attributes:
        name: Name of the data.
        rows: A row for each sample, clients in their order.
        arrays: The arrays that the rows are in; those of one client and split are in one.
        decode: Function that returns the samples; its argument says which of them are for training.
        task: The prediction task; None: classification or segmentation, by the targets.
        classes: Number of classes, labels or targets; None: as found in the training data.
        classes_checked: Whether ``classes`` were already compared with the values in the files.
        class_names: Meaning of the labels 0, 1, ...; empty if unknown.
        note: Description of the data in one sentence, in which ``{samples}`` and ``{clients}`` are counts.
        notices: Remarks on how the data were read.
        faults: Remarks on files that could be data and are not read.

    """

    name: str
    rows: Rows
    arrays: tuple[Array, ...]
    decode: Callable[[Divide], Decoded]
    task: Task | None
    classes: int | None = None
    classes_checked: bool = False
    class_names: tuple[str, ...] = ()
    note: str = ""
    notices: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    def take_targets(self, index: NDArray[np.intp]) -> Tensor:
        """Return the targets of the rows at ``index``, array by array."""
        array, place = self.rows.array[index], self.rows.place[index]
        return torch.cat(
            [self.arrays[at].y[torch.from_numpy(place[array == at])] for at in dict.fromkeys(array.tolist())]
        )


class Reader(Protocol):
    """A module of :mod:`fedshift.data.readers`."""

    holds: str
    """Contents that it reads, in messages: ``tables``."""
    options: frozenset[str]
    """Settings that it honors, beyond those that all do."""

    def can_read(self, source: object) -> bool:
        """Return whether ``source``, a path or an object, is of its kind, by names and types.

        Files are not opened, except those without a known suffix beside medical images, which may be DICOM.
        """

    def read(self, source: Any, reading: ReadOptions) -> Source:
        """Return what ``source`` holds, from headers, targets and groups; raise :class:`UsageError` otherwise."""


def choose_clients(found: Mapping[str, Any] | Iterable[str], reading: ReadOptions) -> list[str]:
    """Return the requested clients in their order, or all; raise :class:`UsageError` if one was not found."""
    known = list(found)
    if reading.domains is None:
        return known
    try:
        return list(match_names(reading.domains, known))
    except UsageError as error:
        raise error.about("domains") from None


def divide_rows(
    rows: Rows, find_strata: Callable[[NDArray[np.intp]], Tensor | None], reading: ReadOptions, lost: Collection[str]
) -> NDArray[np.object_]:
    """Return the split of each of ``rows``, without the ``lost`` files; test samples are drawn by client.

    ``find_strata``: function that returns the class of rows by number, of which equal shares are drawn, or None.
    """
    split = rows.split.copy()
    if lost:
        split[[file in lost for file in rows.file.tolist()]] = LOST
    for client, own in rows.find("client", among=split == DRAWN).items():
        rng, group = stream(0, "test", client), rows.group[own]
        if None not in group.tolist():
            tested = np.flatnonzero(draw_groups(group.astype(str), reading.test_fraction, rng))
        else:
            strata = find_strata(own)
            y = np.zeros(len(own), np.int64) if strata is None else strata.numpy()
            tested = split_stratified(y, reading.test_fraction, rng)[1]
        split[own] = "train"
        split[own[tested]] = "test"
    return split


def draw_groups(group: NDArray[np.generic], fraction: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw whole groups for testing, about ``fraction`` of the rows in total; return a mask of their rows ``[N]``.

    Groups are visited in random order and drawn if the number of rows gets closer to ``fraction * N``; if none is
    drawn, the smallest group is. At least one group remains, so a single group is never drawn. ``group`` contains the
    number of each row's group ``[N]``. Raises :class:`UsageError` for a ``fraction`` outside 0..1.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"test_fraction={fraction:g}: must lie between 0 and 1")
    names, sizes = np.unique(group, return_counts=True)
    order = rng.permutation(len(names))
    taken: list[int] = []
    count, wanted = 0, fraction * len(group)
    for place in order:
        more = count + sizes[place]
        if abs(more - wanted) < abs(count - wanted) and more < len(group):
            taken, count = [*taken, place], more
    if not taken and len(names) > 1:
        taken = [order[sizes[order].argmin()]]
    return np.isin(group, names[taken])
