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
from fedshift.data.readers import find_reader, list_readers
from fedshift.data.source import ReadOptions
from fedshift.data.sources import READ, apply_splits, load_source
from fedshift.utils.errors import UsageError

NAMES = ("ann", "bob", "cid")
SIZES = (20, 14, 12)
READERS = list_readers()
OF_ROWS, OF_COLUMNS = {"client_column": "site"}, {"target": "y", "scaling": "none"}
FOLDERS = ("images", "masks", "volumes")
OTHERS = dict.fromkeys(("npz", "npy", "hub"), "arrays") | dict.fromkeys(FOLDERS, "folders")
"""Further kinds of sources, and the reader of each."""


def draw(name):
    """Samples of one client, each with a value of its own, and labels."""
    count, start = SIZES[NAMES.index(name)], 50 * NAMES.index(name)
    return np.arange(start, start + count, dtype=np.uint8), np.arange(count) % 2


def picture(value, *shape):
    return np.full(shape or (4, 4), value, np.uint8)


class Pictures:
    """A dataset as HuggingFace's, with images and columns of clients and patients."""

    def __init__(self):
        rows = [(picture(v), y, name, int(v) // 2) for name in NAMES for v, y in zip(*draw(name), strict=True)]
        self.columns = dict(zip(("image", "label", "site", "patient"), map(list, zip(*rows, strict=True)), strict=True))
        self.column_names = list(self.columns)
        kinds = {"image": "Image", "label": "ClassLabel", "site": "Value", "patient": "Value"}
        self.features = {name: type(kind, (), {"names": ["a", "b"]})() for name, kind in kinds.items()}

    def __len__(self):
        return sum(SIZES)

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: own[key] for name, own in self.columns.items()}


def frame():
    tables = [pd.DataFrame({"a": draw(name)[0], "y": draw(name)[1], "site": name}) for name in NAMES]
    return pd.concat(tables).assign(patient=lambda rows: rows["a"] // 2)


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
            save(folder / name / "images" / f"{number // 2}-{number}{suffix}", image)
            save(folder / name / "masks" / f"{number // 2}-{number}{suffix}", mask)
    return folder


def make_source(kind, folder):
    """Return a source that the reader called ``kind`` reads, and the options that it needs."""
    if kind == "arrays":
        made = {name: TensorDataset(*map(torch.from_numpy, draw(name))) for name in NAMES}
        for dataset in made.values():
            x, y = dataset.tensors
            dataset.tensors, dataset.patient = (x[:, None], y), (x // 2).tolist()
        return made, {}
    if kind == "hub":
        return Pictures(), OF_ROWS
    if kind == "frames":
        return frame(), OF_ROWS | OF_COLUMNS
    if kind == "tables":
        frame().to_csv(folder / "table.csv", index=False)
        return folder, OF_ROWS | OF_COLUMNS
    if kind == "images":
        for name in NAMES:
            for value, label in zip(*draw(name), strict=True):
                save(folder / name / "ab"[label] / f"{value // 2:03}-{value}.png", picture(value))
    elif kind in ("masks", "volumes"):
        make_pairs(folder, *((".png", 4, 4) if kind == "masks" else (".nii", 4, 4, 3)))
    else:
        for name in NAMES:
            x, y = draw(name)
            arrays = {"x": x[:, None], "y": y, "patient": x // 2}
            parts = {"train": slice(-6), "test": slice(-6, None)}
            if kind == "npz":
                kept = {f"{key}_{part}": array[at] for part, at in parts.items() for key, array in arrays.items()}
                np.savez(folder / f"{name}.npz", **kept)
                continue
            for part, at in parts.items():
                for key, array in arrays.items():
                    save(folder / name / part / f"{key}.npy", array[at])
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


def test_rows_say_what_is_then_decoded(kind, source):
    given, options = source
    assert find_reader(given) is READERS[OTHERS.get(kind, kind)]
    reading = ReadOptions(**options)
    found = find_reader(given).read(given, reading)
    made = read_source(given, reading)
    assert made.names == tuple(found.rows.find("client")) == NAMES
    for client, size in zip(made.clients, SIZES, strict=True):
        own = found.rows.find("client")[client.name]
        assert len(own) == sum(map(len, client.splits.values())) == size
        y = found.take_targets(own)
        assert float(y.sum()) == sum(float(split.y.sum()) for split in client.splits.values())


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
    for fraction in (0.25, 0.5):
        for client, size in zip(
            read_source(given, ReadOptions(test_fraction=fraction, **options)).clients, SIZES, strict=True
        ):
            assert len(client.test) / size == pytest.approx(fraction, abs=2 / size)
            if kind != "volumes":  # each is scaled by itself
                train, test = values(client.train), values(client.test)
                assert len({*train, *test}) == len(train) + len(test) == size


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


@pytest.mark.parametrize(("kind", "source"), PARTED.items())
def test_a_fraction_is_refused_beside_data_that_name_their_test_samples(kind, source):
    options = {"arrays": {}, "hub": OF_ROWS, "frames": OF_ROWS | OF_COLUMNS}[kind]
    assert read_source(source, ReadOptions(**options)).names == NAMES
    with pytest.raises(UsageError) as refused:
        read_source(source, ReadOptions(test_fraction=0.4, **options))
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


@pytest.mark.parametrize(
    ("data", "option"),
    [("digits", {"target": "outcome"}), ("gaussians", {"target": "outcome"}), ("abide", {"window": "-160,240"})],
)
def test_data_by_name_honor_no_option_of_readers(data, option):
    with pytest.raises(UsageError) as refused:
        load_source(data, DataSpec(**option))
    assert refused.value.settings == tuple(option)


def test_every_option_is_honored_by_some_reader_and_every_reader_has_known_options():
    honored = set().union(*(reader.options for reader in READERS.values()))
    assert set(GIVEN) == honored == {*READ, "image_size"}
    assert honored <= {each.name for each in fields(ReadOptions)} & {each.name for each in fields(DataSpec)}


def test_groups_stay_whole_in_what_is_drawn(kind, source):
    given, options = source
    spec = DataSpec(groups="{group}-*" if kind in FOLDERS else "patient", validation=0.3, **options)
    made = apply_splits(load_source(str(given) if isinstance(given, Path) else given, spec), spec)
    for client in made.clients:
        assert set(client.splits) == {"train", "validation", "test"}
        held = {}
        for name, split in client.splits.items():
            assert set(torch.bincount(split.units).tolist()) == {2}
            if name != "test" or kind not in ("npz", "npy"):  # whose parts are numbered each by itself
                for group in split.group.unique().tolist():
                    assert held.setdefault(group, name) == name


def test_groups_that_a_source_does_not_have_are_refused(source):
    given, options = source
    with pytest.raises(UsageError) as refused:
        read_source(given, ReadOptions(groups="none-such", **options))
    assert "none-such" in str(refused.value)
