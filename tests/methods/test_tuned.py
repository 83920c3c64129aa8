"""A learning rate, momentum and weight decay of a method's own, against torch.optim; FedAvg with equal weights."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD, AdamW
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.tuned import tuned
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from fedshift.utils.state import is_equal

SIZES = {"a": 10, "b": 6}


def data():
    rng = np.random.default_rng(0)
    arrays = {name: (rng.normal(shift, 1, (n, 3)), np.arange(n) % 2) for shift, (name, n) in enumerate(SIZES.items())}
    return federation({name: (x, y, x, y) for name, (x, y) in arrays.items()})


def trial(method, optimizer=None):
    settings = Settings(
        rounds=2, work=Work(batch_size=4, epochs=1), optimizer=optimizer or SGD(lr=0.5), evaluate_every=9
    )
    return Trial(method, lambda shape, classes: nn.Linear(3, classes).double(), data(), settings, seed=2)


def mean_of_torch(initial, weights, **sgd):
    """One round of clients that train with ``torch.optim.SGD(**sgd)``, averaged under ``weights``."""
    total = {name: torch.zeros_like(tensor) for name, tensor in initial.items()}
    for client in data().clients:
        model = nn.Linear(3, 2).double()
        model.load_state_dict(initial)
        optimizer = torch.optim.SGD(model.parameters(), **sgd)
        for batch in torch.from_numpy(stream(2, "order", client.name, 0).permutation(len(client.train))).split(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(client.train.x[batch]), client.train.y[batch]).backward()
            optimizer.step()
        for name, tensor in model.state_dict().items():
            total[name] += weights[client.name] * tensor
    return total


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
    for name, tensor in mean_of_torch(running.plan.initial, weights, **sgd).items():
        assert (running.server.shared[name] - tensor).abs().max() <= 1e-14


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
