"""One image file: what its header says, and its pixels in the form that is wanted.

The EXIF orientation (JEITA CP-3451, tag 0x0112) is applied, whatever is transparent is laid over white, of several
frames the first is read, and resizing squashes to the given size, as FedBN did (Li et al. 2021, arXiv:2102.07623,
section 5.1), bilinear with antialiasing. Pillow's readers of PNG, JPEG, TIFF and BMP alone are let at a file, whatever
its name says, so that no other program is ever started for it.
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

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"})

Kind = Literal["byte", "integer", "real"]
"""How a file holds brightness: 8 bits (or 1), gray integers of up to 16 bits, or gray floats in [0, 1]."""

_FORMATS = ("PNG", "JPEG", "TIFF", "BMP")
_GRAY = ("1", "L", "LA")
_TURNED = range(5, 9)  # orientations that exchange height and width
_ORIENTED = frozenset({"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"})
_FILTERS = threading.Lock()
_LASTING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR})  # other refusals may pass


class Unreadable(Exception):
    """Why a file cannot be used, in a few words."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file's header says; ``width`` and ``height`` in pixels once the image is upright."""

    kind: Kind
    channels: int
    width: int
    height: int
    frames: int


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Within it Pillow's warnings are not heard, but more pixels than Pillow's limit are an error.

    Filters of warnings belong to the process and not to a thread, hence one such block at a time.
    """
    with _FILTERS, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def read_header(file: Path) -> Header:
    """The header of ``file``; pixels are not decoded. Raises :class:`Unreadable`."""
    with _open_image(file) as image:
        if isinstance(image, TiffImageFile):  # whose ``size`` is upright since Pillow 11, and was not before
            width, height = image.tag_v2[ExifTags.Base.ImageWidth], image.tag_v2[ExifTags.Base.ImageLength]
            orientation = image.tag_v2.get(ExifTags.Base.Orientation)
        else:
            width, height = image.size
            said = not _ORIENTED.isdisjoint(image.info)  # asking a PNG that does not say it would decode it
            orientation = image.getexif().get(ExifTags.Base.Orientation) if said else None
        if orientation in _TURNED:
            width, height = height, width
        kind: Kind = "integer" if image.mode.startswith("I") else "real" if image.mode == "F" else "byte"
        gray = kind != "byte" or image.mode in _GRAY
        frames = int(getattr(image, "n_frames", 1))
        return Header(kind=kind, channels=1 if gray else 3, width=width, height=height, frames=frames)


def decode_image(
    file: Path, *, kind: Kind, channels: int, height: int, width: int
) -> tuple[NDArray[np.generic], float]:
    """Pixels of ``file`` as ``[channels, height, width]``, and the largest value in the file itself.

    ``kind`` byte gives uint8; integer and real give float32 with the file's own values, of which 0..65535 and [0, 1]
    are taken. Raises :class:`Unreadable`.
    """
    with _open_image(file) as image:
        ImageOps.exif_transpose(image, in_place=True)
        plain = _to_bytes(image, channels) if kind == "byte" else _to_values(image, 65535 if kind == "integer" else 1)
        peak = float(plain.getextrema()[1]) if kind != "byte" else 255.0  # type: ignore[arg-type]
        if plain.size != (width, height):
            plain = plain.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(plain)
        return (pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)), peak


@contextmanager
def _open_image(file: Path) -> Iterator[Image.Image]:
    """The lazily opened image; whatever Pillow raises on a damaged file, and that is nearly anything, is Unreadable."""
    try:
        # not by name: Pillow would map plain gray TIFFs, and turns those wrongly whose orientation is 5 to 8
        with file.open("rb") as stream, Image.open(stream, formats=_FORMATS) as image:
            yield image
    except Unreadable:
        raise
    except UnidentifiedImageError as error:
        empty = file.stat().st_size == 0
        raise Unreadable("is empty" if empty else f"is no image in format {', '.join(_FORMATS)}") from error
    except OSError as error:
        if error.errno is not None and error.errno not in _LASTING:
            raise UsageError(
                f"{file} cannot be read now: {error.strerror}. Make it readable, or take it away"
            ) from error
        raise Unreadable(error.strerror or str(error)) from error
    except Exception as error:
        raise Unreadable(str(error) or type(error).__name__) from error


def _to_bytes(image: Image.Image, channels: int) -> Image.Image:
    """The image in mode L or RGB, laid over white."""
    if "transparency" in image.info or image.mode in ("LA", "PA", "RGBA", "RGBa"):
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return image.convert("L" if channels == 1 else "RGB")


def _to_values(image: Image.Image, most: int) -> Image.Image:
    """The image in mode F with the file's own values, all of them in 0..``most``."""
    values = np.asarray(image).astype(np.float32)
    if not (values.min() >= 0 and values.max() <= most):  # NaN is refused too
        raise Unreadable(f"has values from {values.min():g} to {values.max():g}, not in 0..{most}")
    return Image.fromarray(values)
