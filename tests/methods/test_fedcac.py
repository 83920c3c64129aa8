"""FedCAC equals a plain PyTorch loop that sorts single weights, in rounds of all clients and of some."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.kernel import broadcast
from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedcac import fedcac
from fedshift.utils.state import clone
from tests.methods import plain

SIZES, SEED, LR, BATCH, TAU, BETA, ROUNDS = {"a": 12, "b": 10, "c": 16, "d": 9}, 5, 0.3, 4, 0.4, 3, 4


def network(shape=(4,), classes=3):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.Tanh(), nn.Linear(5, classes)).double()


def data():
    """Two pairs of clients that look alike."""
    rng = np.random.default_rng(0)
    clients = {}
    for name, size in SIZES.items():
        y = np.arange(size) % 3
        x = rng.normal(3 * (name in "bd"), 1, (size, 4)) + y[:, None]
        clients[name] = (x, y, x, y)
    return federation(clients)


def trial(method, rounds=ROUNDS, **given):
    settings = Settings(
        rounds=rounds, work=Work(batch_size=BATCH, epochs=2), optimizer=SGD(lr=LR), evaluate_every=rounds, **given
    )
    return Trial(method, network, data(), settings, SEED)


def find_critical(before, after):
    """Return the critical weights as pairs of an entry's name and a place in it."""
    found = set()
    for name in before:
        pairs = zip(before[name].flatten().tolist(), after[name].flatten().tolist(), strict=True)
        scores = [abs(w * (w - v)) for v, w in pairs]
        places = sorted(range(len(scores)), key=lambda place: -scores[place])
        found |= {(name, place) for place in places[: int(TAU * len(scores))]}
    return found


@pytest.mark.parametrize("participation", [3, 1.0])
def test_rounds_equal_a_plain_loop(participation):
    running = trial(fedcac(tau=TAU, beta=BETA), participation=participation)
    models = dict.fromkeys(SIZES, clone(running.plan.initial))
    critical, passes, shared_with = {}, dict.fromkeys(SIZES, 0), []
    for number in range(1, ROUNDS + 1):
        took_part = sorted(running.advance().participants)
        after = {}
        for client in (each for each in data().clients if each.name in took_part):
            model, name = network(), client.name
            model.load_state_dict(models[name])
            for _ in range(2):
                order = torch.from_numpy(plain.stream(SEED, "order", name, passes[name]).permutation(SIZES[name]))
                passes[name] += 1
                for rows in order.split(BATCH):
                    loss = F.cross_entropy(model(client.train.x[rows]), client.train.y[rows])
                    for parameter, grad in zip(
                        model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
                    ):
                        parameter.data -= LR * grad
            after[name] = clone(model.state_dict())
            critical[name] = find_critical(models[name], after[name])
        overlaps = {
            (i, j): 1 - len(critical[i] ^ critical[j]) / (2 * len(critical[i]))
            for i in critical for j in took_part if i != j
        }  # fmt: skip
        middle, largest = np.mean([*overlaps.values()]), max(overlaps.values())
        threshold = middle + number / BETA * (largest - middle)
        mean = plain.mean([after[name] for name in took_part], [SIZES[name] for name in took_part])
        for name in SIZES:
            partners = [j for j in took_part if j == name or overlaps.get((name, j), 0) >= threshold]
            models[name] = clone(mean)
            if name in critical and partners:
                shared_with.append(len(partners))
                own = plain.mean([after[other] for other in partners], [1] * len(partners))
                for entry, place in critical[name]:
                    models[name][entry].flatten()[place] = own[entry].flatten()[place]
            assert plain.largest_difference(broadcast(running.server, name).shared, models[name]) <= 1e-9
    assert {1, 2} <= set(shared_with)
