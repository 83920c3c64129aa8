"""What holds for every reader: how it is found, its options, its clients, and drawn test samples."""

from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from shutil import copytree

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from fedshift.config.spec import DataSpec
from fedshift.data.assembly import read_source
from fedshift.data.files.read_options import ReadOptions
from fedshift.data.readers import find_reader, list_readers
from fedshift.data.sources import READ, apply_splits, load_source
from fedshift.utils.errors import UsageError

NAMES = ("ann", "bob", "cid")
SIZES = (20, 14, 12)
READERS = list_readers()
FOLDERS = ("images", "masks", "volumes", "signals")
OTHERS = dict.fromkeys(("npz", "npy", "hub"), "arrays") | dict.fromkeys(FOLDERS, "folders")
"""Further kinds of sources, and the reader of each."""


def draw(name):
    """Samples of one client, each with a value of its own, and labels."""
    count, start = SIZES[NAMES.index(name)], 50 * NAMES.index(name)
    return np.arange(start, start + count, dtype=np.uint8), np.arange(count) % 2


def picture(value, *shape):
    return np.full(shape or (4, 4), value, np.uint8)


class Pictures:
    """A dataset as HuggingFace's, with images and a column of clients."""

    def __init__(self):
        rows = [(picture(v), y, name) for name in NAMES for v, y in zip(*draw(name), strict=True)]
        self.columns = dict(zip(("image", "label", "site"), map(list, zip(*rows, strict=True)), strict=True))
        self.column_names = list(self.columns)
        kinds = {"image": "Image", "label": "ClassLabel", "site": "Value"}
        self.features = {name: type(kind, (), {"names": ["a", "b"]})() for name, kind in kinds.items()}

    def __len__(self):
        return sum(SIZES)

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: own[key] for name, own in self.columns.items()}


def frame():
    return pd.concat(pd.DataFrame({"a": draw(name)[0], "y": draw(name)[1], "site": name}) for name in NAMES)


def save(path: Path, array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".nii":
        nibabel = pytest.importorskip("nibabel")
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)
    else:
        Image.fromarray(array).save(path)


def make_pairs(folder, suffix, *shape):
    for name in NAMES:
        for number, value in enumerate(draw(name)[0]):
            image, mask = picture(value, *shape), picture(0, *shape)
            image[0], mask[1] = 255 - value, 1
            save(folder / name / "images" / f"{number}{suffix}", image)
            save(folder / name / "masks" / f"{number}{suffix}", mask)
    return folder


def make_source(kind, folder):
    """Return a source that the reader called ``kind`` reads, and the options that it needs."""
    if kind == "arrays":
        samples = {name: draw(name) for name in NAMES}
        return {
            n: TensorDataset(torch.from_numpy(x)[:, None], torch.from_numpy(y)) for n, (x, y) in samples.items()
        }, {}
    if kind == "hub":
        return Pictures(), {"client_column": "site"}
    if kind == "frames":
        return frame(), {"client_column": "site", "target": "y", "scaling": "none"}
    if kind == "tables":
        frame().to_csv(folder / "table.csv", index=False)
        return folder, {"client_column": "site", "target": "y", "scaling": "none"}
    if kind == "images":
        for name in NAMES:
            for value, label in zip(*draw(name), strict=True):
                save(folder / name / "ab"[label] / f"{value:03}.png", picture(value))
    elif kind == "signals":
        wfdb = pytest.importorskip("wfdb")
        for name in NAMES:
            for value, label in zip(*draw(name), strict=True):
                place = folder / name / "ab"[label]
                place.mkdir(parents=True, exist_ok=True)
                values = np.stack([np.linspace(value, value + 1, 8), np.zeros(8)], axis=1)
                wfdb.wrsamp(
                    f"{value:03}", fs=4, units=["mV", "mV"], sig_name=["I", "V1"], p_signal=values, fmt=["32", "32"],
                    write_dir=str(place),
                )  # fmt: skip
    elif kind in ("masks", "volumes"):
        make_pairs(folder, *((".png", 4, 4) if kind == "masks" else (".nii", 4, 4, 3)))
    else:
        for name in NAMES:
            x, y = draw(name)
            parts = {"train": (x[:-6, None], y[:-6]), "test": (x[-6:, None], y[-6:])}
            if kind == "npz":
                arrays = {f"{key}_{part}": pair["xy".index(key)] for part, pair in parts.items() for key in "xy"}
                np.savez(folder / f"{name}.npz", **arrays)
            for part, pair in parts.items() if kind == "npy" else ():
                for key, array in zip("xy", pair, strict=True):
                    save(folder / name / part / f"{key}.npy", array)
    return folder, {}


@pytest.fixture(params=[*(name for name in READERS if name != "folders"), *OTHERS], scope="module")
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def made(kind, tmp_path_factory):
    return make_source(kind, tmp_path_factory.mktemp(kind))


@pytest.fixture
def source(made, tmp_path, monkeypatch):
    """Return a copy of the source, because some tests change it, and the options that it needs."""
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    given, options = made
    return (copytree(given, tmp_path / "own") if isinstance(given, Path) else deepcopy(given)), options


def values(split):
    """Return the number of each sample of a split."""
    return sorted(split.inputs(slice(None)).flatten(1)[:, 0].mul(1000).round().int().tolist())


def test_a_source_is_read_by_the_reader_of_its_kind(kind, source):
    assert find_reader(source[0]) is READERS[OTHERS.get(kind, kind)]


def test_a_scan_says_what_is_then_loaded(kind, source):
    given, options = source
    reading = ReadOptions(**options)
    parts = find_reader(given).scan(given, reading).parts
    made = read_source(given, reading)
    assert made.names == tuple(dict.fromkeys(part.client for part in parts)) == NAMES
    for client, size in zip(made.clients, SIZES, strict=True):
        own = [part for part in parts if part.client == client.name]
        assert sum(len(part.y) for part in own) == sum(map(len, client.splits.values())) == size
        assert sum(float(part.y.sum()) for part in own) == sum(float(split.y.sum()) for split in client.splits.values())


def test_clients_are_chosen_in_their_order_and_keep_their_samples(source):
    given, options = source
    whole, some = (read_source(given, ReadOptions(domains=names, **options)) for names in (None, ("cid", "ann")))
    assert some.names == ("cid", "ann")
    assert some.fingerprint == whole.select_clients(["cid", "ann"]).fingerprint
    others = read_source(given, ReadOptions(domains="!a*", **options))
    assert others.names == ("bob", "cid")
    assert others.fingerprint == whole.select_clients(["bob", "cid"]).fingerprint
    with pytest.raises(UsageError, match="unknown client 'anna': did you mean 'ann'"):
        read_source(given, ReadOptions(domains=("anna",), **options))


def test_test_samples_are_drawn_where_the_data_name_none(kind, source):
    given, options = source
    if kind in ("npz", "npy"):  # which name some
        return
    shares = {}
    for fraction in (0.25, 0.5):
        for client in read_source(given, ReadOptions(test_fraction=fraction, **options)).clients:
            shares[client.name, fraction] = len(client.test) / SIZES[NAMES.index(client.name)]
            if kind != "volumes":  # each is scaled by itself
                train, test = values(client.train), values(client.test)
                assert len({*train, *test}) == len(train) + len(test)
    for (name, fraction), share in shares.items():
        assert share == pytest.approx(fraction, abs=2 / SIZES[NAMES.index(name)])


PARTED = {
    "arrays": {name: 2 * (draw(name)[0][:, None], draw(name)[1]) for name in NAMES},
    "hub": {"train": Pictures(), "test": Pictures()},
    "frames": {"train": frame(), "test": frame()},
}
GIVEN = {
    "test_fraction": 0.4, "client_column": "who", "target": "label", "split_column": "part", "groups": "patient",
    "ignore_columns": "visit", "missing": "refuse", "scaling": "none", "image_size": 9, "window": "-160,240",
    "spacing": "1,1,3",
}  # fmt: skip


def test_a_fraction_is_refused_beside_data_that_name_their_test_samples(kind, source, tmp_path):
    given, options = source
    if kind in FOLDERS:
        for client in list(given.iterdir()):
            kept = client.rename(tmp_path / f"kept-{client.name}")
            client.mkdir()
            for part in ("train", "test"):
                (client / part).symlink_to(kept)
    elif kind == "tables":
        pd.concat(frame().assign(split=part) for part in ("train", "test")).to_csv(given / "table.csv", index=False)
    else:
        given = PARTED.get(kind, given)
    assert read_source(given, ReadOptions(**options)).names == NAMES
    with pytest.raises(UsageError) as refused:
        read_source(given, ReadOptions(test_fraction=0.4, **options))
    assert "test_fraction" in refused.value.settings


@pytest.mark.parametrize("option", GIVEN)
def test_an_option_that_a_reader_does_not_honor_is_refused_with_those_that_do(option, kind, source):
    given, options = source
    if option in find_reader(given).options:
        return
    with pytest.raises(UsageError) as refused:
        read_source(given, ReadOptions(**options | {option: GIVEN[option]}))
    honoring = [reader.holds for reader in READERS.values() if option in reader.options]
    assert refused.value.settings == (option,)
    assert f"is for {', '.join(honoring)}, not for" in str(refused.value)


@pytest.mark.parametrize("option", ["image_size", "window", "spacing"])
def test_an_option_for_other_files_in_folders_is_refused(option, kind, source):
    honored = {"images": {"image_size"}, "masks": {"image_size"}, "volumes": {"image_size", "window", "spacing"}}
    if kind not in FOLDERS or option in honored.get(kind, ()):
        return
    with pytest.raises(UsageError) as refused:
        read_source(source[0], ReadOptions(**{option: GIVEN[option]}))
    assert refused.value.settings == (option,)


@pytest.mark.parametrize("data", ["digits", "gaussians"])
def test_data_by_name_honor_no_option_of_readers(data):
    with pytest.raises(UsageError) as refused:
        load_source(data, DataSpec(target="outcome"))
    assert refused.value.settings == ("target",)


def test_the_window_of_medical_images_is_not_that_of_a_benchmark():
    with pytest.raises(UsageError) as refused:
        load_source("abide", DataSpec(window="-160,240"))
    assert refused.value.settings == ("window",)


def test_every_option_is_honored_by_some_reader_and_every_reader_has_known_options():
    honored = set().union(*(reader.options for reader in READERS.values()))
    assert set(GIVEN) == honored == {*READ, "image_size"}
    assert honored <= {each.name for each in fields(ReadOptions)} & {each.name for each in fields(DataSpec)}


def add_groups(kind, source, folder):
    """Return the source with a group for each two samples (for each volume), and what names it."""
    if kind == "arrays":
        found = {}
        for name in NAMES:
            x, y = draw(name)
            arrays = {"x": x[:, None], "y": y, "patient": x // 2}
            parts = {"train": slice(4, None), "test": slice(0, 4)}
            found[name] = {f"{key}_{part}": array[at] for part, at in parts.items() for key, array in arrays.items()}
        return found, "patient"
    if kind == "hub":
        source.columns["patient"] = [int(image.flat[0]) // 2 for image in source.columns["image"]]
        source.column_names.append("patient")
        source.features["patient"] = source.features["site"]
        return source, "patient"
    if kind in ("frames", "tables"):
        table = frame().assign(patient=lambda rows: rows["a"] // 2)
        if kind == "frames":
            return table, "patient"
        table.to_csv(source / "table.csv", index=False)
        return source, "patient"
    if kind in ("npz", "npy"):
        for name in NAMES:
            for part, at in (("train", slice(None, -6)), ("test", slice(-6, None))):
                group = draw(name)[0][at] // 2
                if kind == "npy":
                    np.save(source / name / part / "patient.npy", group)
                else:
                    with np.load(source / f"{name}.npz") as packed:
                        np.savez(source / f"{name}.npz", **packed, **{f"patient_{part}": group})
        return source, "patient"
    if kind == "volumes":
        return source, "*/images/{group}.nii"
    files = [file.relative_to(source).as_posix() for file in source.rglob("*.hea" if kind == "signals" else "*.png")]
    groups = [int(Path(file).stem) // 2 for file in files]
    pd.DataFrame({"file": files, "group": groups}).to_csv(folder / "groups.csv", index=False)
    return source, str(folder / "groups.csv")


def test_groups_stay_whole_in_what_is_drawn(kind, source, tmp_path):
    given, options = source
    given, groups = add_groups(kind, given, tmp_path)
    spec = DataSpec(groups=groups, validation=0.3, **options)
    made = apply_splits(load_source(str(given) if isinstance(given, Path) else given, spec), spec)
    for client in made.clients:
        assert set(client.splits) == {"train", "validation", "test"}
        held = {}
        for name, split in client.splits.items():
            assert set(torch.bincount(split.units).tolist()) == ({1} if kind == "volumes" else {2})
            if name != "test" or kind not in ("arrays", "npz", "npy"):  # whose parts are numbered each by itself
                for group in split.group.unique().tolist():
                    assert held.setdefault(group, name) == name


def test_groups_that_a_source_does_not_have_are_refused(source):
    given, options = source
    with pytest.raises(UsageError) as refused:
        read_source(given, ReadOptions(groups="none-such", **options))
    assert "none-such" in str(refused.value)
