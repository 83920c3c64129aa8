"""Splits: no sample is lost or repeated, shares are as asked for, arrays are shared, and a saved split comes back."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.data.assignment import describe_assignment, saved
from fedshift.data.copies import count_copies, number_samples
from fedshift.data.federation import ClientData, Federation
from fedshift.data.nuclei import nuclei
from fedshift.data.partition import CHANGES as CATALOG
from fedshift.data.partition import (
    dirichlet,
    domain_mix,
    ham_non_iid,
    iid,
    labels,
    match_names,
    only,
    quantity,
    repeat,
    sample,
    split_stratified,
    truncate,
    validation,
)
from fedshift.data.samples import Samples
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream


def numbered(*sizes: int, classes: int = 10, test: int = 40, imbalance: bool = False) -> Federation:
    """Domains whose samples are their own numbers, so that each can be followed."""
    clients, start = [], 0
    for place, size in enumerate(sizes):
        parts = {}
        for name, count in (("train", size), ("test", test)):
            x = torch.arange(start, start + count, dtype=torch.float32)[:, None]
            y = torch.from_numpy(np.random.default_rng(start).integers(0, classes, count))
            y = y * torch.rand(count, generator=torch.Generator().manual_seed(start)).gt(0.6) if imbalance else y
            parts[name] = Samples(x=x, y=y)
            start += count
        clients.append(ClientData(name=f"d{place}", **parts))
    return Federation(name="numbered", clients=tuple(clients), classes=classes)


def held(data: Federation, split: str = "train") -> list[int]:
    return [int(number) for client in data.clients for number in client.splits[split].x[:, 0]]


CHANGES = {
    "iid": lambda clients, seed, **more: iid(clients=clients, seed=seed, **more),
    "quantity": lambda clients, seed, **more: quantity(clients=clients, alpha=0.3, seed=seed, **more),
    "dirichlet": lambda clients, seed, **more: dirichlet(clients=clients, alpha=0.05, seed=seed, **more),
    "labels": lambda clients, seed, **more: labels(clients=10 * clients, per_client=2, seed=seed, **more),
}


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(CHANGES)),
    clients=st.integers(1, 7),
    sizes=st.lists(st.integers(90, 200), min_size=1, max_size=3),
    seed=st.integers(0, 5),
    within=st.sampled_from(["all", "domain"]),
)
def test_no_sample_is_lost_or_repeated(name, clients, sizes, seed, within):
    data = numbered(*sizes, test=80)
    made = CHANGES[name](clients, seed, within=within, test="same")(data)
    each = clients * (10 if name == "labels" else 1)
    assert len(made.clients) == each * (len(sizes) if within == "domain" else 1)
    for split in ("train", "test"):
        assert sorted(held(made, split)) == sorted(held(data, split))
    for before in data.clients if within == "domain" else ():
        mine = [number for c in made.clients if c.name.startswith(f"{before.name}-") for number in held_by(c)]
        assert sorted(mine) == sorted(held_by(before))
    labels_of = dict(zip(held(data), torch.cat([c.train.y for c in data.clients]).tolist(), strict=True))
    for client in made.clients:
        assert [labels_of[number] for number in held_by(client)] == client.train.y.tolist()


def held_by(client: ClientData) -> list[int]:
    return [int(number) for number in client.train.x[:, 0]]


@pytest.mark.parametrize("name", ["iid", "labels"])
def test_which_samples_a_client_gets_is_drawn_by_the_seed_and_not_by_their_order(name):
    """Files lie in an order, such as that of the scans of a day: a client's are from all places."""
    first, second = (CHANGES[name](2, seed)(numbered(400, classes=4)).clients[0].train.x[:, 0] for seed in (0, 1))
    assert {*first.tolist()} != {*second.tolist()}
    assert first.min() < 60
    assert first.max() > 340


def count_domains(made: Federation, data: Federation) -> np.ndarray:
    """Training samples of each client that come from each domain, ``[clients, domains]``."""
    starts = [held_by(domain)[0] for domain in data.clients]
    owners = [np.searchsorted(starts, held_by(client), side="right") - 1 for client in made.clients]
    return np.stack([np.bincount(each, minlength=len(starts)) for each in owners])


@pytest.mark.parametrize("mixing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("sizes", "clients"), [((90, 200, 310), 7), ((90, 200, 310, 50, 60), 2), ((100, 100), 2)])
def test_domains_are_mixed_over_clients_as_the_benchmark_of_domain_generalization_does(sizes, clients, mixing):
    data = numbered(*sizes)
    made = domain_mix(clients=clients, mixing=mixing, test="same")(data)
    for split in ("train", "test"):
        assert sorted(held(made, split)) == sorted(held(data, split))
    mains = [[] for _ in range(clients)]  # each client's main domains, by the rules of the paper's code, step by step
    if len(sizes) <= clients:
        order = list(range(len(sizes)))
        while len(order) < clients:
            order.append(max(range(len(sizes)), key=lambda d: sizes[d] / order.count(d)))
        mains = [[domain] for domain in sorted(order)]
    else:
        for domain in sorted(range(len(sizes)), key=lambda d: -sizes[d]):
            min(mains, key=lambda own: sum(sizes[d] for d in own)).append(domain)
    for own, counted in zip(mains, count_domains(made, data), strict=True):
        for domain, size in enumerate(sizes):
            among = sum(domain in other for other in mains)
            wanted = size * ((1 - mixing) * (domain in own) / among + mixing / clients)
            assert abs(counted[domain] - wanted) <= 1


def test_a_kept_domain_stays_a_client_for_newcomers():
    data = numbered(90, 60, 70)
    made = domain_mix(clients=4, mixing=0.1, keep="d1")(data)
    assert made.names == ("client-0", "client-1", "client-2", "client-3", "d1")
    assert made.clients[-1] is data.clients[1]
    assert not set(held_by(data.clients[1])) & {number for c in made.clients[:-1] for number in held_by(c)}
    assert made.clients[0].test is made.clients[1].test
    for wrong, said in (
        ({"mixing": 1.5}, r"mixing=1.5\): give a number from 0"),
        ({"mixing": 0.5, "keep": "d*"}, "keeps every domain"),
        ({"mixing": 0.5, "keep": "e1"}, "unknown client 'e1'"),
    ):
        with pytest.raises(UsageError, match=said):
            domain_mix(clients=2, **wrong)(data)


def test_iid_parts_are_of_equal_size_and_share_the_array_and_the_test_data_unless_these_are_dealt_out():
    data = numbered(1000)
    made = iid(clients=11)(data)
    assert {len(client.train) for client in made.clients} == {90, 91}
    assert made.names == tuple(f"client-{number:02}" for number in range(11))
    assert {client.train.store for client in made.clients} == {data.clients[0].train.store}
    assert {client.test for client in made.clients} == {made.clients[0].test}
    assert made.notices[0].endswith(" share 40 test samples: their results are of the same samples")
    assert held(only(clients="client-00")(made), "test") == held(data, "test")
    assert [len(client.test) for client in iid(clients=4, test="same")(data).clients] == [10] * 4
    assert iid(clients=2, within="domain")(numbered(50, 60)).names == ("d0-0", "d0-1", "d1-0", "d1-1")


@pytest.mark.parametrize("alpha", [0.1, 100.0])
def test_dirichlet_shares_are_those_of_the_distribution(alpha):
    data = numbered(20_000, classes=5)
    made = dirichlet(clients=8, alpha=alpha)(data)
    counts = np.stack([torch.bincount(client.train.y, minlength=5) for client in made.clients])
    shares = counts / torch.bincount(data.clients[0].train.y).numpy()
    assert shares.sum(axis=0) == pytest.approx(np.ones(5), abs=1e-3)
    # A symmetric Dirichlet's shares have mean 1/K and variance (1/K)(1 - 1/K) / (K alpha + 1).
    assert shares.std() == pytest.approx(np.sqrt(1 / 8 * 7 / 8 / (8 * alpha + 1)), rel=0.5)


def test_same_test_data_follow_the_training_shares():
    data = numbered(5000, test=5000, classes=4)
    for client in dirichlet(clients=3, alpha=0.3, test="same")(data).clients:
        counts = [torch.bincount(split.y, minlength=4).double() for split in (client.train, client.test)]
        assert (counts[0] / 1250 - counts[1] / 1250).abs().max() < 0.06


@pytest.mark.parametrize("minimum", [1, 12])
def test_dirichlet_with_a_tiny_alpha_ends_and_gives_every_client_its_minimum(minimum):
    made = dirichlet(clients=50, alpha=1e-3, minimum=minimum)(numbered(700))
    assert min(len(client.train) for client in made.clients) >= minimum
    assert len(set(held(made))) == 700


def test_quantity_skew_changes_sizes_and_not_labels():
    made = quantity(clients=5, alpha=0.5)(numbered(20_000, classes=2))
    sizes = np.array([len(client.train) for client in made.clients])
    assert sizes.max() > 2 * sizes.min()
    means = [float(client.train.y.double().mean()) for client in made.clients if len(client.train) > 500]
    assert means == pytest.approx([0.5] * len(means), abs=0.06)


@pytest.mark.parametrize(("clients", "per_client"), [(10, 1), (100, 2), (5, 10), (15, 4)])
def test_non_iid_l_is_fedmmbs(clients, per_client):
    data = numbered(6000)
    made = labels(clients=clients, per_client=per_client)(data)
    groups = torch.bincount(data.clients[0].train.y, minlength=10)
    parts = clients * per_client // 10
    seen = torch.zeros(10, dtype=torch.int64)
    for client in made.clients:
        counts = torch.bincount(client.train.y, minlength=10)
        assert int((counts > 0).sum()) == per_client
        for label in counts.nonzero()[:, 0]:  # one part of K L / 10 of its group
            assert abs(int(counts[label]) - int(groups[label]) / parts) < 1
        seen += counts > 0
    assert seen.tolist() == [parts] * 10


def test_ham_non_iid_has_the_papers_sizes_and_numbers_of_classes():
    sizes = {"akiec": 262, "bcc": 411, "bkl": 879, "df": 92, "mel": 890, "nv": 5364, "vasc": 114}
    y = torch.repeat_interleave(torch.arange(7), torch.tensor(list(sizes.values())))
    part = Samples(x=torch.arange(len(y), dtype=torch.float32)[:, None], y=y)
    whole = ClientData(name="ham", train=part, test=part)
    data = Federation(name="ham", clients=(whole,), classes=7, class_names=tuple(sizes))
    made = ham_non_iid()(data)
    counts = np.stack([torch.bincount(client.train.y, minlength=7) for client in made.clients])
    assert counts.sum(axis=1).tolist() == [2367, 3376, 2269]
    assert (counts > 0).sum(axis=1).tolist() == [2, 5, 2]
    nevi = counts[:, list(sizes).index("nv")]
    assert (2 * nevi > counts.sum(axis=1)).all()
    assert sorted(held(made)) == sorted(held(data))
    with pytest.raises(UsageError, match="no class 'nv'"):
        ham_non_iid()(numbered(100))


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ("b,a*", ("b", "a1", "a2")),
        ("a[23], ?1", ("a2", "a1")),
        ("d*", r"unknown client 'd\*'"),
        ("!a1", ("a2", "b", "!c")),
        ("a*, !a2", ("a1",)),
        ("!?1,b", ("b",)),
        ("!c", ("!c",)),  # the name of a client
        (("!c",), "unknown client 'c'"),
        ("!a*,!b,!!c", "excludes all clients: a1, a2, b, !c"),
        ("!d", "unknown client 'd'"),
    ],
)
def test_names_are_chosen_and_left_out(patterns, found):
    names = ("a1", "a2", "b", "!c")
    if isinstance(found, tuple):
        assert match_names(patterns, names) == found
    else:
        with pytest.raises(UsageError, match=found):
            match_names(patterns, names)


def test_sizes_are_swept_truncated_and_filled_up_by_repeating():
    data = numbered(100, 70, 30)
    assert [len(client.train) for client in sample(fraction=0.1)(data).clients] == [10, 7, 3]
    assert [len(client.train) for client in sample(size=20)(data).clients] == [20] * 3
    assert [len(client.train) for client in truncate()(data).clients] == [30] * 3
    repeated = repeat()(data)
    for before, after in zip(data.clients, repeated.clients, strict=True):
        times = np.unique(held_by(after), return_counts=True)[1]
        assert len(after.train) == 100
        assert len(times) == len(before.train)
        assert times.max() - times.min() <= 1
        assert set(held_by(after)) == set(held_by(before))
    assert [len(client.validation) for client in validation(fraction=0.1)(data).clients] == [10, 7, 3]
    fixed = validation(size=20)(data)
    assert [(len(client.train), len(client.validation)) for client in fixed.clients] == [(80, 20), (50, 20), (10, 20)]
    assert sorted(held(fixed) + held(fixed, "validation")) == sorted(held(data))


def save(data, changes, file):
    table = describe_assignment(data, changes)
    table.to_csv(file, index=False)
    return table


@pytest.mark.parametrize(("changes", "starred"), [
    ([dirichlet(clients=4, alpha=0.3), validation(fraction=0.25)], {"client-*": 80}),
    ([iid(clients=4, within="domain")], {"d0-*": 40, "d1-*": 40}),
    ([truncate()], {}),
])  # fmt: skip
def test_a_saved_split_is_read_back_sample_for_sample_and_shared_test_data_stand_once(tmp_path, changes, starred):
    data = made = numbered(120, 90)
    for change in changes:
        made = change(made)
    table = save(data, changes, tmp_path / "split.csv")
    assert list(table.columns) == ["client", "split", "domain", "source", "row"]
    stars = table["client"].str.endswith("*")
    assert table[stars].groupby("client").size().to_dict() == starred
    assert set(table["split"][stars]) <= {"test"}
    again = saved(path=str(tmp_path / "split.csv"))(data)
    assert again.names == made.names
    assert again.fingerprint == made.fingerprint
    assert len({client.test for client in again.clients}) == len({client.test for client in made.clients})
    first = table.iloc[0]
    origin = data.client(first["domain"]).splits[first["source"]]
    assert float(made.client(first["client"]).splits[first["split"]].x[0]) == float(origin.x[first["row"]])


def test_clients_may_be_called_what_a_table_takes_for_missing(tmp_path):
    clients = zip(numbered(30, 30, 30).clients, ("NA", "nan", ""), strict=True)
    data = replace(numbered(30), clients=tuple(replace(client, name=name) for client, name in clients))
    save(data, [truncate()], tmp_path / "split.csv")
    assert saved(path=str(tmp_path / "split.csv"))(data).names == ("NA", "nan", "")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("client-0,train,d0,train,", "client-0,training,d0,train,", "splits one of train, validation, test"),
        (",test,d0,test,3\n", ",test,d0,test,3.5\n", "rows must be whole numbers"),
        (",test,d0,test,3\n", ",test,d0,test,99\n", "which has 40 samples here: use the data with which"),
        ("client-1,train", "client-9,test", "client 'client-9' has test samples; it needs train and test"),
        ("client,split,", "a,b,", "has columns a, b, domain, source, row"),
        (None, None, "cannot be read"),
    ],
)
def test_a_saved_split_that_was_changed_or_is_of_other_data_is_refused(tmp_path, old, new, said):
    file, data = tmp_path / "split.csv", numbered(20)
    if old:
        save(data, [iid(clients=2, test="same")], file)
        file.write_text(file.read_text().replace(old, new))
    with pytest.raises(UsageError, match=said):
        saved(path=str(file))(data)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: iid(clients=0), "clients=0"),
        (lambda: iid(clients=200)(numbered(100)), "100 train samples are too few"),
        (lambda: iid(clients=50, test="same")(numbered(100)), "leave test='same' out"),
        (lambda: dirichlet(clients=3, alpha=0), "alpha=0"),
        (lambda: iid(clients=3, within="domains"), "unknown choice in iid 'domains'"),
        (lambda: iid(clients=3, test="none"), "unknown choice in iid 'none'"),
        (lambda: labels(clients=7, per_client=2)(numbered(100)), "multiple of 10"),
        (lambda: sample(fraction=2.0), "fraction=2"),
        (lambda: sample(size=0), "size=0"),
        (lambda: sample(size=10.5), "size=10.5"),
        (lambda: iid(clients=True), "clients=True"),
        (lambda: labels(clients=10, per_client=2.0), "per_client=2.0"),
        (lambda: dirichlet(clients=3, alpha=1.0, minimum="x"), "minimum='x'"),
        (lambda: dirichlet(clients=3, alpha=float("inf")), "alpha=inf"),
        (lambda: only(clients=3), "clients=3"),
        (lambda: saved(path=3), "path=3"),
        (lambda: validation(fraction="x"), "fraction='x'"),
        (lambda: validation(), "exactly one"),
        (
            lambda: validation(size=70)(numbered(100, 70)),
            r"validation\(size=70\) leaves client 'd1' no training sample",
        ),
    ],
)
def test_what_cannot_be_split_so_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()


def test_repeated_samples_are_not_dealt_out():
    with pytest.raises(UsageError, match=r"samples of client 'd1' are repeated.*put repeat\(\) after it"):
        iid(clients=2)(repeat()(numbered(40, 30)))
    assert [len(c.train) for c in repeat()(iid(clients=2, within="domain")(numbered(40, 30))).clients] == [20] * 4


EVERY = {
    "dirichlet": dirichlet(clients=2, alpha=1.0),
    "domain_mix": domain_mix(clients=2, mixing=0.5),
    "ham_non_iid": ham_non_iid(),
    "iid": iid(clients=2),
    "labels": labels(clients=7, per_client=2),
    "only": only(clients="*"),
    "quantity": quantity(clients=2),
    "repeat": repeat(seed=1),
    "sample": sample(fraction=0.5),
    "truncate": truncate(),
    "validation": validation(size=3),
}


def overlapping(data, folder):
    """Both clients have samples of both domains, some of them in common, and one twice."""
    rows = [("a", "d0", 0), ("a", "d0", 1), ("a", "d1", 2), ("b", "d1", 2), ("b", "d0", 1), ("b", "d1", 5)]
    rows += [(name, "d0", row) for name in "ab" for row in range(10, 40)] + [("b", "d0", 1)]
    table = pd.DataFrame([(c, s, d, s, r) for s in ("train", "test") for c, d, r in rows])
    table.to_csv(folder / "split.csv", index=False, header=["client", "split", "domain", "source", "row"])
    return saved(path=str(folder / "split.csv"))(data)


@pytest.mark.parametrize("name", [*EVERY, "saved"])
def test_copies_are_known_after_every_change_and_when_all_are_pooled(name, tmp_path):
    assert EVERY.keys() == {change.__name__ for change in CATALOG}
    names = ("NV", "MEL", "BCC", "AKIEC", "VASC", "DF", "BKL")
    data = replace(numbered(70, 63, classes=7), class_names=names)
    made = overlapping(data, tmp_path) if name == "saved" else EVERY[name](data)
    for whole in (made, repeat()(made), repeat()(truncate()(repeat()(made)))):
        for view in (whole, whole.pool(), whole.to(torch.device("cpu"))):
            parts = {client.name: client.train for client in view.clients}
            numbers = np.concatenate(list(number_samples(parts).values()))
            values = np.array(held(view))  # equal exactly where samples are the same one
            assert len(np.unique(numbers)) == len(np.unique(values)) == len(np.unique(np.c_[numbers, values], axis=0))
            assert count_copies(parts) == np.unique(values, return_counts=True)[1].max()


def test_samples_of_many_numbers_are_copies_where_they_are_equal_unless_they_are_blank():
    x = np.random.default_rng(0).integers(0, 255, (4, 1, 6, 6)).astype(np.uint8)
    x[2:] = 7
    again, few = x.copy(), np.zeros((4, 31), np.float32)
    parts = {name: Samples(x=torch.from_numpy(x), y=torch.arange(4)) for name, x in (("a", x), ("b", again))}
    numbers = number_samples(parts | {"c": Samples(x=torch.from_numpy(few), y=torch.arange(4))})
    assert [len(set(each)) for each in numbers.values()] == [4, 4, 4]
    assert (numbers["a"] == numbers["b"]).tolist() == [True, True, False, False]
    assert not set(numbers["c"]) & set(numbers["a"])
    assert count_copies({}) == 0


# Draws for testing


@pytest.mark.parametrize(
    ("counts", "fraction", "wanted"),
    [
        ({0: 50, 3: 20, 7: 5}, 0.2, {0: 10, 3: 4, 7: 1}),
        ({0: 1, 1: 2, 2: 3}, 0.001, {0: 0, 1: 1, 2: 1}),
        ({0: 1, 1: 2, 2: 3}, 0.5, {0: 0, 1: 1, 2: 2}),
        ({0: 1, 1: 2, 2: 3}, 0.999, {0: 0, 1: 1, 2: 2}),
    ],
)
def test_every_class_gives_its_share_by_its_stream_and_every_place_is_in_one_of_both(counts, fraction, wanted):
    y = np.random.default_rng(0).permutation(np.repeat(list(counts), list(counts.values())))
    rest, drawn = split_stratified(y, fraction, stream(0, "test", "a"))
    assert sorted([*rest, *drawn]) == list(range(len(y)))
    assert [list(rest), list(drawn)] == [sorted(rest), sorted(drawn)]
    assert {label: int((y[drawn] == label).sum()) for label in counts} == wanted
    again, other = (split_stratified(y, fraction, stream(0, "test", name))[1].tolist() for name in ("a", "b"))
    assert again == drawn.tolist()
    assert again != other or len(y) < 10


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, float("nan")])
def test_a_fraction_lies_between_0_and_1(fraction):
    with pytest.raises(UsageError, match=r"test_fraction=.*: must lie between 0 and 1"):
        split_stratified(np.zeros(3, dtype=np.int64), fraction, stream(0, "test", "a"))


def test_masks_are_distributed_without_classes_of_samples():
    data = nuclei()
    parts = iid(clients=3)(data)
    masks = [y.numpy().tobytes() for client in parts.clients for y in client.train.y]
    assert sorted(masks) == sorted(y.numpy().tobytes() for client in data.clients for y in client.train.y)
    assert parts.check().task == data.task
    with pytest.raises(UsageError, match=r"dirichlet\(clients=3\) distributes samples by their class, and for segment"):
        dirichlet(clients=3, alpha=1.0)(data)
