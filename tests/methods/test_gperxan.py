"""gPerXAN equals a plain loop with two normalizations side by side and the loss of the loaded classifier."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.preparation import apply_surgery
from fedshift.methods.fedper import fedper
from fedshift.methods.gn import gn
from fedshift.methods.gperxan import AssembledNorm, gperxan
from fedshift.utils.errors import UsageError
from tests.methods.plain import LR, SHARES, SIZES, batches, largest_difference, mean, network, trial

LAM, LOCAL = 0.7, ("1.batch.weight", "1.batch.bias", "1.batch.running_mean", "1.batch.running_var", "1.batch_score")


def features(state, x, statistics):
    """What the classifier reads; ``statistics``: the batch's mean and variance, or those that are kept."""
    x = F.conv2d(x, state["0.weight"], state["0.bias"])
    mean, var = statistics(x)
    own = (x - mean[:, None, None]) / torch.sqrt(var[:, None, None] + 1e-5)
    own = own * state["1.batch.weight"][:, None, None] + state["1.batch.bias"][:, None, None]
    pixels = x.flatten(2)
    each = (pixels - pixels.mean(2, keepdim=True)) / torch.sqrt(pixels.var(2, keepdim=True, unbiased=False) + 1e-5)
    each = each.reshape(x.shape) * state["1.instance.weight"][:, None, None] + state["1.instance.bias"][:, None, None]
    b, i = torch.exp(state["1.batch_score"]), torch.exp(state["1.instance_score"])
    return ((b * own + i * each) / (b + i)).relu().flatten(1)


def of_batch(x):
    return x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)


def descend(state, client, number, lam):
    """A client's pass, which loads and ends with all entries."""
    loaded = state["4.weight"], state["4.bias"]
    for x, y in batches(client, number):
        leaves = {n: t.detach().requires_grad_() for n, t in state.items() if "running" not in n}
        z = features(leaves, x, of_batch)
        loss = F.cross_entropy(F.linear(z, leaves["4.weight"], leaves["4.bias"]), y)
        loss = loss + lam * F.cross_entropy(F.linear(z, *loaded), y)
        grads = torch.autograd.grad(loss, [*leaves.values()])
        maps = F.conv2d(x, state["0.weight"], state["0.bias"])
        for kind, seen in (("mean", maps.mean((0, 2, 3))), ("var", maps.var((0, 2, 3)))):
            state = state | {f"1.batch.running_{kind}": 0.9 * state[f"1.batch.running_{kind}"] + 0.1 * seen}
        state = state | {n: (t - LR * g).detach() for (n, t), g in zip(leaves.items(), grads, strict=True)}
    return state


@pytest.mark.parametrize("lam", [0.0, LAM])
def test_rounds_equal_a_plain_loop(lam):
    running = trial(gperxan(lam=lam))
    initial = {n: t for n, t in running.plan.initial.items() if "num_batches" not in n}
    assert running.plan.personal == {*LOCAL, "1.batch.num_batches_tracked"}
    assert len(running.plan.rules) == (lam > 0)
    server = {n: t for n, t in initial.items() if n not in LOCAL}
    own = {client: {n: initial[n] for n in LOCAL} for client in SIZES}
    for number in range(3):
        running.advance()
        after = []
        for client in SIZES:
            state = descend(server | own[client], client, number, lam)
            own[client] = {n: state[n] for n in LOCAL}
            after.append({n: state[n] for n in server})
        server = mean(after, SHARES.values())
    assert largest_difference(running.server.shared, server) <= 1e-12
    for client, kept in own.items():
        found = {n: running.clients[client].personal[n] for n in LOCAL}
        assert largest_difference(found, kept) <= 1e-12
    used = apply_surgery(gperxan(), network()).eval()
    used.load_state_dict(running.model_state("a"))
    x, _ = next(batches("a", 0))
    kept = own["a"]["1.batch.running_mean"], own["a"]["1.batch.running_var"]
    z = features(server | own["a"], x, lambda _: kept)
    assert (used(x) - F.linear(z, server["4.weight"], server["4.bias"])).abs().max() <= 1e-12


def test_weights_that_were_trained_before_are_kept_and_vectors_have_no_instance_norm():
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, eps=1e-3), nn.Flatten(), nn.BatchNorm1d(2), nn.Linear(2, 2)
    layers[1].weight.data.fill_(3.0)
    layers[1].running_mean.fill_(2.0)
    made = apply_surgery(gperxan(), nn.Sequential(*layers))
    assert isinstance(made[1], AssembledNorm)
    assert (made[1].batch.eps, made[1].instance.eps) == (1e-3, 1e-3)
    assert made[1].batch.weight.tolist() == [3.0, 3.0]
    assert made[1].batch.running_mean.tolist() == [2.0, 2.0]
    assert type(made[3]) is nn.BatchNorm1d


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: gperxan(lam=-1.0), "gperxan: lam=-1: give a finite strength, 0"),
        (lambda: trial(fedper(gperxan())), "but fedper keeps '4.bias' on clients: use one of the two"),
        (lambda: trial(gn(gperxan())), "both replace normalization layers"),
        (
            lambda: apply_surgery(gperxan(), nn.Linear(2, 2)),
            "gperxan adds InstanceNorm to BatchNorm of feature maps, but the model has none",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()
