"""Federations for segmentation from NIfTI and DICOM files, ``DIR/<client>/images/`` and ``DIR/<client>/masks/``.

Folders, names and class numbers are as in :mod:`fedshift.data.files.masks`; single files are read by
:mod:`fedshift.data.files.volume_decoding`. Masks are kept in memory. Images are decoded when a batch needs them, and
the most recently used :data:`KEPT` bytes over all clients are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ...tasks.segmentation import Segmentation
from ...utils.errors import Ref, UsageError
from ..federation import LAZY, Federation
from ..resizing import resize_mask, resize_volume
from ..stores import Keys, LazyStore, RecentArrays
from . import images, masks
from .image_decoding import Unreadable
from .image_store import ImageFile, run_in_parallel
from .read_options import Progress, ReadOptions
from .volume_decoding import (
    CLOSE,
    READABLE,
    VolumeHeader,
    decode_mask,
    decode_volume,
    find_difference,
    is_volume,
    read_volume_header,
)

KEPT = 2**28
"""Bytes of decoded images to keep."""

Shape = tuple[int, ...]
Found = TypeVar("Found")


class VolumeStore(LazyStore):
    """Images ``[N, C, D, H, W]`` or ``[N, C, H, W]`` in files, decoded when a batch needs them, which is slow.

    Args:
        samples: Files of each sample, whose channels are concatenated.
        shape: Channels and spatial shape of all samples; a file with another shape is resized.
        where: Name of the samples in messages.
        recent: Cache of decoded samples, which stores may share.
        turn: Reorient arrays to the patient's axes.

    """

    probed = 2

    def __init__(
        self,
        samples: Sequence[tuple[Path, ...]],
        shape: Shape,
        where: str,
        recent: RecentArrays,
        *,
        turn: bool = True,
    ) -> None:
        super().__init__(where, len(samples), torch.zeros(1, *shape))
        self._samples, self._recent, self._turn = tuple(samples), recent, turn

    @override
    def _load(self, rows: NDArray[np.int64], key: Keys) -> Tensor:
        x = torch.empty(len(rows), *self.shape[1:])
        for place, row in enumerate(rows.tolist()):
            x[place] = torch.from_numpy(self._decode(self._samples[row]))
        return x

    def _decode(self, files: tuple[Path, ...]) -> NDArray[np.float32]:
        known = self._recent.find(files)
        if known is not None:
            self._recent.keep(files, known)
            return known
        parts = []
        for file in files:
            try:
                parts.append(decode_volume(file, turn=self._turn))
            except Unreadable as error:
                raise UsageError(f"{file} {error}: give a file that is whole, and stays") from error
        made = np.concatenate([resize_volume(torch.from_numpy(part), self.shape[2:]).numpy() for part in parts])
        if made.shape != self.shape[1:]:
            raise UsageError(
                f"{files[0]} has shape {made.shape} and not {self.shape[1:]}: it changed while it was used"
            )
        self._recent.keep(files, made)
        return made


def holds_volumes(path: Path) -> bool:
    """Return whether a client in ``path``, or ``path`` itself, has medical images with masks."""
    return any(
        is_volume(file.name)
        for place in masks.find_places(path)
        for folder in images.list_content(place)[1]
        if folder.name.lower() == masks.IMAGES
        for file in images.list_content(Path(folder))[0]
    )


def read_masked_volumes(path: Path, reading: ReadOptions) -> Federation:
    """Return the federation for segmentation of the medical images in directory ``path``.

    Args:
        path: Directory of clients, or of one client that joins others (``schema``).
        reading: ``domains``, ``classes``, ``image_size`` (voxels along each axis), ``on_unreadable``,
            ``test_fraction``, ``task``, ``schema`` and ``progress`` apply.

    Returns:
        Images float32 from -1 to 1, and masks uint8 ``[N, D, H, W]``, or without D if files contain one slice.

    Raises:
        UsageError: The directory has another layout, files cannot be read, images differ in size, channels or from
            their masks, or the library for their format is missing.

    """
    folders = images.choose_folders(path, reading)
    names = tuple(folders if reading.domains is None else reading.domains)
    notices: list[str] = []
    pairs: dict[str, tuple[masks.Pair, ...]] = {}
    for name in names:
        files, remarks = images.list_files(path, folders[name], READABLE)
        pairs[name] = masks.pair_files(path, name, files)
        notices += remarks
    flat = [pair for own in pairs.values() for pair in own]
    alien = next((image.path for image, _ in flat if not is_volume(image.path)), None)
    if alien is not None:
        raise UsageError(
            f"{path / alien} is no NIfTI or DICOM file, and others are: put each kind into its own directory"
        )
    every = [file for pair in flat for file in pair]
    headers, broken = _read_all(path, every, read_volume_header, "headers of volumes", reading.progress)
    for image, mask in flat:
        if image.path in headers and mask.path in headers:
            differs = find_difference(headers[image.path], headers[mask.path])
            if differs:
                told = differs.replace("{image}", str(path / image.path))
                raise UsageError(f"mask {path / mask.path} {told}: bring it to its image's grid")
    shape = find_common_shape(
        path, {image.path: headers[image.path] for image, _ in flat if image.path in headers}, reading
    )
    readable = [mask for _, mask in flat if mask.path in headers]
    decoded, unread = _read_all(path, readable, lambda file: _fit_mask(file, shape[1:]), "masks", reading.progress)
    broken |= unread
    images.refuse_broken(path, broken, len(every), reading)
    blank = np.zeros(shape[1:], np.uint8)
    y = {name: np.stack([decoded.get(mask.path, blank) for _, mask in own]) for name, own in pairs.items()}
    held = {name: masks.find_values(y[name]) for name in names}
    classes = masks.number_classes(path, pairs, held, reading)
    recent, clients, faults = RecentArrays(KEPT), [], []
    for name in names:
        shown = tuple(image for image, _ in pairs[name])
        left_out = {image.path for pair in pairs[name] for image in pair[:1] if broken.keys() & {f.path for f in pair}}
        store = VolumeStore([(path / image.path,) for image in shown], shape, f"client {name!r}", recent)
        targets = torch.from_numpy(y[name] if classes else (y[name] > 0).astype(np.uint8))
        clients.append(images.make_client(name, shown, store, targets, left_out, reading))
        notices += masks.list_empty(name, pairs[name], held[name], left_out, classes)
        own = {file.path: broken[file.path] for pair in pairs[name] for file in pair if file.path in broken}
        if own:
            why = images.format_few(f"{file}: {reason}" for file, reason in own.items())
            faults.append(f"client {name!r}: {len(own)} of {2 * len(shown)} files cannot be read, left out ({why})")
    task = reading.task if isinstance(reading.task, Segmentation) else Segmentation()
    task, said = choose_spacing(task, [headers[image.path] for image, _ in flat if image.path in headers], shape[1:])
    return Federation(
        name=path.resolve().name,
        clients=tuple(clients),
        classes=classes or 2,
        note=f"{len(flat)} medical images with masks of {len(clients)} clients",
        notices=(LAZY, *notices, *([masks.TWO_VALUES] if classes is None else []), *said),
        faults=tuple(faults),
        task=task,
    )


def find_common_shape(path: Path, headers: Mapping[str, VolumeHeader], reading: ReadOptions) -> Shape:
    """Return the channels and shape of all images; raise :class:`UsageError` if they differ and cannot be resized."""
    first: dict[Shape, str] = {}
    for file, header in headers.items():
        first.setdefault((header.channels, *header.shape), file)
    kinds = sorted({(shape[0], len(shape) - 1) for shape in first})
    if not kinds:
        return 1, 1, 1
    if len(kinds) > 1:
        one, other = (
            (shape, file) for kind in kinds[:2] for shape, file in first.items() if kind == (shape[0], len(shape) - 1)
        )
        raise UsageError(
            f"{path / one[1]} has {_describe(one[0])}, and {path / other[1]} {_describe(other[0])}: give all images "
            "the same number of channels and of axes"
        )
    channels, axes = kinds[0]
    if reading.image_size is not None:
        return channels, *(reading.image_size,) * axes
    if len(first) > 1:
        (shape, a), (another, b) = list(first.items())[:2]
        raise UsageError(
            f"images differ in size: {path / a} has {_describe(shape)}, {path / b} {_describe(another)}: give one "
            "number of voxels for all axes ({}), or bring them to one grid beforehand",
            Ref(image_size=64),
        )
    return next(iter(first))


def choose_spacing(task: Segmentation, headers: Sequence[VolumeHeader], size: Shape) -> tuple[Segmentation, list[str]]:
    """Return ``task`` with the files' spacing if it measures surfaces and all files have one spacing; else a notice."""
    if not task.surface or task.spacing:
        return task, []
    steps = [
        [step * before / after for step, before, after in zip(header.spacing, header.shape, size, strict=True)]
        for header in headers
        if header.spacing
    ]
    if len(steps) == len(headers) and steps and np.allclose(steps, steps[0], rtol=CLOSE):
        return replace(task, spacing=tuple(steps[0])), []
    return task, ["voxels differ in size between files, so that surface distances are in voxels (spacing= of the task)"]


def _describe(shape: Shape) -> str:
    return f"{' x '.join(map(str, shape[1:]))} voxels of {shape[0]} channel{'s' * (shape[0] > 1)}"


def read_all(
    files: Sequence[Path], read: Callable[[Path], Found], what: str, progress: Progress | None
) -> tuple[dict[Path, Found], dict[Path, str]]:
    """Return the result of ``read`` for each readable file, and the reason why each other file is broken."""
    found: dict[Path, Found] = {}
    broken: dict[Path, str] = {}

    def one(row: int) -> None:
        try:
            found[files[row]] = read(files[row])
        except Unreadable as error:
            broken[files[row]] = str(error)

    run_in_parallel(one, len(files), what, progress)
    return found, {file: broken[file] for file in files if file in broken}


def _fit_mask(file: Path, size: Shape) -> NDArray[np.uint8]:
    return resize_mask(torch.from_numpy(decode_mask(file)), size).numpy()


def _read_all(
    root: Path, files: Iterable[ImageFile], read: Callable[[Path], Found], what: str, progress: Progress | None
) -> tuple[dict[str, Found], dict[str, str]]:
    """Return the results of :func:`read_all` by the files' paths below ``root``."""
    paths = {root / file.path: file.path for file in files}
    found, broken = read_all(list(paths), read, what, progress)
    return {paths[file]: each for file, each in found.items()}, {paths[file]: why for file, why in broken.items()}
