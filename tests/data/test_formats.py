"""Published formats byte by byte: what is read, and what is refused by the name of the file."""

import bz2
import gzip
import pickle
import re
import struct

import numpy as np
import pytest
from scipy.io import savemat

from fedshift.data.formats import read_digits_mat, read_idx, read_libsvm, read_pickle
from fedshift.utils import files
from fedshift.utils.errors import UsageError

IMAGES = struct.pack(">4B3I", 0, 0, 8, 3, 2, 2, 3) + bytes(range(12))
LABELS = struct.pack(">4BI", 0, 0, 8, 1, 4) + bytes([7, 0, 9, 3])
DIGITS = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)


def read_images(path):
    return read_idx(path, 3)


def read_rows(path):
    return read_libsvm(path, 4)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress], ids=["plain", "gzip", "bzip2"])
def test_idx_is_read_whether_compressed_or_not(tmp_path, pack):
    (tmp_path / "images").write_bytes(pack(IMAGES))
    (tmp_path / "labels").write_bytes(pack(LABELS))
    images = read_images(tmp_path / "images")
    assert (images.dtype, images.tolist()) == (np.uint8, np.arange(12).reshape(2, 2, 3).tolist())
    assert read_idx(tmp_path / "labels", 1).tolist() == [7, 0, 9, 3]


@pytest.mark.parametrize(
    ("read", "content", "said"),
    [
        (read_images, b"", "begins with nothing, an IDX file of bytes in 3 dimensions with 00 00 08 03"),
        (read_images, LABELS, "begins with 00 00 08 01"),
        (read_images, IMAGES[:-1], "should hold 2 x 2 x 3 bytes, and holds 11: it is cut short or damaged"),
        (read_images, IMAGES + b"\x00", "should hold 2 x 2 x 3 bytes, and holds 13"),
        (read_images, IMAGES[:10], "cut short or damaged"),
        (read_images, gzip.compress(IMAGES, mtime=0)[:-9], "cannot be read as an IDX file"),
        (read_images, gzip.compress(IMAGES, mtime=0)[:12] + bytes(20), "cannot be read as an IDX file"),
        (read_images, bz2.compress(IMAGES)[:-9], "cannot be read as an IDX file"),
        (read_rows, b"1 5:1 \n", "cannot be read as LIBSVM text"),
        (read_rows, b"1 one:1\n", "cannot be read as LIBSVM text"),
        (read_rows, b"\x1f\x8bno gzip", "cannot be read as LIBSVM text"),
        (read_digits_mat, {"X": DIGITS}, "has no variable 'y'"),
        (read_digits_mat, {"X": DIGITS, "y": np.zeros((4, 1))}, "and 4 labels"),
        (read_digits_mat, {"X": DIGITS * 1.0, "y": np.zeros((5, 1))}, "X of float64 (32, 32, 3, 5)"),
        (read_digits_mat, {"X": DIGITS[..., 0], "y": np.zeros(5)}, "cropped digits are uint8 (32, 32, 3, N)"),
        (read_digits_mat, b"MATLAB 5.0", "cannot be read as a MATLAB file"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_name(tmp_path, read, content, said):
    file = tmp_path / "digits.mat"
    savemat(file, content) if isinstance(content, dict) else file.write_bytes(content)
    with pytest.raises(UsageError, match=f"^{re.escape(str(file))} .*{re.escape(said)}"):
        read(file)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress], ids=["gzip", "bzip2"])
@pytest.mark.parametrize(
    ("read", "content"),
    [(read_images, bytes(2**18)), (read_rows, b"1 1:0 2:0\n" * 2**15), (read_pickle, pickle.dumps(bytes(2**18)))],
    ids=["idx", "libsvm", "pickle"],
)
def test_what_goes_on_unpacking_is_refused_by_name(tmp_path, monkeypatch, pack, read, content):
    monkeypatch.setattr(files, "UNSUSPECTED", 2**16)
    (tmp_path / "images").write_bytes(pack(content))
    with pytest.raises(UsageError, match=r"images would unpack to 0.0 GB, \d+ times its size: no data do"):
        read(tmp_path / "images")


def test_a_mat_file_of_digits_gives_images_first_and_ten_as_zero(tmp_path, monkeypatch):
    savemat(tmp_path / "digits.mat", {"X": DIGITS, "y": np.array([[10], [1], [9], [0], [5]], np.uint8)})
    images, labels = read_digits_mat(tmp_path / "digits.mat")
    assert np.array_equal(images, np.moveaxis(DIGITS, 3, 0))
    assert labels.tolist() == [0, 1, 9, 0, 5]
    savemat(tmp_path / "digits.mat", {"X": np.zeros((32, 32, 3, 500), np.uint8)}, do_compression=True)
    monkeypatch.setattr(files, "UNSUSPECTED", 2**20)
    with pytest.raises(UsageError, match=r"digits.mat would unpack to 0.0 GB, \d+ times its size"):
        read_digits_mat(tmp_path / "digits.mat")


def test_libsvm_text_may_leave_out_zeros(tmp_path):
    (tmp_path / "data.bz2").write_bytes(bz2.compress(b"10 1:-1 2:0.5 4:1 \n1 3:-0.25 \n"))
    x, y = read_rows(tmp_path / "data.bz2")
    assert (x.tolist(), y.tolist()) == ([[-1, 0.5, 0, 1], [0, 0, -0.25, 0]], [10, 1])
