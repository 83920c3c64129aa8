"""Contents of a source, before any sample is read: clients, splits, targets and groups of its samples.

A reader scans its source, and loads the samples once the training samples are known
(:func:`fedshift.data.assembly.assemble`), because only they decide which files are left out, and how values are scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..nn.several_inputs import Inputs
from ..tasks.task import Task
from ..utils.errors import UsageError
from ..utils.random_streams import stream
from .columns import Column
from .decoding import Decoding
from .files.read_options import ReadOptions
from .partition import match_names, split_stratified
from .preparation import Scaling
from .stores import LazyStore

SPLITS = ("train", "validation", "test")
UNSAID = -1
"""Split of a sample for which the source names none, so that it is drawn: training or test."""
LEFT_OUT = -2
"""Split of a sample that cannot be read."""

UNGROUPED: NDArray[np.str_] = np.empty(0, np.str_)
"""Groups of samples that have none."""

Ints = NDArray[np.int64]
Sides = NDArray[np.int8]
"""Split of each sample: an index in :data:`SPLITS`, :data:`UNSAID` or :data:`LEFT_OUT`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Samples of one client, which are rows of one store.

    Attributes:
        client: Name of the client.
        where: Name of the client's data in messages.
        y: Targets ``[N, ...]``, in the form of the task.
        side: Split of each sample ``[N]``.
        rows: Row of each sample in the store ``[N]``.
        files: File of each sample; empty if samples are not files.
        group: Group of each sample ``[N]``, whose samples stay together; empty if there are no groups.
        source: What the reader loads the samples from.
        inputs: Layout of samples with several inputs; empty: a sample is one array.

    """

    client: str
    where: str
    y: Tensor
    side: Sides
    rows: Ints
    files: tuple[str, ...] = ()
    group: NDArray[np.str_] = field(default_factory=lambda: UNGROUPED)
    source: Any
    inputs: Inputs = ()

    @classmethod
    def whole(
        cls, client: str, where: str, y: Tensor, split: str, source: Any, group: NDArray[np.str_] = UNGROUPED,
        inputs: Inputs = (),
    ) -> Part:  # fmt: skip
        """Return all rows of a store as samples of ``split``; an empty text: its samples are to be divided."""
        side = np.full(len(y), SPLITS.index(split) if split else UNSAID, np.int8)
        rows = np.arange(len(y))
        return cls(client=client, where=where, y=y, side=side, rows=rows, group=group, source=source, inputs=inputs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """What a source holds.

    Attributes:
        name: Name of the data.
        parts: The samples; a client may have several parts.
        task: The prediction task; None: classification or segmentation, by the targets.
        classes: Number of classes, labels or targets; None: as found in the training data.
        checked: Whether ``classes`` were already compared with the values in the files.
        class_names: Meaning of the labels 0, 1, ...; empty if unknown.
        note: Description of the data in one sentence, in which ``{samples}`` and ``{clients}`` are counts.
        notices: Remarks on how the data were read.
        faults: Remarks on files that could be data and are not read.
        source: What the reader needs in addition to the sources of parts.

    """

    name: str
    parts: tuple[Part, ...]
    task: Task | None
    classes: int | None = None
    checked: bool = False
    class_names: tuple[str, ...] = ()
    note: str = ""
    notices: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    source: Any = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """The samples of a scan.

    Attributes:
        stores: The store of each part.
        normalizations: The scaling of each part's samples; empty: pixels to [-1, 1].
        decodings: How the files of each part's samples are decoded; empty: samples are not files.
        extents: True size of each row of each part's store, ``[rows, axes]``, if rows are padded; empty: they are not.
        left_out: Files that cannot be used.
        columns: Encodings of a table's columns; empty for other data.
        notices: Remarks on how the samples were read.
        faults: Remarks on files that are left out.

    """

    stores: Sequence[Tensor | LazyStore]
    normalizations: Sequence[Scaling] = ()
    decodings: Sequence[Decoding] = ()
    extents: Sequence[Ints] = ()
    left_out: Collection[str] = ()
    columns: tuple[Column, ...] = ()
    notices: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


Assign = Callable[[Part, Collection[str]], Sides]
"""Function that returns the split of each sample of a part, without the named files."""


class Reader(Protocol):
    """A module of :mod:`fedshift.data.readers`."""

    holds: str
    """What it reads, in messages: ``tables``."""
    options: frozenset[str]
    """Settings that it honors, beyond those that all do."""

    def can_read(self, source: object) -> bool:
        """Return whether ``source``, a path or an object, is of its kind, by names and types.

        Files are not opened, except those without a known suffix beside medical images, which may be DICOM.
        """

    def scan(self, source: Any, reading: ReadOptions) -> Scan:
        """Return what ``source`` holds, from headers, targets and groups; raise :class:`UsageError` otherwise."""

    def load(self, scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
        """Return the samples of what it scanned."""


def choose_clients(found: Mapping[str, Any] | Iterable[str], reading: ReadOptions) -> list[str]:
    """Return the requested clients in their order, or all; raise :class:`UsageError` if one was not found."""
    known = list(found)
    if reading.domains is None:
        return known
    try:
        return list(match_names(reading.domains, known))
    except UsageError as error:
        raise error.about("domains") from None


def assign_splits(part: Part, left_out: Collection[str], *, task: Task, reading: ReadOptions) -> Sides:
    """Return the split of each sample of ``part``, without the files that are ``left_out``."""
    side = part.side.copy()
    if left_out:
        side[[file in left_out for file in part.files]] = LEFT_OUT
    drawn = np.flatnonzero(side == UNSAID)
    if len(drawn):
        side[drawn] = SPLITS.index("train")
        rng = stream(0, "test", part.client)
        if len(part.group):
            tested = np.flatnonzero(draw_groups(part.group[drawn], reading.test_fraction, rng))
        else:
            strata = task.strata(part.y[torch.from_numpy(drawn)])
            y = np.zeros(len(drawn), np.int64) if strata is None else strata.numpy()
            tested = split_stratified(y, reading.test_fraction, rng)[1]
        side[drawn[tested]] = SPLITS.index("test")
    return side


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
