"""Several inputs of a sample: rows by hand, equal from every source, and what is refused."""

import re

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import fedshift
from fedshift.data.arrays import LazyDataset
from fedshift.data.assembly import federation, read_folder
from fedshift.data.joining import join_schema
from fedshift.data.preparation import Preparation
from fedshift.data.source import ReadOptions
from fedshift.nn.several_inputs import Input
from fedshift.utils.errors import UsageError

RNG = np.random.default_rng(0)
N = 6
TEXT = {"input_ids": RNG.integers(0, 2**40, (N, 4)), "attention_mask": RNG.integers(0, 2, (N, 4)).astype(np.int8)}
MIXED = {
    "image": RNG.integers(0, 256, (N, 2, 4, 4), dtype=np.uint8), "row": RNG.normal(size=(N, 2)).astype(np.float32),
    "site": RNG.integers(-(2**24), 2**24, N), "seen": RNG.random((N, 2)) < 0.5,
}  # fmt: skip
Y = np.arange(N) % 2


class Items(Dataset):
    def __init__(self, x, *, flat=False):
        self.x, self.flat = x, flat

    def __len__(self):
        return N

    def __getitem__(self, at):
        one = {name: torch.as_tensor(each[at]) for name, each in self.x.items()}
        return {**one, "label": int(Y[at])} if self.flat else (one, int(Y[at]))


class Hub:
    """A dataset as HuggingFace's, with columns of arrays, and one of texts."""

    def __init__(self):
        self.column_names = ["text", *TEXT, "label"]
        self.features = {n: type("Sequence" if n in TEXT else "Value", (), {})() for n in self.column_names}

    def __len__(self):
        return N

    def __getitem__(self, at):
        own = {name: x[at].tolist() for name, x in TEXT.items() if not isinstance(at, str)}
        return Y.tolist() if at == "label" else {"text": "", **own, "label": int(Y[at])}


def backwards(x):
    return dict(reversed(x.items()))


def test_rows_hold_the_inputs_side_by_side():
    data = federation({"a": (MIXED, Y, MIXED, Y)}).check()
    assert data.inputs == (
        Input(name="image", shape=(2, 4, 4), kind="pixels"), Input(name="row", shape=(2,), kind="floats"),
        Input(name="site", shape=(), kind="integers"), Input(name="seen", shape=(2,), kind="bools"),
    )  # fmt: skip
    pixels = (torch.from_numpy(MIXED["image"]) / 127.5 - 1).flatten(1)
    parts = [pixels, *(torch.from_numpy(MIXED[name]).reshape(N, -1).float() for name in ("row", "site", "seen"))]
    assert torch.equal(data.clients[0].train.x, torch.cat(parts, dim=1))
    assert data.clients[0].train.x[:, 34].long().tolist() == MIXED["site"].tolist()  # exactly
    whole = federation({"a": (TEXT, Y, TEXT, Y)}).check().clients[0].train.x
    assert whole.tolist() == np.concatenate([TEXT["input_ids"], TEXT["attention_mask"]], axis=1).tolist()
    alone = federation({"a": ({"x": TEXT["input_ids"]}, Y, TEXT["input_ids"], Y)})
    assert (alone.inputs, alone.sample_shape) == ((), (4,))


@pytest.mark.parametrize("x", [TEXT, MIXED], ids=["text", "mixed"])
def test_every_source_gives_the_same_samples(x, tmp_path):
    plain = federation({"a": (x, Y, x, Y), "b": (backwards(x), Y, x, Y)})  # in the first client's order
    both = (Items(x), Items(x, flat=True))
    made = [federation({"a": both, "b": both}), federation({name: tuple(map(LazyDataset, both)) for name in "ab"})]
    for name in "ab":
        arrays = {f"x_{split}.{key}": each for split in ("train", "test") for key, each in x.items()}
        arrays = backwards(arrays) if name == "b" else arrays
        np.savez(tmp_path / f"{name}.npz", **arrays, y_train=Y, y_test=Y)
    made.append(read_folder(tmp_path))
    if x is TEXT:
        made.append(federation({"a": (Hub(), Hub()), "b": (Hub(), Hub())}))
    for each in made:
        assert each.check().inputs == plain.inputs
        for client, other in zip(each.clients, plain.clients, strict=True):
            for split, given in client.splits.items():
                index = torch.arange(N)
                assert torch.equal(given.inputs(index), other.splits[split].inputs(index))
    assert made[0].fingerprint == made[2].fingerprint == plain.fingerprint
    renamed = {"q" + name: each for name, each in x.items()}
    assert federation({"a": (renamed, Y, renamed, Y), "b": (renamed, Y, renamed, Y)}).fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (TEXT["input_ids"], "client 'b', train data: one array a sample, and client 'a', train data: 'input_ids', 'at"),
        (dict(TEXT, extra=TEXT["input_ids"]), "client 'b', train data: the inputs 'input_ids', 'attention_mask', 'e"),
        (dict(TEXT, attention_mask=TEXT["attention_mask"][:, :3]), "the input attention_mask [N, 3] (integers), and"),
        (dict(TEXT, attention_mask=TEXT["attention_mask"] > 0), "the input attention_mask [N, 4] (bools), and clien"),
        (dict(TEXT, attention_mask=TEXT["attention_mask"][1:]), "5 samples in the input 'attention_mask', and 6 in "),
        (dict(TEXT, attention_mask=["a"] * N), "input 'attention_mask': <U1 ('a', 'a', 'a') where numbers are exp"),
        (dict(TEXT, weight=Y / 2), "the input 'input_ids' holds integers beyond 16,777,216, which floats, which oth"),
        (dict(TEXT, input_ids=np.full((N, 4), 2**63, np.uint64)), "beyond 9,223,372,036,854,775,807, which int64"),
        (list(TEXT.values()), "client 'b', train data: the inputs are a list of 2 arrays: give several inputs of a sa"),
        (tuple(TEXT.values()), "client 'b', train data: the inputs are a tuple of 2 arrays: give several inputs of a "),
        ({1: Y[:, None], 2: Y[:, None]}, "the input 1: name inputs by texts, as the network's parameters"),
    ],
)  # fmt: skip
def test_inputs_that_differ_or_are_no_numbers_are_refused(x, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        federation({"a": (TEXT, Y, TEXT, Y), "b": (x, Y, TEXT, Y)})


class Odd(Items):
    def __getitem__(self, at):
        x, y = super().__getitem__(at)
        return ({**x, "attention_mask": x["attention_mask"][:3]} if at == 4 else x), y


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: LazyDataset(data, targets=Y)])
def test_items_of_other_inputs_are_refused_by_number(wrap):
    with pytest.raises(UsageError, match=r"sample 4 has shape .*'attention_mask': \(3,\)\} and the first"):
        federation({"a": (wrap(Odd(TEXT)), wrap(Odd(TEXT)))}).check()


def test_floats_of_an_input_at_other_scales_are_refused_by_its_name():
    ones = RNG.integers(0, 2, (N, 1, 5, 5)).astype(np.float32)
    inputs = [{"image": image, "ids": TEXT["attention_mask"]} for image in (ones / 2, ones * 255, ones / 3)]
    half, levels, other = ((x, Y, x, Y) for x in inputs)
    federation({"a": half, "b": other}).check()
    with pytest.raises(UsageError, match="data, input 'image': whole numbers up to 255 as floats, but client 'b'"):
        federation({"a": levels, "b": other}).check()


def test_samples_of_an_exported_model_are_those_of_training():
    data = federation({"a": (MIXED, Y, MIXED, Y)})
    stored = Preparation.from_json(data.schema.preparation.to_json())
    assert stored == data.schema.preparation
    x = data.clients[0].train.x
    samples = [{name: each[at] for name, each in MIXED.items()} for at in range(N)]
    for given, expected in ((backwards(MIXED), x), (samples, x), (samples[2], x[2:3])):
        rows, single = stored.store(given)
        assert torch.equal(rows, expected)
        assert single == (given is samples[2])
    parts = dict(zip(stored.names, stored.divide(x), strict=True))
    assert parts["site"].tolist() == MIXED["site"].tolist()
    for wrong, said in (
        ({"image": MIXED["image"]}, "samples: the inputs 'image', and expected: 'image', 'row', 'site', 'seen'"),
        (dict(MIXED, row=MIXED["row"][:, :1]), r"samples: the input row \[N, 1\] \(floats\), and expected: row"),
        ("image.png", "samples are a str: the model takes several inputs: image"),
    ):
        with pytest.raises(UsageError, match=said):
            stored.store(wrong)


def test_new_clients_have_the_inputs_of_the_run():
    schema = federation({"a": (TEXT, Y, TEXT, Y)}).check().schema
    x = backwards(TEXT)
    read = fedshift.data.assembly.read_source({"n": (x, Y, x, Y)}, ReadOptions(schema=schema))
    assert join_schema(read, schema).inputs == schema.preparation.inputs
    with pytest.raises(UsageError, match="own data: the inputs 'attention_mask', 'input_ids', and the run's data"):
        join_schema(federation({"n": (x, Y, x, Y)}), schema)


def test_options_for_images_are_refused():
    data = federation({"a": (MIXED, Y, MIXED, Y)})
    with pytest.raises(UsageError, match="image_size=4 resizes samples of one image, and those of 'own data' have"):
        data.fit_images(4)
