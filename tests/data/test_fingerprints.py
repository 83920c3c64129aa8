"""A fingerprint tells every change of a sample, a target or an order, of all kinds of data, and nothing else."""

import os
from shutil import copytree

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from fedshift import LazyDataset
from fedshift.data.assembly import federation, read_folder
from fedshift.data.checks.quality import check_data
from fedshift.data.decoding import list_members
from fedshift.data.stores import digest_files
from fedshift.utils.errors import FedshiftError


class Labeled(Dataset):
    """Pictures, whose labels are known without decoding them; ``decoded`` lists which were."""

    def __init__(self, x, y):
        self.x, self.targets, self.decoded = x, y.tolist(), []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        self.decoded.append(row)
        return Image.fromarray(self.x[row]), self.targets[row]


class Files(Labeled):
    """Pictures in files, as torchvision's ``ImageFolder`` lists them."""

    loader = staticmethod(np.load)

    def __init__(self, folder, x, y):
        super().__init__(x, y)
        self.samples = [(str(folder / f"{row}.npy"), label) for row, label in enumerate(self.targets)]
        for (path, _), image in zip(self.samples, x, strict=True):
            np.save(path, image)

    def __getitem__(self, row):
        self.decoded.append(row)
        return self.loader(self.samples[row][0]), self.targets[row]


def alone(train, test=None):
    return federation({"a": (train, test or train)})


def write_npz(folder, x, y):
    np.savez(folder / "a.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    return read_folder(folder)


def write_npy(folder, x, y):
    for part in ("train", "test"):
        (folder / "a" / part).mkdir(parents=True)
        for name, array in (("x", x), ("y", y)):
            np.save(folder / "a" / part / f"{name}.npy", array)
    return read_folder(folder)


def map_slices(folder, x, y):
    np.save(folder / "x.npy", x.transpose(0, 2, 1))
    mapped = np.load(folder / "x.npy", mmap_mode="r").transpose(0, 2, 1)[::-1]
    return alone((mapped[20:], y[::-1][20:].copy()), (mapped[:20], y[::-1][:20].copy()))


def write_images(folder, x, y):
    for row, (image, label) in enumerate(zip(x, y, strict=True)):
        place = folder / "a" / ("train", "test")[row < 20] / "xy"[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{row:03}.png")
    return read_folder(folder)


def write_pairs(folder, x, y, write, **options):
    """Write images with masks, half of which has the class ``y``."""
    for row, (image, label) in enumerate(zip(x, y, strict=True)):
        mask = np.arange(16, dtype=np.uint8).reshape(4, 4) % 2
        mask[2:] = label
        for kind, each in (("images", image), ("masks", mask)):
            (folder / "a" / kind).mkdir(parents=True, exist_ok=True)
            write(folder / "a" / kind / f"{row:03}", each)
    return read_folder(folder, **options)


def save_nifti(path, plane):
    nibabel = pytest.importorskip("nibabel")
    values = np.repeat(plane[:, :, None], 3, axis=2)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path.with_suffix(".nii"))


def write_signals(folder, x, y):
    wfdb = pytest.importorskip("wfdb")
    for row, (image, label) in enumerate(zip(x, y, strict=True)):
        place = folder / "a" / "xy"[label]
        place.mkdir(parents=True, exist_ok=True)
        values, facts = image.reshape(-1, 1).astype(float), {"fmt": ["32"], "adc_gain": [1.0], "baseline": [0]}
        wfdb.wrsamp(f"{row:03}", fs=8, units=["mV"], sig_name=["I"], p_signal=values, write_dir=str(place), **facts)
    return read_folder(folder)


def write_table(folder, x, y):
    for name in "ab":
        pd.DataFrame(x.reshape(len(x), -1)).add_prefix("p").assign(y=y).to_csv(folder / f"{name}.csv", index=False)
    return read_folder(folder, target="y")


def pool(folder, x, y):
    """Return samples of two stores, one of them in memory, as one."""
    np.save(folder / "x.npy", x)
    mapped = np.load(folder / "x.npy", mmap_mode="r"), y
    return federation({"a": (mapped, mapped), "b": ((x, y), (x, y))}).pool()


MADE = {
    "npz": (200, write_npz),
    "npy": (200, write_npy),
    "slices of a mapped file": (220, map_slices),
    "images": (100, write_images),
    "masks": (40, lambda f, x, y: write_pairs(f, x, y, lambda p, m: Image.fromarray(m).save(p.with_suffix(".png")))),
    "volumes": (8, lambda f, x, y: write_pairs(f, x, y, save_nifti)),
    "patches": (8, lambda f, x, y: write_pairs(f, x, y, save_nifti, patch="2")),
    "wfdb": (8, write_signals),
    "table": (200, write_table),
    "several inputs": (200, lambda f, x, y: alone(({"image": x, "age": x[:, 0, :1].astype(np.float32)}, y))),
    "lazy tensors": (200, lambda f, x, y: alone(LazyDataset(TensorDataset(*map(torch.from_numpy, (x / 255, y)))))),
    "lazy subset": (201, lambda f, x, y: alone(LazyDataset(Subset(Labeled(x, y), range(1, len(x)))))),
    "lazy files": (200, lambda f, x, y: alone(LazyDataset(Files(f, x, y)))),
    "joined": (200, pool),
}
"""Number of samples, and how a federation of files in a folder, or of objects, is made of images and labels."""


def draw(count):
    return np.random.default_rng(0).integers(0, 256, (count, 4, 4), np.uint8), np.arange(count) % 2


def keep(x, y):
    return x, y


def change_sample(x, y):
    x[len(x) // 2, 2, 2] ^= 1
    return x, y


def change_target(x, y):
    y[len(x) // 2] ^= 1
    return x, y


def swap(x, y):
    """Exchange two samples of one class, which keep their places in folders."""
    some = len(x) // 2 + np.array([0, 2])
    x[some], y[some] = x[some[::-1]], y[some[::-1]]
    return x, y


def drop(x, y):
    return np.delete(x, len(x) // 2, axis=0), np.delete(y, len(y) // 2)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("count", "make"), MADE.values(), ids=MADE)
def test_a_change_of_a_sample_or_target_of_the_order_or_the_number_changes_it(tmp_path, count, make):
    whole, prints = draw(count), []
    for number, change in enumerate((keep, keep, change_sample, change_target, swap, drop)):
        (tmp_path / str(number)).mkdir()
        prints.append(make(tmp_path / str(number), *change(*(array.copy() for array in whole))).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 5


@pytest.mark.parametrize(("kind", "pattern"), [
    ("npy", "*/train/x.npy"), ("volumes", "*/images/004.nii"), ("wfdb", "*/*/004.dat"), ("wfdb", "*/*/004.hea"),
    ("lazy files", "100.npy"), ("joined", "x.npy"),
])  # fmt: skip
def test_of_large_files_it_covers_name_size_and_time_of_change(tmp_path, monkeypatch, kind, pattern):
    monkeypatch.setattr("fedshift.data.stores.CONTENT", 0)
    count, make = MADE[kind]
    (tmp_path / "data").mkdir()
    first = make(tmp_path / "data", *draw(count))
    (file,) = (tmp_path / "data").glob(pattern)
    kept, read = file.stat().st_mtime_ns, [first.fingerprint]

    def print_again():
        return first.map_splits(lambda split: split).fingerprint

    assert print_again() == read[0]
    os.utime(file, ns=(kept, kept + 1))
    read.append(print_again())
    os.utime(file, ns=(kept, kept))
    assert print_again() == read[0]
    with file.open("ab") as stream:
        stream.write(b" ")
    os.utime(file, ns=(kept, kept))
    read.append(print_again())
    assert len(set(read)) == 3
    if kind in ("npy", "volumes", "wfdb"):  # a copy with its times is the same data
        assert read_folder(copytree(tmp_path / "data", tmp_path / "other")).fingerprint == read[2]


def test_of_a_folder_of_slices_every_file_counts(tmp_path):
    read = set()
    for number in range(3):
        (tmp_path / f"{number}.dcm").write_bytes(b"slice")
        read.add(digest_files([list_members(tmp_path)]))
    (tmp_path / "1.dcm").write_bytes(b"other")
    assert digest_files([list_members(tmp_path)]) not in read
    assert len(read) == 3


def test_items_are_decoded_once_and_those_of_listed_files_not_at_all(tmp_path):
    pictures, files = Labeled(*draw(300)), Files(tmp_path, *draw(300))
    for dataset, most in ((pictures, 300), (files, 130)):
        data = alone(LazyDataset(dataset))
        check_data(data, "refuse")
        dataset.decoded.clear()
        assert data.fingerprint == data.map_splits(lambda split: split).fingerprint
        assert len(dataset.decoded) <= 2 * most  # of training and test data
        assert len(dataset.decoded) > most // 2


def test_a_file_that_is_gone_is_named(tmp_path):
    made = write_npy(tmp_path, *draw(200))
    (tmp_path / "a" / "train" / "x.npy").unlink()
    with pytest.raises(FedshiftError, match=r"train/x\.npy cannot be read \(.*No such file"):
        made.fingerprint  # noqa: B018
