"""Files of images, volumes and recordings as arrays, by one function for training, exported models, adapt and sites.

:func:`decode` takes a file and its :class:`Decoding`. Order of reading: ``ranges`` (which values become -1 and 1),
``images`` (pictures), ``dicom``, ``volumes`` (medical images and their masks), ``signals`` (recordings), ``resizing``,
and ``masks`` (predicted masks as files).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from PIL import Image

from .dicom import find_slices
from .images import Kind, Unreadable, decode_image
from .ranges import NO_LEVELS, UNIT_RANGE, Levels, Window, scale
from .resizing import resize_volume
from .signals import WFDB, decode_signal, list_files
from .volumes import decode_volume

FileKind = Literal["array", "byte", "integer", "real", "volume", "signal"]


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Decoding of a file's values into stored numbers.

    Attributes:
        kind: ``byte``, 8-bit pixels; ``integer`` and ``real``, gray integers of more bits and gray floats from 0 to 1,
            stored from -1 to 1; ``volume``, a medical image, turned to the patient's axes and stored from -1 to 1;
            ``signal``, a recording; ``array``, no files.
        window: Values that become -1 and 1, clipped beyond; None: each medical image's own
            (:mod:`~fedshift.data.decoding.ranges`).
        spacing: Millimeters between voxels after resampling, along slices, rows and columns; empty: it is not.
        leads: Names of the leads of a recording, in the order of the channels.
        units: Unit of each lead, as in its file; ``mv`` for voltages. Empty: not known.
        rate: Samples in a second of a recording; 0: not known.

    """

    kind: FileKind = "array"
    window: Window | None = None
    spacing: tuple[float, ...] = ()
    leads: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    rate: float = 0.0

    def rescale(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Return gray values of kind ``integer`` or ``real`` from -1 to 1, clipped beyond; others unchanged."""
        return scale(pixels, [self.window or UNIT_RANGE]) if self.kind in ("integer", "real") else pixels


ARRAY = Decoding()


def decode(
    file: Path | Image.Image, how: Decoding, channels: int, size: tuple[int, ...] = ()
) -> tuple[NDArray[Any], Levels]:
    """Return the values of ``file``, ``[C, *axes]``, before :meth:`Decoding.rescale`, and its levels of gray.

    Args:
        file: A file, a folder of DICOM slices, or an open picture, which is not changed.
        how: The kind and meaning of its values.
        channels: Channels of a picture, 1 or 3; other files keep their channels.
        size: Size of a picture, or of a volume without a spacing, after resizing; empty: no resizing.

    Raises:
        Unreadable: The file is damaged, or holds values unlike ``how``.
        UsageError: The file may be intact, but cannot be read now.

    """
    if isinstance(file, Image.Image) and how.kind in ("signal", "volume"):
        raise Unreadable(f"is an open picture, not a {how.kind} in a file")
    match how.kind, file:
        case "signal", Path():
            return decode_signal(file, how.leads, how.units, how.rate), NO_LEVELS
        case "volume", Path():
            values = torch.from_numpy(decode_volume(file, window=how.window, spacing=how.spacing))
            return (resize_volume(values, size) if size and not how.spacing else values).numpy(), NO_LEVELS
    kind: Kind = how.kind if how.kind in ("integer", "real") else "byte"
    return decode_image(file, kind=kind, channels=channels, size=size)


def list_members(file: Path) -> list[Path]:
    """Return all files that are one image or recording: slices in a folder, or a WFDB header with its values."""
    if file.suffix.lower() == WFDB:
        return list_files(file)
    return find_slices(file) if file.is_dir() else [file]
