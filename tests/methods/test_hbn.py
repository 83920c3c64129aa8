"""HBN equals a plain loop that measures, mixes and pools statistics; its layer is torch's BatchNorm at the extremes."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.preparation import apply_surgery
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.augmentation import AUGMENTATIONS
from fedshift.methods.ditto import ditto
from fedshift.methods.fedper import fedper
from fedshift.methods.hbn import hbn
from fedshift.methods.single import single
from fedshift.nn.hybrid_batch_norm import HybridBatchNorm
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from tests.methods import plain
from tests.methods.plain import BATCH, LR, SEED, SHARES, SIZES, batches, data, largest_difference

MOMENTUM, SAMPLES, LAYERS = 0.3, 10, ("1", "5")
"""Client ``b`` has fewer samples than are measured."""


def network(shape=(1, 4, 4), classes=3):
    return nn.Sequential(
        nn.Conv2d(shape[0], 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5),
        nn.Tanh(), nn.Linear(5, classes),
    ).double()  # fmt: skip


def trial(method, model=network, clients=None, **changes):
    return plain.trial(method, model, clients, **changes)


def normalize(state, layer, x, mixed):
    """Normalize ``x``; in training (``mixed`` is a dictionary) by the mix, which is noted there."""
    over, wide = [axis for axis in range(x.ndim) if axis != 1], (1, -1, *[1] * (x.ndim - 2))
    if mixed is None:
        mean, var = state[f"{layer}.running_mean"], state[f"{layer}.running_var"]
    else:
        share = 1 / (1 + torch.exp(-state[f"{layer}.factor"]))
        mean = (1 - share) * state[f"{layer}.global_mean"] + share * x.mean(over)
        var = (1 - share) * state[f"{layer}.global_var"] + share * x.var(over, unbiased=False)
        mixed[layer] = mean.detach(), var.detach()
    made = (x - mean.reshape(wide)) / torch.sqrt(var.reshape(wide) + 1e-5)
    return made * state[f"{layer}.weight"].reshape(wide) + state[f"{layer}.bias"].reshape(wide)


def run(state, x, mixed=None):
    x = normalize(state, "1", F.conv2d(x, state["0.weight"], state["0.bias"]), mixed).relu().flatten(1)
    x = normalize(state, "5", F.linear(x, state["4.weight"], state["4.bias"]), mixed).tanh()
    return F.linear(x, state["7.weight"], state["7.bias"])


def measure(state, client, number):
    """The mixed statistics of the first samples of a round, and their number."""
    order = torch.from_numpy(stream(SEED, "order", client, number).permutation(SIZES[client]))[:SAMPLES]
    mixed = {}
    run(state, data().client(client).train.x[order], mixed)
    return mixed, len(order)


def descend(state, client, number):
    """The gradient steps of one pass."""
    for x, y in batches(client, number):
        leaves = {n: t.detach().requires_grad_() for n, t in state.items() if "_mean" not in n and "_var" not in n}
        grads = torch.autograd.grad(F.cross_entropy(run(state | leaves, x, {}), y), [*leaves.values()])
        state = state | {n: (t - LR * g).detach() for (n, t), g in zip(leaves.items(), grads, strict=True)}
    return state


def pool(measured, layer):
    """The pooled mean and variance of a layer, one client after another."""
    total = sum(count for _, count in measured)
    mean = sum(count * mixed[layer][0] for mixed, count in measured) / total
    squares = sum(count * (mixed[layer][1] + (mixed[layer][0] - mean) ** 2) for mixed, count in measured)
    return mean, squares / (total - 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("participation", "epochs"), [(1.0, 1), (1, 1), (1.0, 2)])
def test_rounds_equal_a_plain_loop(participation, epochs):
    """With one client a round, the other begins late; in two passes a client's samples come twice and count once."""
    work = Work(batch_size=BATCH, epochs=epochs)
    running = trial(hbn(momentum=MOMENTUM, samples=SAMPLES), participation=participation, work=work)
    server = {name: tensor.clone() for name, tensor in running.plan.initial.items()}
    factors, passes = dict.fromkeys(SIZES), dict.fromkeys(SIZES, 0)
    for _ in range(3 if isinstance(participation, float) else 7):
        took_part = sorted(running.advance().participants)
        measured, after = [], {}
        for client in took_part:
            start = server | (factors[client] or {})
            measured.append(measure(start, client, passes[client]))
            for _ in range(epochs):
                start = descend(start, client, passes[client])
                passes[client] += 1
            after[client] = start
            factors[client] = {f"{layer}.factor": start[f"{layer}.factor"] for layer in LAYERS}
        share = sum(SHARES[client] for client in took_part)
        mean = {n: sum(SHARES[client] / share * after[client][n] for client in took_part) for n in server}
        for layer in LAYERS:
            for kind, pooled in zip(("mean", "var"), pool(measured, layer), strict=True):
                mean[f"{layer}.running_{kind}"] = pooled
                before = server[f"{layer}.global_{kind}"]
                mean[f"{layer}.global_{kind}"] = before + MOMENTUM * (pooled - before)
        server = mean
    assert min(passes.values()) > 1
    assert largest_difference(running.server.shared, server) <= 1e-9
    for client, own in factors.items():
        assert largest_difference(running.clients[client].personal, own) <= 1e-9
        assert all(factor.abs().max() > 1e-4 for factor in own.values())
    x = data().client("a").train.x
    found = running.model_state("a")
    assert not running.plan.personalizes
    hybrid = apply_surgery(hbn(), network())
    hybrid.load_state_dict(found)
    assert (hybrid.eval()(x) - run(server, x)).abs().max() <= 1e-9


def test_what_is_measured_is_augmented_and_drops_alike_where_clients_are_stacked():
    """Two rounds, since the first measures what all clients have in common."""

    def dropping(shape, classes):
        return nn.Sequential(nn.Dropout(0.5), *network(shape, classes))

    arrays = {client.name: (client.train.x.tanh(), client.train.y) for client in data().clients}
    pixels, made = federation({name: (x, y, x, y) for name, (x, y) in arrays.items()}), []
    for engine, augment in product(("sequential", "stacked"), (None, AUGMENTATIONS.parse("crop(padding=1)"))):
        optimizer = SGD(lr=LR, momentum=0.9)
        running = trial(hbn(samples=SAMPLES), dropping, pixels, engine=engine, augment=augment, optimizer=optimizer)
        for _ in range(2):
            running.advance()
        made.append(running.server.shared)
    plain, augmented = made[:2]
    assert largest_difference(plain, made[2]) <= 1e-9
    assert largest_difference(augmented, made[3]) <= 1e-9
    assert (plain["2.running_var"] - augmented["2.running_var"]).abs().max() > 1e-3


def layers(shape):
    """A BatchNorm with statistics and affine parameters, and its hybrid form."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    plain = kind(shape[1], eps=1e-3).double()
    for tensor in (plain.weight.data, plain.bias.data, plain.running_mean, plain.running_var):
        tensor.copy_(torch.rand_like(tensor) + 0.5)
    return plain, HybridBatchNorm.of(plain)


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (4, 3, 2, 3), (2, 3, 2, 2, 2)])
def test_the_layer_is_batch_norm_at_both_extremes_and_in_evaluation(shape):
    plain, hybrid = layers(shape)
    x = 3 * torch.randn(shape, dtype=torch.float64) + 2
    assert hybrid.weight is plain.weight
    with torch.no_grad():
        assert (hybrid.eval()(x) - plain.eval()(x)).abs().max() <= 1e-12
        hybrid.train()
        hybrid.factor.fill_(-1e3)
        assert (hybrid(x) - plain(x)).abs().max() <= 1e-12
        hybrid.factor.fill_(1e3)
        assert (hybrid(x) - plain.train()(x)).abs().max() <= 1e-12


def test_one_sample_trains_and_half_precision_keeps_its_type():
    _, hybrid = layers((4, 3, 2, 2))
    assert hybrid(torch.randn(1, 3, 2, 2, dtype=torch.float64)).isfinite().all()
    assert hybrid.float()(torch.randn(4, 3, 2, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: fedper(hbn(), layers="1.*"),
            "computes '1.global_mean' from what clients measure for hbn, but fedper",
        ),
        (lambda: single(hbn()), "hbn selects exchanged entries, but single exchanges nothing"),
        (
            lambda: ditto(hbn()),
            "ditto keeps another model on each client, but the server computes",
        ),
        (lambda: hbn(hbn()), "both replace normalization layers"),
    ],
)
def test_what_would_leave_statistics_behind_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        trial(make())


def test_a_network_without_batch_norm_is_refused():
    with pytest.raises(UsageError, match="HybridBatchNorm replaces BatchNorm, but the model has none"):
        apply_surgery(hbn(), nn.Linear(2, 2))
