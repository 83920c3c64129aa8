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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ExifTags import Base
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile

from ...utils.errors import UsageError
from ...utils.files import NotRegular, open_regular
from .ranges import NO_LEVELS, Levels, count_levels

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".pbm", ".pgm", ".ppm"})

Kind = Literal["byte", "integer", "real", "mask"]
"""Encoding of pixels: 8 bits (or 1), gray integers of up to 16 bits, gray floats in [0, 1], or class numbers."""

DEPTHS = {"byte": "8-bit pixels", "integer": "gray of more than 8 bits", "real": "gray as floats"}
"""Kinds of images in words."""
ROUNDED = 0.01
"""Largest distance of a mask's value from a class number that is rounding, as by a float slope of a NIfTI file."""
_FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "PPM")
_GRAY = ("1", "L", "LA", "La")
_DARK = 16
"""Largest value of the upper 8 of 16 bits below which these hold fewer bits in truth, which would look black."""
_SWAPPED = range(5, 9)  # orientations that swap height and width
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
    """Facts from a file's header; ``width`` and ``height`` of the upright image in pixels.

    ``turned``: whether a tag of the file asks to turn or mirror its pixels; ``changed``: what of its colors is read
    otherwise than they are stored, in words; empty: nothing.
    """

    kind: Kind
    channels: int
    width: int
    height: int
    frames: int
    turned: bool = False
    changed: str = ""


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
    if image.mode.startswith("I") or _is_signed(image):
        return "integer"
    return "real" if image.mode == "F" else "byte"


def read_header(file: Path) -> Header:
    """Read the header of ``file`` without decoding pixels; raise :class:`Unreadable` if it cannot be read."""
    with _open_image(file) as image:
        if isinstance(image, TiffImageFile):  # its ``size`` is upright only since Pillow 11
            width, height = image.tag_v2[Base.ImageWidth], image.tag_v2[Base.ImageLength]
            orientation = image.tag_v2.get(Base.Orientation)
        else:
            width, height = image.size
            said = not _ORIENTED.isdisjoint(image.info)  # getexif() would decode a PNG without it
            orientation = image.getexif().get(Base.Orientation) if said else None
        if orientation in _SWAPPED:
            width, height = height, width
        kind = find_kind(image)
        channels = 1 if kind != "byte" or image.mode in _GRAY else 3
        return Header(
            kind=kind, channels=channels, width=width, height=height, frames=int(getattr(image, "n_frames", 1)),
            turned=orientation in range(2, 9), changed=", and ".join(_list_changes(image)),
        )  # fmt: skip


def _list_changes(image: Image.Image) -> Iterator[str]:
    """Yield how the colors of an opened ``image`` are read otherwise than they are stored."""
    if find_kind(image) == "byte" and ";16" in _find_encoding(image):
        yield "have 16 bits and are read by the upper 8"
    if image.mode in ("CMYK", "LAB"):
        yield f"are in {image.mode}, made RGB without a color profile"
    if _is_transparent(image):
        yield "may be transparent, and are laid over white"


def decode_image(
    file: Path | Image.Image, *, kind: Kind, channels: int = 1, size: tuple[int, ...] = ()
) -> tuple[NDArray[Any], Levels]:
    """Return the pixels of ``file`` upright, ``[channels, H, W]``, and the levels of gray before it is resized.

    Args:
        file: The file, or an open picture, which is not changed.
        kind: ``byte`` and ``mask`` give uint8; ``integer`` and ``real`` give float32 with the file's own values, which
            must be in 0..65535 and [0, 1].
        channels: 1 or 3; gray is repeated.
        size: ``(H, W)`` to resize to; empty: no resizing.

    Raises:
        Unreadable: The file is damaged, or of another kind.

    """
    with nullcontext(file.copy()) if isinstance(file, Image.Image) else _open_image(file) as image:
        stored = find_kind(image)
        if kind not in ("mask", stored):
            raise Unreadable(f"has {DEPTHS[stored]}, not {DEPTHS[kind]}")
        restore, reduced = _find_stored_numbers(image, kind), ";16" in _find_encoding(image)
        ImageOps.exif_transpose(image, in_place=True)
        if kind == "byte":
            if reduced and np.asarray(image.convert("RGB")).max() < _DARK:
                raise Unreadable("has 16 bits with no value above 4095, and the upper 8 bits are read: make it 8 bits")
            plain = _to_bytes(image, channels)
        else:
            plain = _to_classes(image, restore) if kind == "mask" else _to_values(image, restore)
        levels = count_levels(np.asarray(plain)) if kind == "integer" else NO_LEVELS
        if size and plain.size != size[::-1]:
            method = Image.Resampling.NEAREST if kind == "mask" else Image.Resampling.BILINEAR
            plain = plain.resize((size[1], size[0]), method)
    pixels = np.asarray(plain)
    return (pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)), levels


def to_classes(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a mask's ``values`` as class numbers, which may be off by :data:`ROUNDED`; raise :class:`Unreadable`."""
    low, high = values.min(), values.max()
    if not (low >= -ROUNDED and high <= 255 + ROUNDED):  # also true for NaN
        raise Unreadable(f"is a mask with values from {low:g} to {high:g}, no class numbers in 0..255")
    classes: NDArray[np.uint8] = np.round(values).astype(np.uint8)
    apart = np.abs(values - classes)
    if values.dtype.kind == "f" and apart.max() > ROUNDED:
        raise Unreadable(
            f"is a mask with the fraction {values.flat[apart.argmax()]:g}: give class numbers in 0..255, not shares"
        )
    return classes


@contextmanager
def _open_image(file: Path) -> Iterator[Image.Image]:
    """Open an image lazily, with the errors of :func:`explain_unreadable`."""
    with explain_unreadable(file):
        try:
            # not by name: Pillow would memory-map plain gray TIFFs and rotate orientations 5 to 8 wrongly
            with open_regular(file) as stream, Image.open(stream, formats=_FORMATS) as image:
                yield image
        except UnidentifiedImageError as error:
            if file.stat().st_size == 0:
                raise Unreadable("is empty") from error
            raise Unreadable(_describe_depth(file) or f"is not an image in format {', '.join(_FORMATS)}") from error


def _describe_depth(file: Path) -> str:
    """Return in words that Pillow does not read pixels of the depth of a TIFF file; empty: another file."""
    with open_regular(file) as stream, suppress(Exception):  # a damaged file
        tags = ImageFileDirectory_v2(stream.read(8))
        stream.seek(tags.next)
        tags.load(stream)
        kind = {3: "floats", 6: "complex numbers"}.get(tags.get(Base.SampleFormat, (1,))[0], "whole numbers")
        bits = " + ".join(map(str, tags[Base.BitsPerSample]))
        return (
            f"has {kind} of {bits} bits, which Pillow does not read: save it with 8 or 16 bits, or as floats of 32 bits"
        )
    return ""


def _is_signed(image: Image.Image) -> bool:
    """Return whether pixels are signed numbers of 8 bits, which Pillow takes for unsigned ones."""
    return image.mode == "L" and getattr(image, "tag_v2", {}).get(Base.SampleFormat) == (2,)


def _find_encoding(image: Image.Image) -> str:
    """Return Pillow's name of how the pixels of a file are stored, such as L;4; empty: not known."""
    tile = getattr(image, "tile", None)
    args = tile[0].args if tile else ""
    return str(args[0] if isinstance(args, tuple) else args)


def _find_stored_numbers(image: Image.Image, kind: Kind) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Return the function from Pillow's numbers to the file's, as brightness where these are gray.

    Pillow expands 2 and 4 bits, and values of PGM files, to 8 or 16 bits, which would change class numbers, and does
    not invert TIFF files of more than 8 bits in which 0 is white.
    """
    tags, tile = getattr(image, "tag_v2", {}), getattr(image, "tile", None)
    if _is_signed(image):
        return lambda x: x.view(np.int8)
    if kind != "mask":
        top = 1 if image.mode == "F" else 2 ** tags.get(Base.BitsPerSample, (16,))[0] - 1
        return (lambda x: top - x) if tags.get(Base.PhotometricInterpretation) == 0 else np.asarray
    most = tile[0].args[1] if tile and image.format == "PPM" and isinstance(tile[0].args, tuple) else 0
    encoding = _find_encoding(image)
    if encoding[:3] in ("L;2", "L;4"):
        most = 2 ** int(encoding[2]) - 1
    full = 65535 if image.mode.startswith("I") else 255
    return lambda x: np.round(x * (most / full)).astype(x.dtype) if most else x


def _is_transparent(image: Image.Image) -> bool:
    return "transparency" in image.info or image.mode in ("LA", "La", "PA", "RGBA", "RGBa")


def _to_bytes(image: Image.Image, channels: int) -> Image.Image:
    """Return the image in mode L or RGB, composited over white."""
    image = image.convert("LA") if image.mode == "La" else image
    if _is_transparent(image):
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return image.convert("L" if channels == 1 else "RGB")


def _to_classes(image: Image.Image, restore: Callable[[NDArray[Any]], NDArray[Any]]) -> Image.Image:
    """Return a mask's class numbers in mode L."""
    if image.format == "JPEG":
        raise Unreadable("is a mask in JPEG, which alters class numbers: save it as PNG")
    colored = image.mode in ("LA", "PA", "RGBA", "CMYK") or (image.format == "GIF" and image.mode == "P")
    values = restore(np.asarray(image.convert("RGB") if colored else image))
    if values.ndim == 3:
        if (values != values[..., :1]).any():
            raise Unreadable(
                "is a mask in color: give one class number for each pixel, in gray or as a palette's index"
            )
        values = values[..., 0]
    return Image.fromarray(to_classes(values))


def _to_values(image: Image.Image, restore: Callable[[NDArray[Any]], NDArray[Any]]) -> Image.Image:
    """Return the image in mode F with the file's own values, integers in 0..65535 or floats in [0, 1]."""
    most = 1 if image.mode == "F" else 65535
    values = restore(np.asarray(image)).astype(np.float32)
    if not (values.min() >= 0 and values.max() <= most):  # also true for NaN
        raise Unreadable(f"has values from {values.min():g} to {values.max():g}, not in 0..{most}")
    return Image.fromarray(values)
