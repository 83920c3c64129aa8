"""Clients from objects in memory equal those from the files or arrays that hold the same."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedshift.config.spec import DataSpec
from fedshift.data.arrays import LazyDataset
from fedshift.data.assembly import federation, read_folder
from fedshift.data.sources import load_source
from fedshift.utils.errors import UsageError


def load(data, **settings):
    return load_source(data, DataSpec(**settings))


# Arrays


def test_dictionaries_of_arrays_and_of_parts_are_the_four_arrays(tmp_path, tiny):
    keys = ("x_train", "y_train", "x_test", "y_test")
    ann, bob, cid = ((c.train.x, c.train.y, c.test.x, c.test.y) for c in tiny.clients)
    np.savez(tmp_path / "bob.npz", **dict(zip(keys, map(np.asarray, bob), strict=True)))
    with np.load(tmp_path / "bob.npz") as packed:
        parts = {"train": cid[:2], "test": cid[2:]}
        made = load({"ann": dict(zip(keys, ann, strict=True)), "bob": packed, "cid": parts})
    assert made.fingerprint == tiny.fingerprint
    assert load({"ann": (ann[:2], ann[2:])}).fingerprint == load({"ann": ann}).fingerprint
    assert load(tiny, domains="cid,ann").names == ("cid", "ann")


# Frames


@pytest.fixture
def table():
    """Rows of two hospitals with a number, a text, a truth value, a gap and a label that is a text."""
    random, at = np.random.default_rng(0), np.arange(40)
    columns = {"age": np.where(at == 3, np.nan, random.normal(50, 9, 40)), "sex": random.choice(["f", "m"], 40)}
    columns |= {"smoker": random.random(40) < 0.3, "outcome": np.where(at % 3, "well", "ill")}
    return pd.DataFrame(columns | {"hospital": np.where(at < 25, "north", "south")})


COLUMNS = {"client_column": "hospital", "target": "outcome"}


def describe(data):
    return data.fingerprint, data.class_names, data.columns, data.notices


def test_a_frame_is_the_table_that_it_writes(table, tmp_path):
    table.to_csv(tmp_path / "table.csv", index=False)
    table.to_parquet(tmp_path / "table.parquet", index=False)
    found = [read_folder(tmp_path / f"table.{kind}", **COLUMNS) for kind in ("csv", "parquet")]
    assert describe(load(table, **COLUMNS)) == describe(found[0]) == describe(found[1])
    assert load(table, **COLUMNS, domains="south", missing="refuse").names == ("south",)


def test_frames_by_client_are_the_files_of_a_directory(table, tmp_path):
    frames = {name: rows.drop(columns="hospital") for name, rows in table.groupby("hospital")}
    for name, rows in frames.items():
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
    ours = load(frames, target="outcome", test_fraction=0.3)
    assert ours.fingerprint == read_folder(tmp_path, target="outcome", test_fraction=0.3).fingerprint


def test_pairs_of_frames_are_tables_with_a_column_of_splits(table, tmp_path):
    parted = table.assign(part=np.where(np.arange(len(table)) % 4 == 0, "test", "train"))
    parted = parted.sort_values("part", ascending=False, kind="stable")
    parted.to_csv(tmp_path / "table.csv", index=False)
    theirs = read_folder(tmp_path / "table.csv", split_column="part", **COLUMNS)
    sides = {side: rows.drop(columns="part") for side, rows in parted.groupby("part")}
    assert load(sides, **COLUMNS).fingerprint == theirs.fingerprint
    pairs = {
        name: tuple(rows[rows["part"] == side].drop(columns=["part", "hospital"]) for side in ("train", "test"))
        for name, rows in parted.groupby("hospital")
    }
    assert load(pairs, target="outcome").fingerprint == theirs.fingerprint
    named = {name: dict(zip(("train", "test"), pair, strict=True)) for name, pair in pairs.items()}
    assert load(named, target="outcome").fingerprint == theirs.fingerprint


# HuggingFace datasets, of which only this is used


class ClassLabel:
    def __init__(self, *names):
        self.names = list(names)


class Value:
    pass


class Picture:
    """The feature of a column of images."""


class HubDataset:
    def __init__(self, columns, **features):
        self.columns, self.features = columns, {name: features.get(name, Value()) for name in columns}
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {name: x[key] for name, x in self.columns.items()}

    def to_pandas(self):
        return pd.DataFrame(self.columns)


PIXELS, LABELS = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3)).astype(np.uint8), np.arange(20) % 2
CAMERA, TRAIN, TEST = np.where(np.arange(20) % 4 < 2, "left", "right"), slice(0, 14), slice(14, 20)


def hub(rows, **others):
    columns = {"image": list(map(Image.fromarray, PIXELS[rows])), "label": LABELS[rows].tolist(), **others}
    return HubDataset(columns, image=Picture(), label=ClassLabel())


def test_a_pair_of_hub_datasets_is_its_arrays():
    plain = federation({"a": (PIXELS[TRAIN], LABELS[TRAIN], PIXELS[TEST], LABELS[TEST])})
    assert load({"a": (hub(TRAIN), hub(TEST))}).fingerprint == plain.fingerprint
    named = {"train": hub(TRAIN, sex=["f"] * 14), "test": hub(TEST, sex=["m"] * 6)}
    assert load({"a": named}, target="label").fingerprint == plain.fingerprint


def test_a_column_of_a_hub_dataset_deals_its_samples_to_clients():
    sides = {name: hub(own, camera=CAMERA[own].tolist()) for name, own in (("train", TRAIN), ("test", TEST))}
    own = {
        name: [np.flatnonzero(CAMERA[side] == name) + side.start for side in (TRAIN, TEST)]
        for name in ("left", "right")
    }
    arrays = {name: [x[rows] for rows in both for x in (PIXELS, LABELS)] for name, both in own.items()}
    assert load(sides, client_column="camera").fingerprint == federation(arrays).fingerprint


def test_a_hub_dataset_of_values_is_a_table(table):
    given = HubDataset({name: table[name].tolist() for name in table}, outcome=ClassLabel())
    assert load(given, **COLUMNS).fingerprint == load(table, **COLUMNS).fingerprint


# Labels that mean different classes


class Folder(torch.utils.data.Dataset):
    """A dataset that says what its labels mean, as torchvision's do."""

    def __init__(self, classes, target_transform=None):
        self.classes, self.target_transform = classes, target_transform

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return np.full(3, number), number % 2


def of_kind(kind, *classes):
    """Two samples a class, of ``classes``, as the objects of a ``kind`` hold them."""
    if kind == "table":
        return HubDataset({"a": [1.0, 2.0, 3.0, 4.0], "label": [0, 1, 0, 1]}, label=ClassLabel(*classes))
    if kind == "hub":
        columns = {"image": [np.full(3, number) for number in range(4)], "label": [0, 1, 0, 1]}
        return HubDataset(columns, image=Picture(), label=ClassLabel(*classes))
    whole = Folder(list(classes))
    return {"torch": whole, "subset": torch.utils.data.Subset(whole, range(4)), "lazy": LazyDataset(whole)}[kind]


@pytest.mark.parametrize("kind", ["table", "hub", "subset", "lazy"])
def test_datasets_whose_labels_mean_different_classes_are_refused_with_both_lists(kind):
    settings = {"target": "label"} if kind == "table" else {}
    ours, swapped = of_kind(kind, "cat", "dog"), of_kind(kind, "dog", "cat")
    said = r"label 0 means 'cat' in .*a.* and 'dog' in .*b.* \(classes cat, dog, and dog, cat\): give all datasets"
    with pytest.raises(UsageError, match=said):
        load({"a": (ours, ours), "b": (swapped, swapped)}, **settings)
    with pytest.raises(UsageError, match=r"label 0 means 'cat' in .*train data and 'dog' in .*test data"):
        load({"a": (ours, swapped)}, **settings)
    others = ours, of_kind(kind, "cat", "dog", "emu"), of_kind(kind)
    assert len({load({"a": (ours, ours), "b": (b, b)}, **settings).fingerprint for b in others}) == 1


def test_parts_of_one_hub_dataset_mean_the_same_and_changed_targets_say_nothing():
    columns = of_kind("hub").columns | {"site": list("abab")}
    classes = {"train": ("cat", "dog"), "test": ("dog", "cat")}
    parts = {name: HubDataset(columns, image=Picture(), label=ClassLabel(*own)) for name, own in classes.items()}
    with pytest.raises(UsageError, match="label 0 means 'cat' in train data and 'dog' in test data"):
        load(parts, client_column="site")
    changed = Folder(["dog", "cat"], target_transform=lambda label: 1 - label)
    given = LazyDataset(Folder(["dog", "cat"]), targets=[0, 1, 0, 1])
    assert load({"a": (Folder(["cat", "dog"]), changed), "b": (given, given)}).names == ("a", "b")


# Refusals

X, Y = np.zeros((4, 2)), np.array([0, 1, 0, 1])
FRAME = pd.DataFrame({"a": [1.0, 2.0, 3.0, 4.0], "y": Y, "site": list("ppqq")})
HUB = HubDataset({"u": [1, 2], "v": [3, 4]}, u=Picture(), v=Picture())


@pytest.mark.parametrize(
    ("data", "settings", "said"),
    [
        (3, {}, "data of type int: give a name, a directory, a Federation, {client: (x_train,"),
        ([1], {}, "data of type list: give a name"),
        ({1: (X, Y, X, Y)}, {}, "the client 1 of data is named by a int: give a text"),
        ({"a": (X, Y, X)}, {}, "client 'a': ndarray, ndarray, ndarray given: give (x_train, y_train, x_test,"),
        ({"a": {"x": X, "y": Y, "z": Y}}, {}, "unknown array of client 'a' 'z': allowed are x, y"),
        ({"a": {"train": (X, Y), "tset": (X, Y)}}, {}, "client 'a' has no array 'test'"),
        ({"a": (X, Y, X, Y)}, {"target": "y"}, "target is for tables and datasets of HuggingFace, not for arrays"),
        ({"a": (X, Y, X, Y)}, {"domains": "b"}, "unknown client 'b': allowed are a"),
        (FRAME, {"target": "y"}, "data is one DataFrame of all clients: say which column holds the client"),
        (FRAME, {"client_column": "site"}, "data.DataFrame: say which column holds the label (target); perhaps 'y'"),
        (FRAME, {"client_column": "sites", "target": "y"}, "unknown column 'sites': did you mean 'site'?"),
        ({"p": FRAME}, {"client_column": "site"}, "client_column='site': data is a dictionary by client already"),
        ({"p": FRAME, "q": FRAME[["a", "y"]]}, {"target": "y"}, "q.DataFrame has no column 'site', which p."),
        ({"p": (FRAME, FRAME, FRAME)}, {"target": "y"}, "client 'p': give a frame, two, (train, test),"),
        ({"p": (FRAME, FRAME)}, {"target": "y", "split_column": "a"}, "split_column='a': client 'p' is given in parts"),
        ({"p": (FRAME.assign(split=1),) * 2}, {"target": "y"}, "p, train: column 'split' is named as the parts are"),
        ({"p": pd.DataFrame({"a": [1, "b"], "y": [0, 1]})}, {"target": "y"}, "p: "),
        ({"p": FRAME.set_axis(["a", "a", "y"], axis=1)}, {"target": "y"}, "p: two columns are called 'a'"),
        ({"p": (HUB, HUB)}, {}, "client 'p', train data: say which column holds the label (target)"),
        (HUB, {"client_column": "site", "target": "u"}, "unknown column 'site': allowed are u, v"),
    ],
)  # fmt: skip
def test_what_holds_no_clients_is_refused_by_name(data, settings, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        load(data, **settings)


class Failing(Folder):
    def __getitem__(self, number):
        return np.zeros(3) / len([][number]), 0


def test_an_error_of_a_dataset_names_client_sample_and_line():
    with pytest.raises(UsageError) as refused:
        load({"a": (Failing([]), Failing([]))})
    begin, end = str(refused.value).split(": IndexError: list ")
    assert begin == "client 'a', train data: sample 0 of Failing cannot be read"
    assert end.endswith(f"test_objects.py, line {Failing.__getitem__.__code__.co_firstlineno + 1}, in __getitem__")
