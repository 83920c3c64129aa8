"""Headers and pixels of single image files.

The EXIF orientation (JEITA CP-3451, tag 0x0112) is applied, transparent images are composited over white, and only the
first of several frames is read. Images are resized to the given size without keeping their aspect ratio, as in FedBN
(Li et al. 2021, arXiv:2102.07623, section 5.1), bilinear with antialiasing. Only Pillow's readers for the
formats below are allowed, under any file name, so that no other program is ever started.

A mask contains one class number from 0 to 255 for each pixel: as gray, one bit, or palette indices. In GIF, whose
writers order the palette as they like, it is the gray value of the color. It is resized to the nearest pixel.
"""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from ...utils.errors import UsageError
from ...utils.files import NotRegular, open_regular

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".pbm", ".pgm", ".ppm"})

Kind = Literal["byte", "integer", "real", "mask"]
"""Encoding of pixels: 8 bits (or 1), gray integers of up to 16 bits, gray floats in [0, 1], or class numbers."""

_FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "PPM")
_GRAY = ("1", "L", "LA")
_TURNED = range(5, 9)  # orientations that swap height and width
_ORIENTED = frozenset({"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"})
_FILTERS = threading.Lock()
_LASTING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR})  # other errors may be temporary


class Unreadable(Exception):
    """A file cannot be used; the message gives the reason in a few words."""


@contextmanager
def explain_unreadable(file: Path, kind: str = "") -> Iterator[None]:
    """Convert exceptions of a library that reads ``file``.

    ``kind``: what the file is not if the library fails, with its article.

    Raises:
        Unreadable: The file is damaged.
        UsageError: The file may be intact, but cannot be read now or does not fit into memory: it is never left out.

    """
    try:
        yield
    except (Unreadable, UsageError):
        raise
    except NotRegular as error:
        raise Unreadable(str(error.strerror)) from error
    except EOFError as error:
        raise Unreadable("is cut short") from error
    except MemoryError as error:
        raise UsageError(f"{file} does not fit into memory: use smaller files, or a machine with more") from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.errno is not None:
            reason = error.strerror or reason
            if error.errno not in _LASTING:
                raise UsageError(f"{file} cannot be read now: {reason}. Make it readable, or take it away") from error
        raise Unreadable(f"is not {kind} that can be read ({reason})" if kind else reason) from error


@dataclass(frozen=True, kw_only=True)
class Header:
    """Facts from a file's header; ``width`` and ``height`` of the upright image in pixels."""

    kind: Kind
    channels: int
    width: int
    height: int
    frames: int


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Silence Pillow's warnings, but raise an error for images above Pillow's pixel limit.

    Warning filters are per process, not per thread, so only one such block runs at a time.
    """
    with _FILTERS, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def find_kind(image: Image.Image) -> Kind:
    """Return the encoding of the pixels of ``image``."""
    return "integer" if image.mode.startswith("I") else "real" if image.mode == "F" else "byte"


def read_header(file: Path) -> Header:
    """Read the header of ``file`` without decoding pixels; raise :class:`Unreadable` if it cannot be read."""
    with _open_image(file) as image:
        if isinstance(image, TiffImageFile):  # its ``size`` is upright only since Pillow 11
            width, height = image.tag_v2[ExifTags.Base.ImageWidth], image.tag_v2[ExifTags.Base.ImageLength]
            orientation = image.tag_v2.get(ExifTags.Base.Orientation)
        else:
            width, height = image.size
            said = not _ORIENTED.isdisjoint(image.info)  # getexif() would decode a PNG without it
            orientation = image.getexif().get(ExifTags.Base.Orientation) if said else None
        if orientation in _TURNED:
            width, height = height, width
        kind = find_kind(image)
        gray = kind != "byte" or image.mode in _GRAY
        frames = int(getattr(image, "n_frames", 1))
        return Header(kind=kind, channels=1 if gray else 3, width=width, height=height, frames=frames)


def decode_image(
    file: Path, *, kind: Kind, channels: int, height: int, width: int
) -> tuple[NDArray[np.generic], float]:
    """Return the pixels of ``file`` as ``[channels, height, width]``, and the largest value in the file.

    ``kind`` byte and mask give uint8; integer and real give float32 with the file's own values, which must be in
    0..65535 and [0, 1]. Raises :class:`Unreadable`.
    """
    with _open_image(file) as image:
        return convert_image(image, kind=kind, channels=channels, height=height, width=width)


def convert_image(
    image: Image.Image, *, kind: Kind, channels: int, height: int, width: int
) -> tuple[NDArray[np.generic], float]:
    """Return :func:`decode_image` for an open ``image``, which is rotated upright in place."""
    ImageOps.exif_transpose(image, in_place=True)
    if kind == "mask":
        classes = _to_classes(image).resize((width, height), Image.Resampling.NEAREST)
        return np.asarray(classes)[None], 255.0
    plain = _to_bytes(image, channels) if kind == "byte" else _to_values(image, 65535 if kind == "integer" else 1)
    peak = float(plain.getextrema()[1]) if kind != "byte" else 255.0  # type: ignore[arg-type]
    if plain.size != (width, height):
        plain = plain.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(plain)
    return (pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)), peak


@contextmanager
def _open_image(file: Path) -> Iterator[Image.Image]:
    """Open an image lazily; errors are those of :func:`explain_unreadable`."""
    with explain_unreadable(file):
        try:
            # not by name: Pillow would memory-map plain gray TIFFs and rotate orientations 5 to 8 wrongly
            with open_regular(file) as stream, Image.open(stream, formats=_FORMATS) as image:
                yield image
        except UnidentifiedImageError as error:
            empty = file.stat().st_size == 0
            raise Unreadable("is empty" if empty else f"is not an image in format {', '.join(_FORMATS)}") from error


def _to_bytes(image: Image.Image, channels: int) -> Image.Image:
    """Return the image in mode L or RGB, composited over white."""
    if "transparency" in image.info or image.mode in ("LA", "PA", "RGBA", "RGBa"):
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return image.convert("L" if channels == 1 else "RGB")


def _to_classes(image: Image.Image) -> Image.Image:
    """Return a mask's class numbers in mode L."""
    if image.format == "JPEG":
        raise Unreadable("is a mask in JPEG, which alters class numbers: save it as PNG")
    colored = image.mode in ("LA", "PA", "RGBA", "CMYK") or (image.format == "GIF" and image.mode == "P")
    values = np.asarray(image.convert("RGB") if colored else image)
    if values.ndim == 3:
        if (values != values[..., :1]).any():
            raise Unreadable(
                "is a mask in color: give one class number for each pixel, in gray or as a palette's index"
            )
        values = values[..., 0]
    if not (values.min() >= 0 and values.max() <= 255 and (values == values.astype(np.uint8)).all()):
        raise Unreadable(f"is a mask with values from {values.min():g} to {values.max():g}, no class numbers in 0..255")
    return Image.fromarray(values.astype(np.uint8))


def _to_values(image: Image.Image, most: int) -> Image.Image:
    """Return the image in mode F with the file's own values, which must be in 0..``most``."""
    values = np.asarray(image).astype(np.float32)
    if not (values.min() >= 0 and values.max() <= most):  # also true for NaN
        raise Unreadable(f"has values from {values.min():g} to {values.max():g}, not in 0..{most}")
    return Image.fromarray(values)
