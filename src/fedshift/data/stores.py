"""Stores of samples that are not in memory: mapped files, and datasets that decode a sample when a batch needs it.

A store returns samples for rows as a tensor in memory does for an index, so that
:class:`~fedshift.data.samples.Samples` need not know which of the two it has. Samples are read for a batch and released
afterwards; a store keeps only a cache of bounded size. Values are checked when they are read, because checking all in
advance would mean reading all of them.

An array's file is mapped only while rows of it are copied, because mapped pages count as memory of the process. If its
store is sent to another process, only the file's name is sent.

A random transform draws from a generator keyed by seed, client, step and row, so that a resumed run, another engine and
another number of workers make the same draws. The global generators of Python, NumPy and torch are seeded from it, and
also the generators that transforms own, if these can be seeded (``set_random_state`` in MONAI, ``set_random_seed`` in
albumentations).
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import accumulate
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import torch
from joblib import Parallel, delayed
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..nn.several_inputs import Inputs
from ..utils.errors import FedshiftError, Ref, UsageError
from ..utils.random_streams import Key, key_bits, torch_stream
from .arrays import LazyDataset, find_targets, item_reader, list_files, read_item, require_shape
from .decoding import Decoding, list_members
from .decoding.images import Unreadable
from .decoding.volumes import VolumeHeader, digest_voxels
from .inputs import arrange, find_layout, join_inputs, to_tensor
from .patches import extend

REPEATED = 4
"""Number of times to decode the first item, to check whether the result is always the same."""
DECODED = 256
"""Number of items to decode at a time when only their targets are needed."""
CHUNK_ROWS = 1000
"""Number of samples to check, resize or hash at a time."""
CHUNK_BYTES = 2**26
"""Bytes of lazy samples to read at a time when all are read."""
CONTENT = 2**28
"""Largest file, in bytes, whose content is part of digests."""
Array = NDArray[Any]
Keys = tuple[Key, ...]
Rows = TypeVar("Rows", list[int], Tensor, NDArray[np.int64])


class LazyStore(ABC):
    """Samples ``[N, ...]`` that are read on demand.

    Attributes:
        where: Name of the samples in messages.
        shape: Length and shape, as of a tensor.
        dtype: Type of the samples when read.
        draws: Whether the samples read depend on the key.
        repeats: Whether reading again with the same key gives the same samples.
        probed: Number of evenly spaced samples of a split that represent all in checks.
        threaded: Whether it can be read on another thread while a network trains, because it uses no global generators.

    """

    draws, repeats, threaded = False, True, True
    probed = 64

    def __init__(self, where: str, count: int, sample: Tensor) -> None:
        self.where, self.dtype = where, sample.dtype
        self.shape: tuple[int, ...] = (count, *sample.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def is_floating_point(self) -> bool:
        """Return whether the samples are floating-point numbers."""
        return self.dtype.is_floating_point

    def read(self, rows: Tensor, key: Keys = ()) -> Tensor:
        """Return a new tensor with the samples at ``rows`` (int64 ``[B]``); random transforms draw with ``key``.

        Raises :class:`FedshiftError` if they cannot be read.
        """
        try:
            return self._load(rows.cpu().numpy(), key)
        except UsageError as error:
            raise FedshiftError(str(error)) from error

    def read_finite(self, rows: Tensor, key: Keys = ()) -> Tensor:
        """Return the result of :meth:`read`; raise :class:`FedshiftError` if a value is not finite."""
        x = self.read(rows, key)
        if x.is_floating_point() and not bool(x.isfinite().all()):
            first = rows[int((~x.isfinite()).flatten(1).any(dim=1).nonzero()[0, 0])]
            raise FedshiftError(f"{self.where}: sample {int(first)} has NaN or infinite values; remove or impute them")
        return x

    @abstractmethod
    def _load(self, rows: NDArray[np.int64], key: Keys) -> Tensor:
        """Return a new tensor with the samples at ``rows``."""

    def digest(self, rows: NDArray[np.int64]) -> bytes:
        """Return a digest of all samples at ``rows``, in this order: of their values, or of the files they come from.

        Raises :class:`FedshiftError` if they cannot be read.
        """
        pieces = (torch.from_numpy(some) for some in divide(rows, self.count_rows(CHUNK_BYTES)))
        return digest_arrays(self.read(some).cpu().numpy() for some in pieces)

    def count_rows(self, size: int) -> int:
        """Return how many samples have at most ``size`` bytes; one at least, :data:`CHUNK_ROWS` at most."""
        return max(1, min(CHUNK_ROWS, size // max(1, prod(self.shape[1:]) * self.dtype.itemsize)))

    def identify(self, row: int) -> bytes:
        """Return a digest, 16 bytes, of what the sample at ``row`` is read from; empty: its values tell as much.

        Raises :class:`FedshiftError` if it cannot be read.
        """
        return b""

    def map(self, change: Callable[[Tensor], Tensor]) -> LazyStore:
        """Return the store with ``change``, which treats samples independently, applied to all samples when read."""
        return StoreView([self], change)

    def to(self, device: torch.device) -> LazyStore:
        """Return the store with its samples on ``device`` when read."""
        return self if device.type == "cpu" else self.map(partial(Tensor.to, device=device))


class StoreView(LazyStore):
    """Stores with samples of the same shape and type one after another; ``change`` is applied to what is read."""

    def __init__(self, stores: Sequence[LazyStore | Tensor], change: Callable[[Tensor], Tensor] | None = None) -> None:
        lazy = [store for store in stores if isinstance(store, LazyStore)]
        sample = torch.zeros(1, *stores[0].shape[1:], dtype=stores[0].dtype)
        super().__init__(lazy[0].where, sum(map(len, stores)), change(sample) if change else sample)
        self.draws, self.repeats = any(store.draws for store in lazy), all(store.repeats for store in lazy)
        self.threaded, self.probed = all(store.threaded for store in lazy), min(store.probed for store in lazy)
        self._stores, self._change, self._ends = tuple(stores), change, list(accumulate(map(len, stores)))

    def _divide(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the number of each store that has some of ``rows``, their places among these, and their rows in it."""
        owner = np.searchsorted(self._ends, rows, "right")
        for number in np.unique(owner).tolist():
            places = torch.from_numpy(np.flatnonzero(owner == number))
            yield number, places, torch.from_numpy(rows)[places] - (self._ends[number] - len(self._stores[number]))

    @override
    def digest(self, rows: NDArray[np.int64]) -> bytes:
        """Return a digest as of other stores; shape and type, which are digested with a split, tell the change."""
        parts = [(places, digest_rows(self._stores[number], own)) for number, places, own in self._divide(rows)]
        return b"".join(places.numpy().tobytes() + digest for places, digest in parts)

    @override
    def _load(self, rows: NDArray[np.int64], key: Keys) -> Tensor:
        x: Tensor | None = None
        for number, places, own in self._divide(rows):
            part = read_store(self._stores[number], own, (*key, number) if key and len(self._stores) > 1 else key)
            part = self._change(part) if self._change else part
            if len(places) == len(rows):
                return part
            x = part.new_empty(len(rows), *self.shape[1:]) if x is None else x
            x[places.to(x.device)] = part
        return torch.empty(0, *self.shape[1:], dtype=self.dtype) if x is None else x


def divide(rows: Rows, count: int) -> Iterator[Rows]:
    """Yield ``rows`` in order, ``count`` at a time."""
    yield from (rows[start : start + count] for start in range(0, len(rows), count))


def digest_arrays(arrays: Iterable[Array]) -> bytes:
    """Return the BLAKE2b digest, 16 bytes, of the values of ``arrays``, one after another."""
    digest = blake2b(digest_size=16)
    for x in arrays:
        digest.update(np.ascontiguousarray(x).data)
    return digest.digest()


def digest_files(groups: Iterable[Iterable[Path]]) -> bytes:
    """Return a digest, 16 bytes, of ``groups`` of files in this order; the order within a group does not matter.

    It covers what the files hold if they have at most :data:`CONTENT` bytes in all, which is the same under other names
    and for copies; otherwise the name, size and time of change of each. Raises :class:`FedshiftError` naming a file
    that cannot be read.
    """
    try:
        listed = [tuple(group) for group in groups]
        status = {file: file.stat() for group in listed for file in group}
        small = sum(each.st_size for each in status.values()) <= CONTENT
        known = {
            file: blake2b(file.read_bytes()).hexdigest() if small else f"{file.name} {each.st_size} {each.st_mtime_ns}"
            for file, each in status.items()
        }
    except OSError as error:
        raise FedshiftError(f"{error.filename} cannot be read ({error.strerror}): keep it in place") from error
    return blake2b(repr([sorted(known[file] for file in group) for group in listed]).encode(), digest_size=16).digest()


def digest_rows(store: Tensor | LazyStore, rows: Tensor) -> bytes:
    """Return a digest of the samples of ``store`` at ``rows``, in this order (:meth:`LazyStore.digest`)."""
    if isinstance(store, LazyStore):
        return store.digest(rows.cpu().numpy())
    return digest_arrays(store.index_select(0, some).cpu().numpy() for some in divide(rows, CHUNK_ROWS))


def read_store(store: Tensor | LazyStore, rows: Tensor, key: Keys = ()) -> Tensor:
    """Return a copy of the samples of ``store`` at ``rows``; ``key`` as in :meth:`LazyStore.read`."""
    return store.index_select(0, rows) if isinstance(store, Tensor) else store.read(rows, key)


class FileArray(NamedTuple):
    """Place of a mapped array's values in its file."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: np.memmap[Any, Any]) -> FileArray:
        """Return the place of ``array``, which may be a view of what was mapped."""
        root = array
        while isinstance(root.base, np.memmap):
            root = root.base
        start = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        path = Path(str(array.filename)).resolve()
        return cls(path, array.shape, array.dtype, root.offset + start, array.strides)

    def map(self) -> Array:
        """Return the array with the values of the file now; raise :class:`UsageError` if it cannot be read."""
        try:
            return np.ndarray(*self[1:3], np.memmap(self.path, np.uint8, "c").data, *self[3:])
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.path} cannot be read ({error}): give a complete file, and keep it in place"
            ) from error


class FileStore(LazyStore):
    """An array ``[N, ...]`` in a file, which is mapped while rows of it are copied."""

    def __init__(self, array: np.memmap[Any, Any], where: str) -> None:
        self.where, self._array = where, FileArray.of(array)
        super().__init__(where, len(array), self._load(np.zeros(1, np.int64), ()))

    @override
    def _load(self, rows: NDArray[np.int64], key: Keys) -> Tensor:
        return to_tensor(self._array.map()[rows], self.where, copy=False)

    @override
    def digest(self, rows: NDArray[np.int64]) -> bytes:
        x, path = self._array.map(), self._array.path
        if path.stat().st_size <= CONTENT:
            return digest_arrays(x[some] for some in divide(rows, CHUNK_ROWS))
        return blake2b(repr(self._array[1:]).encode() + rows.tobytes() + digest_files([[path]])).digest()


class MappedStore(LazyStore):
    """Samples decoded from files, each in an array that is mapped from the cache, and padded when it is read.

    Args:
        arrays: The samples ``[C, *axes]``.
        size: Axes of all samples when they are read; smaller ones end with the lowest value in each channel.
        where: Name of the samples in messages.
        files: File, or folder of slices, of each sample.
        how: How they were decoded.
        headers: Header of each sample's file, of medical images; None: unknown.

    """

    def __init__(
        self, arrays: Sequence[Array], size: tuple[int, ...], where: str, files: Sequence[Path],
        how: Decoding, headers: Sequence[VolumeHeader | None] = (),
    ) -> None:  # fmt: skip
        super().__init__(where, len(arrays), torch.zeros(1, len(arrays[0]), *size))
        self._arrays, self._files, self.how, self.headers = tuple(arrays), tuple(files), how, tuple(headers)

    @override
    def _load(self, rows: NDArray[np.int64], key: Keys) -> Tensor:
        x = torch.empty(len(rows), *self.shape[1:], dtype=self.dtype)
        for place, row in enumerate(rows.tolist()):
            x[place] = extend(torch.from_numpy(self._arrays[row]), self.shape[2:])
        return x

    @override
    def digest(self, rows: NDArray[np.int64]) -> bytes:
        shapes = [self._arrays[row].shape for row in rows.tolist()]
        return repr((self.how, shapes)).encode() + digest_files(list_members(self._files[row]) for row in rows.tolist())

    @override
    def identify(self, row: int) -> bytes:
        if not self.headers:
            return b""
        try:
            return digest_voxels(self._files[row])
        except Unreadable as error:
            raise FedshiftError(f"{self._files[row]} {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        sent = (FileArray.of(x) if isinstance(x, np.memmap) and x.filename is not None else x for x in self._arrays)
        return {**vars(self), "_arrays": tuple(sent)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = tuple(x.map() if isinstance(x, FileArray) else x for x in state["_arrays"])
        vars(self).update(state | {"_arrays": held})


class DatasetStore(LazyStore):
    """Inputs of a :class:`~fedshift.data.arrays.LazyDataset`; ``targets [N, ...]``: targets of all its samples.

    ``inputs``: layout of the samples if they are several inputs by name, in the order of ``names`` if these are the
    names; the store then has their rows.
    """

    def __init__(self, given: LazyDataset, where: str, target: str | None = None, names: Sequence[str] = ()) -> None:
        self._given, self._item = given, item_reader(given.dataset, where, target)
        self._begin()
        self.where, self.inputs = where, Inputs()
        self._first, *again = (self._decode([0], ())[0][0] for _ in range(REPEATED))
        if isinstance(self._first, Mapping):
            self.inputs = find_layout(arrange({name: each[None] for name, each in self._first.items()}, names), where)
        x, *others = (self._join(each, 0) for each in (self._first, *again))
        self.repeats = all(np.array_equal(x, other, equal_nan=x.dtype.kind == "f") for other in others)
        self.sample = to_tensor(x[None], where)
        super().__init__(where, len(given.dataset), self.sample)
        self.draws, self.threaded = given.cache_bytes == 0, given.workers > 1
        self._digests: NDArray[np.uint64] = np.zeros((len(self), 2), np.uint64)  # of items that were digested; or 0
        listed = find_targets(given, where, target)
        if listed is None:
            listed = np.stack([y for rows in divide(list(range(len(self))), DECODED) for y in self._digest_items(rows)])
        self.targets: Array = listed

    def _digest_items(self, rows: Sequence[int]) -> list[Array]:
        """Return the targets of ``rows``, and keep digests of the inputs."""
        items = self._decode_rows(rows, ())
        self._digests[rows] = [np.frombuffer(digest_arrays([x]), np.uint64) for x, _ in items]
        return [y for _, y in items]

    @override
    def digest(self, rows: NDArray[np.int64]) -> bytes:
        """Return digests of the values of all items, each decoded once, or of their listed files and of some values.

        Values that differ when they are read again are left out.
        """
        files = list_files(self._given.dataset)
        some = rows[:: max(1, len(rows) // self.probed) if files else 1] if self.repeats else rows[:0]
        missing = np.unique(some[~self._digests[some].any(axis=1)]).tolist()
        with self._lock:
            for few in divide(missing, min(DECODED, self.count_rows(CHUNK_BYTES))):
                self._digest_items(few)
        read = self._digests[some].tobytes()
        return read + digest_files([Path(files[row])] for row in rows.tolist()) if files else read

    def _begin(self) -> None:
        self._lock = Lock()  # datasets and global generators can be used by only one thread at a time
        self._cache: dict[int, Array] = {}
        self._file: Any = None

    @override
    def _load(self, rows: NDArray[np.int64], key: Keys) -> Tensor:
        with self._lock:
            missing = [row for row in dict.fromkeys(rows.tolist()) if row not in self._cache]
            items = dict(zip(missing, self._decode_rows(missing, key if self.draws else ()), strict=True))
            for row, (_, y) in items.items():
                self._require_same(row, y)
            x = np.stack([items[row][0] if row in items else self._cache[row] for row in rows.tolist()])
            room = self._given.cache_bytes // max(1, x[0].nbytes) - len(self._cache)
            self._cache.update({row: items[row][0] for row in missing[: max(0, room)]})
        return to_tensor(x, self.where)

    def _decode_rows(self, rows: Sequence[int], key: Keys) -> list[tuple[Array, Array]]:
        """Return the inputs, as a row if there are several, and the target of each of ``rows``."""
        items = self._run(rows, key)
        for row, (x, _) in zip(rows, items, strict=True):
            require_shape(x, self._first, row, self.where)
        return [(self._join(x, row), y) for row, (x, y) in zip(rows, items, strict=True)]

    def _run(self, rows: Sequence[int], key: Keys) -> list[tuple[Any, Array]]:
        """Decode ``rows``, in worker processes if there are any."""
        if self._given.workers < 2 or not rows:
            return self._decode(rows, key)
        if self._file is None:
            self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lasts as long as the store
            self._file.write(cloudpickle.dumps(self))
            self._file.flush()
        some = np.array_split(np.array(rows), min(self._given.workers, len(rows)))
        done = Parallel(n_jobs=self._given.workers)(
            delayed(_decode_from)(self._file.name, r.tolist(), key) for r in some
        )
        return [pair for pairs in done for pair in pairs]

    def _decode(self, rows: Sequence[int], key: Keys) -> list[tuple[Any, Array]]:
        """Return the input and target of each of ``rows``, decoded with ``key``."""
        decoded = []
        for row in rows:
            with keyed_draws(self._given.dataset, key, row):
                decoded.append(read_item(self._given.dataset, row, self.where, self._item))
        return decoded

    def _join(self, x: Any, row: int) -> Array:
        """Return the inputs ``x`` of a sample as a row, if there are several."""
        if not self.inputs:
            return np.asarray(x)
        one = {name: values[None] for name, values in x.items()}
        return np.asarray(join_inputs(one, self.inputs, f"{self.where}: sample {row}")[0])

    def _require_same(self, row: int, y: Array) -> None:
        known = np.asarray(self.targets[row])
        if known.size != y.size or not np.array_equal(known.reshape(-1), y.reshape(-1)):
            raise UsageError(
                f"{self.where}: sample {row} came with another target than before: targets are read once, and a "
                "transform may not change them ({} moves masks with their images)",
                Ref("augment"),
            )

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("_lock", "_cache", "_file")}
        return state | {"_given": replace(self._given, workers=0), "threaded": False}  # a worker starts no workers

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()


def _decode_from(path: str, rows: Sequence[int], key: Keys) -> list[tuple[Any, Array]]:
    return _load_store(path)._decode(rows, key)


@lru_cache(maxsize=64)
def _load_store(path: str) -> DatasetStore:
    return cloudpickle.loads(Path(path).read_bytes())  # type: ignore[no-any-return]


@contextmanager
def keyed_draws(dataset: object, key: Keys, row: int) -> Iterator[None]:
    """Seed the generators of ``dataset``'s transforms from ``key`` and ``row``; restore the global ones afterwards."""
    bits = key_bits(0, "item", *key, row) % 2**32
    for part in _find_transforms(dataset):
        if hasattr(part, "set_random_seed"):  # first, because albumentations has both, and the other takes generators
            part.set_random_seed(bits)
        elif hasattr(part, "set_random_state"):
            part.set_random_state(seed=bits)
    with torch_stream(0, "item", *key, row):
        yield


def _find_transforms(dataset: object) -> Iterator[Any]:
    """Yield a dataset, its transforms and the dataset that it wraps, found by their usual attribute names."""
    yield dataset
    for name in ("transform", "transforms", "target_transform"):
        if (part := getattr(dataset, name, None)) is not None:
            yield part
    if (whole := getattr(dataset, "dataset", None)) is not None:
        yield from _find_transforms(whole)
