"""Predicted masks as files on the grid of their image: NIfTI for NIfTI and for stacks of slices, PNG for pictures.

A NIfTI mask has the spatial shape of its image, and the geometry of its header unchanged: pixdim, units, qform and
sform with their codes (https://nifti.nimh.nih.gov/nifti-1/documentation/nifti1fields). Text in the header, which may
name a patient, is not copied. The mask of a folder of DICOM slices has their affine, with codes 1 (scanner). Frames of
a DICOM file become a NIfTI file with codes 0: their position is unknown.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .dicom import NIFTI, read_series
from .volumes import read_volume_header

_GEOMETRY = (
    "dim_info", "pixdim", "xyzt_units", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x",
    "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z",
)  # fmt: skip
_SCANNER = 1


def write_mask(directory: Path, stem: str, classes: NDArray[np.uint8], image: Path) -> Path:
    """Write the mask of ``image`` to ``directory``, and return its path, ``stem`` with the suffix of its format.

    Args:
        directory: An existing directory.
        stem: Name of the file without suffix.
        classes: Class of each pixel or voxel, ``[D, H, W]`` or ``[H, W]``, on the axes of
            :func:`~fedshift.data.decoding.volumes.decode_mask`.
        image: The image, a file or a folder of slices, which can be read.

    """
    made = _make_nifti(classes, image)
    path = directory / f"{stem}{'.png' if made is None else '.nii.gz'}"
    save = Image.fromarray(classes).save if made is None else made.to_filename
    save(path)
    return path


def place_mask(classes: NDArray[np.uint8], image: Path) -> NDArray[np.uint8]:
    """Return the array of the file that :func:`write_mask` writes: on the axes of ``image``, as a viewer reads it."""
    made = _make_nifti(classes, image)
    return classes if made is None else np.array(made.dataobj, np.uint8)


def _make_nifti(classes: NDArray[np.uint8], image: Path) -> Any:
    """Return the mask of ``image`` as a NIfTI image; None: it is a picture."""
    if not (image.is_dir() or classes.ndim == 3 or _is_nifti(image)):
        return None
    nibabel = import_module("nibabel")
    if _is_nifti(image):
        source = nibabel.load(image)
        header = type(source.header)()
        for name in _GEOMETRY:
            header[name] = source.header[name]
        header.set_data_dtype(np.uint8)
        places = (*source.shape[:3], *(1,) * (3 - len(source.shape)))
        stored = _turn_back(classes, places, source.header.get_best_affine())
        return type(source)(stored.reshape(source.shape[:3]), None, header)
    if image.is_dir():
        series = read_series(image)
        made = nibabel.Nifti1Image(_turn_back(classes, series.shape, series.affine), series.affine)
        for set_form in (made.set_sform, made.set_qform):
            set_form(series.affine, _SCANNER)
        made.header.set_xyzt_units("mm")
        return made
    made = nibabel.Nifti1Image(np.ascontiguousarray(classes.transpose(2, 1, 0)), None)
    if spacing := read_volume_header(image).spacing:
        made.header.set_zooms(spacing[::-1])
        made.header.set_xyzt_units("mm")
    return made


def _is_nifti(image: Path) -> bool:
    return image.name.lower().endswith(NIFTI)


def _turn_back(classes: NDArray[np.uint8], places: tuple[int, ...], affine: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return classes on the patient's axes on the stored axes of an array of ``places`` voxels with an ``affine``."""
    orientations = import_module("nibabel").orientations
    turned = orientations.io_orientation(affine)
    order = np.argsort(turned[:, 0])[::-1]
    straight = classes.reshape([places[axis] for axis in order]).transpose(2, 1, 0)
    back = orientations.ornt_transform(np.array([[0, 1], [1, 1], [2, 1]]), turned)
    return np.ascontiguousarray(orientations.apply_orientation(straight, back))
