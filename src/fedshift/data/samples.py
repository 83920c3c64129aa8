"""Samples with targets, and their construction from arrays.

Samples are rows of a store: a tensor in memory, or a store of :mod:`fedshift.data.stores` whose rows are read when a
batch needs them. Only these two modules access the store directly; targets are in memory.

Samples are stored unscaled, and become a network's inputs when a batch is taken (:mod:`fedshift.data.preparation`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from hashlib import blake2b
from itertools import zip_longest
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..nn.several_inputs import Inputs
from ..tasks.catalog import infer_task
from ..tasks.segmentation import IGNORED, LEFT_OUT
from ..tasks.task import Task
from ..utils.errors import FedshiftError, Ref, UsageError
from .inputs import arrange, channels_first, find_layout, is_mapped, join_inputs, refuse_several, to_numbers, to_tensor
from .patches import Patches, extend
from .preparation import HALF, Augment, FeatureScaling, Scaling, scale_stored
from .stores import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    FileStore,
    Keys,
    LazyStore,
    StoreView,
    digest_arrays,
    digest_rows,
    read_store,
)


class Samples:
    """Samples ``x`` (uint8 images ``[N, C, ...]``, floats or int64 ``[N, ...]``) with targets ``y [N, ...]``.

    ``x`` is a tensor, or a store that reads samples on demand (``lazy``). Targets have the form of the federation's
    task: a class (int64 ``[N]``), a mask (uint8 ``[N, H, W]``), or numbers.
    ``rows`` (int64 ``[N]``): rows of these samples in ``x`` (None: all, in order); copies of a sample have one row.
    ``normalization``: scaling of uint8 images when a batch is taken, or how a table's rows were scaled.
    ``group`` (int64 ``[N]``): number of each sample's group (such as a patient), which no split divides, equal only for
    samples of one group in all of a federation; below 0: of a group that only this split has; None: no groups.
    ``patches``: a batch takes patches of stored samples and masks; None: it takes them whole.
    """

    def __init__(
        self, *, x: Tensor | LazyStore, y: Tensor, rows: Tensor | None = None, normalization: Scaling = HALF,
        group: Tensor | None = None, patches: Patches | None = None,
    ) -> None:  # fmt: skip
        self.store, self.y, self.normalization, self.group, self.patches = x, y, normalization, group, patches
        self.rows = torch.arange(len(x), device=y.device) if rows is None else rows
        self._all = rows is None

    def __len__(self) -> int:
        return self.y.shape[0]  # Tensor.__len__ takes ten times as long

    def __repr__(self) -> str:
        return f"{len(self)} samples of {describe_shape(self)}"

    @property
    def x(self) -> Tensor:
        """The samples; a copy if the array is shared with other splits. Raises an error for lazy samples."""
        if isinstance(self.store, LazyStore):
            raise UsageError(
                f"{self.store.where}: these samples are read in batches, and are not put into memory whole"
            )
        return self.store if self._all else self.store[self.rows]

    @property
    def lazy(self) -> bool:
        """Return whether samples are read on demand instead of kept in memory."""
        return isinstance(self.store, LazyStore)

    @property
    def draws(self) -> bool:
        """Return whether the samples returned by :meth:`inputs` depend on its key."""
        return self.patches is not None or (isinstance(self.store, LazyStore) and self.store.draws)

    @property
    def threaded(self) -> bool:
        """Return whether samples are lazy and can be read on another thread while a network trains."""
        return isinstance(self.store, LazyStore) and self.store.threaded

    @property
    def repeats(self) -> bool:
        """Return whether reading again with the same key gives the same samples."""
        return not isinstance(self.store, LazyStore) or self.store.repeats

    @property
    def dtype(self) -> torch.dtype:
        """The type of the stored samples."""
        return self.store.dtype

    @property
    def nbytes_each(self) -> int:
        """Bytes of one stored sample."""
        return prod(self.whole_shape) * self.dtype.itemsize

    @property
    def address(self) -> Hashable:
        """Value that is equal for splits with the same samples and targets in memory."""
        kept = self.store, self.y, None if self._all else self.rows
        return tuple((x.data_ptr(), x.shape, x.stride()) if isinstance(x, Tensor) else x for x in kept)

    @property
    def units(self) -> Tensor:
        """Number of what each sample moves with, from 0 (int64 ``[N]``): its group, or else its copies."""
        return number_distinct(self.rows)[0] if self.group is None else torch.unique(self.group, return_inverse=True)[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample in a batch."""
        return self.whole_shape if self.patches is None else (self.whole_shape[0], *self.patches.size)

    def count_units(self) -> int:
        """Return the number of groups, such as patients, or of distinct samples where there are none."""
        return len(np.unique(self.units.numpy()))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of one stored sample."""
        return tuple(self.store.shape[1:])

    def take(self, index: Tensor) -> Samples:
        """Return the samples at ``index`` (int64), in that order; the array is shared, not copied."""
        group = None if self.group is None else self.group[index]
        return self.replace(y=self.y[index], rows=self.rows[index], group=group)

    def replace(self, **fields: Any) -> Samples:
        """Return the same samples except these arguments of :class:`Samples`; another ``x`` has as many rows."""
        own = {name: getattr(self, name) for name in ("y", "normalization", "group", "patches")}
        return Samples(**{"x": self.store, "rows": None if self._all else self.rows, **own, **fields})

    def copy_rows(self, index: Tensor | slice) -> Tensor:
        """Return a copy of the stored samples at ``index``."""
        return read_store(self.store, self.find_rows(index))

    def find_rows(self, index: Tensor | slice) -> Tensor:
        """Return the rows of the store that hold the samples at ``index``."""
        return index if self._all and isinstance(index, Tensor) else self.rows[index]

    def read(self, index: Tensor | slice, key: Keys = ()) -> Tensor:
        """Return a copy of the samples at ``index``, patches if there are any; lazy samples are checked now.

        ``key``: as in :meth:`inputs`.
        """
        if self.patches is not None:
            numbers, places = self._place(index, key)
            cases = (self._read_whole(slice(number, number + 1), key)[0] for number in numbers)
            parts = [self.patches.cut(case, place) for case, place in zip(cases, places, strict=True)]
            return torch.stack(parts) if parts else torch.empty(0, *self.shape, dtype=self.dtype)
        return self._read_whole(index, key)

    def _place(self, index: Tensor | slice, key: Keys) -> tuple[list[int], NDArray[np.int64]]:
        """Return the number of each sample at ``index``, and the first voxel of its patch ``[B, axes]``."""
        assert self.patches is not None
        numbers = torch.arange(len(self))[index].tolist() if isinstance(index, slice) else index.tolist()
        return numbers, self.patches.draw(self.rows[index].tolist(), [self.y[number] for number in numbers], key)

    def take_case(self, number: int) -> Samples:
        """Return a case without its padding as one sample."""
        assert self.patches is not None
        row = int(self.rows[number])
        x = self.patches.crop(self._read_whole(slice(number, number + 1)), row)
        return Samples(x=x, y=self.patches.crop(self.y[number][None], row), normalization=self.normalization)

    def read_case(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the stored case ``[1, ...]`` without its padding, and its targets (:meth:`targets`)."""
        case = self.take_case(number)
        return case.x, case.targets()

    def _read_whole(self, index: Tensor | slice, key: Keys = ()) -> Tensor:
        """Return a copy of the stored samples at ``index``; lazy samples are checked now."""
        return (
            self.store.read_finite(self.find_rows(index), key)
            if isinstance(self.store, LazyStore)
            else self.copy_rows(index)
        )

    def pieces(self, count: int | None = None) -> Iterator[slice]:
        """Yield slices that cover all samples, or ``count`` of them, in order, each small enough to read at once."""
        step = self.store.count_rows(CHUNK_BYTES) if isinstance(self.store, LazyStore) else CHUNK_ROWS
        yield from (slice(start, start + step) for start in range(0, len(self) if count is None else count, step))

    def probe(self) -> Iterator[Tensor]:
        """Yield some stored samples, checked, one at a time ``[1, ...]``, as representatives of all lazy samples."""
        count = self.store.probed if isinstance(self.store, LazyStore) else len(self)
        for row in np.unique(np.linspace(0, len(self) - 1, count).astype(np.int64)):
            yield self._read_whole(torch.tensor([row]))

    def find_range(self) -> tuple[float, float]:
        """Return the lowest and highest value in the store; for a lazy store, in some samples."""
        ranges = [x.aminmax() for x in (self.probe() if isinstance(self.store, LazyStore) else [self.store])]
        return min(float(low) for low, _ in ranges), max(float(high) for _, high in ranges)

    def inputs(
        self,
        index: Tensor | slice,
        dtype: torch.dtype = torch.float32,
        augment: Augment | None = None,
        key: Keys = (),
    ) -> Tensor:
        """Return the samples at ``index`` as network inputs: images augmented and normalized, others unchanged.

        Floating-point images are augmented as values from -1 to 1. ``key``: key for random transforms of lazy samples
        and for patches; an empty one always draws the same.
        Raises :class:`FedshiftError` if lazy samples cannot be used.
        """
        return self.scale(self.read(index, key), dtype, augment)

    def scale(self, x: Tensor, dtype: torch.dtype = torch.float32, augment: Augment | None = None) -> Tensor:
        """Return copies ``x [..., *shape]`` of stored samples as network inputs, possibly in place.

        With ``augment``, ``x`` must be a single batch.
        """
        return scale_stored(x, self.normalization, len(self.shape) - 1, dtype, augment)

    def targets(self, index: Tensor | slice = slice(None), key: Keys = ()) -> Tensor:
        """Return the targets at ``index`` as losses expect them: masks as int64, with -100 for ignored pixels.

        ``key``: as in :meth:`inputs`.
        """
        return _mark_ignored(self.take_targets(index, key))

    def take_targets(self, index: Tensor | slice, key: Keys = ()) -> Tensor:
        """Return the stored targets at ``index``; masks are cut as :meth:`read` cuts their images."""
        if self.patches is None:
            return self.y[index]
        numbers, places = self._place(index, key)
        parts = [self.patches.cut(self.y[n], place, IGNORED) for n, place in zip(numbers, places, strict=True)]
        return torch.stack(parts) if parts else self.y.new_empty(0, *self.patches.size)

    def copy_alone(self) -> Samples:
        """Return the same samples, without groups, in an array that has no others."""
        patches = self.patches and self.patches.take(self.rows)
        return self.replace(x=self.x, rows=None, group=None, patches=patches)

    def read_all(self) -> Iterator[Tensor]:
        """Yield copies of all stored samples, some at a time ``[n, ...]``, without padding."""
        if self.patches is None:
            yield from map(self.copy_rows, self.pieces())
        else:
            yield from (self.read_case(number)[0] for number in range(len(self)))

    def to(self, device: torch.device) -> Samples:
        """Return the same samples on ``device``."""
        rows = None if self._all else self.rows.to(device)
        group = None if self.group is None else self.group.to(device)
        return self.replace(x=self.store.to(device), y=self.y.to(device), rows=rows, group=group)

    def check(self, where: str, task: Task, classes: int) -> None:
        """Raise :class:`UsageError`, with ``where`` in front, unless samples and targets can be used for training."""
        if len(self) == 0:
            raise UsageError(f"{where}: empty; every client needs at least one sample in each split")
        if len(self.rows) != len(self.y):
            raise UsageError(f"{where}: {len(self.rows)} samples but {len(self.y)} labels; both must be equal")
        task.check_targets(self.y, self.whole_shape, classes, where)
        if self.lazy:  # others are checked when they are read
            try:
                for _ in self.probe():
                    pass
            except FedshiftError as error:
                raise UsageError(str(error)) from error
            return
        for start in range(0, len(self) if self.store.is_floating_point() else 0, CHUNK_ROWS):
            bad = ~self.copy_rows(slice(start, start + CHUNK_ROWS)).isfinite().flatten(1).all(dim=1)
            if bad.any():
                first = start + int(bad.nonzero()[0, 0])
                raise UsageError(f"{where}: sample {first} has NaN or infinite values; remove or impute them")


def _mark_ignored(y: Tensor) -> Tensor:
    """Return masks uint8 as int64 with -100 for ignored pixels, and other targets unchanged."""
    if y.dtype != torch.uint8:
        return y
    classes = y.long()
    return classes.masked_fill_(classes == IGNORED, LEFT_OUT)


def is_whole(x: Tensor | LazyStore) -> bool:
    """Return whether samples are integers that are not scaled, such as tokens: neither floats nor 8-bit pixels."""
    return not x.is_floating_point() and x.dtype != torch.uint8


def describe_shape(split: Samples) -> str:
    """Return the shape and type of one sample in a batch: ``3 x 28 x 28 (uint8)``."""
    return f"{' x '.join(map(str, split.shape)) or 'one number'} ({str(split.dtype).removeprefix('torch.')})"


def gather_rows(parts: Sequence[Samples], indices: Sequence[Tensor]) -> Tensor:
    """Return copies of the stored samples at ``indices[i]`` of each ``parts[i]``, one part after another.

    All samples must have the same type and shape.
    """
    first, rows = parts[0].store, [part.find_rows(index) for part, index in zip(parts, indices, strict=True)]
    if all(part.store is first for part in parts):
        joined = torch.cat(rows)
        return first.index_select(0, joined) if isinstance(first, Tensor) else first.read_finite(joined)
    if not isinstance(first, Tensor) or any(part.lazy for part in parts):
        return torch.cat([part.read(index, ()) for part, index in zip(parts, indices, strict=True)])
    gathered = first.new_empty(sum(map(len, indices)), *first.shape[1:])
    slots = torch.split(gathered, [len(index) for index in indices])
    for part, own, slot in zip(parts, rows, slots, strict=True):
        assert isinstance(part.store, Tensor)
        torch.index_select(part.store, 0, own, out=slot)
    return gathered


def are_alike(parts: Sequence[Samples]) -> bool:
    """Return whether :func:`gather_rows` and one scaling work for all ``parts``: same type and scale, no draws."""
    first = parts[0]
    return not any(part.draws for part in parts) and all(
        (part.dtype, part.normalization) == (first.dtype, first.normalization) for part in parts
    )


def count_memory(parts: Iterable[Samples]) -> int:
    """Return the number of bytes of the samples in ``parts``; shared arrays count once, lazy samples count 0."""
    return sum(store.nbytes for store in {part.store for part in parts} if isinstance(store, Tensor))


def number_rows(parts: Sequence[Samples], *keys: Hashable) -> Tensor:
    """Return the number of each sample of all ``parts``, int64 ``[N]``; equal numbers are one row of one store.

    Rows are counted through the stores, one after another. ``keys``: of each part; rows under other keys differ.
    """
    starts: dict[Hashable, int] = {}
    end, rows = 0, []
    for part, key in zip_longest(parts, keys):
        if (part.store, key) not in starts:
            starts[part.store, key] = end
            end += len(part.store)
        rows.append(starts[part.store, key] + part.rows)
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)


def number_distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of each value, from 0 in order of first occurrence, and the places of these occurrences."""
    _, first, number = np.unique(values.cpu().numpy(), return_index=True, return_inverse=True)
    return torch.from_numpy(first.argsort().argsort()[number]), torch.from_numpy(np.sort(first))


def join_samples(parts: Sequence[Samples]) -> Samples:
    """Concatenate the samples of ``parts``; duplicate splits are skipped, and copies remain one row of one store.

    Parts that share an array continue to share it. If types or normalizations differ, network inputs are concatenated.
    Raises :class:`UsageError` if shapes differ.
    """
    shapes = sorted({part.shape for part in parts})
    if len(shapes) > 1:
        raise UsageError(
            f"samples of shapes {shapes[0]} and {shapes[1]} cannot be put together: bring all to one shape"
        )
    parts = _extend_alike(list(dict.fromkeys(parts)))
    first = parts[0]
    if len(parts) == 1:
        return first
    rows, stores = number_rows(parts, *(part.normalization for part in parts)), dict.fromkeys(p.store for p in parts)
    joined = first.replace(y=torch.cat([part.y for part in parts]), rows=rows, group=_join_groups(parts))
    alike = len({(part.dtype, part.normalization) for part in parts}) == 1
    if alike and len(stores) == 1:
        return joined
    if any(part.lazy for part in parts):
        if not alike:
            raise UsageError(
                "lazy samples of different types or scalings cannot be put together: give all clients one type and one "
                "scaling ({})",
                Ref(normalize="half"),
            )
        leads = {part.store: part.patches for part in reversed(parts)}
        return joined.replace(x=StoreView(list(stores)), patches=_join_patches([leads[store] for store in stores]))
    x = torch.cat([part.x if alike else part.scale(part.copy_rows(slice(None))) for part in parts])
    patches = _join_patches([part.patches and part.patches.take(part.rows) for part in parts])
    number, places = number_distinct(rows)
    scaling = first.normalization if alike else HALF
    if len(places) == len(x):
        return joined.replace(x=x, rows=None, patches=patches, normalization=scaling)
    return joined.replace(x=x[places], rows=number, patches=patches and patches.take(places), normalization=scaling)


def _extend_alike(parts: list[Samples]) -> list[Samples]:
    """Return ``parts`` with cases padded to the largest size among them; parts of one store keep sharing it."""
    if len({part.whole_shape for part in parts}) < 2:
        return parts
    size = tuple(max(lengths) for lengths in zip(*(part.whole_shape[1:] for part in parts), strict=True))
    enlarge = cache(lambda store: map_store(store, partial(extend, size=size)))  # once for each store
    return [part.replace(x=enlarge(part.store), y=extend(part.y, size, IGNORED)) for part in parts]


def _join_patches(patches: Sequence[Patches | None]) -> Patches | None:
    """Return the patches of a store that has the rows of several, one after another."""
    some = [each for each in patches if each is not None]
    return replace(some[0], true_sizes=np.concatenate([each.true_sizes for each in some])) if some else None


def _join_groups(parts: Sequence[Samples]) -> Tensor | None:
    """Return the groups of all ``parts``; None if no part has any. Groups of one part alone are numbered below 0."""
    if all(part.group is None for part in parts):
        return None
    numbers, start = [], -1
    for part in parts:
        alone = torch.ones(len(part), dtype=torch.bool) if part.group is None else part.group < 0
        own = start - torch.unique(part.units[alone], return_inverse=True)[1]
        start -= len(torch.unique(own))
        number = own.new_zeros(len(part)) if part.group is None else part.group.clone()
        number[alone] = own
        numbers.append(number)
    return torch.cat(numbers)


def digest_samples(split: Samples) -> tuple[str, str]:
    """Return digests of all samples, before and after a table was scaled, and of all targets, in their order.

    Each has 16 hexadecimal digits. Lazy samples have the digest of :meth:`~fedshift.data.stores.LazyStore.digest`.
    """
    rows, scaling, patches = split.rows.cpu().numpy(), split.normalization, split.patches
    facts = split.whole_shape, str(split.dtype), scaling.stamp, patches and (patches.size, patches.resized)
    found = blake2b(repr(facts).encode(), digest_size=8)
    if patches is not None:
        found.update(patches.true_sizes[rows].tobytes())
    if isinstance(scaling, FeatureScaling) and len(scaling.digests) == len(split.store):
        found.update(scaling.digests[rows].tobytes())
    found.update(digest_rows(split.store, split.rows))
    y = split.y.cpu().numpy()
    targets = blake2b(f"{y.shape}{y.dtype}".encode() + digest_arrays([y]), digest_size=8)
    return found.hexdigest(), targets.hexdigest()


def digest_each(x: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Return the BLAKE2b digest (RFC 7693, 128 bits) of the bytes of each sample of ``x``, ``[n, 2]``."""
    rows = x.reshape(len(x), -1).view(np.uint8)
    joined = b"".join(blake2b(row.data, digest_size=16).digest() for row in rows)
    return np.frombuffer(joined, np.uint64).reshape(-1, 2)


def map_store(store: Tensor | LazyStore, change: Callable[[Tensor], Tensor]) -> Tensor | LazyStore:
    """Apply ``change``, which treats samples independently, to ``store``: now, or on reading if the store is lazy."""
    return change(store) if isinstance(store, Tensor) else store.map(change)


def to_samples(x: ArrayLike | LazyStore, y: ArrayLike, where: str = "data", task: Task | None = None) -> Samples:
    """Convert arrays to :class:`Samples`; both are copied, except for inputs that are mapped files or in a store.

    Args:
        x: Images ``[N, H, W]``, ``[N, H, W, C]`` with 1 or 3 channels or ``[N, C, H, W]`` with any, volumes
            ``[N, C, D, H, W]`` (integers 0..255 become uint8, floats stay), features ``[N, D]``, or tokens ``[N, L]``
            (int64 stays).
        y: Targets of ``task``: integer labels ``[N]`` or ``[N, 1]``; the class 0..254 of each pixel, or 255 for ignored
            pixels, ``[N, H, W]``; labels of 0 and 1, or numbers, ``[N, outputs]``.
        where: Beginning of error messages.
        task: The prediction task; None: classification or segmentation, inferred from ``y``.

    Raises:
        UsageError: The arrays have invalid shapes, types or values.

    """
    x = keep_or_map(x, where)
    targets = read_targets(x, y, where, task)
    return Samples(x=to_store(x, where), y=targets)


def keep_or_map(x: ArrayLike | LazyStore, where: str) -> NDArray[Any] | LazyStore:
    """Return inputs as an array, or as a store if they are mapped from a file or are in a store already."""
    refuse_several(x, where)
    return FileStore(x, where) if is_mapped(x) else x if isinstance(x, LazyStore) else to_numbers(x, where)


def join_several(x: Any, where: str, names: Sequence[str] = ()) -> tuple[NDArray[Any] | LazyStore, Inputs]:
    """Return inputs as :func:`keep_or_map` does, or as rows with their layout if they are several.

    ``names``: the inputs' order, if these are their names.
    """
    x = arrange(x, names)
    if not isinstance(x, Mapping):
        return keep_or_map(x, where), ()
    inputs = find_layout(x, where)
    return join_inputs(x, inputs, where), inputs


def to_store(x: NDArray[Any] | Tensor | LazyStore, where: str) -> Tensor | LazyStore:
    """Return inputs as samples keep them; arguments and errors as in :func:`to_samples`."""
    return x if isinstance(x, LazyStore | Tensor) else to_tensor(x, where)


def read_targets(x: NDArray[Any] | LazyStore, y: ArrayLike, where: str, task: Task | None) -> Tensor:
    """Return the targets ``y`` of inputs ``x``; only shape and type of ``x`` are used.

    Arguments and errors are as in :func:`to_samples`.
    """
    x_array = np.broadcast_to(np.zeros((), np.float32), x.shape) if isinstance(x, LazyStore) else x
    y_array = to_numbers(y, f"{where}, labels")
    if x_array.ndim < 2 or 0 in x_array.shape[1:] or y_array.ndim < 1 or len(x_array) != len(y_array):
        raise UsageError(
            f"{where}: samples of shape {x_array.shape} and labels of shape {y_array.shape}; "
            "samples need two or more dimensions, and labels one number per sample"
        )
    task = task or infer_task(x_array, y_array, where)
    shape = x.shape if isinstance(x, LazyStore) else channels_first(x, where).shape
    return task.read_targets(y_array, tuple(shape[1:]), where)
