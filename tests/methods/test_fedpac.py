"""FedPAC equals a plain PyTorch loop over samples; its weights are those of the best of all sets of classifiers."""

from itertools import combinations

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
from fedshift.methods.fedpac import _weigh, fedpac
from fedshift.methods.fedper import fedper
from fedshift.utils.errors import UsageError
from fedshift.utils.state import clone
from tests.methods import plain

SIZES, SEED, LR, LAM, BATCH = {"a": 12, "b": 10, "c": 16, "d": 9}, 5, 0.1, 0.6, 4
HEAD = ("2.bias", "2.weight")


def network(shape=(4,), classes=4):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.Tanh(), nn.Linear(5, classes)).double()


def data():
    """Two pairs of clients that look alike; class 3 is ``d``'s alone."""
    rng = np.random.default_rng(0)
    clients = {}
    for name, size in SIZES.items():
        y = np.arange(size) % 3 + (name == "d")
        x = rng.normal(2 * (name in "bd"), 1, (size, 4)) + y[:, None]
        clients[name] = (x, y, x, y)
    return federation(clients)


def trial(method, rounds=4, **given):
    settings = Settings(
        rounds=rounds, work=Work(batch_size=BATCH, epochs=3), optimizer=SGD(lr=LR), evaluate_every=rounds, **given
    )
    return Trial(method, network, data(), settings, SEED)


def best_weights(form):
    """The minimum on each set of clients by Lagrange's condition, and the best of those without a negative weight."""
    found = []
    for count in range(1, len(form) + 1):
        for chosen in map(list, combinations(range(len(form)), count)):
            part = np.linalg.solve(form[np.ix_(chosen, chosen)], np.ones(count))
            weights = np.zeros(len(form))
            weights[chosen] = part / part.sum()
            if (weights >= 0).all():
                found.append((weights @ form @ weights, weights.tolist()))
    return np.array(min(found)[1])


def test_weights_are_those_of_the_best_set_of_classifiers():
    left_out = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        h, v = rng.normal(size=(5, 6)), 10.0 ** rng.uniform(-3, 2, 5)
        form = (h[0] - h) @ (h[0] - h).T + np.diag(v)
        expected = best_weights(form)
        expected[expected <= 1e-3] = 0
        expected /= expected.sum()
        assert _weigh(form) == pytest.approx(expected, abs=1e-9)
        left_out += (expected == 0).any()
    assert 0 < left_out < 40
    assert _weigh(np.zeros((2, 2))).tolist() == [0.5, 0.5]


def mean_by_class(z, y):
    return {label: z[y == label].mean(0) for label in sorted(set(y.tolist()))}


def describe(model, client):
    """What the server compares clients by, sample by sample, under the features that were loaded."""
    with torch.no_grad():
        z, y, n = model[:2](client.train.x), client.train.y, len(client.train.y)
    h, v = torch.zeros(4, 5, dtype=torch.float64), 0.0
    for label, mu in mean_by_class(z, y).items():
        own = z[y == label]
        p = len(own) / n
        h[label] = p * mu
        v += p * torch.trace(own.T @ own / len(own)) - p**2 * mu @ mu
    return h, float(v) / n


@pytest.mark.parametrize(("participation", "engine"), [(2, "sequential"), (1.0, "stacked")])
def test_rounds_equal_a_plain_loop(participation, engine):
    running = trial(fedpac(lam=LAM, head=1, body=2), participation=participation, engine=engine)
    shared = clone(running.plan.initial)
    heads = {name: {entry: shared[entry] for entry in HEAD} for name in SIZES}
    prototypes, known, passes, mixed, sat_out = {}, {}, dict.fromkeys(SIZES, 0), False, False
    for _ in range(4):
        took_part = sorted(running.advance().participants)
        states, met, variances = {}, {}, {}
        for client in (each for each in data().clients if each.name in took_part):
            model, name = network(), client.name
            model.load_state_dict(shared | heads[name])
            known[name], variances[name] = describe(model, client)
            for number in range(3):
                order = stream_order(name, passes[name])
                passes[name] += 1
                moving = list(model[2].parameters()) if number == 0 else list(model[0].parameters())
                seen = []
                for rows in order.split(BATCH):
                    x, y = client.train.x[rows], client.train.y[rows]
                    z = model[:2](x)
                    seen.append((z.detach(), y))
                    pulls = [F.mse_loss(z[i], prototypes[k]) for i, k in enumerate(y.tolist()) if k in prototypes]
                    loss = F.cross_entropy(model[2](z), y) + LAM * sum(pulls) / len(y)
                    for parameter, grad in zip(moving, torch.autograd.grad(loss, moving), strict=True):
                        parameter.data -= LR * grad
            states[name] = clone(model.state_dict())
            met[name] = [torch.cat(part) for part in zip(*seen, strict=True)]
        sizes = [SIZES[name] for name in took_part]
        shared = plain.mean([states[name] for name in took_part], sizes)
        z, y = (torch.cat([met[name][part] for name in took_part]) for part in (0, 1))
        prototypes |= mean_by_class(z, y)
        for name in SIZES:
            if name not in known:
                heads[name] = {entry: shared[entry] for entry in HEAD}
                continue
            gaps = np.array([(known[name] - known[other]).flatten().numpy() for other in took_part])
            weights = best_weights(gaps @ gaps.T + np.diag([variances[other] for other in took_part]))
            weights[weights <= 1e-3] = 0
            mixed |= bool((weights > 0).sum() > 1)
            sat_out |= name not in took_part
            heads[name] = {entry: plain.mean([states[n] for n in took_part], weights.tolist())[entry] for entry in HEAD}
        for name in SIZES:
            found = broadcast(running.server, name).shared
            assert plain.largest_difference(found, shared | heads[name]) <= 1e-9
    assert mixed
    assert sat_out == (participation == 2)
    assert set(prototypes) == {0, 1, 2, 3}


def stream_order(client, number):
    return torch.from_numpy(plain.stream(SEED, "order", client, number).permutation(SIZES[client]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fedpac(lam=-1.0), "fedpac: lam=-1 is negative"),
        (lambda: fedpac(body=0), "fedpac: head=1 and body=0: give 1 or more for each"),
        (lambda: trial(fedpac(fedper())), "FedPAC mixes classifiers of clients, but fedper keeps '2.bias'"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()
