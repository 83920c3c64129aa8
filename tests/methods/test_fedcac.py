"""FedCAC equals a plain PyTorch loop that sorts single weights, in rounds of all clients and of some."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedshift.core.kernel import broadcast
from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.methods.fedcac import fedcac
from fedshift.utils.state import clone
from tests.methods import plain

SIZES, LR, TAU, BETA, ROUNDS = {"a": 12, "b": 10, "c": 16, "d": 9}, 0.3, 0.4, 3, 4
DATA = plain.paired_vectors(SIZES)


def network():
    return plain.small_network(classes=3)


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
    given = {"work": Work(batch_size=plain.BATCH, epochs=2), "optimizer": SGD(lr=LR)}
    method = fedcac(tau=TAU, beta=BETA)
    running = plain.trial(method, plain.small_network, DATA, participation=participation, **given)
    models = dict.fromkeys(SIZES, clone(running.plan.initial))
    critical, passes, shared_with = {}, dict.fromkeys(SIZES, 0), []
    for number in range(1, ROUNDS + 1):
        took_part = sorted(running.advance().participants)
        after = {}
        for client in (each for each in DATA.clients if each.name in took_part):
            name = client.name
            model = plain.loaded_with(models[name], network)
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            for x, y in plain.passes(client, passes[name], passes[name] + 1):
                plain.step(sgd, F.cross_entropy(model(x), y))
            passes[name] += 2
            after[name] = plain.copied(model)
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
