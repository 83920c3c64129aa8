"""Division of rows into a network's inputs: values and types by hand, and which networks can be given which inputs."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

from fedshift.nn.several_inputs import Input, find_inputs, take_inputs
from fedshift.utils.errors import UsageError

INPUTS = (
    Input(name="image", shape=(1, 2, 2), kind="pixels"), Input(name="site", shape=(), kind="integers"),
    Input(name="mask", shape=(2,), kind="bools"),
)  # fmt: skip
ROWS = torch.tensor([[0.5, -1.0, 0.25, 1.0, 7.0, 0.0, 1.0], [1.0, 2.0, 3.0, 4.0, 2.0**24, 1.0, 1.0]])


def network(forward):
    """A network that returns what its forward takes, by name."""
    return type("Network", (nn.Module,), {"forward": forward})()


def by_name(self, mask, image, site=None, other=None):
    return {"image": image, "site": site, "mask": mask}


def in_order(self, a, b, c):
    return {"image": a, "site": b, "mask": c}


def passed_on(self, **given):
    return given


def passed_on_in_order(self, *given):
    return dict(zip(("image", "site", "mask"), given, strict=True))


@pytest.mark.parametrize("forward", [by_name, in_order, passed_on, passed_on_in_order])
def test_a_network_is_given_its_inputs(forward):
    taken = take_inputs(network(forward), INPUTS)
    found = taken(ROWS.double())
    assert found["image"].tolist() == [[[[0.5, -1.0], [0.25, 1.0]]], [[[1.0, 2.0], [3.0, 4.0]]]]
    assert found["site"].tolist() == [7, 2**24]
    assert found["mask"].tolist() == [[False, True], [True, True]]
    assert [each.dtype for each in found.values()] == [torch.float64, torch.int64, torch.bool]
    assert find_inputs(copy.deepcopy(taken)) == INPUTS
    again = taken(**found) if forward in (by_name, passed_on) else taken(*found.values())
    assert all(again[name] is each for name, each in found.items())  # the inputs themselves, as well
    linear = take_inputs(nn.Bilinear(2, 1, 1), (INPUTS[2], INPUTS[1]))
    assert find_inputs(pickle.loads(pickle.dumps(linear))) == (INPUTS[2], INPUTS[1])
    assert linear.state_dict().keys() == {"weight", "bias"}


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x,
        lambda self, image, site: image,
        lambda self, image, site, masks: image,  # a name is misspelled, and order is not to be guessed
        lambda self, image, site, mask, age: image,
        lambda self, a=None, b=None, c=None, d=None: a,
        lambda self, image, *rest: image,
        lambda self, image, **rest: image,
    ],
)
def test_a_network_that_takes_others_is_refused_with_both_names(forward):
    with pytest.raises(
        UsageError, match=r"have the inputs 'image', 'site', 'mask', and the network's forward takes "
    ) as e:
        take_inputs(network(forward), INPUTS)
    assert re.search(r"takes (x|image|a=None)", str(e.value))
