"""FedPLVM equals a plain loop over samples, with the clusters of FINCH's adjacency matrix on clients and server."""

import pytest
import torch
import torch.nn.functional as F

from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedplvm import SMALLEST, LocalClusterPrototypes
from fedshift.utils.random_streams import stream
from fedshift.utils.state import clone
from tests.methods.test_fpl import LR, SEED, data, finch, network, trial

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
            model, x, y, seen = network(), client.train.x, client.train.y, []
            model.load_state_dict(shared)
            for epoch in (2 * number, 2 * number + 1):
                order = stream(SEED, "order", client.name, epoch).permutation(len(y))
                for batch in torch.from_numpy(order).split(4):
                    z = model[:2](x[batch])
                    loss = F.cross_entropy(model[2](z), y[batch])
                    for row, label in enumerate(y[batch].tolist()):
                        seen.append((label, z[row].detach()))
                        if label in prototypes:
                            terms = {k: sum(sharpened(z[row], p) for p in each) for k, each in prototypes.items()}
                            contrast = -torch.log(terms[label] / sum(terms.values()))
                            center = torch.stack(prototypes[label]).mean(0)
                            far = 2 * (1 - F.cosine_similarity(z[row], center, dim=0)) ** 2
                            loss = loss + LAM * (contrast + far) / len(batch)
                    for parameter, grad in zip(
                        model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
                    ):
                        parameter.data -= LR * grad
            states[client.name] = model.state_dict()
            last = seen[-min(samples, len(y)) :]
            for label in {label for label, _ in last}:
                points = [z for each, z in last if each == label]
                clusters = cluster(points)
                mean = [torch.stack(points).mean(0)]
                uploaded.setdefault(label, []).extend(clusters if len(clusters) <= most else mean)
                several += len(clusters) > 1
        for name in shared:
            shared[name] = sum(state[name] * SIZES[client] / sum(SIZES.values()) for client, state in states.items())
        prototypes = {label: cluster(points) for label, points in uploaded.items()}
    assert several > 3
    for name, tensor in running.server.shared.items():
        assert (tensor - shared[name]).abs().max() <= 1e-9, name
    memory = running.server.memory[0]
    for label, expected in prototypes.items():
        found, expected = memory["clusters"][label][memory["used"][label] > 0], torch.stack(expected)
        assert (found[found[:, 0].argsort()] - expected[expected[:, 0].argsort()]).abs().max() <= 1e-9
