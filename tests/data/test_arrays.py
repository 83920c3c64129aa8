"""Arrays of every kind: what reaches a network is numpy's own conversion, or is said or refused with values."""

import re
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from scipy.sparse import csr_matrix
from torch.utils.data import IterableDataset, StackDataset, TensorDataset

from fedshift import LazyDataset
from fedshift.config.spec import DataSpec
from fedshift.data.assembly import read_folder
from fedshift.data.readers.arrays import SPLIT_ENDS
from fedshift.data.sources import load_federation
from fedshift.utils.errors import UsageError

RNG = np.random.default_rng(0)
Y = np.arange(12) % 2
X, PIXELS = RNG.normal(size=(12, 3)), RNG.integers(0, 256, (12, 1, 5, 6))
PIXELS[0, 0, 0, :2] = 0, 255
BYTES = PIXELS.astype(np.uint8)
SCALED = PIXELS / 127.5 - 1


def load(x, y=Y, **settings):
    return load_federation(dict.fromkeys("ab", (x, y, x, y)), DataSpec(**settings))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (X, X), (X.astype(">f8"), X), (X.astype(np.longdouble), X), (X.astype(np.float16), X.astype(np.float16)),
        (np.asfortranarray(X), X), (X[::-1], X[::-1]), (X > 0, X > 0), (X.tolist(), X), (np.ma.array(X), X),
        (torch.tensor(X, requires_grad=True), X),
        (torch.tensor([[0.5, -2]] * 12, dtype=torch.bfloat16), [[0.5, -2]] * 12),
        (np.rint(100 * X).astype(">i2"), np.rint(100 * X)), (np.uint32(2**31) * (X > 0), 2.0**31 * (X > 0)),
        (BYTES, SCALED), (PIXELS, SCALED), (BYTES.astype(">u2"), SCALED), (BYTES[:, 0], SCALED),
        (BYTES.transpose(0, 2, 3, 1), SCALED), (PIXELS > 99, 2.0 * (PIXELS > 99) - 1), (SCALED, SCALED),
        (BYTES.transpose(0, 2, 3, 1).repeat(3, 3), SCALED.repeat(3, 1)), (BYTES.repeat(4, 1), SCALED.repeat(4, 1)),
    ],
)  # fmt: skip
def test_values_are_those_of_numpy(x, expected):
    data = load(x)
    found = data.client("a").train.inputs(slice(None), torch.float64).numpy()
    assert np.abs(found - np.asarray(expected, float)).max() < 1e-12
    assert data.notices == ()


class Foreign:
    """An array of another library, which gives NumPy's."""

    def __init__(self, x):
        self.x, self.shape = x, x.shape

    def __array__(self, dtype=None, copy=None):
        return self.x


def test_arrays_of_other_libraries_are_read_by_their_protocol():
    labels = pd.Series(Y), Y[:, None].astype(bool), Foreign(Y)
    assert {load(x, y).fingerprint for x in (X, Foreign(X)) for y in labels} == {load(X).fingerprint}


@pytest.mark.parametrize(
    ("x", "notice"),
    [
        (X + 1e9, r"train data: feature \d \(.*\) varies by .* and floats of 32 bits, .* round it by up to .* \(and"),
        (1e-60 * X, "round it by up to"),
        ((2**32 - 1 - Y[:, None]).astype(np.uint32).repeat(3, 1), "varies by 0.5 .* round it by up to 2"),
        ((2**24 + np.arange(36).reshape(12, 3) % 4).astype(np.int32), "round it by up to 1"),
        (PIXELS.astype(float), "images of floats reach the network unscaled, client 'a', train data: 0 to 255"),
        (np.resize(PIXELS, (12, 64)).astype(float), "images of floats reach the network unscaled"),
        (1000.0 + 0 * SCALED + X[:, :1, None, None], "images of floats reach the network unscaled, .*: 99"),
        (BYTES // 128, "8-bit pixels are 0 to 1 at all clients, .*: multiply them by 255 if 1 is white"),
        (BYTES // 16, "8-bit pixels are 0 to 15 at all clients, .*: multiply them by 17"),
        (np.resize(BYTES, (12, 3, 8, 3)), "samples of shape 3 x 8 x 3 have 3 channels, in front; give images"),
        (np.resize(BYTES, (12, 1, 28, 1)), "samples of shape 1 x 28 x 1 have 1 channels, in front"),
    ],
)  # fmt: skip
def test_what_is_unlikely_to_be_meant_is_said_in_one_line(x, notice):
    data = load(x)
    (said,) = data.notices
    assert re.search(notice, said)
    assert data.sample_shape == np.shape(x)[1:]


@pytest.mark.parametrize(
    "x",
    [
        np.column_stack([X, np.full(12, 0.1) + 1e-17 * Y]),  # constant but for rounding
        np.column_stack([X, np.full(12, 1e9)]), np.column_stack([X, 1e9 * Y]),
        np.column_stack([X, 1e-12 * Y + X[:, 0]]),
        1.7e9 + 1e7 * X, 100 * X, 1e-30 * X, 30 * np.resize(X, (12, 2, 8)), 3 * SCALED, 0 * SCALED, BYTES // 12,
    ],
)  # fmt: skip
def test_what_networks_can_learn_from_is_not_said(x):
    assert [said for said in load(x).notices if "signals" not in said] == []


def test_clients_of_other_scales_and_sizes_and_absent_classes_are_said():
    two = {"a": (SCALED + 1, Y + 1, SCALED, Y + 1), "b": (257.1 * PIXELS, Y + 1, 257.1 * PIXELS, Y + 1)}
    apart, absent = read(two).notices
    assert "images of floats have other scales, client 'a', train data: 0 to 2, but client 'b', train data: 0" in apart
    assert absent.startswith("no training sample has class 0, and networks have 3 outputs")
    halves = {"a": (SCALED, Y, SCALED, Y), "b": (PIXELS / 255, Y, PIXELS / 255, Y)}
    assert (
        "other scales, client 'b', train data: 0 to 1, but client 'a', train data: -1 to 1" in read(halves).notices[0]
    )
    assert read(two, classes=3).notices == (apart,)
    sizes = {"a": (BYTES, Y, BYTES, Y), "b": (BYTES[..., 1:], Y, BYTES[..., 1:], Y)}
    assert re.search("images of 5 x 5, . x . pixels become 28 x 28.* image_size", read(sizes).notices[-1])
    assert not any("28 x 28" in said for said in read(sizes, image_size=8).notices)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (1e39 * X, Y, r"client 'a', train data: sample 0, place \(2,\): \d+ values such as 6.40423e.38, .* are bey"),
        (np.where(X > 1, 1e300, SCALED[:, 0, 0, :3])[:, None, None], Y, "1e[+]300 are beyond 3.4e[+]38, the largest"),
        (np.where(X > 1, np.inf, X), Y, "sample 2 has NaN or infinite values"),
        (np.full((12, 3), 2**60 + 1, np.uint64), Y, "integers up to 1152921504606846977, beyond the 9007199254740992"),
        (np.ma.masked_less(X, -1), Y, r"values are masked: fill them \(x.filled"),
        (csr_matrix(X), Y, r"a sparse csr_matrix: give an array of all numbers, x.toarray\(\)"),
        (torch.tensor(X).to_sparse(), Y, "a Tensor cannot become an array .*to_dense"),
        ([[1.0, 2.0], [1.0]] * 6, Y, "a list cannot become an array .*inhomogeneous.*padded to one length"),
        (X + 1j, Y, r"complex128 \(.*j\), .* where numbers are expected"),
        (X.astype(object), Y, r"object \(0.1257.*where numbers are expected: give integers, floats"),
        (np.zeros(12, [("age", float)]), Y, r"\[\('age', '<f8'\)\] \(\(0.0,\), "),
        (X.astype("M8[s]"), Y, "datetime64.* where numbers are expected"),
        (X, np.array(["no", "yes"])[Y], "labels: <U3 .'no', 'yes', 'no'. where numbers .* classes 0, 1, ..., numbered"),
        (X, np.ma.masked_equal(Y, 1), "train data, labels: values are masked"),
        (X, np.where(Y, np.nan, 1), "labels are not whole numbers; the label of sample 1 is nan"),
        (X, np.eye(2)[Y], r"of one-hot labels, y.argmax\(axis=1\)"),
        (X, 2 * Y - 1, "label -1 is out of range"),
        (np.array(3.0), Y, r"samples of shape \(\)"),
        (np.zeros((12, 0)), Y, r"samples of shape \(12, 0\) and labels"),
        (PIXELS + 1, Y, "integer pixels from 1 to 256; they must lie in 0..255"),
        ({"row": 1e39 * X, "more": X}, Y, "input 'row': sample 0.* beyond 3.4e"),
    ],
)  # fmt: skip
def test_what_is_no_array_of_numbers_is_refused_with_values(x, y, said):
    with pytest.raises(UsageError, match=said):
        load(x, y)


def test_a_model_takes_and_refuses_what_training_does():
    store = load(X).schema.preparation.store
    for x in (X.astype(">f8"), X.tolist(), torch.tensor(X, requires_grad=True), np.asfortranarray(X)):
        rows, single = store(x)
        assert (rows.tolist(), single) == (X.tolist(), False)
    for wrong, said in ((csr_matrix(X), "sparse"), (1e39 * X, "beyond"), (X.astype(object), "numbers are expected")):
        with pytest.raises(UsageError, match=f"^samples: .*{said}"):
            store(wrong)


def write(folder, kind, **arrays):
    folder.mkdir(exist_ok=True)
    for name in "ab":
        place = folder / name
        if kind == "npz":
            np.savez(folder / f"{name}.npz", **arrays)
        for key, array in arrays.items() if kind == "npy" else ():
            stem, _, part = key.partition("_")
            (place / part).mkdir(parents=True, exist_ok=True)
            np.save(place / part / f"{stem}.npy", array)
    return folder if kind != "memory" else dict.fromkeys("ab", arrays)


def read(source, **settings):
    return load_federation(source if isinstance(source, dict) else str(source), DataSpec(**settings))


OWN = {"x_train": X, "y_train": Y, "x_test": X[6:], "y_test": Y[6:]}


@pytest.mark.parametrize("kind", ["npz", "npy", "memory"])
def test_arrays_by_name_are_the_same_from_files_and_memory(kind, tmp_path):
    for end in SPLIT_ENDS["validation"] if kind == "memory" else ["dev"]:
        data = read(write(tmp_path / "ends", kind, **OWN, **{f"x_{end}": X[:4], f"y_{end}": Y[:4]}))
        assert data.client("b").validation.copy_rows(slice(None)).tolist() == X[:4].tolist()
    alone = read(write(tmp_path / "alone", kind, x=X, y=Y), test_fraction=0.5).client("a")
    rows = np.concatenate([split.copy_rows(slice(None)) for split in (alone.train, alone.test)])
    assert sorted(rows.tolist()) == sorted(X.tolist())
    assert (len(alone.test), alone.test.y.sum()) == (6, 3)


@pytest.mark.parametrize(
    ("without", "more", "said"),
    [
        ("y_train", {}, r"no array 'y_train', or file train/y\.npy \(it has x_t"),
        ("x_test", {}, r"no array 'x_test', or file test/x\.npy"),
        ("", {"x_val": X}, r"has no array 'y_val', or file val/y\.npy"),
        ("", {"x_val": X, "x_dev": X}, "validation data twice, as '(dev|val)' and '(dev|val)'"),
    ],
)  # fmt: skip
def test_arrays_that_lack_or_repeat_one_are_refused(tmp_path, without, more, said):
    with pytest.raises(UsageError, match=said):
        read(write(tmp_path, "npy", **{name: x for name, x in OWN.items() if name != without}, **more))


def test_arrays_and_files_that_are_not_read_are_named(tmp_path):
    write(tmp_path, "npz", **OWN, x_holdout=X, ids=Y)
    (tmp_path / "b.npz").rename(tmp_path / "b.NPZ")
    for name in ("c.npz.gz", "d.npy", "notes.txt"):
        (tmp_path / name).touch()
    data = read(tmp_path)
    assert data.names == ("a", "b")
    files, arrays, _ = data.notices
    assert files.startswith(f"{tmp_path}: files that are not read: c.npz.gz, d.npy: see the layouts of")
    assert "a.npz: arrays that are not read: x_holdout, ids; the data are x_train, y_train, x_test, y_test" in arrays


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_two_layouts_and_single_clients_are_refused(kind, tmp_path):
    write(tmp_path, kind, **OWN)
    with pytest.raises(UsageError, match="is one client: give a directory with a file or folder for each client"):
        read(tmp_path / ("a.npz" if kind == "npz" else "a"))
    write(tmp_path, "npy" if kind == "npz" else "npz", **OWN)
    with pytest.raises(UsageError, match=r"holds \.npz files and folders of \.npy files: put each kind into its own"):
        read(tmp_path)


def test_numbers_are_predicted_where_a_folder_is_read_by_the_name_of_a_task(tmp_path):
    write(tmp_path, "npz", x_train=X, y_train=X[:, 0], x_test=X, y_test=X[:, 0])
    assert read_folder(tmp_path, task="regression").client("a").train.y[:, 0].tolist() == X[:, 0].tolist()


def test_a_table_of_arrow_is_a_table():
    frame = pd.DataFrame({"age": X[:, 0], "ill": Y})
    ours, theirs = (dict.fromkeys("ab", table) for table in (pa.Table.from_pandas(frame), frame))
    assert read(ours, target="ill").fingerprint == read(theirs, target="ill").fingerprint
    for columns in ({"age": [1.0, 2.0], "ill": [0, 1]}, [1.0] * 9):
        with pytest.raises(UsageError, match=r"columns of a table as pandas\.DataFrame"):
            read({"a": columns})


# Datasets


class Items(torch.utils.data.Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        return self.items[number]


RED = Image.fromarray(np.full((4, 4, 3), (255, 0, 0), np.uint8))
CLEAR = RED.convert("RGBA")
CLEAR.putalpha(0)
DEEP = Image.fromarray(np.full((4, 4), 40000, np.uint16))


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (RED, [255, 0, 0]), (RED.convert("P"), [255, 0, 0]), (RED.convert("L"), [76]), (CLEAR, [255, 255, 255]),
        (RED.convert("CMYK"), [255, 0, 0]), (Image.new("1", (4, 4), 1), [255] * 3), (DEEP, "integer pixels from 40000"),
        (Image.fromarray(np.full((4, 4), 0.5, np.float32)), [0.5]),
    ],
)  # fmt: skip
def test_pictures_of_datasets_are_those_of_files(picture, expected):
    data = Items(*[(picture, label) for label in (0, 1)] * 2)
    for wrap in (lambda x: x, LazyDataset):
        with pytest.raises(UsageError, match=expected) if isinstance(expected, str) else nullcontext():
            split = read({"a": (wrap(data), wrap(data))}).client("a").train
            assert split.copy_rows(slice(0, 1))[0, :, 0, 0].tolist() == expected


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Endless(), "Endless has no length: give a map-style dataset"),
        (Items((BYTES[0], 0), (SCALED[0], 1)), r"sample 1 has shape \(1, 5, 6\) and the first \(1, 5, 6\) of uint8"),
        (Items((BYTES[0], 0), (BYTES[0] > 9, 1)), r"sample 1 has shape \(1, 5, 6\) of bool and the first"),
        (Items((X[0], [0]), (X[1], [0, 1])), r"labels: sample 1 has shape \(2,\) and the first \(1,\)"),
        (Items((X[0], 0), (X[1], None)), r"sample 1, label: object \(None\) where numbers are expected"),
        (Items((X[0], "a"), (X[1], "b")), r"sample 0, label: <U1 \('a'\) where numbers"),
        (Items((X[0], 0, 5)), "sample 0 is a tuple, not a pair"), (Items({"x": 1}), "sample 0 is a dict, not a pair"),
        (Items(), "client 'a', train data: empty"), (iter([]), "list_iterator given: give"),
    ],
)  # fmt: skip
def test_datasets_that_give_no_arrays_are_refused_by_sample(data, said):
    with pytest.raises(UsageError, match=said):
        read({"a": (data, data)})


def test_datasets_of_torch_are_their_arrays():
    x, y = torch.tensor(X, requires_grad=True), torch.from_numpy(Y)
    for data in (TensorDataset(x, y), StackDataset(image=x, label=y), Items(*zip(X, Y, strict=True))):
        for wrapped in (data, LazyDataset(data)):
            split = read(dict.fromkeys("ab", (wrapped, wrapped))).client("b").train
            assert split.copy_rows(slice(None)).tolist() == X.tolist()
            assert split.y.tolist() == Y.tolist()
