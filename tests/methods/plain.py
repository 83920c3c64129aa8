"""A plain PyTorch federation to compare methods with: clients of unequal size, float64, written-out loops."""

import numpy as np
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.utils.random_streams import stream

SIZES, SEED, LR, BATCH = {"a": 12, "b": 7}, 6, 0.1, 4
SHARES = {name: size / sum(SIZES.values()) for name, size in SIZES.items()}


def network(shape=(1, 4, 4), classes=3):
    return nn.Sequential(
        nn.Conv2d(shape[0], 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, classes)
    ).double()


def data(sizes=None, shape=(1, 4, 4)):
    rng = np.random.default_rng(0)
    clients = {}
    for shift, (name, size) in enumerate((sizes or SIZES).items()):
        x, y = rng.normal(shift, 1 + shift, (size, *shape)), np.arange(size) % 3
        clients[name] = (x, y, x[:4], y[:4])
    return federation(clients)


def trial(method, model=network, clients=None, **settings):
    chosen = {
        "rounds": 9, "work": Work(batch_size=BATCH, epochs=1), "evaluate_every": 99, "optimizer": SGD(lr=LR),
    }  # fmt: skip
    return Trial(method, model, clients or data(), Settings(**chosen | settings), SEED)


def advance(*trials, rounds=1):
    """Take ``rounds`` rounds of each of ``trials``."""
    for running in trials:
        for _ in range(rounds):
            running.advance()


def passes(client, *numbers):
    """Yield inputs and labels of the batches of a client's passes ``numbers``."""
    for number in numbers:
        order = torch.from_numpy(stream(SEED, "order", client.name, number).permutation(len(client.train)))
        for index in order.split(BATCH):
            yield client.train.x[index], client.train.y[index]


def batches(client, number):
    """Yield inputs and labels of the batches of pass ``number`` of a client of :func:`data`."""
    return passes(data().client(client), number)


def loaded_with(state, model=network):
    """A network in training that holds a copy of ``state``."""
    made = model()
    made.load_state_dict(state)
    return made.train()


def step(sgd, loss):
    sgd.zero_grad()
    loss.backward()
    sgd.step()


def average(models, sizes, kept=()):
    """Give all ``models`` their mean under ``sizes``, but for entries whose names begin with ``kept``; return it."""
    shared = mean([copied(model) for model in models.values()], sizes.values())
    for model in models.values():
        model.load_state_dict({name: x for name, x in shared.items() if not name.startswith(kept)}, strict=False)
    return shared


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def parameters(model):
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def train(model, client, number, extra=lambda model: 0.0, still=()):
    """Take the client's pass ``number`` of plain gradient steps on its loss and ``extra(model)``.

    Parameters whose names begin with ``still`` stay.
    """
    for x, y in batches(client, number):
        loss = nn.functional.cross_entropy(model(x), y) + extra(model)
        moving = [parameter for name, parameter in model.named_parameters() if not name.startswith(tuple(still))]
        for parameter, grad in zip(moving, torch.autograd.grad(loss, moving), strict=True):
            parameter.data -= LR * grad
    return model


def mean(states, weights):
    """The weighted mean of states, whose counters are rounded."""
    weights = [*weights]
    total = sum(weights)
    made = {}
    for name, like in states[0].items():
        value = sum(weight / total * state[name].double() for weight, state in zip(weights, states, strict=True))
        made[name] = value.to(like.dtype) if like.is_floating_point() else value.round().to(like.dtype)
    return made


def largest_difference(found, expected):
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in expected.items())
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())


def vector_network(shape=(4,), classes=4):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, classes)).double()


def deep_network(shape=(4,), classes=3):
    layers = nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, classes)
    return nn.Sequential(*layers).double()


def small_network(shape=(4,), classes=4):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.Tanh(), nn.Linear(5, classes)).double()


def paired_vectors(sizes, other="", sign=1, shift=3):
    """Vectors ``[N, 4]`` of clients of two looks, ``b`` and ``d`` and all others; ``other`` has class 3 and no 0."""
    rng, clients = np.random.default_rng(0), {}
    for name, size in sizes.items():
        y, far = np.arange(size) % 3 + (name == other), name in "bd"
        x = rng.normal(shift * far, 1, (size, 4)) * (sign if far else 1) + y[:, None]
        clients[name] = (x, y, x, y)
    return federation(clients)


def skewed_vectors():
    """Vectors ``[N, 4]``: client ``a`` has classes 0, 1 and 2, client ``b`` has 1 and 3, unequally often."""
    rng = np.random.default_rng(0)
    labels = {"a": np.arange(12) % 3, "b": 1 + 2 * (np.arange(10) % 3 > 0)}
    clients = {}
    for shift, (name, y) in enumerate(labels.items()):
        x = rng.normal(shift, 1 + shift, (len(y), 4))
        clients[name] = (x, y, x, y)
    return federation(clients)
