"""Streams, states and errors."""

import random

import numpy as np
import torch

from fedshift.utils.errors import FedshiftError, UsageError, unknown_name
from fedshift.utils.random_streams import key_bits, stream, torch_stream
from fedshift.utils.state import (
    add_prefix,
    clone,
    entries_under,
    group_entries,
    is_equal,
    join_states,
    nbytes,
    pick,
    split_state,
)


def test_streams_depend_on_every_part_of_the_key_and_on_nothing_else():
    keys = [(0, "order", "a", 0), (1, "order", "a", 0), (0, "init", "a", 0), (0, "order", "b", 0), (0, "order", "a", 1)]
    draws = [stream(*key).integers(0, 2**62) for key in keys]
    assert len(set(draws)) == len(keys)
    assert [stream(*key).integers(0, 2**62) for key in keys] == draws
    assert key_bits(0, "a", "b", 1) != key_bits(0, "a", "b,1")
    assert key_bits(0, "x", 1) != key_bits(0, "x", "1")


def test_a_stream_is_numpys_generator_of_its_key():
    numpys = np.random.Generator(np.random.Philox(key=key_bits(3, "order", "mnist", 7)))
    ours = stream(3, "order", "mnist", 7)
    for draw in (lambda one: one.permutation(40), lambda one: one.normal(size=5), lambda one: one.integers(0, 9, 5)):
        assert np.array_equal(draw(ours), draw(numpys))


def test_streams_are_the_same_in_every_process_and_version():
    # A change here breaks the resuming of runs that exist; BLAKE2b and Philox are fixed standards.
    assert key_bits(0, "order", "mnist", 3) == 115695801221363703421688310534719538579
    assert stream(0, "order", "mnist", 3).permutation(8).tolist() == [6, 0, 7, 1, 3, 5, 4, 2]
    assert stream(0, "order", "mnist").permutation(8).tolist() == [6, 2, 3, 7, 1, 4, 5, 0]


def test_a_stream_keys_the_generators_of_torch_python_and_numpy_and_restores_them():
    def draw():
        return float(torch.rand(())), random.random(), np.random.normal()  # noqa: NPY002

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    np.random.normal()  # noqa: NPY002 - the second of the pair that it draws is kept for later
    before, drawn = (random.getstate(), repr(np.random.get_state())), []  # noqa: NPY002
    expected = torch.get_rng_state()
    for seed in (1, 1, 2):
        with torch_stream(seed, "init"):
            drawn.append(draw())
            with torch_stream(seed, "item"):
                draw()
            drawn[-1] += draw()
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])
    assert (random.getstate(), repr(np.random.get_state())) == before  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), expected)


def test_state_arithmetic():
    state = {"a.w": torch.ones(2, 3), "b": torch.tensor(4)}
    assert pick(state, ["b"]) == {"b": state["b"]}
    assert entries_under("x", add_prefix("x", state) | {"y/a.w": torch.zeros(1)}) == state
    names = ["a", "a/b", "a%2Fb", "b"]  # of clients, with which entries' names must not mix
    joined = join_states(names, states := [{"b/c": torch.tensor(n), "c": torch.tensor(-n)} for n in range(4)])
    assert len(joined) == 8
    assert group_entries(joined) == dict(zip(names, states, strict=True))
    assert list(split_state(names, joined)) == states
    assert nbytes(state) == 2 * 3 * 4 + 8
    copy = clone(state)
    assert is_equal(copy, state)
    copy["a.w"][0, 0] = 2
    assert not is_equal(copy, state)
    assert not is_equal({"a.w": state["a.w"]}, state)


def test_an_unknown_name_comes_with_the_nearest_and_the_allowed():
    error = unknown_name("method", "fedbm", ["fedbn", "fedavg"])
    assert str(error) == "unknown method 'fedbm': did you mean 'fedbn'? allowed are fedavg, fedbn"
    assert "mean" not in str(unknown_name("method", "zzzzzz", ["fedbn"]))
    assert isinstance(error, FedshiftError)
    assert (UsageError.exit_code, FedshiftError.exit_code) == (2, 1)
