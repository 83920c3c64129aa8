"""Aggregation of plain dictionaries: against NumPy written out, against selection by type, and every refusal."""

from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedshift.aggregation import FedBNAggregation, weighted_mean
from fedshift.utils.errors import UsageError

SHAPES = {
    "conv.weight": (2, 3), "bn.weight": (2,), "bn.bias": (2,), "bn.running_mean": (2,), "bn.running_var": (2,),
    "bn.num_batches_tracked": (), "fc.weight": (4, 2),
}  # fmt: skip
WEIGHTS = {"ann": 26, "bob": 17, "cid": 33}


def model(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {
        name: np.array(rng.integers(0, 100)) if name.endswith("tracked") else rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def models(names=WEIGHTS):
    return {name: model(seed) for seed, name in enumerate(names)}


def as_torch(states):
    return {client: {name: torch.from_numpy(value) for name, value in m.items()} for client, m in states.items()}


# The mean


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_the_mean_equals_the_formula_written_out_in_float64(weights, seed):
    values = np.random.default_rng(seed).normal(size=(len(weights), 3, 2))
    expected = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
    states = {client: {"w": value, "h": value.astype(np.float32)} for client, value in enumerate(values)}
    folded = weighted_mean(states, dict(enumerate(weights)))
    assert np.abs(folded["w"] - expected).max() <= 1e-13
    assert folded["h"].dtype == np.float32
    assert np.abs(folded["h"] - expected).max() <= 1e-6


@given(st.permutations(list(WEIGHTS)), st.permutations(list(WEIGHTS)))
def test_insertion_order_changes_no_bit(first, second):
    states = {name: {"w": np.float64([10.0**seed, 0.1 * seed])} for seed, name in enumerate(WEIGHTS)}
    one, other = (
        weighted_mean({name: states[name] for name in order}, {name: WEIGHTS[name] for name in reversed(order)})
        for order in (first, second)
    )
    assert one["w"].tobytes() == other["w"].tobytes()


def test_integer_keys_are_added_up_in_numerical_order():
    # (1e16 + 1) - 1e16 is 0 in float64, and (1e16 - 1e16) + 1 is 1: clients 1, 2, 10 in this order, and not 1, 10, 2.
    states = {client: {"w": np.float32(value)[None]} for client, value in ((10, -1e16), (2, 1.0), (1, 1e16))}
    assert weighted_mean(states, dict.fromkeys(states, 1))["w"] == 0


def test_sums_run_in_float64():
    states = {client: {"w": np.float32([1 + client % 2 * 2**-22])} for client in range(1000)}
    assert weighted_mean(states, dict.fromkeys(states, 1))["w"] == np.float32(1 + 2**-23)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(-(2**40), 2**40)), min_size=1, max_size=6))
def test_integers_stay_integers_rounded_to_the_nearest(pairs):
    states = {client: {"n": np.array(value)} for client, (_, value) in enumerate(pairs)}
    weights = {client: weight for client, (weight, _) in enumerate(pairs)}
    exact = Fraction(sum(w * v for w, v in pairs), sum(w for w, _ in pairs))
    for given_states in (states, as_torch(states)):
        folded = weighted_mean(given_states, weights)["n"]
        assert folded.dtype == given_states[0]["n"].dtype
        assert abs(int(folded) - exact) <= Fraction(1, 2) + Fraction(1, 1000)


def test_what_is_equal_everywhere_passes_unchanged_and_permutations_are_the_largest_clients():
    big, mask = np.array([6364136223846793005, 2**53 + 1]), np.float64([0, -np.inf, 0.1])
    states = {
        name: {"big": big, "mask": mask, "order": np.roll(np.arange(5), seed)} for seed, name in enumerate(WEIGHTS)
    }
    for given_states in (states, as_torch(states)):
        folded = weighted_mean(given_states, WEIGHTS)
        for name, value in {**states["cid"]}.items():
            assert np.asarray(folded[name]).tobytes() == value.tobytes()
            assert folded[name] is not given_states["cid"][name]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "int64", "float16", "float32", "float64", ">f4"])
def test_one_client_folds_to_itself_bit_for_bit(dtype):
    value = (np.arange(-3, 4) / 3 if "f" in dtype else np.arange(7)).astype(dtype)
    tensors = [torch.arange(-3, 4).bfloat16() / 3] if dtype == ">f4" else [torch.from_numpy(value)]
    for array in (value, value[::-1], *tensors):
        folded = weighted_mean({"a": {"w": array}}, {"a": 7})["w"]
        assert folded.dtype == array.dtype
        assert (folded == array).all()


def test_torch_equals_numpy():
    states = models()
    folded = weighted_mean(as_torch(states), WEIGHTS)
    for name, value in weighted_mean(states, WEIGHTS).items():
        assert isinstance(value, np.ndarray)
        assert torch.equal(folded[name], torch.from_numpy(value))


def test_parameters_and_fractional_and_zero_weights_are_taken():
    states = {name: {"w": nn.Parameter(torch.full((2,), value))} for name, value in (("a", 1.0), ("b", 3.0))}
    folded = weighted_mean(states, {"a": 0.5, "b": np.float32(0.5)})["w"]
    assert folded.tolist() == [2.0, 2.0]
    assert type(folded) is torch.Tensor
    assert not folded.requires_grad
    assert weighted_mean(states, {"a": 0, "b": 2})["w"].tolist() == [3.0, 3.0]
    kept = FedBNAggregation({"w"}).aggregate(states, {"a": 1, "b": 1}).clients["b"]["w"]
    assert (kept.tolist(), kept.requires_grad) == ([3.0, 3.0], False)


# FedBN


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_normalization_stays_with_its_client_and_the_rest_is_the_mean(kind):
    states = models() if kind == "numpy" else as_torch(models())
    states["bob"] = dict(reversed(states["bob"].items()))
    done = FedBNAggregation().aggregate(states, WEIGHTS)
    total = sum(WEIGHTS.values())
    assert list(done.shared) == ["conv.weight", "fc.weight"]
    assert done.local == {name for name in SHAPES if name.startswith("bn.")}
    for name, shared in done.shared.items():
        expected = sum(WEIGHTS[c] / total * np.asarray(states[c][name], np.float64) for c in sorted(states))
        assert np.abs(np.asarray(shared) - expected).max() <= 1e-7
    assert list(done.clients) == ["ann", "bob", "cid"]
    for client, state in done.clients.items():
        assert list(state) == list(states[client])
        for name, value in state.items():
            wanted = states[client][name] if name.startswith("bn.") else done.shared[name]
            assert type(value) is type(wanted)
            assert value.dtype == wanted.dtype
            assert np.array_equal(np.asarray(value), np.asarray(wanted))


def test_inputs_are_not_modified_and_no_array_is_given_twice():
    states = models()
    before = models()
    for given_states in (states, as_torch(models())):
        done = FedBNAggregation().aggregate(given_states, WEIGHTS)
        everywhere = [done.shared, *done.clients.values(), *given_states.values()]
        places = [value.__array_interface__["data"][0] if isinstance(value, np.ndarray) else value.data_ptr()
                  for m in everywhere for value in m.values()]  # fmt: skip
        assert len(set(places)) == len(places)
        for client, m in before.items():
            for name, value in m.items():
                assert np.array_equal(np.asarray(given_states[client][name]), value)


def test_statistics_only_is_silobn():
    strategy = FedBNAggregation(statistics_only=True)
    done = strategy.aggregate(models(), WEIGHTS)
    assert done.local == {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    assert list(done.shared) == ["conv.weight", "bn.weight", "bn.bias", "fc.weight"]
    assert (strategy.name, FedBNAggregation().name) == ("SiloBN", "FedBN")


def test_exact_names_and_patterns():
    assert FedBNAggregation({"fc.weight"}).local_names(model(0)) == {"fc.weight"}
    both = FedBNAggregation(patterns=["fc"])
    assert both.local_names(model(0)) == SHAPES.keys() - {"conv.weight"}
    assert FedBNAggregation(patterns=["fc"], statistics_only=True).local_names(model(0)) == {
        "bn.running_mean", "bn.running_var", "bn.num_batches_tracked", "fc.weight",
    }  # fmt: skip


# Refusals


@contextmanager
def refused(words):
    with pytest.raises(UsageError) as error:
        yield
    assert not [word for word in words if word not in str(error.value)]


def changed(client="bob", **entry):
    states = models()
    states[client] |= entry
    return states


def without(client, name):
    states = models()
    del states[client][name]
    return states


def conv(value):
    return changed(**{"conv.weight": value})


def filled(bad):
    value = np.zeros((2, 3), np.float32)
    value[1, 2] = bad
    return value


BOB = "entry 'conv.weight' of client 'bob'"
MATRIX = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (conv(np.zeros((3, 2), np.float32)), [BOB, "shape (3, 2)", "'ann' has a NumPy", "shape (2, 3)"]),
        (conv(np.zeros((2, 3))), [BOB, "dtype float64", "'ann' has a NumPy array of dtype float32", "make them equal"]),
        (conv(torch.zeros(2, 3)), [BOB, "is a torch tensor on cpu", "'ann' has a NumPy"]),
        (conv(filled(np.nan)), [BOB, "NaN or infinity", "leave this client out"]),
        (conv(filled(-np.inf)), [BOB, "NaN or infinity"]),
        (changed(**{"bn.running_var": np.float32([np.inf, 1])}), ["'bn.running_var' of client 'bob'", "infinity"]),
        (changed(**{"bn.num_batches_tracked": np.array(-(2**53))}), ["batches_tracked' of client 'bob'", "2**53"]),
        (conv(MATRIX.astype(complex)), [BOB, "dtype complex128", "allowed are", "convert it"]),
        (conv(MATRIX.astype(object)), [BOB, "dtype object"]),
        (conv(MATRIX.astype(np.longdouble)), [BOB, "has dtype", "up to 64 bits"]),
        (conv(MATRIX.astype("S4")), [BOB, "dtype |S4", "up to 64 bits"]),
        (conv(torch.zeros(2, 3, dtype=torch.complex64)), [BOB, "torch.complex64"]),
        (conv(torch.zeros(2, 3).to_sparse()), [BOB, "dense"]),
        (conv(np.ma.masked_array(MATRIX)), [BOB, "MaskedArray", "NumPy array"]),
        (conv(MATRIX.tolist()), [BOB, "is a list", "numpy.asarray"]),
        (changed(extra=MATRIX), ["client 'ann' has no entry 'extra'", "client 'bob' has"]),
        (without("bob", "fc.weight"), ["client 'bob' has no entry 'fc.weight'", "client 'ann' has"]),
        ({**models(), "bob": {3: MATRIX}}, ["client 'bob'", "strings"]),
        ({**models(), "bob": list(models()["bob"].values())}, ["client 'bob'", "dictionary"]),
        ({**models(), "ann": {}}, ["client 'ann'", "dictionary"]),
    ],
)  # fmt: skip
def test_models_that_cannot_be_averaged_are_refused_by_client_and_entry(states, words):
    for call in (weighted_mean, FedBNAggregation().aggregate):
        with refused(words):
            call(states, WEIGHTS)


@pytest.mark.parametrize("other", [torch.zeros(2, 3).double(), torch.zeros(2, 3, device="meta")])
def test_torch_dtypes_and_devices_must_agree(other):
    states = as_torch(models())
    states["bob"]["conv.weight"] = other
    with pytest.raises(
        UsageError, match=f"{BOB} is a torch tensor on (cpu of dtype torch.float64|meta).*, but client 'ann' has"
    ):
        weighted_mean(states, WEIGHTS)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"ann": 1, "bob": 2}, ["client 'cid' has no weight"]),
        ({**WEIGHTS, "dan": 1}, ["client 'dan' has a weight but no model"]),
        ({**WEIGHTS, "bob": -1}, ["client 'bob' has weight -1", "zero or more"]),
        ({**WEIGHTS, "bob": float("nan")}, ["client 'bob' has weight nan", "finite"]),
        ({**WEIGHTS, "bob": float("inf")}, ["client 'bob' has weight inf"]),
        ({**WEIGHTS, "bob": "3"}, ["client 'bob' has weight '3'"]),
        (dict.fromkeys(WEIGHTS, 0), ["'ann', 'bob', 'cid'", "add up to 0.0"]),
        (dict.fromkeys(WEIGHTS, 1e308), ["add up to inf"]),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, words):
    with refused(words):
        FedBNAggregation().aggregate(models(), weights)


def test_no_clients_and_keys_without_order_are_refused():
    with pytest.raises(UsageError, match="client_models is empty"):
        weighted_mean({}, {})
    with pytest.raises(UsageError, match=r"\['a', 1\] cannot be sorted"):
        weighted_mean({"a": model(0), 1: model(1)}, {"a": 1, 1: 1})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local": {"bn.wieght"}}, ["'bn.wieght' matches no entry", "bn.weight"]),
        ({"local": ()}, ["FedBN would keep nothing local", "conv.weight", "weighted_mean"]),
        ({"patterns": ["head"]}, ["'head' matches no entry"]),
        ({"patterns": ["bn", "f"]}, ["'f' matches no entry"]),
        ({"include_layer_norm": True}, ["'layer_norm' matches no entry"]),
    ],
)
def test_what_matches_nothing_is_refused(options, words):
    with refused(words):
        FedBNAggregation(**options).aggregate(models(), WEIGHTS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local": "bn.weight"}, ["one string", "['bn.weight']"]),
        ({"patterns": "bn"}, ["one string", "['bn']"]),
        ({"patterns": ["bn*"]}, ["'bn*' does not consist of words", "no wildcards"]),
        ({"patterns": ["_"]}, ["'_' does not consist of words"]),
        ({"local": {"a"}, "patterns": {"b"}}, ["excludes every other option"]),
        ({"local": {"a"}, "statistics_only": True}, ["excludes every other option"]),
    ],
)
def test_options_that_contradict_are_refused(options, words):
    with refused(words):
        FedBNAggregation(**options)
