"""Pixels of pictures of every kind, against the numbers that a small writer of the test puts into the file."""

import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from fedshift.data.decoding import Decoding, decode
from fedshift.data.decoding.images import Unreadable, decode_image, read_header

DRAWS = np.random.default_rng(0)
BYTES = DRAWS.integers(0, 256, (6, 5)).astype(np.uint8)
DEEP = DRAWS.integers(0, 65536, (6, 5)).astype(np.uint16)
REAL = DRAWS.random((6, 5))
COLOR = DRAWS.integers(0, 256, (6, 5, 3)).astype(np.uint8)


def pack(values, bits):
    return np.packbits(np.unpackbits(values[..., None], axis=-1)[..., 8 - bits :].reshape(len(values), -1), axis=1)


def write_tiff(path, pixels, *, photometric=1, bits=None, order="<", **tags):
    """Write ``[H, W]`` or ``[H, W, C]`` as one strip; ``bits``: of packed samples, whose bytes are given by rows."""
    height, width, channels = (*pixels.shape, 1)[:3]
    content = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    if bits:
        content = pack(pixels, bits).tobytes()
    kinds = {"u": 1, "i": 2, "f": 3}
    entries = {
        256: (4, [width]), 257: (4, [height]), 258: (3, [bits or 8 * pixels.itemsize] * channels), 259: (3, [1]),
        262: (3, [photometric]), 273: (4, [0]), 277: (3, [channels]), 278: (4, [height]), 279: (4, [len(content)]),
        339: (3, [kinds[pixels.dtype.kind]] * channels),
    }  # fmt: skip
    entries |= {int(tag.removeprefix("t")): value for tag, value in tags.items()}
    start, directory, extra = 14 + 12 * len(entries), b"", b""
    for tag, (kind, values) in sorted(entries.items()):
        packed = struct.pack(f"{order}{len(values)}{'HI'[kind == 4]}", *values)
        if tag == 273:
            packed = b"STRI"
        if len(packed) > 4:
            extra, packed = extra + packed, struct.pack(f"{order}I", start + len(extra))
        directory += struct.pack(f"{order}HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    directory = directory.replace(b"STRI", struct.pack(f"{order}I", start + len(extra)))
    head = struct.pack(f"{order}HIH", 42, 8, len(entries))
    path.write_bytes({"<": b"II", ">": b"MM"}[order] + head + directory + bytes(4) + extra + content)


def write_png(path, rows, bits, kind=0, chunks=()):
    """Write ``rows`` of bytes as a PNG file of ``bits`` and color type ``kind``."""
    height, width = rows.shape[0], rows.shape[1] * 8 // bits if kind == 0 and bits < 8 else rows.shape[1]
    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    data = b"".join(b"\0" + row.tobytes() for row in rows)
    blocks = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(block)) + name + block + struct.pack(">I", zlib.crc32(name + block))
        for name, block in blocks
    ))  # fmt: skip


def tiff(pixels, **options):
    return lambda path: write_tiff(path.with_suffix(".tif"), pixels, **options)


def pillow(suffix, image, **options):
    return lambda path: image.save(path.with_suffix(suffix), **options)


def png(rows, bits, kind=0, chunks=()):
    return lambda path: write_png(path.with_suffix(".png"), rows, bits, kind, chunks)


def text(suffix, content):
    return lambda path: path.with_suffix(suffix).write_bytes(content)


def paletted(index, palette):
    image = Image.frombytes("P", index.shape[::-1], index.tobytes())
    image.putpalette(palette.flatten().tolist())
    return image


def oriented(value):
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def over_white(color, alpha):
    share = alpha[..., None] / 255
    return color * share + 255 * (1 - share)


TURNS = {
    1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud,
    5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1), 8: np.rot90,
}  # fmt: skip
"""What EXIF's orientations ask for."""
RGBA = DRAWS.integers(0, 256, (6, 5, 4)).astype(np.uint8)
INDEX, COLORS = DRAWS.integers(0, 4, (6, 5)).astype(np.uint8), DRAWS.integers(0, 200, (4, 3)).astype(np.uint8)
CLEARED = np.concatenate([COLORS[:2], [[255] * 3], COLORS[3:]])
NEUTRAL = np.stack([BYTES, np.full_like(BYTES, 128), np.full_like(BYTES, 128)], -1)
SMOOTH = np.add.outer(np.linspace(0, 120, 16), np.linspace(0, 120, 24))[..., None] * [1, 0.8, 0.6]
SMALL = DRAWS.integers(0, 4, (6, 8)).astype(np.uint8)
HALVES = DRAWS.integers(0, 16, (6, 8)).astype(np.uint8)
SIGNED = DRAWS.integers(0, 128, (6, 5)).astype(np.int8)
ORDERS = {"TIFF": "<", "TIFF of a big end": ">"}
CASES = {
    **{f"{name} of {bits}": (tiff(pixels, order=order), kind, values) for name, order in ORDERS.items()
       for bits, pixels, kind, values in (
           (8, BYTES, "byte", BYTES), (16, DEEP, "integer", DEEP), (32, REAL.astype(np.float32), "real", REAL))},
    **{f"white is 0 of {bits}": (tiff(pixels, photometric=0, order=order), kind, values)
       for bits, order, pixels, kind, values in (
           ("8", "<", BYTES, "byte", 255 - BYTES), ("16", "<", DEEP, "integer", 65535 - DEEP),
           ("32, floats", "<", REAL.astype(np.float32), "real", 1 - REAL))},
    "signed of 8": (tiff(SIGNED), "integer", SIGNED),
    "signed of 16": (tiff(SIGNED.astype(np.int16) * 100), "integer", SIGNED * 100.0),
    "signed of 32": (tiff(SIGNED.astype(np.int32) * 100), "integer", SIGNED * 100.0),
    "unsigned of 32": (tiff(DEEP.astype(np.uint32)), "integer", DEEP),
    "TIFF of 4 bits": (tiff(HALVES, bits=4), "byte", HALVES * 17),
    "TIFF in color": (tiff(COLOR, photometric=2), "byte", COLOR),
    "TIFF by planes": (tiff(np.ascontiguousarray(COLOR), photometric=2), "byte", COLOR),
    "LZW with a predictor": (pillow(".tif", Image.fromarray(COLOR), compression="tiff_lzw",
                                    tiffinfo={317: 2}), "byte", COLOR),
    "deflated floats": (pillow(".tif", Image.fromarray(REAL.astype(np.float32)), compression="tiff_adobe_deflate"),
                        "real", REAL),
    "fax": (pillow(".tif", Image.fromarray(BYTES > 99), compression="group4"), "byte", (BYTES > 99) * 255),
    "PNG of 2 bits": (png(pack(SMALL, 2), 2), "byte", SMALL * 85),
    "PNG of 4 bits": (png(pack(HALVES, 4), 4), "byte", HALVES * 17),
    "PNG of 16 bits": (png(DEEP.astype(">u2"), 16), "integer", DEEP),
    "PNG of 16 bits in color": (png(np.stack([DEEP] * 3, -1).astype(">u2"), 16, 2), "byte",
                                np.stack([DEEP >> 8] * 3, -1)),
    "PNG of 16 bits with alpha": (png(np.stack([DEEP, DEEP * 0 + 65535], -1).astype(">u2"), 16, 4), "byte", DEEP >> 8),
    "TIFF with alpha": (tiff(np.stack([BYTES, BYTES * 0 + 255], -1), t338=(3, [1])), "byte", BYTES),
    "PNG with gamma": (png(BYTES, 8, 0, [(b"gAMA", struct.pack(">I", 100000))]), "byte", BYTES),
    "PGM of 12 bits": (text(".pgm", b"P5 5 6 4095\n" + (DEEP >> 4).astype(">u2").tobytes()), "integer",
                       np.round((DEEP >> 4) * (65535 / 4095))),
    "PGM of 16 bits": (text(".pgm", b"P5 5 6 65535\n" + DEEP.astype(">u2").tobytes()), "integer", DEEP),
    "PBM": (text(".pbm", b"P4 8 6\n" + np.packbits(SMALL > 1, axis=1).tobytes()), "byte", (SMALL < 2) * 255),
    **{f"palette {suffix}": (pillow(suffix, paletted(INDEX, COLORS)), "byte", COLORS[INDEX])
       for suffix in (".png", ".bmp", ".tif")},
    "transparent entry": (pillow(".png", paletted(INDEX, COLORS), transparency=2), "byte", CLEARED[INDEX]),
    "transparent entries": (pillow(".png", paletted(INDEX, COLORS), transparency=bytes([255, 255, 0, 255])), "byte",
                            CLEARED[INDEX]),
    "transparent gray": (pillow(".png", Image.fromarray(INDEX), transparency=1), "byte",
                         np.where(INDEX == 1, 255, INDEX)),
    "transparent color": (pillow(".png", Image.fromarray(COLORS[INDEX]), transparency=tuple(COLORS[2].tolist())),
                          "byte", CLEARED[INDEX]),
    "alpha": (pillow(".png", Image.fromarray(RGBA)), "byte", over_white(RGBA[..., :3], RGBA[..., 3])),
    "gray with alpha": (pillow(".png", Image.frombytes("LA", (5, 6), RGBA[..., :2].tobytes())), "byte",
                        over_white(RGBA[..., :1], RGBA[..., 1])[..., 0]),
    "inks": (pillow(".tif", Image.frombytes("CMYK", (5, 6), RGBA.tobytes())), "byte",
             (255.0 - RGBA[..., :3]) * (255.0 - RGBA[..., 3:]) / 255),
    "luma": (pillow(".tif", Image.frombytes("YCbCr", (5, 6), NEUTRAL.tobytes())), "byte", np.stack([BYTES] * 3, -1)),
    **{f"turned {value} {suffix}": (pillow(suffix, Image.fromarray(COLOR), exif=oriented(value)), "byte",
                                    TURNS[value](COLOR))
       for value in TURNS for suffix in (".png", ".tif")},
    **{f"deep turned {value} {suffix}": (pillow(suffix, Image.fromarray(DEEP), exif=oriented(value)), "integer",
                                         TURNS[value](DEEP)) for value in TURNS for suffix in (".png", ".tif")},
    "turned JPEG": (pillow(".jpg", Image.fromarray(np.uint8(SMOOTH)), exif=oriented(6), quality=100, subsampling=0),
                    "byte", np.rot90(SMOOTH, -1)),
    "BMP": (pillow(".bmp", Image.fromarray(COLOR)), "byte", COLOR),
    "GIF": (pillow(".gif", Image.fromarray(BYTES)), "byte", BYTES),
}  # fmt: skip
"""A function that writes the file, the kind of its pixels, and their values."""


@pytest.mark.sampled(25)
@pytest.mark.parametrize("case", CASES)
def test_pixels_of_each_kind_are_those_that_were_written(tmp_path, case):
    save, kind, values = CASES[case]
    save(tmp_path / "x")
    (file,) = tmp_path.iterdir()
    header = read_header(file)
    channels = header.channels if values.ndim == 2 else 3
    pixels, _ = decode(file, Decoding(kind=kind), channels)
    wanted = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
    assert (header.kind, header.height, header.width) == (kind, *values.shape[:2])
    rounded = 1.5 if kind == "byte" and wanted.dtype.kind == "f" else 1e-6
    if case == "turned JPEG":
        rounded = 4
    np.testing.assert_allclose(pixels, np.broadcast_to(wanted, pixels.shape), atol=rounded)


MASKS = {
    "PNG of 1 bit": (png(pack(SMALL // 2, 1), 1), SMALL // 2),
    "PNG of 2 bits": (png(pack(SMALL, 2), 2), SMALL),
    "PNG of 4 bits": (png(pack(HALVES, 4), 4), HALVES),
    "PNG of a palette of 2 bits": (png(np.pad(SMALL, 0), 8, 3, [(b"PLTE", bytes(range(12)))]), SMALL),
    "PNG of 16 bits": (png(HALVES.astype(">u2"), 16), HALVES),
    "TIFF of 2 bits": (tiff(SMALL, bits=2), SMALL),
    "TIFF of 4 bits": (tiff(HALVES, bits=4), HALVES),
    "TIFF of floats": (tiff(HALVES + np.float32(0.001)), HALVES),
    "TIFF of signed": (tiff(HALVES.astype(np.int8)), HALVES),
    "PGM of 4 values": (text(".pgm", b"P5 8 6 3\n" + SMALL.tobytes()), SMALL),
    "plain PGM": (text(".pgm", f"P2 8 6 15\n{' '.join(map(str, HALVES.flat))}\n".encode()), HALVES),
    "PGM of 300 values": (text(".pgm", b"P5 8 6 300\n" + HALVES.astype(">u2").tobytes()), HALVES),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", MASKS)
def test_masks_hold_the_class_numbers_that_were_written(tmp_path, case):
    save, classes = MASKS[case]
    save(tmp_path / "x")
    (file,) = tmp_path.iterdir()
    assert np.array_equal(decode_image(file, kind="mask")[0][0], classes)


@pytest.mark.parametrize(
    ("save", "kind", "message"),
    [
        (tiff(SIGNED - np.int8(127)), "integer", r"has values from -\d+ to -?\d+, not in 0..65535"),
        (tiff((SIGNED - np.int8(127)).astype(np.int16)), "integer", r"has values from -\d+ to -?\d+, not in 0..65535"),
        (tiff(np.float32(REAL * 255)), "real", r"has values from [\d.]+ to [\d.]+, not in 0..1"),
        (tiff(np.float32(REAL)), "mask", r"is a mask with the fraction 0\.\d+: give class numbers in 0..255"),
        (png(np.stack([DEEP >> 4] * 3, -1).astype(">u2"), 16, 2), "byte", "has 16 bits with no value above 4095"),
        (png(np.stack([DEEP >> 4, DEEP], -1).astype(">u2"), 16, 4), "byte", "has 16 bits with no value above 4095"),
        (tiff(BYTES), "integer", "has 8-bit pixels, not gray of more than 8 bits"),
        (tiff(REAL), "real", "has floats of 64 bits, which Pillow does not read: save it with 8 or 16 bits"),
        (tiff(REAL.astype("f2")), "real", "has floats of 16 bits, which Pillow does not read"),
        (tiff(DEEP, photometric=0, order=">"), "integer", "has whole numbers of 16 bits, which Pillow does not read"),
        (text(".tif", b"no image"), "byte", "^is not an image in format PNG"),
    ],
)  # fmt: skip
def test_pixels_without_a_known_range_are_refused(tmp_path, save, kind, message):
    save(tmp_path / "x")
    (file,) = tmp_path.iterdir()
    with pytest.raises(Unreadable, match=message):
        decode_image(file, kind=kind)


def test_a_header_says_that_a_picture_is_turned(tmp_path):
    for value in (1, 3, 6):
        Image.fromarray(COLOR).save(tmp_path / "x.jpg", exif=oriented(value))
        header = read_header(tmp_path / "x.jpg")
        assert (header.turned, header.height) == (value > 1, 5 if value == 6 else 6)


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("PNG of 16 bits in color", "have 16 bits and are read by the upper 8"),
        ("PNG of 16 bits with alpha", "have 16 bits and .* upper 8, and may be transparent, and are laid over white"),
        ("inks", "are in CMYK, made RGB without a color profile"),
        ("transparent entry", "may be transparent, and are laid over white"),
        ("PNG of 16 bits", "$"),
    ],
)
def test_a_header_says_how_colors_are_read_otherwise_than_stored(tmp_path, case, changed):
    CASES[case][0](tmp_path / "x")
    assert re.match(changed, read_header(next(tmp_path.iterdir())).changed)
