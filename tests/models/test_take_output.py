"""Networks that return several outputs, and the expressions that name a factory with options or one of them."""

import copy
import pickle
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedshift.core.network import forward
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.experiments.factory import resolve_model
from fedshift.methods.fedavg import fedavg
from fedshift.models import MODELS, describe_factory, make_network, take_output
from fedshift.models.digits import small_cnn
from fedshift.models.unet import unet_small
from fedshift.utils.errors import UsageError

SHAPE = (3, 8, 8)
Pair = namedtuple("Pair", "features logits")


class Several(nn.Module):
    """Features and scores, put together by ``form``."""

    def __init__(self, classes, form=dict):
        super().__init__()
        self.body, self.head, self.form = make_body(), nn.Linear(8, classes), form

    def forward(self, x):
        features = self.body(x)
        return self.form(features=features, logits=self.head(features))


def make_body():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8))


def several(shape, classes, *, form=dict):
    return Several(classes, form)


def as_tuple(**outputs):
    return tuple(outputs.values())


@pytest.mark.parametrize(
    ("form", "output"), [(dict, "logits"), (SimpleNamespace, "logits"), (Pair, "logits"), (Pair, 1), (as_tuple, -1)]
)
def test_a_chosen_output_takes_the_place_of_all(form, output):
    x = torch.randn(4, *SHAPE)
    network = Several(5, form).eval()
    expected = network.head(network.body(x))
    names = list(network.state_dict())
    changed = take_output(network, output)
    assert changed is network
    assert torch.equal(changed(x), expected)
    assert list(changed.state_dict()) == names
    again = pickle.loads(pickle.dumps(take_output(Several(5, dict), "logits")))
    assert torch.equal(again.eval()(x), again.head(again.body(x)))
    assert torch.equal(copy.deepcopy(changed)(x), expected)


@pytest.mark.parametrize(
    ("form", "output", "said"),
    [
        (dict, "scores", "returned a dict without an output 'scores': it has 'features', 'logits'"),
        (dict, 0, "without an output 0: it has 'features', 'logits'"),
        (as_tuple, 2, "returned a tuple without an output 2: it has 2 of them, from 0"),
        (as_tuple, "logits", "without an output 'logits': it has 2 of them"),
        (lambda logits, features: logits, "logits", "returned a Tensor .*: leave take_output out where it is a tensor"),
        (dict, "form", "without an output 'form'"),
    ],
)
def test_an_output_that_is_not_there_is_refused_with_those_that_are(form, output, said):
    network = make_network(take_output(partial(several, form=form), output), SHAPE, 3)
    with pytest.raises(UsageError, match=said):
        prepare(fedavg(), network, optimizer=SGD(lr=0.1), sample=torch.zeros(1, *SHAPE))


def test_the_message_about_several_outputs_is_one_that_works():
    network = Several(3, as_tuple)
    with pytest.raises(UsageError, match=r"take_output\(network, 0\)"):
        prepare(fedavg(), network, optimizer=SGD(lr=0.1), sample=torch.zeros(1, *SHAPE))
    plan = prepare(fedavg(), take_output(network, 1), optimizer=SGD(lr=0.1), sample=torch.zeros(1, *SHAPE))
    assert forward(plan, plan.initial, torch.zeros(2, *SHAPE)).shape == (2, 3)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (small_cnn, "small-cnn"),
        (several, f"{__name__}:several"),
        (partial(unet_small, width=4), "unet-small(width=4)"),
        (take_output(several, "logits"), f"take_output({__name__}:several, output='logits')"),
        (take_output(partial(several, form=None), 0), f"take_output({__name__}:several(form=None), output=0)"),
        (take_output(small_cnn, "a-b"), "take_output(small-cnn, output='a-b')"),
    ],
)  # fmt: skip
def test_factories_and_their_expressions(factory, text):
    assert MODELS.write(factory) == describe_factory(factory) == text
    assert MODELS.write(resolve_model(text, SHAPE)) == text


def test_options_reach_the_factory_and_unknown_ones_are_named():
    assert MODELS.parse("unet_small( width=4 )")(SHAPE, 2).out.in_channels == 4
    for text, said in (
        ("unet-small(wide=4)", "unknown argument 'wide'; unet_small takes .*width=8"),
        ("unet-small(4)", "is not a name"),
        ("take_output(unet-small)", "argument.*output"),
        ("take_output(small-cn, output=0)", "small-cn.*small-cnn"),
        ("small-cnn(), small-cnn()", "give one, not 2"),
    ):
        with pytest.raises(UsageError, match=said):
            MODELS.parse(text)
    for factory in (lambda shape, classes: None, partial(several, form=as_tuple), partial(lambda s, c: None)):
        assert MODELS.write(factory) is None
