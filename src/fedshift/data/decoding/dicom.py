"""DICOM files by pydicom (extra ``medical``): which are read, and folders of slices as volumes.

The slices of a series lie at ImagePositionPatient, in the plane of ImageOrientationPatient, with PixelSpacing between
rows and between columns (DICOM PS3.3, C.7.6.2, equation C.7.6.2.1-1). They are sorted, and their distance is measured,
along the normal of that plane: names, InstanceNumber and SliceThickness may say otherwise. DICOM's axes point to the
patient's left, back and head (LPS), NIfTI's to the right, front and head (RAS). The frames of one file are sorted
along the normal, too, if it has their positions.

Stored numbers become values, frame by frame, by a palette (C.7.6.3.1.5), a Modality LUT, or slope and intercept
(C.11.1), of the frame's functional groups or of the file. Slopes of 0, unless the stored numbers are equal, doses,
Real World Value Mappings (C.7.6.16.2.11) without these, and what this module does not understand are refused by name.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ...utils.files import open_regular
from .images import SUFFIXES, Unreadable, explain_unreadable

NIFTI = (".nii", ".nii.gz")
DICOM = (".dcm",)
"""Suffixes of DICOM files, which often have none, or numbers in its place."""
_INDEX = "dicomdir"
"""Name in lower case of the list of a medium's files, which is DICOM but not an image (PS3.10, section 8.6)."""
_PREAMBLE, _MARK = 128, b"DICM"
"""Bytes before the mark of a DICOM file, and the mark (PS3.10, section 7.1)."""
MOST_BYTES = 2**31
"""Maximum number of bytes to unpack for a volume's values."""
CLOSE = 0.01
"""Relative tolerance for distances."""
ROUNDING = 0.02
"""Largest difference of distances, in millimeters, that comes from positions rounded to 0.01 mm."""

_DEFLATED = "1.2.840.10008.1.2.1.99"
_NO_IMAGES = {
    "SEG": "is a DICOM segmentation (SEG): convert it to NIfTI, for example with segimage2itkimage of dcmqi",
    "RTSTRUCT": "has contours and no pixels (RTSTRUCT): convert them to a NIfTI mask, for example with plastimatch",
    "RTDOSE": "is a dose (RTDOSE): convert it to NIfTI, for example with plastimatch",
}
_IN_TIME = {"FrameTime", "FrameTimeVector"}
_PHOTOMETRIC = {
    1: {"MONOCHROME1", "MONOCHROME2", "PALETTE COLOR"},
    3: {"RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT"},
}
"""Meanings of pixels by their number of samples; pydicom makes all of 3 RGB, the last two only in JPEG 2000."""
_COLORS = ("Red", "Green", "Blue")
_RESCALE = ("RescaleSlope", "RescaleIntercept")
_REAL_WORLD = ("RealWorldValueSlope", "RealWorldValueLUTData")
_LPS_TO_RAS = np.array([-1.0, -1.0, 1.0])

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """Slices of one volume in the order of their positions.

    Attributes:
        files: Their files.
        slices: Their data sets.
        shape: Voxels along rows, columns and slices: ``(Columns, Rows, number of slices)``.
        affine: Transform of these voxels to millimeters in RAS, float64 ``[4, 4]``.

    """

    files: tuple[Path, ...]
    slices: tuple[Any, ...]
    shape: tuple[int, int, int]
    affine: NDArray[np.float64]


def load_library(library: str, file: Path, extra: str = "medical") -> ModuleType:
    """Return an optional library; raise :class:`UsageError` with the extra to install if it is missing."""
    try:
        made = import_module(library)
    except ModuleNotFoundError as error:
        raise UsageError(f"{file} needs the package {library} to be read: pip install 'fedshift[{extra}]'") from error
    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)  # it logs as errors what is reported here
    return made


def check_bytes(count: int, what: str) -> None:
    """Raise :class:`Unreadable` if ``what`` has more than :data:`MOST_BYTES`."""
    if count > MOST_BYTES:
        raise Unreadable(
            f"says that it holds {what}, {count / 1e9:.1f} GB: at most {MOST_BYTES / 1e9:.1f} GB are unpacked"
        )


def open_dicom(file: Path, *, whole: bool) -> Any:
    """Return the data set of an image, without its pixels unless ``whole``; raise :class:`Unreadable` for others."""
    pydicom = load_library("pydicom", file)
    with open_regular(file) as stream:
        if pydicom.filereader.read_file_meta_info(file).get("TransferSyntaxUID") == _DEFLATED:
            raise Unreadable(
                "is a deflated DICOM file, which does not say to what size it unpacks: save it uncompressed"
            )
        found = pydicom.dcmread(stream, stop_before_pixels=not whole)
    signs = {"SegmentSequence": "SEG", "DoseGridScaling": "RTDOSE"}
    kind = next((kind for name, kind in signs.items() if name in found), found.get("Modality"))
    if kind in _NO_IMAGES:
        raise Unreadable(_NO_IMAGES[kind])
    frames = int(found.get("NumberOfFrames") or 1)
    if frames > 1:
        _refuse_other_frames(found, frames)
    return found


def _refuse_other_frames(found: Any, frames: int) -> None:
    """Raise :class:`Unreadable` if the frames of a data set are not the slices of one volume."""
    groups = found.get("PerFrameFunctionalGroupsSequence")
    if groups and len(groups) != frames:
        raise Unreadable(f"has {frames} frames, and PerFrameFunctionalGroupsSequence {len(groups)}: export it again")
    pointers = found.get("FrameIncrementPointer")
    tags = [pointers] if isinstance(pointers, int) else pointers or ()
    names = {import_module("pydicom.datadict").keyword_for_tag(tag) for tag in tags}
    placed = find_attribute(found, "ImagePositionPatient", 1) is not None and groups
    times = int(found.get("NumberOfTemporalPositions") or 1) > 1 or names & _IN_TIME
    if times or (not placed and any(name in found for name in _IN_TIME)):
        raise Unreadable(f"has {frames} frames in time: write each point in time to its own file")
    for name in sorted(names):
        values = found.get(name)
        fixed = isinstance(values, Sequence) and len(set(values)) == 1
        if not (fixed or (name == "SliceVector" and values and list(values) == sorted(set(values)))):
            raise Unreadable(f"has {frames} frames by {name}, not by slices: write each volume to its own file")


def find_attribute(found: Any, name: str, frame: int = 0) -> Any:
    """Return an attribute of a frame: of its functional groups, or else of the data set; None: there is none."""
    own, shared = (found.get(f"{kind}FunctionalGroupsSequence") or () for kind in ("PerFrame", "Shared"))
    for group in (*own[frame : frame + 1], *shared):
        for element in group:
            if element.VR == "SQ" and not element.is_private and element.value:
                value = element.value[0].get(name)
                if value is not None:
                    return value
    return found.get(name)


def count_frames(found: Any) -> tuple[int, int, int, int]:
    """Return frames, height, width and channels of an image; raise :class:`Unreadable` for other contents."""
    height, width, bits = (int(found.get(name) or 0) for name in ("Rows", "Columns", "BitsAllocated"))
    frames, samples = int(found.get("NumberOfFrames") or 1), int(found.get("SamplesPerPixel") or 1)
    photometric = found.get("PhotometricInterpretation")
    channels = 3 if photometric == "PALETTE COLOR" else samples
    if min(height, width, bits, frames) < 1 or samples not in (1, 3) or (frames > 1 and channels > 1):
        raise Unreadable(
            f"holds no image that is read: {frames} frames of {height} x {width} with {channels} samples of {bits} bits"
        )
    if photometric not in _PHOTOMETRIC[samples]:
        raise Unreadable(f"has the PhotometricInterpretation {photometric} with {samples} samples, which is not read")
    if photometric == "MONOCHROME2" and found.get("PresentationLUTShape") == "INVERSE":
        raise Unreadable("has the PhotometricInterpretation MONOCHROME2 with an INVERSE PresentationLUTShape")
    if photometric != "PALETTE COLOR" and found.get("PixelPresentation") in ("COLOR", "MIXED"):
        raise Unreadable(f"has gray with colors (PixelPresentation {found.PixelPresentation}), which is not read")
    stored, high = found.get("BitsStored"), found.get("HighBit")
    if None not in (stored, high) and high != stored - 1:
        raise Unreadable(f"has the HighBit {high} with {stored} BitsStored of {bits}: export it again")
    pixels = frames * height * width
    check_bytes(pixels * channels * max(1, bits // 8), f"{pixels} pixels of {bits} bits")
    return frames, height, width, channels


def read_patient(found: Any) -> str:
    """Return the PatientID of a data set; empty if it has none."""
    return str(found.get("PatientID") or "").strip()


def order_frames(found: Any) -> tuple[tuple[int, ...], float]:
    """Return the frames of a data set in the order of their positions, and the millimeters between; 0: not known.

    The order is empty if positions are not known. Raises :class:`Unreadable` unless frames are one upright stack.
    """
    apart = float(find_attribute(found, "SpacingBetweenSlices") or find_attribute(found, "SliceThickness") or 0)
    groups = found.get("PerFrameFunctionalGroupsSequence") or ()
    sides = [find_attribute(found, "ImageOrientationPatient", frame) or [0] * 6 for frame in range(len(groups))]
    planes = np.array(sides, float)
    if not np.allclose(planes, planes[:1], atol=1e-3):
        raise Unreadable("has frames that differ in ImageOrientationPatient: take localizers and other planes away")
    items = [group.get("PlanePositionSequence") for group in groups]
    known = [item[0].get("ImagePositionPatient") if item else None for item in items]
    if len(known) < 2 or not any(known):
        return (), apart
    if any(len(place or ()) != 3 for place in known):
        raise Unreadable(f"has {len(known)} frames, and an ImagePositionPatient for some of them: export it again")
    if not planes.any():
        raise Unreadable("has frames with an ImagePositionPatient, but no ImageOrientationPatient: export it again")
    places, normal = np.array(known, float), np.cross(*planes[0].reshape(2, 3))
    order = _sort_slices(places, normal, [f"frame {frame + 1}" for frame in range(len(known))])
    return tuple(order), float((places[order[-1]] - places[order[0]]) @ normal) / (len(known) - 1)


def holds_hounsfield(found: Any) -> bool:
    """Return whether a data set's values are Hounsfield units: those in CT without another RescaleType."""
    inverted = found.get("PhotometricInterpretation") == "MONOCHROME1"
    return found.get("Modality") == "CT" and find_attribute(found, "RescaleType") in (None, "", "HU") and not inverted


def read_values(found: Any) -> Array:
    """Return the pixels of a data set in the unit of its slope and intercept, float64, or as stored without these.

    ``[H, W]``, in color ``[H, W, 3]``, or frames ``[D, H, W]`` in the order of :func:`order_frames`.
    """
    stored = np.asarray(found.pixel_array)
    if found.PhotometricInterpretation == "PALETTE COLOR":
        return _apply_palette(found, stored)
    if int(found.get("SamplesPerPixel") or 1) > 1:
        return stored
    frames = int(found.get("NumberOfFrames") or 1)
    if frames == 1:
        return _apply_modality(found, stored.reshape(stored.shape[-2:]), 0)
    order, _ = order_frames(found)
    return np.stack([_apply_modality(found, stored[frame], frame) for frame in order or range(frames)])


def _apply_palette(found: Any, index: Array) -> Array:
    """Return the colors of palette indices, ``[H, W, 3]``."""
    sizes = [tuple(found.get(f"{color}PaletteColorLookupTableDescriptor") or ()) for color in _COLORS]
    contents = [found.get(f"{color}PaletteColorLookupTableData") for color in _COLORS]
    if not all(contents) or len(sizes[0]) != 3 or len(set(sizes)) > 1:
        raise Unreadable("has a PaletteColorLookupTable that is not read: export it in RGB")
    entries, first = sizes[0][0] % 2**16 or 2**16, sizes[0][1]
    order = "<" if found.file_meta.TransferSyntaxUID.is_little_endian else ">"
    wide = len(contents[0]) >= 2 * entries  # entries of 8 bits are in bytes or words
    tables = [np.frombuffer(content, f"{order}u2" if wide else np.uint8)[:entries] for content in contents]
    if min(map(len, tables)) < entries:
        raise Unreadable(f"has a PaletteColorLookupTable of fewer than the {entries} entries by its descriptor")
    colors: Array = np.stack(tables, axis=-1)[np.clip(index.astype(np.int64) - first, 0, entries - 1)]
    return colors


def _apply_modality(found: Any, numbers: Array, frame: int) -> Array:
    """Return the values of a frame's stored numbers ``[H, W]``; raise :class:`Unreadable` if these are not defined."""
    if found.get("ModalityLUTSequence"):
        values: Array = import_module("pydicom.pixels").apply_modality_lut(numbers.astype(np.int64), found)
        return values
    known = {name: value for name in _RESCALE if (value := find_attribute(found, name, frame)) is not None}
    mapping = found.get("RealWorldValueMappingSequence") or [{}]
    if not known and any(mapping[0].get(name, find_attribute(found, name, frame)) is not None for name in _REAL_WORLD):
        raise Unreadable("has a RealWorldValueMappingSequence, and no RescaleSlope: convert it to NIfTI")
    if len(known) == 1:
        raise Unreadable(f"has a {next(iter(known))} and not {' and '.join(_RESCALE)}: export it again")
    for name, value in known.items():
        if found.get(name) not in (None, value):
            raise Unreadable(
                f"has the {name} {value} in functional groups and {found.get(name)} in the file: export it again"
            )
    slope, intercept = (float(known.get(name, one)) for name, one in zip(_RESCALE, (1, 0), strict=True))
    if not (math.isfinite(slope) and math.isfinite(intercept)) or (slope == 0 and np.ptp(numbers)):
        raise Unreadable(f"has the RescaleSlope {slope:g}, which makes its values one number, or none: write it again")
    return numbers if (slope, intercept) == (1.0, 0.0) else numbers * slope + intercept


def is_dicom(file: Path) -> bool:
    """Return whether ``file`` is a DICOM file: by its name, or by its mark if the name has no suffix that is read."""
    name = file.name.lower()
    if name.endswith(DICOM):
        return True
    if name == _INDEX or name.startswith(".") or name.endswith((*NIFTI, *SUFFIXES)):
        return False
    try:
        with open_regular(file) as stream:
            return stream.read(_PREAMBLE + len(_MARK))[_PREAMBLE:] == _MARK
    except OSError:  # a folder, or a file that cannot be read
        return False


def holds_slices(folder: Path) -> bool:
    """Return whether ``folder`` directly contains DICOM files."""
    return folder.is_dir() and any(map(is_dicom, folder.iterdir()))


def is_stack(folder: Path) -> bool:
    """Return whether the DICOM files directly in ``folder`` are slices of one volume: the first has a single frame."""
    files = sorted(filter(is_dicom, folder.iterdir()))
    try:
        return bool(files) and count_frames(open_dicom(files[0], whole=False))[0] == 1
    except Exception:  # a damaged file, which is reported when it is read
        return False


def find_slices(folder: Path) -> list[Path]:
    """Return the files in ``folder`` that are slices, or should be, in the order of their names."""
    return sorted(file for file in folder.iterdir() if not file.name.startswith(".") and file.name.lower() != _INDEX)


def read_series(folder: Path, *, whole: bool = False) -> Series:
    """Return the slices in ``folder``, without their pixels unless ``whole``.

    Raises :class:`Unreadable`, naming two slices, if they are not the slices of one upright stack: of several series,
    orientations, sizes or pixel spacings, at unequal distances, at one position, or sheared by a tilted gantry.
    """
    files = find_slices(folder)
    other = next((file.name for file in files if not is_dicom(file)), None)
    if other is not None:
        raise Unreadable(f"is a folder of slices with {other}, which is not a DICOM file: move it elsewhere")
    if len(files) < 2:
        raise Unreadable("is a folder with a single slice: put the file beside the folders, or add the other slices")
    check_bytes(sum(file.stat().st_size for file in files), f"{len(files)} slices")
    slices = [_open_slice(file, whole) for file in files]
    for name, fix in _COMMON.items():
        values = [_read(each, name) for each in slices]
        for file, value in zip(files, values, strict=True):
            # numbers other than counts may differ by rounding
            if value != values[0] and not (name in _COUNTS and np.allclose(value, values[0], rtol=1e-3, atol=1e-4)):
                shown = "" if name in _PRIVATE else f" ({_show(values[0])} and {_show(value)})"
                raise Unreadable(f"has slices that differ in {name}, {files[0].name} and {file.name}{shown}: {fix}")
    first = slices[0]
    shape = (int(first.Columns), int(first.Rows), len(files))
    check_bytes(math.prod(shape) * max(1, int(first.BitsAllocated) // 8), f"{len(files)} slices")
    columns, rows = np.reshape(_read(first, "ImageOrientationPatient"), (2, 3))
    between_rows, between_columns = _read(first, "PixelSpacing")
    if np.abs(np.array([columns @ columns, rows @ rows, columns @ rows]) - (1, 1, 0)).max() > CLOSE:
        raise Unreadable("has an ImageOrientationPatient that is not two perpendicular directions: write it again")
    if min(between_rows, between_columns) <= 0:
        raise Unreadable(f"has a PixelSpacing of {between_rows:g} x {between_columns:g} mm: write it again")
    places = np.array([_read(each, "ImagePositionPatient") for each in slices])
    order = _sort_slices(places, np.cross(columns, rows), [file.name for file in files])
    places = places[order]
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = columns * between_columns, rows * between_rows
    affine[:3, 2], affine[:3, 3] = (places[-1] - places[0]) / (len(files) - 1), places[0]
    affine[:3] *= _LPS_TO_RAS[:, None]
    return Series(
        files=tuple(files[at] for at in order), slices=tuple(slices[at] for at in order), shape=shape, affine=affine,
    )  # fmt: skip


def stack_slices(series: Series) -> Array:
    """Return the values of a series that was read whole, ``[slices, Rows, Columns]``; raise :class:`Unreadable`."""
    values = []
    for file, found in zip(series.files, series.slices, strict=True):
        with _explain_slice(file):
            values.append(read_values(found))
    return np.stack(values)


_COMMON = {
    "SeriesInstanceUID": "put each series into its own folder",
    "PatientID": "put the slices of each patient into their own folder",
    "ImageOrientationPatient": "take localizers and slices of other planes away",
    "Rows": "take localizers and other images away",
    "Columns": "take localizers and other images away",
    "PixelSpacing": "take slices of another reconstruction away",
    "PhotometricInterpretation": "write all slices in one way",
}
"""Attributes that are equal in all slices of a volume, and how to repair a folder in which they differ."""
_PRIVATE = {"SeriesInstanceUID", "PatientID"}
"""Attributes whose values may name a patient, and are not shown."""
_COUNTS = {"ImagePositionPatient": 3, "ImageOrientationPatient": 6, "PixelSpacing": 2}


def _open_slice(file: Path, whole: bool) -> Any:
    """Return the data set of one slice; raise :class:`Unreadable` with its name."""
    with _explain_slice(file):
        found = open_dicom(file, whole=whole)
        frames, *_, channels = count_frames(found)
        if frames > 1 or channels > 1:
            raise Unreadable("has several frames or colors: move it out of the folder")
        for name, count in _COUNTS.items():
            if len(find_attribute(found, name) or ()) != count:
                raise Unreadable(f"has no {name}: export the series again, or convert it to NIfTI")
    return found


@contextmanager
def _explain_slice(file: Path) -> Iterator[None]:
    """Convert exceptions while a slice is read as :func:`~.images.explain_unreadable` does, and name it."""
    try:
        with explain_unreadable(file, "a DICOM file"):
            yield
    except Unreadable as error:
        raise Unreadable(f"has the slice {file.name}, which {error}") from error


def _read(found: Any, name: str) -> Any:
    """Return the value of an attribute, numbers as floats."""
    return tuple(map(float, find_attribute(found, name))) if name in _COUNTS else found.get(name)


def _show(value: Any) -> str:
    return " x ".join(f"{number:g}" for number in value) if isinstance(value, tuple) else str(value)


def _sort_slices(places: Array, normal: Array, names: list[str]) -> list[int]:
    """Return the order of the slices along ``normal``; raise :class:`Unreadable` unless they are one regular stack.

    ``places``: positions in millimeters ``[N, 3]``.
    """
    depths = places @ normal
    order = np.argsort(depths, kind="stable").tolist()
    gaps = np.diff(depths[order])
    near = int(gaps.argmin())
    if gaps[near] <= CLOSE * gaps.max():
        raise Unreadable(
            f"has two slices at one position, {names[order[near]]} and {names[order[near + 1]]}, as in time series: "
            "keep one slice for each position"
        )
    usual = float(np.sort(gaps)[(len(gaps) - 1) // 2])
    far = int(np.abs(gaps - usual).argmax())
    if abs(gaps[far] - usual) > max(CLOSE * usual, ROUNDING):
        raise Unreadable(
            f"has slices {usual:g} mm from each other, but {gaps[far]:g} mm between {names[order[far]]} and "
            f"{names[order[far + 1]]}: add the slices that are missing, or resample the series to one distance"
        )
    moved = places - places[order[0]]
    aside = np.linalg.norm(moved - np.outer(moved @ normal, normal), axis=1).max()
    if aside > max(CLOSE * gaps.sum(), ROUNDING):
        raise Unreadable(
            f"has slices that are shifted sideways by up to {aside:.1f} mm, as by a tilted gantry: resample the "
            "series to an upright volume"
        )
    return [int(at) for at in order]
