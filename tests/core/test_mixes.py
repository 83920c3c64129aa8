"""Mixes of uploads by entry and by value, of a method that is not fedshift's, on every engine and across machines."""

import numpy as np
import pytest
import torch

from fedshift.core.kernel import broadcast
from fedshift.core.method import Method
from fedshift.core.mixes import Mixes
from fedshift.core.rule import Folded, Rule
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.methods import plain
from tests.methods.others import layer_mixes


def draw(shape, seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def test_an_entry_is_mixed_by_its_own_weights_by_one_for_each_value_or_by_those_of_all_others():
    uploads = tuple({name: draw((2, 3), 10 * k + i) for i, name in enumerate("abcd")} for k in range(4))
    row, whole = draw(4, 100).softmax(0), draw((4, 2, 3), 101).softmax(0)
    mixed = Mixes(uploads=uploads, weights={"me": {"a": row, "b": whole, "": torch.eye(4)[2].double()}}).mix("me")
    stacked = {name: np.stack([upload[name].numpy() for upload in uploads]) for name in "abcd"}
    assert np.abs(mixed["a"].numpy() - np.einsum("k,kij->ij", row.numpy(), stacked["a"])).max() <= 1e-15
    assert np.abs(mixed["b"].numpy() - np.einsum("kij,kij->ij", whole.numpy(), stacked["b"])).max() <= 1e-15
    for name in "cd":
        assert (mixed[name] - uploads[2][name]).abs().max() <= 1e-15


def test_entries_without_weights_and_clients_without_a_mix_load_the_servers():
    mixes = Mixes(uploads=({"a": torch.ones(2), "b": torch.ones(2)},), weights={"me": {"a": torch.ones(1)}})
    assert mixes.mix("me").keys() == {"a"}
    assert mixes.mix("you") == {}


def test_counters_are_rounded_and_equal_values_stay_what_they_are():
    third = torch.full((2, 3), 1 / 3, dtype=torch.float32)
    uploads = tuple({"n": torch.tensor([k, 2 * k]), "w": third} for k in range(3))
    weights = {"n": torch.full((3, 2), 1 / 3, dtype=torch.float64), "w": draw((3, 2, 3), 0).softmax(0)}
    mixed = Mixes(uploads=uploads, weights={"me": weights}).mix("me")
    assert mixed["n"].tolist() == [1, 2]
    assert mixed["n"].dtype == torch.int64
    assert torch.equal(mixed["w"], third)


def test_mixes_are_kept_and_restored_whole():
    uploads = tuple({"a": draw((2,), k), "b": draw((), k)} for k in range(2))
    weights = {"y/a": {"": draw(2, 5)}, "y": {"a": draw((2, 2), 6), "b": draw(2, 7), "a/b": draw(2, 8)}}
    again = Mixes.unflatten(Mixes(uploads=uploads, weights=weights).flatten())
    assert all(map(is_equal, again.uploads, uploads))
    assert again.weights.keys() == weights.keys()
    assert all(is_equal(again.weights[client], rows) for client, rows in weights.items())


def test_each_client_starts_each_layer_from_its_own_mix_of_the_uploads():
    running = plain.trial(layer_mixes())
    running.advance()
    uploads = running.server.mixes.uploads
    for me, client in enumerate(plain.SIZES):
        loaded = broadcast(running.server, client).shared
        for name, tensor in loaded.items():
            values = np.stack([upload[name].double().numpy().ravel() for upload in uploads])
            near = np.exp(-np.linalg.norm(values - values[me], axis=1))
            weights = near / near.sum() if name in running.plan.trained else list(plain.SHARES.values())
            assert np.abs(np.average(values, axis=0, weights=weights) - tensor.numpy().ravel()).max() <= (
                1e-12 if tensor.is_floating_point() else 0.5
            ), name


class Wrong(Rule):
    aggregates = mixes = True

    def __init__(self, **folded):
        self.folded = folded

    def fold(self, server):
        return Folded(entries=server.entries, **self.folded)


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ({"head": torch.ones(2) / 2}, "mixes entry 'head' of client 'a', which clients do not load: name entries"),
        ({"": torch.ones(3) / 3}, r"mixes entry '' of client 'a' with weights of shape \(3,\): give \(2,\) or \(2,\)"),
        ({"1.bias": torch.ones(2, 2) / 2}, r"with weights of shape \(2, 2\): give \(2,\) or \(2, 3\)"),
        ({"": torch.ones(2)}, "with weights that do not sum to one over the 2 uploads: normalize them"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_entry_and_client(weights, why):
    with pytest.raises(UsageError, match=rf"method 'fedavg': Wrong .*{why}"):
        plain.trial(Method().with_rule(Wrong(mixes={"a": weights}))).advance()


class Undeclared(Wrong):
    mixes = False


@pytest.mark.parametrize(("field", "flag"), [("kept", "keeps"), ("mixes", "mixes")])
def test_what_is_kept_or_mixed_without_a_declaration_is_refused(field, flag):
    value = torch.ones(2) / 2 if field == "kept" else {"": torch.ones(2) / 2}
    why = rf"Undeclared {flag} 'a' without informing sites: declare {flag} = True in Undeclared"
    with pytest.raises(UsageError, match=why):
        plain.trial(Method().with_rule(Undeclared(**{field: {"a": value}}))).advance()
