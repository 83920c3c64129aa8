"""DICOM files by pydicom (extra ``medical``): which are read, and folders of slices as volumes.

The slices of a series lie at ImagePositionPatient, in the plane of ImageOrientationPatient, with PixelSpacing between
rows and between columns (DICOM PS3.3, C.7.6.2, equation C.7.6.2.1-1). They are sorted, and their distance is measured,
along the normal of that plane: names, InstanceNumber and SliceThickness may say otherwise. DICOM's axes point to the
patient's left, back and head (LPS), NIfTI's to the right, front and head (RAS).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.errors import UsageError
from ...utils.files import open_regular
from .images import SUFFIXES, Unreadable

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
}
_IN_TIME = {0x00181063, 0x00181065}
"""FrameTime and FrameTimeVector."""
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
        patient: PatientID, only in memory; empty if the files do not have it.

    """

    files: tuple[Path, ...]
    slices: tuple[Any, ...]
    shape: tuple[int, int, int]
    affine: NDArray[np.float64]
    patient: str = field(default="", repr=False)


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
    if found.get("Modality") in _NO_IMAGES:
        raise Unreadable(_NO_IMAGES[found.Modality])
    frames, times = (int(found.get(name) or 1) for name in ("NumberOfFrames", "NumberOfTemporalPositions"))
    if frames > 1 and (times > 1 or found.get("FrameIncrementPointer") in _IN_TIME):
        raise Unreadable(f"has {frames} frames in time: write each point in time to its own file")
    return found


def count_frames(found: Any) -> tuple[int, int, int, int]:
    """Return frames, height, width and samples per pixel of an image; raise :class:`Unreadable` for other contents."""
    height, width, bits = (int(found.get(name) or 0) for name in ("Rows", "Columns", "BitsAllocated"))
    frames, channels = int(found.get("NumberOfFrames") or 1), int(found.get("SamplesPerPixel") or 1)
    if min(height, width, bits, frames) < 1 or channels not in (1, 3) or (frames > 1 and channels > 1):
        raise Unreadable(
            f"holds no image that is read: {frames} frames of {height} x {width} with {channels} samples of {bits} bits"
        )
    pixels = frames * height * width
    check_bytes(pixels * channels * max(1, bits // 8), f"{pixels} pixels of {bits} bits")
    return frames, height, width, channels


def read_patient(found: Any) -> str:
    """Return the PatientID of a data set; empty if it has none."""
    return str(found.get("PatientID") or "").strip()


def holds_hounsfield(found: Any) -> bool:
    """Return whether a data set's values are Hounsfield units, as those of CT are unless it says otherwise."""
    unit, inverted = found.get("RescaleType") or "HU", found.get("PhotometricInterpretation") == "MONOCHROME1"
    return found.get("Modality") == "CT" and unit == "HU" and not inverted


def read_values(found: Any) -> Array:
    """Return the pixels of a data set in the unit of its slope and intercept, float64, or as stored without these."""
    values: Array = np.asarray(found.pixel_array)
    slope, intercept = (
        float(plain if found.get(name) is None else found.get(name))
        for name, plain in (("RescaleSlope", 1), ("RescaleIntercept", 0))
    )
    return values if (slope, intercept) == (1.0, 0.0) else values * slope + intercept


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
        values = [_read_numbers(each, name) for each in slices]
        for file, value in zip(files, values, strict=True):
            if value != values[0] and not _is_close(value, values[0]):
                shown = "" if name in _PRIVATE else f" ({_show(values[0])} and {_show(value)})"
                raise Unreadable(f"has slices that differ in {name}, {files[0].name} and {file.name}{shown}: {fix}")
    first = slices[0]
    shape = (int(first.Columns), int(first.Rows), len(files))
    check_bytes(math.prod(shape) * max(1, int(first.BitsAllocated) // 8), f"{len(files)} slices")
    columns, rows = np.reshape(_read_numbers(first, "ImageOrientationPatient"), (2, 3))
    between_rows, between_columns = _read_numbers(first, "PixelSpacing")
    if np.abs(np.array([columns @ columns, rows @ rows, columns @ rows]) - (1, 1, 0)).max() > CLOSE:
        raise Unreadable("has an ImageOrientationPatient that is not two perpendicular directions: write it again")
    if min(between_rows, between_columns) <= 0:
        raise Unreadable(f"has a PixelSpacing of {between_rows:g} x {between_columns:g} mm: write it again")
    places = np.array([_read_numbers(each, "ImagePositionPatient") for each in slices])
    order = _sort_slices(places, np.cross(columns, rows), [file.name for file in files])
    places = places[order]
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = columns * between_columns, rows * between_rows
    affine[:3, 2], affine[:3, 3] = (places[-1] - places[0]) / (len(files) - 1), places[0]
    affine[:3] *= _LPS_TO_RAS[:, None]
    return Series(
        files=tuple(files[at] for at in order), slices=tuple(slices[at] for at in order), shape=shape, affine=affine,
        patient=read_patient(first),
    )  # fmt: skip


def stack_slices(series: Series) -> Array:
    """Return the values of a series that was read whole, ``[slices, Rows, Columns]``; raise :class:`Unreadable`."""
    values = []
    for file, found in zip(series.files, series.slices, strict=True):
        try:
            values.append(read_values(found))
        except Exception as error:  # pydicom raises exceptions of any type for damaged pixels
            raise _explain_slice(file, error) from error
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
    try:
        found = open_dicom(file, whole=whole)
        frames, *_, channels = count_frames(found)
        if frames > 1 or channels > 1:
            raise Unreadable("has several frames or colors: move it out of the folder")
        for name, count in _COUNTS.items():
            if len(found.get(name) or ()) != count:
                raise Unreadable(f"has no {name}: export the series again, or convert it to NIfTI")
    except Unreadable as error:
        raise Unreadable(f"has the slice {file.name}, which {error}") from error
    except Exception as error:  # pydicom raises exceptions of any type for damaged bytes
        raise _explain_slice(file, error) from error
    return found


def _explain_slice(file: Path, error: Exception) -> Exception:
    """Return what to raise for an exception while a slice is read."""
    if isinstance(error, UsageError):
        return error
    return Unreadable(f"has the slice {file.name}, which cannot be read ({str(error) or type(error).__name__})")


def _read_numbers(found: Any, name: str) -> tuple[Any, ...]:
    """Return the value of an attribute, numbers as floats."""
    value = found.get(name)
    return tuple(map(float, value)) if name in _COUNTS else (value,)


def _is_close(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether numbers other than counts differ only by rounding."""
    return all(isinstance(each, float) for each in one + other) and np.allclose(one, other, rtol=1e-3, atol=1e-4)


def _show(values: tuple[Any, ...]) -> str:
    return " x ".join(f"{value:g}" if isinstance(value, int | float) else str(value) for value in values)


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
