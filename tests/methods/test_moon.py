"""MOON equals a plain PyTorch loop with two more models in evaluation mode."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.moon import moon
from fedshift.utils.random_streams import stream
from fedshift.utils.state import clone, is_equal

SIZES, SEED, LR, MU, TAU = {"a": 12, "b": 10}, 6, 0.1, 2.0, 0.4


def network(shape=(4,), classes=3):
    return nn.Sequential(
        nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, classes)
    ).double()


def data():
    rng = np.random.default_rng(0)
    arrays = {name: (rng.normal(s, 1 + s, (n, 4)), np.arange(n) % 3) for s, (name, n) in enumerate(SIZES.items())}
    return federation({name: (x, y, x, y) for name, (x, y) in arrays.items()})


def trial(method, rounds=2, **changes):
    given = {"work": Work(batch_size=4, epochs=2), "optimizer": SGD(lr=LR), "evaluate_every": 99, **changes}
    return Trial(method, network, data(), Settings(rounds=rounds, **given), SEED)


def load(start, shared):
    model = network()
    model.load_state_dict({**start, **shared})
    return model


@pytest.mark.parametrize("base", [fedavg(), fedbn()], ids=lambda method: method.name)
def test_rounds_equal_a_plain_loop(base):
    running = trial(moon(base, mu=MU, tau=TAU))
    kept = "1." if base.name == "fedbn" else "nothing"
    shared = clone(running.plan.initial)
    previous = {name: clone(shared) for name in SIZES}
    for number in range(2):
        running.advance()
        for client in data().clients:
            x, y, last = client.train.x, client.train.y, previous[client.name]
            sent = {name: tensor for name, tensor in shared.items() if not name.startswith(kept)}
            model, server, before = load(last, sent), load(last, sent).eval(), load(last, {}).eval()
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            for epoch in (2 * number, 2 * number + 1):
                order = torch.from_numpy(stream(SEED, "order", client.name, epoch).permutation(len(y)))
                for batch in order.split(4):
                    z = model[:5](x[batch])
                    pull, push = (F.cosine_similarity(z, other[:5](x[batch]).detach()) for other in (server, before))
                    contrast = -torch.log((pull / TAU).exp() / ((pull / TAU).exp() + (push / TAU).exp()))
                    sgd.zero_grad()
                    (F.cross_entropy(model[5](z), y[batch]) + MU * contrast.mean()).backward()
                    sgd.step()
            previous[client.name] = clone(model.state_dict())
        for name, tensor in shared.items():
            mean = sum(previous[client][name].double() * size / 22 for client, size in SIZES.items())
            shared[name] = mean if tensor.is_floating_point() else mean.round().long()
    for name, tensor in running.server.shared.items():
        assert (tensor - shared[name]).abs().max() <= 1e-9, name
    for client in SIZES:
        for name, tensor in running.clients[client].memory[0].items():
            assert (tensor - previous[client][name]).abs().max() <= 1e-9, (client, name)


def test_the_servers_entries_are_not_written_into():
    running = trial(moon(mu=MU))
    running.advance()
    server, before = running.server, copy.deepcopy(running.server.shared)
    running.advance()
    assert is_equal(server.shared, before)
