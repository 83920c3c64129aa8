"""Grids of medical images: sizes, spacings and places of their voxels, compared between files and clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...config.grid_plan import Fingerprint
from ...tasks.segmentation import Segmentation
from ...utils.errors import Ref, UsageError
from ...utils.words import Information, join_some
from ..decoding import list_members
from ..decoding.dicom import CLOSE
from ..decoding.ranges import Window, choose_shared, parse_window
from ..decoding.volumes import (
    UNMEASURED,
    VolumeHeader,
    find_difference,
    is_volume,
    measure_volume,
    parse_spacing,
)  # fmt: skip
from ..federation import Federation
from ..schema import Schema
from ..source import ReadOptions
from ..stores import MappedStore
from .cache import keep, read_all, stamp
from .listing import ImageFile

OWN_RANGE = (
    "each medical image is scaled by its own 0.5th and 99.5th percentiles, since its file names no unit; --window "
    "LOW,HIGH keeps values comparable where they have one, as in CT"
)
MIXED_RANGE = (
    "{} of {} medical images say that they are CT, in Hounsfield units, so each is scaled by its own 0.5th and 99.5th "
    "percentiles: --window LOW,HIGH keeps these units, if all have them"
)
SHARED_RANGE = (
    "CT: {:g} to {:g} become -1 to 1, the medians of the 0.5th and 99.5th percentiles of all training images; --window "
    "LOW,HIGH names others"
)
MEASURE = "write a NIfTI file with a qform or sform, or leave it out of the plan"
OBLIQUE = 20.0
"""Degrees against the patient's axes beyond which a notice tells of tilted images."""

Shape = tuple[int, ...]


def refuse_other_grids(
    path: Path, pairs: Sequence[tuple[ImageFile, ImageFile]], headers: Mapping[str, VolumeHeader]
) -> None:
    """Raise :class:`UsageError` if an image is a picture among medical images, or lies elsewhere than its mask."""
    for image, _ in pairs:
        if not is_volume(path / image.path) and not (path / image.path).is_dir():
            raise UsageError(
                f"{path / image.path} is no NIfTI or DICOM file, and others are: put each kind into its own directory"
            )
    for image, mask in pairs:
        if image.path in headers and mask.path in headers:
            differs = find_difference(headers[image.path], headers[mask.path])
            if differs:
                told = differs.replace("{image}", str(path / image.path))
                raise UsageError(f"mask {path / mask.path} {told}: bring it to its image's grid")


def refuse_other_kinds(path: Path, headers: Mapping[str, VolumeHeader]) -> None:
    """Raise :class:`UsageError` if images differ in their number of channels or of axes."""
    first: dict[tuple[int, int], str] = {}
    for file, header in headers.items():
        first.setdefault((header.channels, len(header.shape)), file)
    if len(first) > 1:
        one, other = (first[kind] for kind in sorted(first)[:2])
        shapes = (_describe((headers[file].channels, *headers[file].shape)) for file in (one, other))
        raise UsageError(
            f"{path / one} has {next(shapes)}, and {path / other} {next(shapes)}: give all images the same number of "
            "channels and of axes"
        )


def find_spacing(
    path: Path, headers: Mapping[str, VolumeHeader], trained: Collection[str], reading: ReadOptions
) -> tuple[float, ...]:
    """Return the millimeters to which images are resampled along their axes; empty: they keep their voxels.

    Args:
        path: Directory of the images.
        headers: Header of each image, by its path.
        trained: Images over which a median is taken.
        reading: The options, with the spacing asked for; clients that join others take that of these.

    Raises:
        UsageError: The text names no spacing, or the images cannot be resampled to it.

    """
    joined = reading.schema.preparation.decoding.spacing if isinstance(reading.schema, Schema) else None
    asked = parse_spacing(reading.spacing) if joined is None else joined
    if not headers or not (asked or (joined is None and reading.spacing)):
        return asked
    if reading.image_size is not None:
        raise UsageError(
            "{} would stretch the voxels to which {} resamples: leave one out",
            Ref(image_size=reading.image_size),
            Ref("spacing"),
        )
    unmeasured = [file for file, header in headers.items() if not header.measured]
    if unmeasured:
        raise UsageError(f"{path / unmeasured[0]} {UNMEASURED} ({len(unmeasured)} of {len(headers)} images)")
    axes = len(next(iter(headers.values())).shape)
    if not asked:
        steps = np.array([headers[file].spacing for file in trained if file in headers])
        asked = tuple(round(float(step), 4) for step in np.median(steps, axis=0))
    spacing = asked * axes if len(asked) == 1 else asked
    if len(spacing) != axes:
        raise UsageError(
            f"{{}} has {len(spacing)} numbers, and images have {axes} axes: give one number for each axis, or for all",
            Ref(spacing=reading.spacing),
        )
    return spacing


def find_window(
    path: Path, headers: Mapping[str, VolumeHeader], trained: Collection[str], reading: ReadOptions
) -> tuple[Window | None, list[str]]:
    """Return the values that become -1 and 1, and a notice; None: each image has its own range.

    Arguments are as for :func:`find_spacing`. Clients that join others take the others' range.
    """
    if isinstance(reading.schema, Schema) and reading.schema.preparation.decoding.kind == "volume":
        return reading.schema.preparation.decoding.window, []
    if (asked := parse_window(reading.window)) is not None or not headers:
        return asked, []
    count = sum(header.hounsfield for header in headers.values())
    if count < len(headers):
        return None, [MIXED_RANGE.format(count, len(headers)) if count else Information(OWN_RANGE)]

    def measure(file: Path) -> Window:
        facts = "range", stamp(list_members(file))
        return keep(reading.cache_directory, facts, lambda: measure_volume(file))[0]

    ends, _ = read_all({file: path / file for file in headers if file in trained}, measure, "ranges of CT",
                       reading.progress)  # fmt: skip
    window = choose_shared([*ends.values()])
    return window, [Information(SHARED_RANGE.format(*window))] if window else []


def find_sizes(path: Path, headers: Mapping[str, VolumeHeader], reading: ReadOptions) -> dict[str, Shape]:
    """Return the size of each image when it is decoded; raise :class:`UsageError` if sizes differ and may not."""
    first: dict[Shape, str] = {}
    for file, header in headers.items():
        first.setdefault((header.channels, *header.shape), file)
    if reading.image_size is not None:
        return {file: (reading.image_size,) * len(header.shape) for file, header in headers.items()}
    if len(first) > 1 and not reading.patch:
        (shape, a), (another, b) = list(first.items())[:2]
        if reading.spacing:
            raise UsageError(
                f"images differ in size at one spacing: {path / a} would have {_describe(shape)}, {path / b} "
                f"{_describe(another)}: train on patches ({{}}), or crop or pad them to one extent beforehand",
                Ref(patch=64),
            )
        raise UsageError(
            f"images differ in size: {path / a} has {_describe(shape)}, {path / b} {_describe(another)}: give one "
            "number of voxels for all axes ({}), train on patches ({}), or bring them to one grid beforehand",
            Ref(image_size=64),
            Ref(patch=64),
        )
    return {file: header.shape for file, header in headers.items()}


def choose_spacing(
    task: Segmentation, headers: Sequence[VolumeHeader], sizes: Sequence[Shape]
) -> tuple[Segmentation, list[str]]:
    """Return ``task`` with the files' spacing if it measures surfaces and all files have one spacing; else a notice."""
    if not task.surface or task.spacing:
        return task, []
    steps = [
        [step * before / after for step, before, after in zip(header.spacing, header.shape, size, strict=True)]
        for header, size in zip(headers, sizes, strict=True)
        if header.spacing
    ]
    if len(steps) == len(headers) and steps and np.allclose(steps, steps[0], rtol=CLOSE):
        return replace(task, spacing=tuple(steps[0])), []
    return task, ["voxels differ in size between files, so that surface distances are in voxels (spacing= of the task)"]


def compare_grids(clients: Mapping[str, Sequence[VolumeHeader]], *, resampled: bool) -> list[str]:
    """Return notices about differences between files or clients that reorientation does not remove.

    ``clients``: headers of each client's images; ``resampled``: all get one spacing.
    """
    notices = []
    every = [header for headers in clients.values() for header in headers]
    stored = {header.axes for header in every if header.affine is None and header.axes}
    if len(stored) > 1:
        notices.append(
            f"files of single slices or frames keep their stored axes, which differ ({join_some(sorted(stored))}): "
            "bring them to one orientation"
        )
    medians = {
        name: np.median([header.spacing for header in headers], axis=0)
        for name, headers in clients.items()
        if headers and all(header.spacing for header in headers)
    }
    steps = list(medians.values())
    if not resampled and not all(np.allclose(each, steps[0], rtol=CLOSE) for each in steps):
        told = (f"{' x '.join(f'{step:.3g}' for step in each[::-1])} at {name!r}" for name, each in medians.items())
        notices.append(
            f"voxels differ between clients (medians, mm): {join_some(told)}; --spacing median resamples all"
        )
    for name, headers in clients.items():
        unplaced = sum(not header.placed for header in headers)
        if unplaced:
            notices.append(
                f"client {name!r}: {unplaced} of {len(headers)} images do not say how their axes lie in the patient "
                "(qform and sform codes are 0): they are read as nibabel assumes, the first axis to the patient's "
                "left; make sure that they lie as the others do"
            )
        apart = [header.apart for header in headers if header.apart > min(header.spacing, default=0.0) / 2]
        if apart:
            notices.append(
                f"client {name!r}: {len(apart)} of {len(headers)} images lie up to {max(apart):.1f} mm elsewhere by "
                "their qform than by their sform, which is used: other programs may use the other"
            )
        tilts = [tilt for tilt in map(_find_tilt, headers) if tilt > OBLIQUE]
        if tilts:
            notices.append(
                f"client {name!r}: {len(tilts)} of {len(headers)} images are tilted by up to {max(tilts):.0f} degrees "
                "against the patient's axes, and stay so"
            )
    return notices


def list_headers(data: Federation) -> dict[str, list[VolumeHeader]]:
    """Return the headers of each client's medical images, of all splits; clients without such are absent."""
    found = {}
    for client in data.clients:
        stores = {id(split.store): split.store for split in client.splits.values()}
        known = [each for store in stores.values() for each in getattr(store, "headers", ()) if each is not None]
        if known:
            found[client.name] = known
    return found


def count_cases(data: Federation) -> dict[str, Fingerprint]:
    """Return the counts of each client's training cases, of which patches are cut.

    Raises :class:`UsageError` if files say how far their voxels are apart at some cases only.
    """
    found = {}
    for client in data.clients:
        train, rows = client.train, client.train.rows.tolist()
        assert train.patches is not None
        headers = [train.store.headers[row] for row in rows] if isinstance(train.store, MappedStore) else []
        for row, header in zip(rows, headers, strict=False):
            if header is None or not header.measured:
                raise UsageError(f"{client.files[row]} {UNMEASURED.partition(':')[0]}: {MEASURE}")
        found[client.name] = Fingerprint.count(
            train.patches.true_sizes[rows][:, ::-1].tolist(),
            [header.spacing[::-1] for header in headers if header],
            data.task.count_classes(train.y, data.classes).tolist(),
        )
    return found


def _find_tilt(header: VolumeHeader) -> float:
    """Return the largest angle between an axis of the array and the patient's nearest axis, in degrees."""
    if header.affine is None:
        return 0.0
    axes = np.abs(np.array(header.affine)[:3, :3])
    return float(np.degrees(np.arccos(np.clip(axes.max(axis=0) / np.linalg.norm(axes, axis=0), 0, 1))).max())


def _describe(shape: Shape) -> str:
    return f"{' x '.join(map(str, shape[1:]))} voxels of {shape[0]} channel{'s' * (shape[0] > 1)}"
