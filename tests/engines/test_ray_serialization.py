"""Values wrapped for Ray come out as they were, in writable memory of their own."""

import pickle
import threading

import pytest
import torch
from torch import nn

from fedshift.engines.ray import deserialize, serialize

TENSORS = {
    "floats": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "low": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "none": torch.empty(0, 3, dtype=torch.float64),
    "turned": torch.arange(6).reshape(2, 3).t(),
    "repeated": torch.tensor([2.0]).expand(4),
    "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
}


def carried(value):
    """What another process gets: memory that it must not write to."""
    packed, raw = serialize(value)
    copies = [each.copy() for each in raw]
    for each in copies:
        each.flags.writeable = False
    return deserialize((packed, copies))


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_keeps_type_shape_and_bits(name):
    tensor = TENSORS[name]
    found = carried({"it": tensor})["it"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    found.zero_()
    assert found.is_contiguous()


def test_a_tensor_in_two_places_travels_once_and_is_one_again():
    value = [TENSORS["floats"], {"same": TENSORS["floats"]}]
    assert len(serialize(value)[1]) == 1
    found = carried(value)
    assert found[0] is found[1]["same"]


def test_the_rest_is_pickled_without_the_tensors():
    net = nn.Linear(300, 300)
    packed, raw = serialize(net)
    assert len(packed) < 2000
    assert sorted(each.nbytes for each in raw) == [300 * 4, 300 * 300 * 4]
    assert torch.equal(carried(net).weight, net.weight)


def test_what_cannot_be_pickled_is_told():
    with pytest.raises((TypeError, pickle.PicklingError), match="cannot pickle"):
        serialize(threading.Lock())
