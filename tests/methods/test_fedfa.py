"""FedFA equals a plain loop over layers, channels and clients, on the same draws."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.method import Method
from fedshift.core.preparation import apply_surgery
from fedshift.methods.dp import dp
from fedshift.methods.fedfa import EPS, fedfa
from fedshift.methods.median import median
from fedshift.models.vision import alexnet_bn
from fedshift.nn.dropout import draw_normal, draw_uniform
from fedshift.utils.errors import UsageError
from tests.methods import plain
from tests.methods.plain import LR, SHARES, SIZES, advance, batches, data, largest_difference, mean

P, MOMENTUM, LAYERS = 0.6, 0.3, ("2.0", "3.0")
RENAMED = {f"2.{part}": f"2.1.{part}" for part in ("weight", "bias")}


def network(shape=(1, 4, 4), classes=3):
    return nn.Sequential(
        nn.Conv2d(shape[0], 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, classes)
    ).double()


def augment(state, x, layer, key, first, p):
    """The maps after a layer, and what it adds to its moving means: nothing where it does not act."""
    moving = {f"{layer}.running_{kind}": state[f"{layer}.running_{kind}"] for kind in ("mean", "std")}
    if float(draw_uniform(key, first, 1)[0]) >= p:
        return x, moving
    m = torch.stack([torch.stack([channel.mean() for channel in image]) for image in x])
    s = torch.stack([torch.stack([((c - c.mean()) ** 2).mean() + EPS for c in image]) for image in x]).sqrt()
    drawn = []
    for at, (kind, value) in enumerate((("mean", m), ("std", s))):
        over_clients = state[f"{layer}.var_{kind}"]
        k = [1 / (1 + 1 / (float(v) + EPS)) for v in over_clients]
        g = torch.tensor([len(k) * each / sum(k) for each in k], dtype=torch.float64)
        of_batch = ((value - value.mean(0)) ** 2).mean(0) + EPS
        noise = draw_normal(key, first + 1 + 2 * at, value.shape)
        drawn.append(value + noise * torch.sqrt((1 + g) * of_batch))
        old = moving[f"{layer}.running_{kind}"]
        moving[f"{layer}.running_{kind}"] = (1 - MOMENTUM) * old + MOMENTUM * value.detach().mean(0)
    wide = [each[:, :, None, None] for each in (m, s, *drawn)]
    return wide[3] * (x - wide[0]) / wide[1] + wide[2], moving


def run(state, x, key, p):
    x, moved = torch.tanh(F.conv2d(x, state["0.weight"], state["0.bias"])), {}
    x, found = augment(state, x, "2.0", key, 0, p)
    moved |= found
    x = F.conv2d(x, state["2.1.weight"], state["2.1.bias"])
    x, found = augment(state, x, "3.0", key, 5, p)
    return F.linear(x.flatten(1), state["4.weight"], state["4.bias"]), moved | found


def trial(method, **changes):
    return plain.trial(method, network, **changes)


@pytest.mark.parametrize("p", [P, 1.0])
def test_rounds_equal_a_plain_loop(p):
    running, steps = trial(fedfa(p=p, momentum=MOMENTUM)), dict.fromkeys(SIZES, 0)
    server = dict(running.plan.initial)
    for number in range(3):
        running.advance()
        after = []
        for client in SIZES:
            state = server
            for x, y in batches(client, number):
                leaves = {n: t.detach().requires_grad_() for n, t in state.items() if n.endswith(("weight", "bias"))}
                made, moved = run(state | leaves, x, running.engine.step_keys(client, [steps[client]])[0], p)
                grads = torch.autograd.grad(F.cross_entropy(made, y), [*leaves.values()])
                state = state | moved
                state = state | {n: (t - LR * g).detach() for (n, t), g in zip(leaves.items(), grads, strict=True)}
                steps[client] += 1
            after.append(state)
        server = mean(after, SHARES.values())
        for layer in LAYERS:
            for kind in ("mean", "std"):
                a, b = (state[f"{layer}.running_{kind}"] for state in after)
                server[f"{layer}.var_{kind}"] = ((a - b) / 2) ** 2
    assert largest_difference(running.server.shared, server) <= 1e-12
    assert min(float(server[f"{layer}.var_mean"].max()) for layer in LAYERS) > 0
    used = apply_surgery(fedfa(), network()).eval()
    used.load_state_dict(running.model_state())
    x = data().client("a").train.x
    bare = network().eval()
    bare.load_state_dict({name: server[RENAMED.get(name, name)] for name in bare.state_dict()})
    assert (used(x) - bare(x)).abs().max() <= 1e-12


def test_with_probability_0_it_is_its_base():
    none, base = trial(fedfa(p=0.0)), trial(Method())
    advance(none, base, rounds=2)
    for name, tensor in base.server.shared.items():
        assert (none.server.shared[RENAMED.get(name, name)] - tensor).abs().max() <= 1e-15, name


def test_on_alexnet_it_stands_where_the_authors_put_it():
    with torch.device("meta"):
        module = apply_surgery(fedfa(), alexnet_bn((3, 64, 64), 10))
    found = {name: len(layer.var_mean) for name, layer in module.named_modules() if hasattr(layer, "var_mean")}
    assert found == {"conv2.0": 64, "conv3.0": 192, "conv4.0": 384, "conv5.0": 256, "avgpool.0": 256}


@pytest.mark.parametrize("guard", [dp, median])
def test_variances_of_single_clients_are_refused_where_uploads_are_guarded(guard):
    with pytest.raises(UsageError, match="fedfa computes from the entries of single clients, beside those that"):
        trial(guard(fedfa()))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: apply_surgery(fedfa(), nn.Linear(2, 2)), "of these none is another convolution or pooling"),
        (lambda: apply_surgery(fedfa(layers="2x"), network()), r"none matches layers='2x'; near it are 2: name layers"),
        (lambda: trial(fedfa(layers="4")), r"a layer that it was asked for reads \[4, 8\]: name others \(layers=\)"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()
