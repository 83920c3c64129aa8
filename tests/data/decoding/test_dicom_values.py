"""Values of DICOM files of every kind, against pydicom's functions or arithmetic in float64, and what is refused."""

import numpy as np
import pytest

from fedshift.data.decoding.images import Unreadable
from fedshift.data.decoding.volumes import decode_mask, decode_volume, find_difference, read_volume_header

pydicom = pytest.importorskip("pydicom")
pytest.importorskip("nibabel")
DRAWS = np.random.default_rng(0)
DEEP = DRAWS.integers(0, 4096, (4, 6, 5)).astype(np.uint16)
FLAT = DRAWS.integers(0, 256, (6, 5)).astype(np.uint8)
COLOR = DRAWS.integers(0, 256, (6, 5, 3)).astype(np.uint8)


def item(**facts):
    made = pydicom.Dataset()
    for name, value in facts.items():
        setattr(made, name, value)
    return made


def sequence(*items):
    return pydicom.Sequence(items)


def save(path, pixels, *, photometric="MONOCHROME2", color=False, syntax=None, **facts):
    """Write ``pixels`` ``[H, W]``, ``[H, W, 3]`` with ``color``, or frames; bytes are written as they are."""
    made = pydicom.Dataset()
    made.file_meta = pydicom.dataset.FileMetaDataset()
    made.file_meta.TransferSyntaxUID = syntax or pydicom.uid.ExplicitVRLittleEndian
    made.SOPClassUID = made.file_meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    made.SOPInstanceUID = made.file_meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    made.Rows, made.Columns = pixels.shape[:2] if color else pixels.shape[-2:]
    if pixels.ndim == 3 and not color:
        made.NumberOfFrames = len(pixels)
    made.SamplesPerPixel, made.PhotometricInterpretation = 1 + 2 * color, photometric
    if color:
        made.PlanarConfiguration = 0
    made.BitsAllocated = made.BitsStored = 8 * pixels.itemsize
    made.HighBit, made.PixelRepresentation = 8 * pixels.itemsize - 1, int(pixels.dtype.kind == "i")
    for name, value in facts.items():
        setattr(made, name, value)
        if value is None:
            delattr(made, name)
    if pixels.dtype.kind == "f":
        made.FloatPixelData = pixels.tobytes()
    elif "PixelData" not in made:
        order = "<" if made.file_meta.TransferSyntaxUID.is_little_endian else ">"
        made.PixelData = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
        made["PixelData"].VR = "OB" if pixels.itemsize == 1 else "OW"
    made.save_as(path, enforce_file_format=True)
    return path


def groups(*frames, **shared):
    """Return functional groups: a dictionary from macro to item for each frame, and shared ones."""
    own, all_of_them = (
        sequence(*(item(**{k: sequence(v) for k, v in macros.items()}) for macros in each if macros or own))
        for own, each in ((True, frames), (False, [shared]))
    )
    facts = {"PerFrameFunctionalGroupsSequence": own, "SharedFunctionalGroupsSequence": all_of_them}
    return {name: value for name, value in facts.items() if value}


def rescale(slope, intercept=0.0):
    return {"PixelValueTransformationSequence": item(RescaleSlope=slope, RescaleIntercept=intercept)}


def place(*position):
    return {"PlanePositionSequence": item(ImagePositionPatient=list(position))}


def map_values(slope):
    return sequence(item(RealWorldValueSlope=slope, RealWorldValueIntercept=-7.0))


def palette(entries, bits, first=0, word=None):
    """Return a palette of ``entries`` colors and its attributes, in words of ``word`` bits."""
    table = np.random.default_rng(1).integers(0, 2**bits, (3, entries)).astype(f"u{(word or bits) // 8}")
    facts = {}
    for color, row in zip(("Red", "Green", "Blue"), table, strict=True):
        facts[f"{color}PaletteColorLookupTableDescriptor"] = [entries % 2**16, first, bits]
        facts[f"{color}PaletteColorLookupTableData"] = row.tobytes() + b"\0" * (row.nbytes % 2)
    return table, facts


def look_up(table, index, first=0):
    return np.moveaxis(table[:, np.clip(index.astype(int) - first, 0, table.shape[1] - 1)], 0, 0)


def lut(table, first=0):
    data = item(LUTDescriptor=[len(table) % 2**16, first, 16], ModalityLUTType="OD", LUTData=table.tobytes())
    data["LUTData"].VR = "OW"
    return {"ModalityLUTSequence": sequence(data)}


EMPTY = DEEP * np.uint16([[[1]], [[0]], [[1]], [[1]]])
SQUARES = (np.arange(256)[::-1] ** 2).astype(np.uint16)
UP = {"PlaneOrientationSequence": item(ImageOrientationPatient=[1, 0, 0, 0, 1, 0])}
NARROW, WIDE, PADDED = palette(256, 8), palette(4096, 8), palette(200, 8, first=20, word=16)
YBR = pydicom.pixels.convert_color_space(COLOR, "RGB", "YBR_FULL")
SIGNED = DRAWS.integers(-2048, 2048, (6, 5)).astype(np.int16)
CASES = {
    "slope and intercept": (DEEP[0], {"RescaleSlope": 0.5, "RescaleIntercept": -1024}, DEEP[0] * 0.5 - 1024),
    "signed numbers": (SIGNED, {}, SIGNED),
    "numbers of 32 bits": (DEEP[0].astype(np.uint32) * 1000, {}, DEEP[0] * 1000.0),
    "floats": (DEEP[0] / np.float32(7), {"BitsStored": 32}, DEEP[0] / np.float32(7)),
    "big endian": (DEEP[0], {"syntax": pydicom.uid.ExplicitVRBigEndian}, DEEP[0]),
    "bits of overlays": (DEEP[0] | 0x9000, {"BitsStored": 12, "HighBit": 11}, DEEP[0]),
    "signed 12 bits": (SIGNED & 0xFFF, {"BitsStored": 12, "HighBit": 11, "PixelRepresentation": 1}, SIGNED),
    "Modality LUT": (FLAT, lut(SQUARES), SQUARES[FLAT]),
    "Modality LUT from -100": (SIGNED, lut(SQUARES, -100), SQUARES[np.clip(SIGNED + 100, 0, 255)]),
    "MONOCHROME1": (DEEP[0], {"photometric": "MONOCHROME1", "PresentationLUTShape": "INVERSE"}, 5000.0 - DEEP[0]),
    "shared slope": (DEEP, groups(**rescale(2, -1024)), DEEP * 2.0 - 1024),
    "slope of each frame": (DEEP, groups(*(rescale(n + 1, n) for n in range(4))),
                            np.stack([DEEP[n] * (n + 1.0) + n for n in range(4)])),
    "an empty frame of slope 0": (EMPTY, groups(*(rescale(n) for n in (2, 0, 2, 2))), EMPTY * 2.0),
    "positions with planes": (DEEP, groups(*(place(0, 0, z) for z in (9, 6, 3, 0)), **UP), DEEP[::-1]),
    "slices and slopes": (DEEP, groups(*(place(0, 0, -n) | rescale(n + 1) for n in range(4)), **UP),
                          np.stack([DEEP[n] * (n + 1.0) for n in (3, 2, 1, 0)])),
    "YBR": (YBR, {"color": True, "photometric": "YBR_FULL"}, pydicom.pixels.convert_color_space(
        YBR, "YBR_FULL", "RGB").transpose(2, 0, 1)),
    "RGB": (COLOR, {"color": True, "photometric": "RGB"}, COLOR.transpose(2, 0, 1)),
    "RGB by planes": (COLOR, {"color": True, "photometric": "RGB", "PlanarConfiguration": 1,
                              "PixelData": COLOR.transpose(2, 0, 1).tobytes()}, COLOR.transpose(2, 0, 1)),
    "palette": (FLAT, NARROW[1] | {"photometric": "PALETTE COLOR"}, look_up(NARROW[0], FLAT)),
    "palette of 4096 entries": (DEEP[0], WIDE[1] | {"photometric": "PALETTE COLOR"}, look_up(WIDE[0], DEEP[0])),
    "palette in words": (FLAT, PADDED[1] | {"photometric": "PALETTE COLOR"}, look_up(PADDED[0], FLAT, 20)),
}  # fmt: skip
"""Stored numbers, attributes, and the values."""


def scale(values):
    low, high = np.percentile(values.astype(float), (0.5, 99.5))
    return np.clip((values - low) / (high - low), 0, 1) * 2 - 1


@pytest.mark.parametrize("case", CASES)
def test_values_of_each_kind_are_those_of_the_standard(tmp_path, case):
    pixels, facts, values = CASES[case]
    made = decode_volume(save(tmp_path / "x.dcm", pixels, **facts))
    values = values if len(made) == 3 else values[None]
    assert read_volume_header(tmp_path / "x.dcm").shape == values.shape[1:]
    np.testing.assert_allclose(made, scale(values), atol=1e-5)


def test_a_window_is_in_the_unit_of_each_frame(tmp_path):
    file = save(tmp_path / "x.dcm", DEEP, **groups(*(rescale(n + 1, -1024) for n in range(4))))
    values = np.stack([DEEP[n] * (n + 1.0) - 1024 for n in range(4)])
    made = decode_volume(file, window=(-160, 240))[0]
    np.testing.assert_allclose(made, (np.clip(values, -160, 240) + 160) / 200 - 1, atol=1e-6)


REFUSED = {
    "two slopes": (DEEP, {"RescaleSlope": 1, "RescaleIntercept": 0} | groups(**rescale(3, 0)),
                   "has the RescaleSlope 3.* in functional groups and 1.* in the file"),
    "a slope alone": (DEEP[0], {"RescaleSlope": 2}, "has a RescaleSlope and not RescaleSlope and RescaleIntercept"),
    "a dose": (DEEP, {"DoseGridScaling": 2e-3}, "is a dose"),
    "real world values": (DEEP, groups(*({"RealWorldValueMappingSequence": map_values(n + 1.0)[0]} for n in range(4))),
                          "has a RealWorldValueMappingSequence, and no RescaleSlope"),
    "slices in another order": (DEEP, {"FrameIncrementPointer": 0x00540080, "SliceVector": [2, 1, 4, 3]},
                                "has 4 frames by SliceVector, not by slices"),
    "positions without planes": (DEEP, groups(*(place(0, 0, z) for z in (0, 10, 5, 15))),
                                 "has frames with an ImagePositionPatient, but no ImageOrientationPatient"),
    "a slope of 0": (DEEP[0], {"RescaleSlope": 0, "RescaleIntercept": 3}, "has the RescaleSlope 0, which makes"),
    "high bit below": (DEEP[0], {"BitsStored": 12, "HighBit": 10}, "has the HighBit 10 with 12 BitsStored of 16"),
    "two frames at a place": (DEEP, groups(*(place(0, 0, z) for z in (0, 1, 1, 2)), **UP), "two slices at one pos"),
    "a gap of frames": (DEEP, groups(*(place(0, 0, z) for z in (0, 1, 2, 4)), **UP), "1 mm from each other, but 2"),
    "frames of two planes": (DEEP, groups(*({"PlaneOrientationSequence": item(ImageOrientationPatient=side)}
                                            for side in ([1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1]) * 2)),
        "has frames that differ in ImageOrientationPatient"),
    "some positions": (DEEP, groups(place(0, 0, 0), place(0, 0, 1), {}, {}), "an ImagePositionPatient for some"),
    "groups of fewer frames": (DEEP, groups(place(0, 0, 0)), "has 4 frames, and PerFrameFunctionalGroupsSequence 1"),
    "frames by detector": (DEEP, {"FrameIncrementPointer": [0x00540020, 0x00540080], "DetectorVector": [1, 1, 2, 2]},
                           "has 4 frames by DetectorVector, not by slices"),
    "a slice twice": (DEEP, {"FrameIncrementPointer": 0x00540080, "SliceVector": [1, 1, 2, 2]}, "by SliceVector"),
    "frames in time": (DEEP, {"FrameIncrementPointer": 0x00181063, "FrameTime": 40}, "has 4 frames in time"),
    "several real worlds": (DEEP[0], {"RealWorldValueMappingSequence": sequence(*map_values(1), *map_values(2))},
                            "has a RealWorldValueMappingSequence, and no RescaleSlope"),
    "unknown colors": (COLOR, {"color": True, "photometric": "HSV"}, "has the PhotometricInterpretation HSV with 3"),
    "inverse presentation": (DEEP[0], {"PresentationLUTShape": "INVERSE"}, "MONOCHROME2 with an INVERSE Presentation"),
    "gray with colors": (DEEP[0], {"PixelPresentation": "MIXED"}, r"has gray with colors \(PixelPresentation MIXED"),
    "palette without tables": (FLAT, {"photometric": "PALETTE COLOR"}, "has a PaletteColorLookupTable that is not"),
    "a short palette": (FLAT, NARROW[1] | {"photometric": "PALETTE COLOR", "RedPaletteColorLookupTableData": b"12"},
                        "has a PaletteColorLookupTable of fewer than the 256"),
    "segments": (DEEP, {"SegmentSequence": sequence(item(SegmentNumber=1))}, "is a DICOM segmentation"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_attribute(tmp_path, case):
    pixels, facts, message = REFUSED[case]
    with pytest.raises(Unreadable, match=message):
        decode_volume(save(tmp_path / "x.dcm", pixels, **facts))


def test_masks_of_frames_lie_as_their_images_or_are_refused(tmp_path):
    mixed = groups(*(place(0, 0, z) for z in (0, 10, 5, 15)), **UP)
    image = save(tmp_path / "image.dcm", DEEP, **mixed)
    classes = (DEEP > 2000).astype(np.uint8)
    placed = save(tmp_path / "placed.dcm", classes, **mixed)
    assert np.array_equal(decode_mask(placed), classes[[0, 2, 1, 3]])
    bare = save(tmp_path / "bare.dcm", classes)
    header = read_volume_header(image)
    assert header.order == (0, 2, 1, 3)
    assert find_difference(header, read_volume_header(placed)) is None
    assert "frames in different orders" in find_difference(header, read_volume_header(bare))
    assert find_difference(read_volume_header(bare), read_volume_header(bare)) is None
