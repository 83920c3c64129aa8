"""NIfTI and DICOM files with masks, for segmentation: ``DIR/<client>/images/`` and ``DIR/<client>/masks/``.

Folders, names and class numbers are as in :mod:`fedshift.data.readers.masks`; single files, and folders of DICOM slices
that are one volume, are read by :mod:`fedshift.data.decoding.volumes`. Masks are kept in memory, uint8
``[N, D, H, W]``, or without D if files contain one slice. Images, float32 from -1 to 1, are decoded when a batch needs
them, and the most recently used :data:`~fedshift.data.files.volumes.KEPT` bytes over all clients are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...tasks.segmentation import Segmentation
from ...utils.errors import UsageError
from ...utils.words import Information
from ..decoding import Decoding
from ..decoding.ranges import Window, parse_window
from ..decoding.resizing import describe_stretch, resample_mask, resize_mask
from ..decoding.volumes import (
    READABLE,
    VolumeHeader,
    decode_mask,
    describe_spacing,
    find_difference,
    is_volume,
    parse_spacing,
    read_volume_header,
)
from ..files import image_store
from ..files import images as folders
from ..files import masks as pairing
from ..files.image_store import read_all
from ..files.masks import Pair
from ..files.read_options import ReadOptions
from ..files.volumes import (
    KEPT,
    VolumeStore,
    choose_spacing,
    compare_grids,
    find_sizes,
    find_spacing,
    find_window,
    list_unplaced,
    refuse_other_kinds,
)
from ..patches import make_box
from ..scan import SPLITS, Assign, Loaded, Scan, assign_splits
from ..stores import RecentArrays
from .images import list_clients, make_part, require_task

holds = "medical images with masks"
UNKEPT = "cannot be written: images are decoded whenever a batch needs them"
options = frozenset({"test_fraction", "image_size", "groups", "window", "spacing"})


@dataclass(frozen=True, kw_only=True, eq=False)
class _Volumes:
    """Files of all clients with what their headers and masks say.

    Attributes:
        path: Directory of the clients.
        spacing: Millimeters to which images are resampled; empty: they keep their voxels.
        window: Values that become -1 and 1; None: each image's own.
        pairs: Files of each client.
        channels: Number of channels of all images.
        sizes: Voxels of each client's images, ``[N, axes]``; without patches all are equal.
        broken: The reason why a file is left out.
        headers: What each readable file's header says, before resampling.

    """

    path: Path
    spacing: tuple[float, ...]
    window: Window | None
    pairs: dict[str, tuple[Pair, ...]]
    channels: int
    sizes: dict[str, NDArray[np.int64]]
    broken: dict[str, str]
    headers: dict[str, VolumeHeader]


def can_read(source: object) -> bool:
    """Return whether ``source`` is a directory of medical images with masks."""
    return folders.find_kind(source) == folders.VOLUMES


def scan(source: Path, reading: ReadOptions) -> Scan:
    """Return the clients in directory ``source``, which is one itself if it joins others.

    Raises :class:`UsageError` if the directory has another layout, files cannot be read, images differ in size, in
    channels or from their masks, or the library for their format is missing.
    """
    require_task(source, reading, Segmentation)
    parse_window(reading.window)
    parse_spacing(reading.spacing)
    places = folders.choose_folders(source, reading)
    files, notices = list_clients(source, places, reading, READABLE)
    pairs = {name: pairing.pair_files(source, name, own) for name, own in files.items()}
    flat = [pair for own in pairs.values() for pair in own]
    images = (image.path for image, _ in flat)
    alien = next((path for path in images if not is_volume(source / path) and not (source / path).is_dir()), None)
    if alien is not None:
        raise UsageError(
            f"{source / alien} is no NIfTI or DICOM file, and others are: put each kind into its own directory"
        )
    every = {file.path: source / file.path for pair in flat for file in pair}
    headers, broken = read_all(every, read_volume_header, "headers of volumes", reading.progress)
    for image, mask in flat:
        if image.path in headers and mask.path in headers:
            differs = find_difference(headers[image.path], headers[mask.path])
            if differs:
                told = differs.replace("{image}", str(source / image.path))
                raise UsageError(f"mask {source / mask.path} {told}: bring it to its image's grid")
    shown = {image.path: headers[image.path] for image, _ in flat if image.path in headers}
    refuse_other_kinds(source, shown)
    lost = pairing.list_left_out(pairs, broken)
    known = [
        make_part(
            name, [image for image, _ in own], torch.zeros(len(own), dtype=torch.uint8), places[name], reading,
            [headers[image.path].patient if image.path in headers else image.path for image, _ in own],
        )
        for name, own in pairs.items()
    ]  # fmt: skip
    trained = {
        file
        for part in known
        for file, side in zip(part.files, assign_splits(part, lost, task=Segmentation(), reading=reading), strict=True)
        if side == SPLITS.index("train")
    }
    spacing = find_spacing(source, shown, trained or set(shown), reading)
    window, ranges = find_window(source, shown, trained or set(shown), reading)
    before = {every[mask.path]: headers[image.path].spacing for image, mask in flat if image.path in headers}
    if spacing:
        shown = {file: header.resample(spacing) for file, header in shown.items()}
    sizes = find_sizes(source, shown, reading)
    wanted = {every[mask.path]: sizes[image.path] for image, mask in flat if image.path in sizes}

    def read_mask(file: Path) -> NDArray[np.generic]:
        mask = decode_mask(file)
        mask = resample_mask(mask, before[file], spacing) if spacing and file in before else mask
        return resize_mask(torch.from_numpy(mask), wanted.get(file, mask.shape)).numpy()

    readable = {mask.path: every[mask.path] for _, mask in flat if mask.path in headers}
    decoded, damaged = read_all(readable, read_mask, "masks", reading.progress)
    broken |= damaged
    folders.refuse_broken(source, broken, len(every), reading)
    blank = (1,) * len(next(iter(sizes.values()), (1, 1, 1)))
    found = {
        name: np.array([sizes.get(image.path, blank) for image, _ in own], np.int64) for name, own in pairs.items()
    }
    y = {}
    for name, own in pairs.items():
        y[name] = np.zeros((len(own), *found[name].max(axis=0)), np.uint8)
        for number, (image, mask) in enumerate(own):
            if image.path in sizes and mask.path in decoded:
                y[name][number][make_box([0] * len(blank), sizes[image.path])] = decoded[mask.path]
    held = {name: pairing.find_values(own) for name, own in y.items()}
    classes, white = pairing.number_classes(source, pairs, held, reading)
    left_out = pairing.list_left_out(pairs, broken)
    parts, faults = [], []
    for part, (name, own) in zip(known, pairs.items(), strict=True):
        classes_of = pairing.to_classes(y[name], white=name in white)
        targets = torch.from_numpy(pairing.ignore_outside(classes_of, found[name]) if reading.patch else classes_of)
        parts.append(replace(part, y=targets))
        notices += list_unplaced(name, [headers[image.path] for image, _ in own if image.path in headers])
        notices += pairing.list_empty(name, own, held[name], left_out, white=name in white)
        notices += pairing.describe_partners(name, own)
        if unread := {file.path: broken[file.path] for pair in own for file in pair if file.path in broken}:
            faults.append(folders.describe_broken(name, unread, 2 * len(own)))
    task = reading.task if isinstance(reading.task, Segmentation) else Segmentation()
    own_headers = {
        name: [headers[image.path] for image, _ in own if image.path in headers] for name, own in pairs.items()
    }
    notices += compare_grids(own_headers, resampled=bool(spacing))
    if reading.image_size is not None and sizes:
        told = describe_stretch([header.shape for header in shown.values()], next(iter(sizes.values())))
        notices += [told] if told else []
    resampled = [Information(f"images are resampled to {describe_spacing(spacing)}")] if spacing else []
    task, said = choose_spacing(task, list(shown.values()), list(sizes.values()))
    return Scan(
        name=source.resolve().name,
        parts=tuple(parts),
        task=task,
        classes=classes,
        checked=True,
        note="{samples} medical images with masks of {clients} clients",
        notices=(*notices, *pairing.describe_values(white, pairs), *resampled, *ranges, *said),
        faults=tuple(faults),
        source=_Volumes(
            path=source,
            spacing=spacing,
            window=window,
            pairs=pairs,
            sizes=found,
            broken=broken,
            headers=headers,
            channels=next((header.channels for header in shown.values()), 1),
        ),
    )


def load(scan: Scan, reading: ReadOptions, assign: Assign) -> Loaded:
    """Return stores that decode each client's images when a batch needs them."""
    found: _Volumes = scan.source
    recent = RecentArrays(KEPT)
    cases = bool(reading.patch or found.spacing)

    def list_entries(client: str) -> list[Path]:
        """Return the cache entry of each image, by what its files hold and how they are decoded."""
        images = [image for image, _ in found.pairs[client]] if cases else []
        return [
            image_store.cache_entry(
                reading.cache_directory, found.path, [image], "volume", found.window, found.spacing, reading.image_size,
                *list_slices(found.path / image.path),
            )
            for image in images
        ]  # fmt: skip

    unkept = cases and not image_store.can_write(reading.cache_directory)
    sizes = [found.sizes[part.client] for part in scan.parts]
    return Loaded(
        stores=[
            VolumeStore(
                [(found.path / file,) for file in part.files],
                (found.channels, *own.max(axis=0).tolist()),
                part.where,
                recent,
                extents=own if reading.patch and reading.image_size is None else None,
                kept=list_entries(part.client),
                window=found.window,
                spacing=found.spacing,
                headers=[found.headers.get(file) for file in part.files],
            )
            for part, own in zip(scan.parts, sizes, strict=True)
        ],
        extents=sizes,
        decodings=[Decoding(kind="volume", window=found.window, spacing=found.spacing)] * len(scan.parts),
        left_out=pairing.list_left_out(found.pairs, found.broken),
        notices=(Information(f"{reading.cache_directory} {UNKEPT}"),) if unkept else (),
    )


def list_slices(path: Path) -> list[tuple[str, int, int]]:
    """Return the name, size and time of change of each file in a folder of slices; empty for a file."""
    files = sorted(path.iterdir()) if path.is_dir() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
