"""A learning rate, momentum and weight decay of a method's own, against torch.optim; FedAvg with equal weights."""

import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD, AdamW
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.tuned import tuned
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.methods import plain
from tests.methods.plain import copied, data, largest_difference, loaded_with, mean, passes, step

DATA = data({"a": 10, "b": 6}, (3,))


def linear(shape=(3,), classes=3):
    return nn.Linear(3, classes).double()


def trial(method, optimizer=None):
    return plain.trial(method, linear, DATA, optimizer=optimizer or SGD(lr=0.5))


def mean_of_torch(initial, weights, **sgd):
    """One round of clients that train with ``torch.optim.SGD(**sgd)``, averaged under ``weights``."""
    states = []
    for client in DATA.clients:
        model = loaded_with(initial, linear)
        optimizer = torch.optim.SGD(model.parameters(), **sgd)
        for x, y in passes(client, 0):
            step(optimizer, nn.functional.cross_entropy(model(x), y))
        states.append(copied(model))
    return mean(states, weights.values())


@pytest.mark.parametrize(
    ("method", "weights", "sgd"),
    [
        (tuned(lr=0.2), {"a": 10 / 16, "b": 6 / 16}, {"lr": 0.2}),
        (tuned(momentum=0.9), {"a": 10 / 16, "b": 6 / 16}, {"lr": 0.5, "momentum": 0.9}),
        (tuned(lr=0, weight_decay=0.1), {"a": 10 / 16, "b": 6 / 16}, {"lr": 0.0, "weight_decay": 0.1}),
        (
            tuned(lr=0.1, momentum=0.5, weight_decay=0.3), {"a": 10 / 16, "b": 6 / 16},
            {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.3},
        ),
        (tuned(tuned(lr=0.2), momentum=0.9), {"a": 10 / 16, "b": 6 / 16}, {"lr": 0.2, "momentum": 0.9}),
        (fedavg(weighting="uniform"), {"a": 0.5, "b": 0.5}, {"lr": 0.5}),
        (tuned(fedavg(weighting="uniform"), lr=0.2), {"a": 0.5, "b": 0.5}, {"lr": 0.2}),
    ],
    ids=lambda each: getattr(each, "name", None),
)  # fmt: skip
def test_clients_train_and_weigh_as_asked(method, weights, sgd):
    running = trial(method)
    running.advance()
    assert largest_difference(running.server.shared, mean_of_torch(running.plan.initial, weights, **sgd)) <= 1e-14


def test_other_settings_stay_the_experiments():
    one, other = trial(tuned(lr=0.01), AdamW(lr=0.5, beta1=0.7)), trial(fedavg(), AdamW(lr=0.01, beta1=0.7))
    for each in (one, other):
        each.advance()
    assert is_equal(one.server.shared, other.server.shared)


def test_nothing_given_changes_nothing():
    assert tuned() == fedavg()
    method = fedbn()
    assert tuned(method) is method


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tuned(tuned(lr=0.1), lr=0.2), "sets lr already; set it once"),
        (
            lambda: trial(tuned(momentum=0.9), AdamW(lr=0.1)),
            "sets momentum, which AdamW lacks: its fields are .*weight_decay",
        ),
        (lambda: trial(tuned(lr=-1.0)), "learning rate lr=-1: it must be a number of 0 or more"),
        (lambda: trial(tuned(weight_decay=-1.0)), "weight_decay=-1 is negative"),
    ],
)
def test_what_cannot_be_set_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()
