"""FedPAC equals a plain PyTorch loop over samples; its weights are those of the best of all sets of classifiers."""

import copy
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedshift.core.kernel import broadcast
from fedshift.core.work import Work
from fedshift.methods import METHODS
from fedshift.methods.fedpac import _weigh, fedpac
from fedshift.methods.fedper import fedper
from fedshift.utils.errors import UsageError
from fedshift.utils.state import clone
from tests.methods import plain
from tests.methods.plain import LR, SEED
from tests.methods.plain import small_network as network

SIZES, LAM, BATCH = {"a": 12, "b": 10, "c": 16, "d": 10}, 0.6, 2


DATA = plain.paired_vectors(SIZES, "d", shift=2)


def trial(method, model=network, epochs=3, **given):
    return plain.trial(method, model, DATA, work=Work(batch_size=BATCH, epochs=epochs), **given)


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


def describe(model, batches, n):
    """What the server compares clients by: shares of the client's samples among the classes that its batches have."""
    with torch.no_grad():
        z, y = (torch.cat(part) for part in zip(*((model[:-1](x), y) for x, y in batches), strict=True))
    h, v = torch.zeros(4, 5, dtype=torch.float64), 0.0
    for label, mu in mean_by_class(z, y).items():
        own, p = z[y == label], n[label] / sum(n[k] for k in y.unique())
        h[label] = p * mu
        v += p * torch.trace(own.T @ own / len(own)) - p**2 * mu @ mu
    return h, float(v / n.sum())


@pytest.mark.parametrize(
    ("participation", "model", "body", "epochs", "noted"),
    [(2, network, 2, 3, 0), (1.0, network, 5, 1, 1), (1.0, plain.vector_network, 5, 1, 1)],
)
def test_rounds_equal_a_plain_loop(participation, model, body, epochs, noted):
    """In the last two, the features move in the second step."""
    running = trial(fedpac(lam=LAM, head=1, body=body), model, epochs=epochs, participation=participation)
    shared, head = clone(running.plan.initial), list(running.plan.initial)[-2:]
    heads = {name: {entry: shared[entry] for entry in head} for name in SIZES}
    prototypes, known, passes, mixed, unseen = {}, {}, dict.fromkeys(SIZES, 0), False, 0
    for _ in range(3):
        took_part = sorted(running.advance().participants)
        states, met, variances = {}, {}, {}
        for client in (each for each in DATA.clients if each.name in took_part):
            name = client.name
            net = plain.loaded_with(shared | heads[name], model)
            streams = [plain.stream(SEED, "order", name, passes[name] + number) for number in range(epochs)]
            passes[name] += epochs
            orders = [torch.from_numpy(stream.permutation(SIZES[name])) for stream in streams]
            rows = [batch for order in orders for batch in order.split(BATCH)]
            batches = [(client.train.x[batch], client.train.y[batch]) for batch in rows]
            turn, of_pass = max(1, round(len(rows) / (1 + body))), len(rows) // epochs
            first, of_class = batches[: min(turn + 1, of_pass)], torch.bincount(client.train.y, minlength=4)
            unseen += len(set(torch.cat([y for _, y in first]).tolist())) < of_class.count_nonzero()
            known[name], variances[name] = describe(copy.deepcopy(net), first, of_class)
            seen = []
            for number, (x, y) in enumerate(batches):
                z = net[:-1](x)
                seen.append((z.detach(), y))
                pulls = [F.mse_loss(z[i], prototypes[k]) for i, k in enumerate(y.tolist()) if k in prototypes]
                loss = F.cross_entropy(net[-1](z), y) + LAM * sum(pulls) / len(y)
                moving = list(net[-1].parameters() if number < turn else net[:-1].parameters())
                for parameter, grad in zip(moving, torch.autograd.grad(loss, moving), strict=True):
                    parameter.data -= LR * grad
            states[name] = clone(net.state_dict())
            met[name] = [torch.cat(part) for part in zip(*seen[-of_pass:], strict=True)]
        sizes = [SIZES[name] for name in took_part]
        shared = plain.mean([states[name] for name in took_part], sizes)
        z, y = (torch.cat([met[name][part] for name in took_part]) for part in (0, 1))
        prototypes |= mean_by_class(z, y)
        for name in SIZES:
            weights = np.array(sizes)  # until a client takes part
            if name in known:
                gaps = np.array([(known[name] - known[other]).flatten().numpy() for other in took_part])
                weights = best_weights(gaps @ gaps.T + np.diag([variances[other] for other in took_part]))
                weights[weights <= 1e-3] = 0
                mixed |= bool((weights > 0).sum() > 1)
            heads[name] = {entry: plain.mean([states[n] for n in took_part], weights.tolist())[entry] for entry in head}
            found = broadcast(running.server, name).shared
            assert plain.largest_difference(found, shared | heads[name]) <= 2e-8
    assert mixed
    assert set(prototypes) == {0, 1, 2, 3}
    assert bool(unseen) == noted == sum(len(bound.notices) for bound in running.plan.rules)


def test_features_that_start_from_a_mix_of_models_are_measured():
    running = trial(METHODS.parse("fedala(layers=2)+fedpac"))
    for _ in range(2):
        running.advance()
    assert all(means.norm() > 0.1 for state in running.server.kept for means in state.values())


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
