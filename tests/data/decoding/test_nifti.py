"""NIfTI files of every kind of number, against nibabel's values in float64, and masks within rounding of classes."""

import numpy as np
import pytest

from fedshift.data.decoding.images import Unreadable
from fedshift.data.decoding.volumes import decode_mask, decode_volume

nibabel = pytest.importorskip("nibabel")
BASE = np.random.default_rng(0).integers(0, 100, (4, 5, 6))


def with_slope(slope, intercept):
    """Write a slope and an intercept that nibabel would not."""

    def change(content):
        content[112:120] = np.array([slope, intercept], "<f4").tobytes()

    return change


def keep(content):
    pass


CASES = {
    **{f"{np.dtype(kind)}": (BASE.astype(kind), keep) for kind in ("i1", "u2", ">i2", "u4", "i8", "u8", ">f4", "f8")},
    **{f"slope {slope:g}": (BASE.astype("i2"), with_slope(slope, 7)) for slope in (2.5, -1, 0, np.nan)},
    "an offset of whole numbers": ((BASE + 10**9).astype("i4"), keep),
    "an offset of floats": (BASE + 1e9, keep),
    "huge": (BASE * 1e300, keep),
    "tiny": (BASE * 1e-60, keep),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES)
def test_numbers_of_each_kind_are_those_of_nibabel(tmp_path, case):
    values, change = CASES[case]
    file = tmp_path / "x.nii"
    order = "<" if values.dtype.isnative else ">"
    nibabel.Nifti1Image(values, np.eye(4), nibabel.Nifti1Header(endianness=order), dtype=values.dtype).to_filename(file)
    content = bytearray(file.read_bytes())
    change(content)
    file.write_bytes(content)
    read = np.asanyarray(nibabel.load(file).dataobj).astype(float)
    low, high = np.percentile(read, (0.5, 99.5))
    wanted = np.clip((read - low) / (high - low), 0, 1) * 2 - 1
    np.testing.assert_allclose(decode_volume(file)[0].transpose(2, 1, 0), wanted, atol=1e-6)
    resampled = decode_volume(file, spacing=(1.0, 1.0, 1.0))
    np.testing.assert_allclose(resampled, decode_volume(file), atol=1e-6)


@pytest.mark.parametrize("kind", ["u1", "i2", "f4"])
def test_masks_that_a_float_slope_rounds_hold_their_classes(tmp_path, kind):
    classes = BASE % 3
    mask = nibabel.Nifti1Image(classes.astype(float), np.eye(4))
    mask.header.set_data_dtype(kind)  # nibabel scales floats over the whole range of integers
    mask.to_filename(tmp_path / "m.nii")
    assert np.array_equal(decode_mask(tmp_path / "m.nii").transpose(2, 1, 0), classes)
    nibabel.Nifti1Image(classes * 0.5, np.eye(4)).to_filename(tmp_path / "half.nii")
    with pytest.raises(Unreadable, match=r"is a mask with the fraction 0\.5: give class numbers"):
        decode_mask(tmp_path / "half.nii")
