"""Headers and voxels of single medical images: NIfTI by nibabel, DICOM by pydicom (extra ``medical``).

An image is a file, or a folder of DICOM slices, which are one volume (:mod:`fedshift.data.decoding.dicom`).

- Axes: a NIfTI array, or the volume of a folder of slices, is reoriented to the nearest axes of the patient and becomes
  ``[C, D, H, W]`` with slices from feet to head, rows from back to front, and columns from left to right; a fourth axis
  of a NIfTI file is channels. An axis of one slice is dropped: ``[C, H, W]``. A DICOM file is used as stored: an image,
  or frames ``[1, D, H, W]``.
- With a spacing, the values are then resampled to it (:mod:`fedshift.data.decoding.resizing`).
- Then values are scaled to [-1, 1] (:mod:`fedshift.data.decoding.ranges`).
- Masks are class numbers from 0 to 255. The mask of a one-slice image may be a picture that Pillow can read.

The number of bytes is checked in the header before anything is unpacked: it must not exceed :data:`MOST_BYTES` or what
a file of this size can contain, and no part may have unknown length. Files must be regular; no other program is started
to read them.
"""

from __future__ import annotations

import gzip
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import Ref, UsageError
from ...utils.files import open_regular, require_regular
from ...utils.words import join_some
from .dicom import (
    CLOSE,
    DICOM,
    NIFTI,
    Series,
    check_bytes,
    count_frames,
    find_attribute,
    holds_hounsfield,
    is_dicom,
    load_library,
    open_dicom,
    order_frames,
    read_patient,
    read_series,
    read_values,
    stack_slices,
)
from .images import SUFFIXES, Unreadable, decode_image, explain_unreadable, read_header, to_classes
from .ranges import Window, find_range, parse_numbers, scale
from .resizing import find_size, resample_image

VOLUMES = (*NIFTI, *DICOM)
"""Suffixes of files that this module reads."""
READABLE = (*VOLUMES, *sorted(SUFFIXES))
"""Suffixes of files that may be masks of these images."""
MOST_EXPANSION = 1032
"""Maximum expansion factor of deflate, the compression of gzip."""
MEDIAN = "median"
"""Spacing in words: the median of the files along each axis."""
UNMEASURED = "does not say how far its voxels are apart: write a NIfTI file with a qform or sform, or give no spacing"

_MILLIMETERS = {1: 1000.0, 3: 0.001}
"""Millimeters in NIfTI's units of length, meters and micrometers; a file without a unit is read in millimeters."""
_UNIT_OF_LENGTH = 0b111
_COMMENTS = 2**20
"""Maximum number of bytes to read between the header and the values."""

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class VolumeHeader:
    """Facts from a file's header.

    Attributes:
        shape: ``(D, H, W)`` or ``(H, W)`` of the decoded array.
        channels: Number of channels.
        spacing: Millimeters between neighbors along these axes; empty if the file does not specify it.
        axes: Directions of the file's own axes, such as ``RAS`` (right, anterior, superior), if known.
        affine: Transform of the voxels ``(column, row, slice)`` of the decoded array to millimeters, ``[4, 4]``; None:
            unknown.
        placed: Whether the directions of its axes in the patient are known (NIfTI: by a qform or sform).
        apart: Largest distance in millimeters between a voxel's places by the qform and by the sform of a NIfTI file.
        order: Frames of a DICOM file in the order of their positions; empty: one frame, or not known.
        hounsfield: Whether its values are Hounsfield units.
        patient: DICOM's PatientID, only in memory; empty: not known.

    """

    shape: tuple[int, ...]
    channels: int = 1
    spacing: tuple[float, ...] = ()
    axes: str = ""
    affine: tuple[tuple[float, ...], ...] | None = None
    placed: bool = True
    apart: float = 0.0
    order: tuple[int, ...] = ()
    hounsfield: bool = False
    patient: str = field(default="", repr=False)

    @property
    def measured(self) -> bool:
        """Return whether the file says how far its voxels are apart."""
        return bool(self.spacing) and self.placed

    def resample(self, spacing: tuple[float, ...]) -> VolumeHeader:
        """Return the header of the decoded array after resampling to ``spacing``; its affine is unknown."""
        return replace(self, shape=find_size(self.shape, self.spacing, spacing), spacing=spacing, affine=None)


def is_volume(file: Path) -> bool:
    """Return whether ``file`` is read as a medical image: by its name, or see :func:`is_dicom`."""
    return file.name.lower().endswith(NIFTI) or is_dicom(file)


def find_stem(name: str) -> str:
    """Return the name of a file or folder without the suffix of an image, if it has one."""
    lower = name.lower()
    return next((name.removesuffix(name[-len(each) :]) for each in reversed(READABLE) if lower.endswith(each)), name)


def read_volume_header(file: Path) -> VolumeHeader:
    """Read the header of ``file`` without its voxels; raise :class:`Unreadable` if it cannot be used."""
    with explain_unreadable(file, _describe_kind(file)):
        if file.is_dir():
            return _describe_series(file, read_series(file))[0]
        if file.name.lower().endswith(NIFTI):
            return _describe_nifti(file)[0]
        if is_dicom(file):
            return _describe_dicom(open_dicom(file, whole=False))
        picture = read_header(file)
        return VolumeHeader(shape=(picture.height, picture.width))


def parse_spacing(text: str | None) -> tuple[float, ...]:
    """Return the millimeters that a text names, slices before rows before columns; one number is for all axes.

    Empty for no text and for :data:`MEDIAN`. Raises :class:`UsageError` for other texts.
    """
    if text is None or text == MEDIAN:
        return ()
    steps = parse_numbers(text)
    if not (1 <= len(steps) <= 3 and min(steps) > 0):
        raise UsageError(
            "{}: give the millimeters between voxels along columns, rows and slices, such as 1,1,3, one number for all "
            f"axes, or {MEDIAN}",
            Ref(spacing=text),
        )
    return steps[::-1]


def describe_spacing(spacing: tuple[float, ...]) -> str:
    """Return a spacing along slices, rows and columns in words, columns first."""
    return f"{_times(spacing[::-1])} mm ({join_some(('right', 'front', 'head')[: len(spacing)])})"


def decode_volume(file: Path, *, window: Window | None = None, spacing: tuple[float, ...] = ()) -> NDArray[np.float32]:
    """Return the brightness in ``file``, ``[C, D, H, W]`` or ``[C, H, W]``, from -1 to 1; raise :class:`Unreadable`.

    ``window``: values, in Hounsfield units where the file has such, that become -1 and 1; None: the volume's own range.
    ``spacing``: resample to these millimeters between voxels along the array's axes; empty: keep the file's voxels.
    """
    with explain_unreadable(file, _describe_kind(file)):
        values, header = _decode(file, window)
        if count := values.size - int(np.isfinite(values).sum()):
            raise Unreadable(f"has {count} voxel{'s' * (count > 1)} that are NaN or infinite")
        if spacing and not header.measured:
            raise Unreadable(UNMEASURED)
        if len(spacing) not in (0, len(header.shape)):
            raise Unreadable(
                f"has {len(header.shape)} axes, and the spacing {describe_spacing(spacing)} {len(spacing)}"
            )
        resampled = resample_image(values, header.spacing, spacing) if spacing else values
        return scale(resampled, [window] if window else _find_ranges(file, values, resampled))


def measure_volume(file: Path) -> Window:
    """Return the range of the values in ``file`` by themselves, of all channels together; raise :class:`Unreadable`."""
    with explain_unreadable(file, _describe_kind(file)):
        values, _ = _decode(file)
        return find_range(values, values)


def _find_ranges(file: Path, values: Array, resampled: Array) -> list[Window]:
    """Return the range of each channel of a NIfTI file, or one of all channels of a DICOM file."""
    pairs = zip(values, resampled, strict=True) if file.name.lower().endswith(NIFTI) else [(values, resampled)]
    return [find_range(*pair) for pair in pairs]


def decode_mask(file: Path) -> NDArray[np.uint8]:
    """Return the class of each voxel in ``file``, ``[D, H, W]`` or ``[H, W]``; raise :class:`Unreadable`."""
    with explain_unreadable(file, _describe_kind(file)):
        if is_volume(file) or file.is_dir():
            values, _ = _decode(file, brighten=False)
        else:
            values, _ = decode_image(file, kind="mask")
        if len(values) != 1:
            raise Unreadable(f"is a mask with {len(values)} channels: give one class number for each place")
        return to_classes(values[0])


def find_difference(image: VolumeHeader, mask: VolumeHeader) -> str | None:
    """Return how a mask's position differs from its image's, or None if the headers show no difference."""
    if mask.shape != image.shape:
        return f"has {_times(mask.shape)} voxels, but its image {{image}} has {_times(image.shape)}"
    axes = f"has axes that point {mask.axes}, but its image {{image}} {image.axes}"
    other_axes = bool(mask.axes and image.axes and mask.axes != image.axes)
    if other_axes and (mask.affine is None or image.affine is None):
        return axes
    if mask.axes not in ("", "RAS") and not image.axes:
        return f"has axes that point {mask.axes}, but its image {{image}} has axes of unknown direction"
    if image.axes not in ("", "RAS") and image.affine is not None and not mask.axes and len(mask.shape) == 3:
        return f"has axes of unknown direction, but its image {{image}} has axes that point {image.axes}"
    unknown = image.affine is None and mask.affine is None and bool(image.order) != bool(mask.order)
    if unknown and list(image.order or mask.order) != sorted(image.order or mask.order):
        return "and its image {image} have frames in different orders, and one has no positions of frames"
    if mask.spacing and image.spacing and not np.allclose(mask.spacing, image.spacing, rtol=CLOSE):
        return f"has a spacing of {_times(mask.spacing)} mm, but its image {{image}} {_times(image.spacing)} mm"
    if mask.affine is not None and image.affine is not None:
        apart = _measure_distance(mask.affine, image.affine, max(image.shape))
        if apart > min(image.spacing) / 2 + CLOSE * max(image.shape) * max(image.spacing):
            return axes if other_axes else f"lies up to {apart:.1f} mm elsewhere than its image {{image}}"
    return None


def _measure_distance(one: Any, other: Any, size: int) -> float:
    """Return the largest distance between the places that two affines give to a corner of a cube of ``size`` voxels."""
    corners = np.array(np.meshgrid(*([0.0, size],) * 3, [1.0])).reshape(4, -1)
    return float(np.linalg.norm((np.array(one) - np.array(other))[:3] @ corners, axis=0).max())


def _times(numbers: tuple[float, ...]) -> str:
    return " x ".join(f"{number:g}" for number in numbers)


def digest_voxels(file: Path) -> bytes:
    """Return a digest that is equal for files with the same voxels, also under other names, axes and spacings.

    It is that of the sums over each slab along each axis, modulo 2^64, of numbers that spread each value's bits
    (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195, figure 16), from the end at which they are smaller.
    """
    with explain_unreadable(file, _describe_kind(file)):
        values, _ = _decode(file, brighten=False)
    bits = np.ascontiguousarray(values + np.float32(0), np.float32).view(np.uint32).astype(np.uint64)
    bits *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    others = (tuple(other for other in range(bits.ndim) if other != axis) for axis in range(bits.ndim))
    sums = [bits.sum(axis=each, dtype=np.uint64) for each in others]
    return blake2b(b"".join(sorted(min(s.tobytes(), s[::-1].tobytes()) for s in sums)), digest_size=16).digest()


def _decode(file: Path, window: Window | None = None, *, brighten: bool = True) -> tuple[Array, VolumeHeader]:
    """Return the values of ``file``, ``[C, D, H, W]`` or ``[C, H, W]``, and its header.

    Inverted values become bright with ``brighten``, and are refused with a ``window``.
    """
    if file.is_dir():
        series = read_series(file, whole=True)
        described, turned = _describe_series(file, series)
        values = stack_slices(series)
        values = _brighten(values, series.slices[0], window) if brighten else values
        values = values.transpose(2, 1, 0)[..., None]
    elif is_dicom(file):
        found = open_dicom(file, whole=True)
        *_, channels = count_frames(found)
        values = read_values(found)
        values = _brighten(values, found, window) if brighten else values
        return np.moveaxis(values, -1, 0) if channels > 1 else values[None], _describe_dicom(found)
    else:
        described, turned = _describe_nifti(file)
        values = np.asanyarray(load_library("nibabel", file).load(file).dataobj)
        values = values.reshape(*values.shape[:3], *(1,) * (3 - values.ndim), described.channels)
    values = load_library("nibabel", file).orientations.apply_orientation(values, turned)
    straight = np.ascontiguousarray(values.transpose(3, 2, 1, 0))
    return straight.reshape(described.channels, *described.shape), described


def _brighten(values: Array, found: Any, window: Window | None) -> Array:
    """Return values of a DICOM image, or inverted ones, which are in no unit, if the smallest is the brightest."""
    if found.get("PhotometricInterpretation") != "MONOCHROME1":
        return values
    if window is not None:
        raise Unreadable("shows its smallest values as the brightest (MONOCHROME1), for which no window is defined")
    inverted: Array = values.max() - values
    return inverted


def _describe_nifti(file: Path) -> tuple[VolumeHeader, Array]:
    """Return the header of a NIfTI file, and the orientation with which its array is turned."""
    nibabel = load_library("nibabel", file)
    require_regular(file)
    packed = file.name.lower().endswith(".gz")
    kinds = (nibabel.Nifti1Header, nibabel.Nifti2Header)
    with open_regular(file) as stream:
        block = (gzip.GzipFile(fileobj=stream) if packed else stream).read(kinds[-1].sizeof_hdr)
    kind = next((kind for kind in kinds if kind.may_contain_header(block)), None)
    if kind is None:
        raise Unreadable("is not a NIfTI file, or is cut short")
    size = kind.sizeof_hdr
    header = kind(block[:size], check=False)
    shape, dtype = tuple(map(int, header.get_data_shape())), header.get_data_dtype()
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    start = float(header["vox_offset"])
    if dtype.kind not in "iuf" or not 2 <= len(shape) <= 4 or min(shape) < 1:
        raise Unreadable(f"holds values of type {dtype} and shape {_times(shape)}: 2 to 4 axes of numbers are read")
    count = math.prod(shape) * dtype.itemsize
    check_bytes(count, f"{_times(shape)} values of {dtype}")
    length = file.stat().st_size
    if not 0 <= start <= size + _COMMENTS:
        raise Unreadable(f"says that its values begin at byte {start:g}: at most {size + _COMMENTS} are read before")
    if (start + count) > length * (MOST_EXPANSION if packed else 1):
        raise Unreadable(f"is cut short: {length} bytes cannot hold {_times(shape)} values of {dtype}")
    affine = np.asarray(header.get_best_affine(), float)
    unit = _MILLIMETERS.get(int(header["xyzt_units"]) & _UNIT_OF_LENGTH, 1.0)
    affine[:3] *= unit
    apart, unused = 0.0, (ValueError, nibabel.spatialimages.HeaderDataError)  # of a qform that is not a rotation
    if header["qform_code"] and header["sform_code"]:
        with suppress(*unused):
            apart = unit * _measure_distance(header.get_qform(), header.get_sform(), max(shape[:3]))
    channels = shape[3] if len(shape) == 4 else 1
    places = (*shape[:3], *(1,) * (3 - len(shape)))
    described, turned = _describe_grid(file, places, affine)
    placed = bool(header["qform_code"] or header["sform_code"])
    return replace(described, channels=channels, placed=placed, apart=apart), turned


def _describe_grid(file: Path, places: tuple[int, ...], affine: NDArray[np.float64]) -> tuple[VolumeHeader, Array]:
    """Return the header of an array of ``places`` voxels, and the orientation with which it is turned.

    ``affine``: transform of the array's voxels to millimeters. Raises :class:`Unreadable` if it has no inverse.
    """
    nibabel = load_library("nibabel", file)
    turned = nibabel.orientations.io_orientation(affine) if np.isfinite(affine).all() else np.full((3, 2), np.nan)
    if not np.isfinite(turned).all():
        raise Unreadable("does not say in which direction its axes point (an affine matrix of rank 3)")
    steps = nibabel.affines.voxel_sizes(affine)
    order = np.argsort(turned[:, 0])[::-1].tolist()  # axes of the file that become superior, anterior, right
    wide = [axis for axis in order if places[axis] > 1]
    kept = wide if len(wide) == 2 else order
    decoded = affine @ nibabel.orientations.inv_ornt_aff(turned, places)
    described = VolumeHeader(
        shape=tuple(places[axis] for axis in kept),
        spacing=tuple(round(float(steps[axis]), 4) for axis in kept),
        axes="".join(nibabel.aff2axcodes(affine)),
        affine=tuple(map(tuple, decoded.tolist())),
    )
    return described, turned


def _describe_series(folder: Path, series: Series) -> tuple[VolumeHeader, Array]:
    """Return the header of a folder of slices, and the orientation with which their array is turned."""
    described, turned = _describe_grid(folder, series.shape, series.affine)
    return replace(
        described, patient=read_patient(series.slices[0]), hounsfield=holds_hounsfield(series.slices[0])
    ), turned


def _describe_dicom(found: Any) -> VolumeHeader:
    """Return the header of a DICOM data set."""
    frames, height, width, channels = count_frames(found)
    shape = (frames, height, width) if frames > 1 else (height, width)
    order, apart = order_frames(found)
    steps = (*[apart] * (frames > 1), *map(float, find_attribute(found, "PixelSpacing") or (0, 0)))
    spacing = steps if min(steps) > 0 else ()
    sides = [float(cosine) for cosine in find_attribute(found, "ImageOrientationPatient") or ()]
    codes = "" if len(sides) != 6 else "".join(_point(sides[at : at + 3]) for at in (0, 3))
    return VolumeHeader(
        shape=shape, channels=channels, spacing=spacing, axes=codes, order=order, hounsfield=holds_hounsfield(found),
        patient=read_patient(found),
    )  # fmt: skip


def _point(cosines: list[float]) -> str:
    """Return the direction of a DICOM axis: the patient's left, posterior, superior or their opposites."""
    axis = max(range(3), key=lambda number: abs(cosines[number]))
    return ("LPS" if cosines[axis] > 0 else "RAI")[axis]


def _describe_kind(file: Path) -> str:
    if file.name.lower().endswith(NIFTI):
        return "a NIfTI file"
    return "a series of DICOM slices" if file.is_dir() else "a DICOM file"
