"""Federations: what each transformation keeps, what is refused, and that no input is ever changed."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

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
        assert len(limited.train) == 15
        assert len(set(samples(limited.train))) == 15
        assert set(samples(limited.train)) < set(samples(whole.train))
        assert limited.test is whole.test


def test_limit_to_fewer_samples_takes_some_of_those_that_limit_to_more_takes(tiny):
    for few, more in zip(tiny.limit_samples(6).clients, tiny.limit_samples(12).clients, strict=True):
        assert set(samples(few.train)) < set(samples(more.train))


def test_limit_names_the_client_that_has_too_few_and_what_would_work(tiny):
    with pytest.raises(UsageError, match=r"client 'bob' has 17 training samples, fewer than samples=20: .* at most 17"):
        tiny.limit_samples(20)
    with pytest.raises(UsageError, match="samples=0: must be at least 1"):
        tiny.limit_samples(0)


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5])
def test_hold_out_moves_samples_and_neither_loses_nor_repeats_one(tiny, unchanged, fraction):
    held = tiny.hold_out(fraction)
    for whole, parted in zip(tiny.clients, held.clients, strict=True):
        assert len(parted.validation) == max(1, round(fraction * len(whole.train)))
        assert sorted(samples(parted.train) + samples(parted.validation)) == sorted(samples(whole.train))
        assert parted.test is whole.test
    assert held.fingerprint == tiny.hold_out(fraction).fingerprint


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_hold_out_takes_fractions_only(tiny, fraction):
    with pytest.raises(UsageError, match=r"validation=.*: must lie between 0 and 1"):
        tiny.hold_out(fraction)


def test_hold_out_leaves_every_client_a_training_sample(tiny):
    with pytest.raises(UsageError, match=r"validation=0.99 leaves client 'ann' no training sample of 26"):
        tiny.hold_out(0.99)


def test_only_chooses_and_orders(tiny):
    assert tiny.select_clients(["cid", "ann"]).names == ("cid", "ann")
    assert tiny.select_clients(["cid"]).clients[0] is tiny.client("cid")
    said = replace(tiny, notices=("client 'ann': one file left out", "client 'bob': two", "column 'a' is constant"))
    assert said.select_clients(["cid", "bob"]).notices == said.notices[1:]
    with pytest.raises(UsageError, match="unknown client 'bobby': did you mean 'bob'\\? allowed are ann, bob, cid"):
        tiny.select_clients(["bobby"])


def test_pooled_holds_every_sample_once(tiny, unchanged):
    (pooled,) = tiny.hold_out(0.2).pool().clients
    assert pooled.name == "pooled"
    for name, part in pooled.splits.items():
        separate = [sample for c in tiny.hold_out(0.2).clients for sample in samples(c.splits[name])]
        assert sorted(samples(part)) == sorted(separate)


def test_pooled_keeps_the_validation_samples_of_those_who_have_some(tiny):
    some = replace(tiny, clients=(tiny.clients[0], *tiny.hold_out(0.2).clients[1:]))
    pooled = some.pool().clients[0]
    assert len(pooled.validation) == sum(len(client.validation) for client in some.clients[1:])
    assert len(pooled.train) + len(pooled.validation) == sum(len(client.train) for client in tiny.clients)


def test_pooled_samples_are_scaled_as_each_clients_own_even_where_they_share_an_array():
    dealt = dirichlet(clients=3, alpha=0.1)(digits())
    scaled = replace(dealt, clients=tuple(client.normalize() for client in dealt.clients))
    own = torch.cat([client.train.inputs(slice(None)) for client in scaled.clients])
    assert torch.equal(scaled.pool().clients[0].train.inputs(slice(None)), own)


def test_copies_of_a_sample_stay_on_one_side_of_validation(tiny):
    held = repeat()(tiny).hold_out(0.3)
    for client in held.clients:
        assert not set(client.train.rows.tolist()) & set(client.validation.rows.tolist())
        assert len(client.train) + len(client.validation) == 33


def test_validation_data_that_there_are_already_are_not_drawn_again(tiny):
    with pytest.raises(UsageError, match="client 'ann' has 5 validation samples already"):
        tiny.hold_out(0.2).hold_out(0.2)


# One shape for all


def test_images_of_two_sizes_are_brought_to_28():
    federation = of(client("a", shape=(3, 16, 16)), client("b", shape=(3, 32, 32)))
    for before, after in zip(federation.clients, federation.fit_images().check().clients, strict=True):
        for name, part in after.splits.items():
            assert part.x.shape[1:] == (3, 28, 28)
            assert part.x.dtype == torch.uint8
            assert torch.equal(part.y, before.splits[name].y)
            exact = F.interpolate(
                before.splits[name].x.double(), size=(28, 28), mode="bilinear", antialias=True, align_corners=False
            )
            assert (part.x.double() - exact).abs().max() <= 0.51  # rounded, not cut


def test_images_of_one_size_keep_it_and_their_memory(tiny, unchanged):
    for before, after in zip(tiny.clients, tiny.fit_images().clients, strict=True):
        assert after.train.x.shape == before.train.x.shape
        assert torch.equal(after.train.x, before.train.x)
        assert after.train.x.data_ptr() == before.train.x.data_ptr()


def test_a_size_asked_for_is_given(tiny, unchanged):
    assert tiny.fit_images(12).sample_shape == (3, 12, 12)


def test_a_test_set_of_another_size_is_fitted_too():
    odd = client("a", test=split(6, (3, 16, 16)))
    assert {part.x.shape[1:] for part in of(odd).fit_images(8).check().clients[0].splits.values()} == {(3, 8, 8)}
    assert {part.x.shape[1:] for part in of(odd).fit_images().check().clients[0].splits.values()} == {(3, 28, 28)}


def test_gray_is_repeated_next_to_color():
    gray, color = of(client("gray", shape=(1, 8, 8)), client("rgb")).fit_images().check().clients
    assert gray.train.x.shape[1:] == color.train.x.shape[1:] == (3, 8, 8)
    assert torch.equal(gray.train.x[:, 0], gray.train.x[:, 1])
    assert torch.equal(gray.train.x[:, 0], gray.train.x[:, 2])
    assert torch.equal(gray.train.x[:, :1], client("gray", shape=(1, 8, 8)).train.x)


def test_gray_alone_stays_gray():
    assert of(client("a", shape=(1, 8, 8)), client("b", shape=(1, 8, 8))).fit_images().sample_shape == (1, 8, 8)


def test_gray_test_images_beside_color_training_images_are_repeated():
    odd = client("a", test=split(6, (1, 8, 8)))
    assert of(odd).fit_images().check().clients[0].test.x.shape[1:] == (3, 8, 8)


def test_float_images_are_resized_but_never_rounded_or_cut():
    values = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    part = Samples(x=values, y=torch.arange(10) % 3)
    (fitted,) = of(ClientData(name="a", train=part, test=part)).fit_images(8).clients
    exact = F.interpolate(values, size=(8, 8), mode="bilinear", antialias=True, align_corners=False)
    assert torch.equal(fitted.train.x, exact)
    assert exact.min() < 0


def test_images_with_an_odd_number_of_channels_are_refused_by_name():
    data = of(client("a"), client("b"), client("four", shape=(4, 8, 8)))
    with pytest.raises(UsageError, match=r"client 'four', train data: 4 channels where others have 3: .* 3 channels"):
        data.fit_images()


def test_features_and_images_do_not_mix():
    with pytest.raises(UsageError, match=r"client 'flat', train data: samples of shape \(5,\) where others are images"):
        of(client("a"), client("flat", shape=(5,))).fit_images()


def test_features_must_agree():
    same = of(client("a", shape=(5,)), client("b", shape=(5,)))
    assert same.fit_images() is same
    with pytest.raises(UsageError, match=r"image_size=28 resizes images, and .* has none"):
        same.fit_images(28)
    with pytest.raises(UsageError, match=r"client 'odd', train data: samples of shape \(4,\) where others have \(5,\)"):
        of(client("a", shape=(5,)), client("b", shape=(5,)), client("odd", shape=(4,))).fit_images().check()


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


@pytest.mark.parametrize("data", [of(), of(client("a", train=0), client("b", shape=(3, 9, 9)))])
def test_fitting_leaves_what_is_wrong_to_the_check(data):
    with pytest.raises(UsageError):
        data.fit_images().check()


def test_classes_default_to_one_more_than_the_largest_training_label_of_any_client():
    x, few, many = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1]), np.array([0, 4, 1, 0])
    assert federation({"a": (x, few, x, few), "b": (x, many, x, few)}).classes == 5
    assert federation({"a": (x, few, x, few)}, classes=7).classes == 7
    with pytest.raises(UsageError, match=r"label 4 is out of range; labels must be 0\.\.1"):
        federation({"a": (x, few, x, many)}).check()


# Fingerprint


def test_the_fingerprint_changes_with_every_sample_label_name_order_and_split(tiny):
    def with_first(**changed: torch.Tensor) -> Federation:
        first = tiny.clients[0]
        train = Samples(**({"x": first.train.x.clone(), "y": first.train.y.clone()} | changed))
        return replace(tiny, clients=(replace(first, train=train), *tiny.clients[1:]))

    x, y = tiny.clients[0].train.x.clone(), tiny.clients[0].train.y.clone()
    x[5, 2, 7, 7] ^= 1
    y[5] = (y[5] + 1) % 3
    others = [
        with_first(x=x), with_first(y=y),
        tiny.select_clients(["bob", "ann", "cid"]), tiny.select_clients(["ann", "bob"]),
        tiny.hold_out(0.1), tiny.limit_samples(17), with_first(x=tiny.clients[0].train.x.float()),
        replace(tiny, clients=(replace(tiny.clients[0], name="eve"), *tiny.clients[1:])),
    ]  # fmt: skip
    prints = [data.fingerprint for data in (tiny, *others)]
    assert len(set(prints)) == len(prints)
    assert with_first().fingerprint == tiny.fingerprint


@given(
    sizes=st.lists(st.integers(4, 30), min_size=1, max_size=4),
    fraction=st.floats(0.01, 0.6),
    samples_each=st.integers(2, 4),
)
def test_choosing_loses_nothing_at_any_size(sizes, fraction, samples_each):
    data = of(*(client(f"c{i}", train=size, shape=(2,)) for i, size in enumerate(sizes)))
    held = data.hold_out(fraction)
    for before, after in zip(data.clients, held.clients, strict=True):
        assert sorted(samples(after.train) + samples(after.validation)) == sorted(samples(before.train))
        assert len(after.train) >= 1
    assert {len(c.train) for c in data.limit_samples(samples_each).clients} == {samples_each}


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


def test_samples_print_their_number_shape_and_labels(tiny):
    assert repr(tiny.client("bob").train) == "17 samples of 3 x 8 x 8 (uint8), by label {0: 6, 1: 6, 2: 5}"
    assert repr(split(50, (4,), classes=25, dtype=torch.float32)) == "50 samples of 4 (float32), 25 labels"
    one = client("a", 3)
    assert repr(one) == f"Client 'a': train {one.train!r}, test {one.test!r}"


# Datasets of torch


def test_pairs_of_torch_datasets_are_the_arrays_that_they_hold():
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (9, 3, 8, 8)).astype(np.uint8), np.arange(9) % 3
    plain = federation({"a": (x[:6], y[:6], x[6:], y[6:])})
    held = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    made = federation({"a": (Subset(held, range(6)), Subset(held, range(6, 9)))})
    assert made.fingerprint == plain.fingerprint
    assert made.check().sample_shape == (3, 8, 8)
    pictures = [(Image.fromarray(image.transpose(1, 2, 0)), int(label)) for image, label in zip(x, y, strict=True)]
    assert federation({"a": (Listed(pictures[:6]), Listed(pictures[6:]))}).fingerprint == plain.fingerprint


class Listed(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        return self.samples[number]


class Stream(IterableDataset):
    def __iter__(self):
        yield np.zeros(3), 0


GOOD = Listed([(np.zeros(3), 0), (np.ones(3), 1)])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((Stream(), GOOD), "client 'a', train data: Stream has no length: give a map-style torch.utils.data.Dataset"),
        ((GOOD, Listed([])), "client 'a', test data: empty"),
        ((GOOD, Listed([{"x": 1}])), "client 'a', test data: sample 0 is a dict, not a pair (input, label)"),
        (
            (GOOD, Listed([({"input_ids": 1, "attention_mask": 1}, 0)])),
            "client 'a', test data: they have the inputs 'input_ids', 'attention_mask'",
        ),
        ((GOOD, Listed([*GOOD.samples, (np.zeros(4), 1)])), "sample 2 has shape (4,) and the first (3,): bring"),
        (3, "client 'a': int given: give (x_train, y_train, x_"),
    ],
)  # fmt: skip
def test_what_is_neither_four_arrays_nor_two_datasets_is_refused(given, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        federation({"a": given})
