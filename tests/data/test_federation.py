"""Federations: what each transformation keeps, what is refused, and that no input is ever changed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedshift.data.assembly import federation
from fedshift.data.digits import digits
from fedshift.data.federation import ClientData, Federation
from fedshift.data.partition import dirichlet, repeat
from fedshift.data.samples import Samples
from fedshift.utils.errors import UsageError


def split(count: int, shape: tuple[int, ...] = (3, 8, 8), classes: int = 3, key: int = 0, dtype=torch.uint8) -> Samples:
    random = np.random.default_rng([key, count])
    x = random.integers(0, 256, (count, *shape))
    x = torch.from_numpy(x).to(dtype)
    return Samples(x=x / 255 if x.is_floating_point() else x, y=torch.arange(count) % classes)


def client(name: str, train: int = 10, shape: tuple[int, ...] = (3, 8, 8), **others) -> ClientData:
    parts = {"train": split(train, shape, key=len(name)), "test": split(6, shape, key=7)}
    return ClientData(name=name, **(parts | others))


def of(*clients: ClientData, classes: int = 3) -> Federation:
    return Federation(name="test", clients=clients, classes=classes)


def samples(part: Samples) -> list[bytes]:
    """Each sample with its label as bytes, so that sets of samples can be compared."""
    return [x.numpy().tobytes() + bytes([int(y)]) for x, y in zip(part.x, part.y, strict=True)]


# Choosing samples


def test_limit_draws_without_replacement_and_the_same_in_every_call(tiny, unchanged):
    first, second = tiny.limit_samples(15), tiny.limit_samples(15)
    assert first.fingerprint == second.fingerprint != tiny.fingerprint
    for whole, limited in zip(tiny.clients, first.clients, strict=True):
        assert len(set(samples(limited.train))) == len(limited.train) == 15
        assert set(samples(limited.train)) < set(samples(whole.train))
        assert limited.test is whole.test


@pytest.mark.parametrize("fraction", [0.01, 0.5])
def test_hold_out_moves_samples_and_neither_loses_nor_repeats_one(tiny, unchanged, fraction):
    held = tiny.hold_out(fraction)
    for whole, parted in zip(tiny.clients, held.clients, strict=True):
        assert len(parted.validation) == max(1, round(fraction * len(whole.train)))
        assert sorted(samples(parted.train) + samples(parted.validation)) == sorted(samples(whole.train))
        assert parted.test is whole.test
    assert held.fingerprint == tiny.hold_out(fraction).fingerprint


def test_only_chooses_and_orders(tiny):
    assert tiny.select_clients(["cid", "ann"]).names == ("cid", "ann")
    assert tiny.select_clients(["cid"]).clients[0] is tiny.client("cid")
    said = replace(tiny, notices=("client 'ann': one file left out", "client 'bob': two", "column 'a' is constant"))
    assert said.select_clients(["cid", "bob"]).notices == said.notices[1:]


@pytest.mark.parametrize(("choose", "said"), [
    (lambda tiny: tiny.limit_samples(20), "client 'bob' has 17 training samples, fewer than samples=20: .* at most 17"),
    (lambda tiny: tiny.limit_samples(0), "samples=0: must be at least 1"),
    (lambda tiny: tiny.hold_out(1.0), "validation=1.0: must lie between 0 and 1"),
    (lambda tiny: tiny.hold_out(float("nan")), "validation=nan: must lie between 0 and 1"),
    (lambda tiny: tiny.hold_out(0.99), "validation=0.99 leaves client 'ann' no training sample of 26"),
    (lambda tiny: tiny.hold_out(0.2).hold_out(0.2), "client 'ann' has 5 validation samples already"),
    (lambda tiny: tiny.hold_out(0.2, size=3), "give exactly one of the two"),
    (lambda tiny: tiny.select_clients(["bobby"]), r"unknown client 'bobby': did you mean 'bob'\? allowed are ann, bob"),
])  # fmt: skip
def test_samples_or_clients_that_there_are_not_are_refused_by_name(tiny, choose, said):
    with pytest.raises(UsageError, match=said):
        choose(tiny)


def test_pooled_holds_every_sample_once(tiny, unchanged):
    (pooled,) = tiny.hold_out(0.2).pool().clients
    assert pooled.name == "pooled"
    for name, part in pooled.splits.items():
        separate = [sample for c in tiny.hold_out(0.2).clients for sample in samples(c.splits[name])]
        assert sorted(samples(part)) == sorted(separate)


def test_pooled_samples_are_scaled_as_each_clients_own_even_where_they_share_an_array():
    scaled = dirichlet(clients=3, alpha=0.1)(digits(size=8).limit_samples(60)).normalize_clients()
    own = torch.cat([client.train.inputs(slice(None)) for client in scaled.clients])
    assert torch.equal(scaled.pool().clients[0].train.inputs(slice(None)), own)


def test_copies_of_a_sample_stay_on_one_side_of_validation(tiny):
    for client in repeat()(tiny).hold_out(0.3).clients:
        assert not set(client.train.rows.tolist()) & set(client.validation.rows.tolist())
        assert len(client.train) + len(client.validation) == 33


# One shape for all


def test_images_of_one_size_keep_it_and_their_memory(tiny, unchanged):
    for before, after in zip(tiny.clients, tiny.fit_images().clients, strict=True):
        assert after.train.x.shape == before.train.x.shape
        assert after.train.x.data_ptr() == before.train.x.data_ptr()


@pytest.mark.parametrize(
    ("test", "size", "shape"),
    [
        ((3, 16, 16), 8, (3, 8, 8)),
        ((3, 16, 16), None, (3, 28, 28)),
        ((3, 8, 8), 12, (3, 12, 12)),
        ((1, 8, 8), None, (3, 8, 8)),
    ],
)
def test_images_are_brought_to_one_shape_and_another_size_than_asked_for_is_said(test, size, shape):
    data = of(client("a", test=split(6, test))).fit_images(size).check()
    assert {part.x.shape[1:] for part in data.clients[0].splits.values()} == {shape}
    said = [notice for notice in data.notices if "images of 8 x 8, 16 x 16 pixels become 28 x 28" in notice]
    assert len(said) == (shape[1] == 28)


def test_gray_is_repeated_next_to_color():
    gray, color = of(client("gray", shape=(1, 8, 8)), client("rgb")).fit_images().check().clients
    assert gray.train.x.shape[1:] == color.train.x.shape[1:] == (3, 8, 8)
    assert torch.equal(gray.train.x[:, 0], gray.train.x[:, 1])
    assert torch.equal(gray.train.x[:, 0], gray.train.x[:, 2])
    assert torch.equal(gray.train.x[:, :1], client("gray", shape=(1, 8, 8)).train.x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_resized_bytes_are_rounded_and_floats_neither_rounded_nor_cut(dtype):
    part = split(10, (3, 16, 16), dtype=dtype)
    part = part.replace(x=part.x - 0.5) if dtype.is_floating_point else part
    (fitted,) = of(ClientData(name="a", train=part, test=part)).fit_images(8).clients
    exact = F.interpolate(part.x.double(), size=(8, 8), mode="bilinear", antialias=True, align_corners=False)
    assert (fitted.train.x.dtype, exact.min() < 0) == (dtype, dtype.is_floating_point)
    assert (fitted.train.x.double() - exact).abs().max() <= (1e-6 if dtype.is_floating_point else 0.51)
    assert torch.equal(fitted.train.y, part.y)


FLAT = client("a", shape=(5,)), client("b", shape=(5,))


@pytest.mark.parametrize(("clients", "size", "said"), [
    ((client("a"), client("b"), client("four", shape=(4, 8, 8))), None,
     r"client 'four', train data: 4 channels where others have 3: .* 3 channels"),
    ((client("a"), client("flat", shape=(5,))), None,
     r"client 'flat', train data: samples of shape \(5,\) where others are images"),
    (FLAT, 28, "image_size=28 resizes images, and .* has none"),
    ((*FLAT, client("odd", shape=(4,))), None,
     r"client 'odd', train data: samples of shape \(4,\) where others have \(5,\)"),
])  # fmt: skip
def test_samples_that_cannot_have_one_shape_are_refused_by_name(clients, size, said):
    with pytest.raises(UsageError, match=said):
        of(*clients).fit_images(size).check()
    same = of(*FLAT)
    assert same.fit_images() is same


# Checks


def nan_at(part: Samples, index: int) -> Samples:
    x = part.x.float()
    x[index, 0, 2, 2] = float("nan")
    return Samples(x=x, y=part.y)


GOOD = split(6)
BAD = {
    "no client": (of(), "federation 'test' has no client"),
    "a name twice": (of(client("a"), client("a")), "client name 'a' occurs twice"),
    "an empty client": (of(client("a"), client("b", train=0)), "client 'b', train data: empty"),
    "an empty test set": (of(client("a", test=split(0))), "client 'a', test data: empty"),
    "a label too large": (
        of(client("a"), classes=2), "client 'a', train data: label 2 is out of range; labels must be 0..1",
    ),
    "a negative label": (
        of(client("a", test=Samples(x=GOOD.x, y=torch.tensor([0, 1, 2, 0, -1, 1])))),
        "client 'a', test data: label -1 is out of range; labels must be 0..2",
    ),
    "NaN": (of(client("a", test=nan_at(GOOD, 4))), "client 'a', test data: sample 4 has NaN or infinite values"),
    "a label too few": (of(client("a", test=Samples(x=GOOD.x, y=GOOD.y[:5]))), "6 samples but 5 labels"),
    "one class": (of(client("a", train=1)), "client 'a' has only class 0 in its 1 training samples"),
    "two shapes": (of(client("a"), client("b", shape=(3, 9, 9))), "where others have"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "said"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_trained_on_is_refused_by_name(data, said):
    with pytest.raises(UsageError) as refused:
        data.check()
    assert said in str(refused.value)


def test_a_single_class_may_be_allowed():
    data = of(client("a", train=1), client("b"))
    assert data.check(allow_single_class=True) is data


def test_classes_default_to_one_more_than_the_largest_training_label_of_any_client():
    x, few, many = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1]), np.array([0, 4, 1, 0])
    assert federation({"a": (x, few, x, few), "b": (x, many, x, few)}).classes == 5
    assert federation({"a": (x, few, x, few)}, classes=7).classes == 7
    with pytest.raises(UsageError, match=r"label 4 is out of range; labels must be 0\.\.1"):
        federation({"a": (x, few, x, many)}).check()


# Digests


def test_digests_tell_which_client_changed_and_what(tiny):
    ann = tiny.client("ann")
    x, y = ann.train.x.clone(), ann.train.y.clone()
    x[5, 2, 7, 7] ^= 1
    y[5] = (y[5] + 1) % 3
    for train, said in (
        (Samples(x=x, y=ann.train.y), ["samples"]), (Samples(x=ann.train.x, y=y), ["targets"]),
        (ann.train.replace(x=ann.train.x.float()), ["samples"]),
        (ann.train.take(torch.arange(26).flip(0)), ["samples", "targets"]),
    ):  # fmt: skip
        changed = replace(tiny, clients=(replace(ann, train=train), *tiny.clients[1:])).digests
        different = [what for what, digest in changed.items() if digest != tiny.digests[what]]
        assert different == [f"client 'ann', train {what}" for what in said]
    prints = [data.fingerprint for data in (tiny, tiny.select_clients(["bob", "ann", "cid"]), tiny.hold_out(0.1))]
    assert len(set(prints)) == 3


# Printing


def test_a_federation_prints_its_clients_and_the_sizes_of_their_splits(tiny):
    some = replace(tiny, clients=(*tiny.hold_out(0.5).clients[:1], *tiny.clients[1:]))
    title, *lines = str(some).splitlines()
    assert title == "Federation 'tiny': 3 clients, 3 classes, samples of 3 x 8 x 8 (uint8)"
    assert [line.split() for line in lines] == [
        ["client", "train", "validation", "test", "classes"],
        ["ann", "13", "13", "12", "3"],
        ["bob", "17", "-", "12", "3"],
        ["cid", "33", "-", "12", "3"],
    ]
    assert len({len(line) for line in lines}) == 1
    many = of(*(client(f"site {number}") for number in range(23)))
    assert str(many).splitlines()[-2].startswith("site 19 ")
    assert str(many).splitlines()[-1] == "and 3 more"
    assert str(of()).startswith("Federation 'test': 0 clients, 3 classes\n")
    sizes = "train 3 samples of 3 x 8 x 8 (uint8), test 6 samples of 3 x 8 x 8 (uint8)"
    assert repr(client("a", 3)) == f"Client 'a': {sizes}"
