"""The authors' own programs beside fedshift: equal weights, data and orders give equal weights, in float64.

Plain loops written from the text of FedBN's federated/fed_digits.py (med-air/FedBN at df4a9f9) and of FLamby's
flamby/strategies (owkin/FLamby: fed_avg, fed_prox, scaffold, fed_opt and cyclic), with fedshift's orders of samples in
place of torch's.
"""

from copy import deepcopy
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, max_pool2d, relu

import fedshift
from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.initial_weights import InitialWeights
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.models.digits import digit_cnn_bn
from fedshift.utils.random_streams import stream

pytestmark = pytest.mark.slow
SEED, PIXELS, BATCH, LR, MU = 3, 8, 32, 0.01, 0.01
SIZES = {"pen": 80, "photo": 70, "worn": 66}
"""Training images: three batches each, so that BatchNorm's counters agree, which fed_digits.py takes from the first."""


class DigitModel(nn.Module):
    """The digit network with the names of layers by which fed_digits.py finds BatchNorm."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 5, padding=2), nn.BatchNorm2d(64)
        self.conv2, self.bn2 = nn.Conv2d(64, 64, 5, padding=2), nn.BatchNorm2d(64)
        self.conv3, self.bn3 = nn.Conv2d(64, 128, 5, padding=2), nn.BatchNorm2d(128)
        self.fc1, self.bn4 = nn.Linear(128 * (PIXELS // 4) ** 2, 2048), nn.BatchNorm1d(2048)
        self.fc2, self.bn5 = nn.Linear(2048, 512), nn.BatchNorm1d(512)
        self.fc3 = nn.Linear(512, 10)

    def forward(self, x):
        for number in (1, 2, 3):
            x = relu(getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(x)))
            x = max_pool2d(x, 2) if number < 3 else x.flatten(1)
        x = relu(self.bn4(self.fc1(x)))
        return self.fc3(relu(self.bn5(self.fc2(x))))


@pytest.fixture(scope="module")
def digits():
    clients = {}
    for name, size in SIZES.items():
        split = fedshift.digits().client(name).train
        pixels = split.copy_rows(slice(size)).double() / 255
        x = interpolate((pixels - 0.5) / 0.5, PIXELS).numpy()
        clients[name] = (x, split.y[:size].numpy(), x[:4], split.y[:4].numpy())
    return federation(clients)


def run_ours(text, data, rounds, weights=None):
    settings = Settings(
        rounds=rounds, work=Work(batch_size=BATCH, epochs=1), optimizer=SGD(lr=LR), evaluate_every=rounds,
        engine="sequential", weights=weights,
    )  # fmt: skip
    running = Trial(METHODS.parse(text), lambda shape, _: digit_cnn_bn(shape).double(), data, settings, SEED)
    initial = {name: tensor.clone() for name, tensor in running.plan.initial.items()}
    for _ in range(rounds):
        running.advance()
    return running, initial


def renamed(state, like):
    """``state`` under the names of ``like``, by the order of layers."""
    assert [tensor.shape for tensor in state.values()] == [tensor.shape for tensor in like.values()]
    return dict(zip(like, state.values(), strict=True))


def fed_digits(mode, data, start, rounds, *, before=0):
    """The loop of fed_digits.py after ``before`` rounds; the server's model, and each client's."""
    server = DigitModel().double()
    server.load_state_dict(renamed(start, server.state_dict()))
    models = {client.name: deepcopy(server) for client in data.clients}
    for number in range(rounds):
        for client in data.clients:
            model, split = models[client.name].train(), client.train
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            order = torch.from_numpy(stream(SEED, "order", client.name, number).permutation(len(split.y)))
            for step, rows in enumerate(order.split(BATCH)):
                loss = cross_entropy(model(split.x[rows]), split.y[rows])
                if mode == "fedprox" and before + number > 0 and step > 0:
                    pairs = zip(server.parameters(), model.parameters(), strict=True)
                    loss = loss + MU / 2 * sum((w.detach() - v).norm() ** 2 for w, v in pairs)
                sgd.zero_grad()
                loss.backward()
                sgd.step()
        with torch.no_grad():
            states = [model.state_dict() for model in models.values()]
            for key, tensor in server.state_dict().items():
                if "num_batches_tracked" in key and mode != "fedbn":
                    tensor.copy_(states[0][key])
                elif mode != "fedbn" or "bn" not in key:
                    tensor.copy_(sum(state[key] / len(states) for state in states))
                    for state in states:
                        state[key].copy_(tensor)
    return server.state_dict(), {name: model.state_dict() for name, model in models.items()}


def assert_equal(ours, theirs):
    for name, tensor in renamed(ours, theirs).items():
        assert float((tensor.double() - theirs[name].double()).abs().max()) <= 1e-9, name


def test_fedavg_is_that_of_fed_digits(digits):
    running, start = run_ours("fedavg(weighting='uniform')", digits, 3)
    server, _ = fed_digits("fedavg", digits, start, 3)
    assert_equal(running.server.shared, server)


def test_fedbn_is_that_of_fed_digits(digits):
    running, start = run_ours("fedbn+fedavg(weighting='uniform')", digits, 3)
    _, models = fed_digits("fedbn", digits, start, 3)
    for name, state in models.items():
        assert_equal(running.model_state(name), state)


def test_fedprox_is_that_of_fed_digits_from_its_second_round_on(digits):
    """In its first round the program has no proximal term: it begins with FedAvg's."""
    first, _ = run_ours("fedavg(weighting='uniform')", digits, 1)
    weights = InitialWeights(source="the first round", entries=first.server.shared)
    running, start = run_ours(f"fedprox(mu={MU})+fedavg(weighting='uniform')", digits, 2, weights)
    assert_equal(start, first.server.shared)
    server, _ = fed_digits("fedprox", digits, start, 2, before=1)
    assert_equal(running.server.shared, server)
    without, _ = fed_digits("fedavg", digits, start, 2)
    assert max(float((tensor - without[name]).abs().max()) for name, tensor in server.items()) > 1e-7


UPDATES, ROUNDS, FEW, RATE = 5, 6, 4, 0.1
"""FLamby's strategies: updates of a client in a round, rounds, samples in a batch, learning rate."""
TAU = 1e-4
ADAPTIVE = f"lr=0.05, beta1=0.9, tau={TAU}"
STRATEGIES = {
    "FedAvg": "fedavg", "FedProx": "fedprox(mu=0.5)", "Scaffold": "scaffold(server_lr=0.7)",
    "FedAdam": f"fedadam({ADAPTIVE}, beta2=0.9)", "FedYogi": f"fedyogi({ADAPTIVE}, beta2=0.9)",
    "FedAdagrad": f"fedadagrad({ADAPTIVE})",
}  # fmt: skip
"""FLamby's name of a strategy, and fedshift's method."""


@pytest.fixture(scope="module")
def hospitals():
    rng = np.random.default_rng(0)
    drawn = {name: (rng.normal(size=(size, 4)), np.arange(size) % 3) for name, size in (("a", 14), ("b", 9), ("c", 17))}
    return federation({name: (x + number, y, x, y) for number, (name, (x, y)) in enumerate(drawn.items())})


def run_steps(text, data, rounds=ROUNDS, **given):
    settings = Settings(
        rounds=rounds, work=Work(batch_size=FEW, steps=UPDATES), optimizer=SGD(lr=RATE), evaluate_every=rounds, **given
    )
    running = Trial(METHODS.parse(text), lambda *_: nn.Linear(4, 3).double(), data, settings, SEED)
    start = [tensor.clone() for tensor in running.plan.initial.values()]
    for _ in range(rounds):
        running.advance()
    return list(running.server.shared.values()), start


def endless(client):
    for number in count():
        order = torch.from_numpy(stream(SEED, "order", client.name, number).permutation(len(client.train.y)))
        yield from ((client.train.x[rows], client.train.y[rows]) for rows in order.split(FEW))


def update(model, batches, term=lambda params: 0.0):
    """Some updates of plain SGD; ``term`` is added to each batch's loss."""
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(UPDATES):
        x, y = next(batches)
        sgd.zero_grad()
        (cross_entropy(model(x), y) + term(list(model.parameters()))).backward()
        sgd.step()
    return [tensor.detach().clone() for tensor in model.parameters()]


def flamby(name, data, start, server_lr):
    """The loop of a strategy of FLamby: every client's copy starts a round from the server's parameters."""
    server, total = [tensor.clone() for tensor in start], sum(len(client.train.y) for client in data.clients)
    batches = {client.name: endless(client) for client in data.clients}
    ends = {client.name: server for client in data.clients}
    corrections = {client.name: [torch.zeros_like(tensor) for tensor in start] for client in data.clients}
    first, second = ([torch.full_like(tensor, value) for tensor in start] for value in (0.0, TAU**2))
    for _ in range(ROUNDS):
        delta = [torch.zeros_like(tensor) for tensor in start]
        for client in data.clients:
            model, term = nn.Linear(4, 3).double(), lambda params: 0.0
            model.load_state_dict(dict(zip(model.state_dict(), server, strict=True)))
            if name == "FedProx":

                def term(params, before=server):
                    return 0.5 / 2 * sum((one - two).square().sum() for one, two in zip(params, before, strict=True))

            if name == "Scaffold":
                corrections[client.name] = corrected = [
                    c + (new - old) / (server_lr * RATE * UPDATES)
                    for c, new, old in zip(corrections[client.name], server, ends[client.name], strict=True)
                ]

                def term(params, by=corrected):
                    return -sum((one * two).sum() for one, two in zip(params, by, strict=True))

            local = update(model, batches[client.name], term)
            if name == "Scaffold":
                local = [server_lr * new + (1 - server_lr) * old for new, old in zip(local, server, strict=True)]
            ends[client.name] = local
            for into, new, old in zip(delta, local, server, strict=True):
                into += (new - old) * len(client.train.y) / total
        if name in ("FedAdam", "FedYogi", "FedAdagrad"):
            first = [0.9 * m + 0.1 * change for m, change in zip(first, delta, strict=True)]
            for v, square in zip(second, (change**2 for change in delta), strict=True):
                if name == "FedAdam":
                    v.mul_(0.9).add_(0.1 * square)
                elif name == "FedYogi":
                    v.sub_(0.1 * square * torch.sign(v - square))
                else:
                    v.add_(square)
            delta = [0.05 * m / (v.sqrt() + TAU) for m, v in zip(first, second, strict=True)]
        server = [tensor + change for tensor, change in zip(server, delta, strict=True)]
    return server


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_are_flambys(name, hospitals):
    """But that second moments start at tau squared, as in the paper, where FLamby has 0: 1e-16 apart at its tau."""
    ours, start = run_steps(STRATEGIES[name], hospitals)
    theirs = flamby(name, hospitals, start, server_lr=0.7)
    for one, two, before in zip(ours, theirs, start, strict=True):
        assert float((one - two).abs().max()) <= 1e-12
        assert float((one - before).abs().max()) > 1e-2


@pytest.mark.parametrize("turns", ["ordered", "shuffled"])
def test_cyclic_training_is_one_model_that_each_client_trains_in_turn(turns, hospitals):
    """Cyclic weight transfer, as FLamby's documentation describes it; its program does not transfer (test_flamby)."""
    ours, start = run_steps("fedavg", hospitals, 7, participation=turns)
    model = nn.Linear(4, 3).double()
    model.load_state_dict(dict(zip(model.state_dict(), start, strict=True)))
    batches = {client.name: endless(client) for client in hospitals.clients}
    drawn = Settings(participation=turns)
    for number in range(1, 8):
        (name,) = drawn.draw_participants(SEED, number, hospitals.names)
        update(model, batches[name])
    for one, two in zip(ours, model.parameters(), strict=True):
        assert float((one - two.detach()).abs().max()) <= 1e-12
