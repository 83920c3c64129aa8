"""FedPLVM equals a plain loop over samples, with the clusters of FINCH's adjacency matrix on clients and server."""

import pytest
import torch
import torch.nn.functional as F

from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedplvm import SMALLEST, LocalClusterPrototypes
from fedshift.utils.state import clone
from tests.methods.plain import LR, largest_difference, loaded_with, mean, passes, step
from tests.methods.test_fpl import assert_clusters, data, finch, network, trial

ALPHA, TAU, LAM, SIZES = 0.5, 0.3, 0.6, {"a": 14, "b": 23, "e": 18}


def cluster(points):
    points = torch.stack(points)
    return [points[group].mean(0) for group in finch(points.numpy())]


def sharpened(z, prototype):
    return (F.cosine_similarity(z, prototype, dim=0).clamp(min=SMALLEST) ** ALPHA / TAU).exp()


@pytest.mark.parametrize(("samples", "most"), [(256, 8), (15, 1)])
def test_rounds_equal_a_plain_loop_over_samples(samples, most):
    """Fifteen features of 18 or 23 samples fill the ring more than once; at most one cluster: means are sent."""
    rule = LocalClusterPrototypes(LAM, tau=TAU, alpha=ALPHA, samples=samples, most=most)
    running = trial(fedavg().with_rule(rule), data(SIZES))
    shared, prototypes, several = clone(running.plan.initial), {}, 0
    for number in range(3):
        running.advance()
        states, uploaded = {}, {}
        for client in data(SIZES).clients:
            model, seen = loaded_with(shared, network), []
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            for x, y in passes(client, 2 * number, 2 * number + 1):
                z = model[:2](x)
                loss = F.cross_entropy(model[2](z), y)
                for row, label in enumerate(y.tolist()):
                    seen.append((label, z[row].detach()))
                    if label in prototypes:
                        terms = {k: sum(sharpened(z[row], p) for p in each) for k, each in prototypes.items()}
                        contrast = -torch.log(terms[label] / sum(terms.values()))
                        center = torch.stack(prototypes[label]).mean(0)
                        far = 2 * (1 - F.cosine_similarity(z[row], center, dim=0)) ** 2
                        loss = loss + LAM * (contrast + far) / len(y)
                step(sgd, loss)
            states[client.name] = model.state_dict()
            last = seen[-min(samples, len(client.train)) :]
            for label in {label for label, _ in last}:
                points = [z for each, z in last if each == label]
                clusters = cluster(points)
                center = [torch.stack(points).mean(0)]
                uploaded.setdefault(label, []).extend(clusters if len(clusters) <= most else center)
                several += len(clusters) > 1
        shared = mean([*states.values()], SIZES.values())
        prototypes = {label: cluster(points) for label, points in uploaded.items()}
    assert several > 3
    assert largest_difference(running.server.shared, shared) <= 1e-9
    assert_clusters(running.server.memory[0], prototypes)
