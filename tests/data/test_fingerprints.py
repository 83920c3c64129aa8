"""A fingerprint tells every change of a sample, a target or an order, of all kinds of data, and nothing else."""

import os
from shutil import copytree

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from fedshift import LazyDataset, load_data
from fedshift.data.assembly import federation, read_folder
from fedshift.data.checks.quality import check_data
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


class Hub:
    """A dataset as HuggingFace's."""

    column_names = ("image", "label")

    def __init__(self, x, y):
        self.column_names = ["image", "label"]
        self.columns = {"image": list(map(Image.fromarray, x)), "label": y.tolist()}
        self.features = {"image": type("Image", (), {})(), "label": type("ClassLabel", (), {"names": ["0", "1"]})()}

    def __len__(self):
        return len(self.columns["label"])

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: own[key] for name, own in self.columns.items()}


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


def save_slices(path, plane):
    """Write a folder with three slices."""
    pydicom = pytest.importorskip("pydicom")
    path.mkdir()
    for number in range(3):
        made = pydicom.Dataset()
        made.file_meta = pydicom.dataset.FileMetaDataset()
        made.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        made.SOPClassUID = made.file_meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
        made.SOPInstanceUID = made.file_meta.MediaStorageSOPInstanceUID = f"1.2.{number + 1}"
        made.SeriesInstanceUID, made.PatientID, made.Modality = "1.3", path.name, "CT"
        made.Columns, made.Rows, made.SamplesPerPixel, made.PhotometricInterpretation = 4, 4, 1, "MONOCHROME2"
        made.BitsAllocated, made.BitsStored, made.HighBit, made.PixelRepresentation = 8, 8, 7, 0
        made.PixelSpacing, made.ImageOrientationPatient = [1, 1], [1, 0, 0, 0, 1, 0]
        made.ImagePositionPatient, made.PixelData = [0, 0, number], plane.tobytes()
        made.save_as(path / f"{number}.dcm", enforce_file_format=True)


def save_wfdb(place, row, values):
    pytest.importorskip("wfdb").wrsamp(
        f"{row:03}", fs=8, units=["mV"], sig_name=["I"], p_signal=values[:, None], fmt=["32"], adc_gain=[1.0],
        baseline=[0], write_dir=str(place),
    )  # fmt: skip


def save_edf(place, row, values):
    edfio = pytest.importorskip("edfio")
    signal = edfio.EdfSignal(values, 8, label="I", physical_dimension="mV", physical_range=(0, 255))
    edfio.Edf([signal]).write(place / f"{row:03}.edf")


def write_signals(folder, x, y, save):
    for row, (image, label) in enumerate(zip(x, y, strict=True)):
        place = folder / "a" / "xy"[label]
        place.mkdir(parents=True, exist_ok=True)
        save(place, row, image.flatten().astype(float))
    return read_folder(folder)


def tabulate(x, y):
    return pd.DataFrame(x.reshape(len(x), -1)).add_prefix("p").assign(y=y)


def write_table(folder, x, y):
    for name in "ab":
        tabulate(x, y).to_csv(folder / f"{name}.csv", index=False)
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
    "images": (200, write_images),
    "masks": (40, lambda f, x, y: write_pairs(f, x, y, lambda p, m: Image.fromarray(m).save(p.with_suffix(".png")))),
    "volumes": (20, lambda f, x, y: write_pairs(f, x, y, save_nifti)),
    "patches": (20, lambda f, x, y: write_pairs(f, x, y, save_nifti, patch="2")),
    "resampled": (20, lambda f, x, y: write_pairs(f, x, y, save_nifti, spacing="2")),
    "slices": (14, lambda f, x, y: write_pairs(f, x, y, save_slices)),
    "wfdb": (20, lambda f, x, y: write_signals(f, x, y, save_wfdb)),
    "edf": (20, lambda f, x, y: write_signals(f, x, y, save_edf)),
    "table": (200, write_table),
    "frame": (200, lambda f, x, y: load_data({"a": tabulate(x, y)}, target="y")),
    "several inputs": (200, lambda f, x, y: alone(({"image": x, "age": x[:, 0, :1].astype(np.float32)}, y))),
    "tensors": (200, lambda f, x, y: alone(TensorDataset(torch.from_numpy(x)[:, None], torch.from_numpy(y)))),
    "lazy tensors": (200, lambda f, x, y: alone(LazyDataset(TensorDataset(*map(torch.from_numpy, (x / 255, y)))))),
    "lazy pictures": (200, lambda f, x, y: alone(LazyDataset(Labeled(x, y)))),
    "lazy subset": (201, lambda f, x, y: alone(LazyDataset(Subset(Labeled(x, y), range(1, len(x)))))),
    "lazy files": (200, lambda f, x, y: alone(LazyDataset(Files(f, x, y)))),
    "subset of files": (200, lambda f, x, y: alone(LazyDataset(Subset(Files(f, x, y), range(len(x)))))),
    "lazy hub": (200, lambda f, x, y: alone(LazyDataset(Hub(x, y)))),
    "joined": (200, pool),
}  # fmt: skip
"""Number of samples, and how a federation of files in a folder, or of objects, is made of images and labels."""


def draw(count):
    return np.random.default_rng(0).integers(0, 256, (count, 4, 4), np.uint8), np.arange(count) % 2


def change_sample(x, y):
    x[len(x) // 2, 2, 2] ^= 1


def change_target(x, y):
    y[len(x) // 2] ^= 1


def swap(x, y):
    """Exchange two samples of one class, which keep their places in folders."""
    some = len(x) // 2 + np.array([0, 2])
    x[some], y[some] = x[some[::-1]], y[some[::-1]]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("count", "make"), MADE.values(), ids=MADE)
def test_a_change_of_one_sample_or_target_or_of_the_order_changes_it(tmp_path, count, make):
    prints = []
    for number, change in enumerate((lambda x, y: None, lambda x, y: None, change_sample, change_target, swap)):
        x, y = draw(count)
        change(x, y)
        (tmp_path / str(number)).mkdir()
        prints.append(make(tmp_path / str(number), x, y).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4
    (tmp_path / "fewer").mkdir()
    x, y = draw(count)
    assert (
        make(tmp_path / "fewer", *(np.delete(each, [count // 2], axis=0) for each in (x, y))).fingerprint not in prints
    )


@pytest.mark.parametrize(("kind", "pattern"), [
    ("npy", "*/train/x.npy"), ("volumes", "*/images/010.nii"), ("slices", "*/images/007/1.dcm"),
    ("wfdb", "*/*/010.dat"), ("wfdb", "*/*/010.hea"), ("edf", "*/*/010.edf"), ("lazy files", "100.npy"),
    ("joined", "x.npy"),
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


@pytest.mark.parametrize("kind", ["npy", "volumes", "wfdb"])
def test_a_copy_with_its_times_is_the_same_data_at_any_size(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("fedshift.data.stores.CONTENT", 0)
    count, make = MADE[kind]
    (tmp_path / "data").mkdir()
    made = make(tmp_path / "data", *draw(count))
    assert read_folder(copytree(tmp_path / "data", tmp_path / "other")).fingerprint == made.fingerprint


def test_items_are_decoded_once_and_those_of_listed_files_not_at_all(tmp_path):
    pictures, files = Labeled(*draw(1000)), Files(tmp_path, *draw(1000))
    for dataset, most in ((pictures, 1000), (files, 130)):
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
