"""FPL equals a plain PyTorch loop over samples; its clusters are those of FINCH's adjacency matrix."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedshift.core.work import Work
from fedshift.methods.fpl import ClusterPrototypes, fpl
from fedshift.utils.state import clone
from tests.methods import plain
from tests.methods.plain import LR, largest_difference, loaded_with, mean, passes, step
from tests.methods.plain import small_network as network

SIZES, LAM, TAU = {"a": 6, "b": 8, "c": 10, "d": 8, "e": 6}, 0.6, 0.3


def data(sizes=SIZES):
    return plain.paired_vectors(sizes, "e", -1)


def trial(method, clients=None, **given):
    return plain.trial(method, network, clients or data(), work=Work(batch_size=4, epochs=2), **given)


def finch(points):
    """The partition of FINCH, from the adjacency of the paper's equation 1, as lists of points."""
    groups = [[number] for number in range(len(points))]
    history = []
    while len(groups) > 1 or not history:
        means = np.array([np.mean([points[number] for number in group], axis=0) for group in groups])
        unit = means / np.linalg.norm(means, axis=1, keepdims=True)
        distance = 1 - unit @ unit.T
        np.fill_diagonal(distance, 1e12)
        near = distance.argmin(axis=1)
        size = len(groups)
        linked = [[j == near[i] or near[j] == i or near[i] == near[j] for j in range(size)] for i in range(size)]
        merged, left = [], set(range(size))
        while left:
            found, new = set(), {min(left)}
            while new:
                found |= new
                new = {j for i in new for j in range(size) if linked[i][j]} - found
            merged.append(sorted(number for i in found for number in groups[i]))
            left -= found
        if history and (len(merged) == 1 or len(merged) == size):
            break
        history.append(merged)
        stop = len(history) > 1 and size - len(merged) == 1
        groups = merged
        if stop:
            break
    return sorted(history[-1])


def test_clusters_are_those_of_the_papers_adjacency():
    counts = set()
    for seed in range(60):
        points = np.random.default_rng(seed).normal(size=(2 + seed % 30, 3))
        labels = ClusterPrototypes.cluster(torch.from_numpy(points)).numpy()
        found = sorted(np.flatnonzero(labels == label).tolist() for label in range(labels.max() + 1))
        assert found == finch(points)
        counts.add(len(found))
    assert len(counts) > 2


@pytest.mark.parametrize(("participation", "rounds"), [(1.0, 3), (2, 6)])
def test_rounds_equal_a_plain_loop_over_samples(participation, rounds):
    """With two clients a round, a class that both lack has no prototype in the next one."""
    running = trial(fpl(tau=TAU, lam=LAM), participation=participation)
    shared, prototypes, most, lost, done = clone(running.plan.initial), {}, 0, set(), dict.fromkeys(SIZES, 0)
    for _ in range(rounds):
        took_part = running.advance().participants
        states, uploaded = {}, {}
        for client in (each for each in data().clients if each.name in took_part):
            model, met = loaded_with(shared, network), {}
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            done[client.name] += 2
            for epoch in (done[client.name] - 2, done[client.name] - 1):
                met = {}
                for x, y in passes(client, epoch):
                    z = model[:2](x)
                    loss = F.cross_entropy(model[2](z), y)
                    for row, label in enumerate(y.tolist()):
                        met.setdefault(label, []).append(z[row].detach())
                        if label in prototypes:
                            terms = {
                                k: sum((F.cosine_similarity(z[row], p, dim=0) / TAU).exp() for p in each)
                                for k, each in prototypes.items()
                            }
                            contrast = -torch.log(terms[label] / sum(terms.values()))
                            center = torch.stack(prototypes[label]).mean(0)
                            loss = loss + LAM * (contrast + F.mse_loss(z[row], center)) / len(y)
                    step(sgd, loss)
            states[client.name] = model.state_dict()
            for label, features in met.items():
                uploaded.setdefault(label, []).append(torch.stack(features).mean(0))
        shared = mean([*states.values()], [SIZES[client] for client in states])
        before, prototypes = prototypes, {}
        for label, points in uploaded.items():
            groups = finch(torch.stack(points).numpy())
            prototypes[label] = [torch.stack([points[i] for i in group]).mean(0) for group in groups]
            most = max(most, len(groups))
        lost |= before.keys() - prototypes.keys()
    assert most > 1 if participation == 1.0 else lost  # some class has several prototypes, or no longer one
    assert largest_difference(running.server.shared, shared) <= 1e-9
    assert_clusters(running.server.memory[0], prototypes)


def assert_clusters(memory, prototypes):
    """The server's memory holds these ``prototypes`` of each class, in any order, and no others."""
    for label in range(4):
        found = memory["clusters"][label][memory["used"][label] > 0]
        if label not in prototypes:
            assert not len(found)
            continue
        expected = torch.stack(prototypes[label])
        assert found.shape == expected.shape
        assert (found[found[:, 0].argsort()] - expected[expected[:, 0].argsort()]).abs().max() <= 1e-9
