"""Published formats byte by byte: what is read, and what is refused by the name of the file."""

import bz2
import gzip
import pickle
import struct

import numpy as np
import pytest
from scipy.io import savemat

from fedshift.data.formats import read_digits_mat, read_idx, read_libsvm, read_pickle
from fedshift.utils import files
from fedshift.utils.errors import UsageError

IMAGES = struct.pack(">4B3I", 0, 0, 8, 3, 2, 2, 3) + bytes(range(12))
LABELS = struct.pack(">4BI", 0, 0, 8, 1, 4) + bytes([7, 0, 9, 3])


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress], ids=["plain", "gzip", "bzip2"])
def test_idx_is_read_whether_compressed_or_not(tmp_path, pack):
    (tmp_path / "images").write_bytes(pack(IMAGES))
    (tmp_path / "labels").write_bytes(pack(LABELS))
    images = read_idx(tmp_path / "images", 3)
    assert images.dtype == np.uint8
    assert images.tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert read_idx(tmp_path / "labels", 1).tolist() == [7, 0, 9, 3]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "begins with nothing, an IDX file of bytes in 3 dimensions with 00 00 08 03"),
        (LABELS, "begins with 00 00 08 01"),
        (b"\x00\x00\x0d\x03" + IMAGES[4:], "begins with 00 00 0d 03"),
        (IMAGES[:-1], "should hold 2 x 2 x 3 bytes, and holds 11: it is cut short or damaged"),
        (IMAGES + b"\x00", "should hold 2 x 2 x 3 bytes, and holds 13"),
        (IMAGES[:10], "cut short or damaged"),
        (gzip.compress(IMAGES, mtime=0)[:-9], "cannot be read as an IDX file"),
        (gzip.compress(IMAGES, mtime=0)[:12] + bytes(20), "cannot be read as an IDX file"),
        (bz2.compress(IMAGES)[:-9], "cannot be read as an IDX file"),
    ],
)
def test_a_wrong_idx_file_is_refused_by_name(tmp_path, content, said):
    (tmp_path / "train-images").write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_idx(tmp_path / "train-images", 3)
    assert str(refused.value).startswith(str(tmp_path / "train-images"))
    assert said in str(refused.value)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress], ids=["gzip", "bzip2"])
@pytest.mark.parametrize(
    ("read", "content"),
    [
        (lambda path: read_idx(path, 3), bytes(2**22)),
        (lambda path: read_libsvm(path, 2), b"1 1:0 2:0\n" * 2**18),
        (read_pickle, pickle.dumps(bytes(2**22))),
    ],
    ids=["idx", "libsvm", "pickle"],
)
def test_what_goes_on_unpacking_is_refused_by_name(tmp_path, monkeypatch, pack, read, content):
    monkeypatch.setattr(files, "UNSUSPECTED", 2**20)
    (tmp_path / "images").write_bytes(pack(content))
    with pytest.raises(UsageError, match=r"images would unpack to 0.0 GB, \d+ times its size: no data do"):
        read(tmp_path / "images")


def test_a_mat_file_that_declares_more_than_memory_holds_is_refused(tmp_path, monkeypatch):
    savemat(tmp_path / "digits.mat", {"X": np.zeros((32, 32, 3, 500), np.uint8)}, do_compression=True)
    monkeypatch.setattr(files, "UNSUSPECTED", 2**20)
    with pytest.raises(UsageError, match=r"digits.mat would unpack to 0.0 GB, \d+ times its size"):
        read_digits_mat(tmp_path / "digits.mat")


def test_a_mat_file_of_digits_gives_images_first_and_ten_as_zero(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    savemat(tmp_path / "digits.mat", {"X": x, "y": np.array([[10], [1], [9], [0], [5]], np.uint8)})
    images, labels = read_digits_mat(tmp_path / "digits.mat")
    assert images.shape == (5, 32, 32, 3)
    assert all(np.array_equal(images[place], x[:, :, :, place]) for place in range(5))
    assert labels.tolist() == [0, 1, 9, 0, 5]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"X": np.zeros((32, 32, 3, 5), np.uint8)}, "has no variable 'y'"),
        ({"X": np.zeros((32, 32, 3, 5), np.uint8), "y": np.zeros((4, 1))}, "and 4 labels"),
        ({"X": np.zeros((32, 32, 3, 5)), "y": np.zeros((5, 1))}, "X of float64 (32, 32, 3, 5)"),
        ({"X": np.zeros((5, 32, 32), np.uint8), "y": np.zeros((5, 1))}, "cropped digits are uint8 (32, 32, 3, N)"),
    ],
)
def test_another_mat_file_is_refused_by_name(tmp_path, content, said):
    savemat(tmp_path / "digits.mat", content)
    with pytest.raises(UsageError) as refused:
        read_digits_mat(tmp_path / "digits.mat")
    assert said in str(refused.value)


def test_a_mat_file_that_is_cut_short_is_refused(tmp_path):
    file = tmp_path / "digits.mat"
    savemat(file, {"X": np.ones((32, 32, 3, 5), np.uint8), "y": np.ones((5, 1))})
    file.write_bytes(file.read_bytes()[:4000])
    with pytest.raises(UsageError, match=r"digits.mat cannot be read as a MATLAB file"):
        read_digits_mat(file)


def test_libsvm_text_may_leave_out_zeros(tmp_path):
    (tmp_path / "data.bz2").write_bytes(bz2.compress(b"10 1:-1 2:0.5 4:1 \n1 3:-0.25 \n"))
    x, y = read_libsvm(tmp_path / "data.bz2", 4)
    assert x.tolist() == [[-1, 0.5, 0, 1], [0, 0, -0.25, 0]]
    assert y.tolist() == [10, 1]


@pytest.mark.parametrize("content", [b"1 5:1 \n", b"1 one:1\n", b"\x1f\x8bno gzip"])
def test_other_text_than_libsvms_is_refused_by_name(tmp_path, content):
    (tmp_path / "data").write_bytes(content)
    with pytest.raises(UsageError, match="data cannot be read as LIBSVM text"):
        read_libsvm(tmp_path / "data", 4)
