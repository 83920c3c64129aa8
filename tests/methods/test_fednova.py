"""FedNova equals a plain loop with the paper's norms: clients that take more steps do not pull the federation."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD, AdamW
from fedshift.core.schedule import StepDecay
from fedshift.core.server_round import server_round
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedmmb import fedmmb
from fedshift.methods.fednova import fednova
from fedshift.methods.fedprox import fedprox
from fedshift.methods.fixbn import fixbn
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from tests.methods.plain import advance, largest_difference

SIZES = {"a": 21, "b": 8, "c": 3}


def clients():
    rng = np.random.default_rng(0)
    made = {
        name: (rng.normal(at, 1 + at, (size, 3)), np.arange(size) % 2) for at, (name, size) in enumerate(SIZES.items())
    }
    return federation({name: (x, y, x, y) for name, (x, y) in made.items()})


def network(shape, classes):
    frozen = nn.Linear(4, 4)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), frozen.requires_grad_(False), nn.Linear(4, classes))
    return net.double()


def trial(method, optimizer=SGD(lr=0.05), work=Work(batch_size=4, epochs=2), rounds=4, engine="sequential"):  # noqa: B008
    settings = Settings(optimizer=optimizer, work=work, rounds=rounds, engine=engine, evaluate_every=rounds)
    return Trial(method, network, clients(), settings, seed=0)


def norm_of(steps, lr, rho, mu, nesterov):
    """The norm |a|_1 as the paper prints it; where it prints none, how often each step's gradient is in the change."""
    if rho and not mu and not nesterov:
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    if mu and not rho:
        return (1 - (1 - lr * mu) ** steps) / (lr * mu)
    counts = []
    for at in range(steps):  # the change that a gradient of one in step ``at``, and of zero elsewhere, makes
        w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        sgd = torch.optim.SGD([w], lr=lr, momentum=rho, nesterov=nesterov)
        for number in range(steps):
            w.grad = mu * w.detach() + float(number == at)
            sgd.step()
        counts.append(-w.item() / lr)
    return sum(counts)


def by_hand(running, rounds, lr, *, rho=0.0, mu=0.0, nesterov=False, decay=0.0):
    """The server's state after rounds of torch's own layers, autograd and SGD, folded by the paper's formula."""
    shares = {name: size / sum(SIZES.values()) for name, size in SIZES.items()}
    server, done = {name: tensor.clone() for name, tensor in running.plan.initial.items()}, dict.fromkeys(SIZES, 0)
    for _ in range(rounds):
        after, lengths, used = {}, {}, {}
        for client in clients().clients:
            net, x, y = network((3,), 2), client.train.x.double(), client.train.y
            net.load_state_dict(server)
            params = [(name, p) for name, p in net.train().named_parameters() if p.requires_grad]
            sgd = torch.optim.SGD([p for _, p in params], lr=lr, momentum=rho, nesterov=nesterov, weight_decay=decay)
            bounds, first = running.plan.work.batch_bounds(len(x), 2), done[client.name]
            coming, used[client.name] = running.plan.work.steps_of_round(first, len(bounds)), 0
            for number in coming:
                order = stream(0, "order", client.name, number // len(bounds)).permutation(len(x))
                start, stop = bounds[number % len(bounds)]
                batch = torch.from_numpy(order[start:stop])
                loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
                pull = sum((p - server[name]).square().sum() for name, p in params)
                sgd.zero_grad()
                (loss + mu / 2 * pull).backward()
                sgd.step()
                used[client.name] += stop - start
            done[client.name] = coming.stop
            after[client.name] = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            lengths[client.name] = norm_of(len(coming), lr, rho, mu, nesterov)
        assert len(set(lengths.values())) > 1
        effective = sum(shares[k] * lengths[k] for k in SIZES)
        weights, trained = {k: used[k] / sum(used.values()) for k in SIZES}, [name for name, _ in params]
        for name, before in server.items():
            if name in trained:
                moves = (shares[k] / lengths[k] * (after[k][name] - before) for k in SIZES)
                server[name] = before + effective * sum(moves)
            else:
                average = sum(weights[k] * after[k][name] for k in SIZES)
                server[name] = average if before.is_floating_point() else average.round().to(before.dtype)
    return server


LOCAL = [
    {"rho": 0.9}, {"mu": 2.0}, {"rho": 0.5, "decay": 0.01}, {"rho": 0.9, "nesterov": True},
    {"rho": 0.8, "mu": 1.0}, {"rho": 0.8, "mu": 1.0, "nesterov": True}, {},
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("local", LOCAL, ids=str)
def test_rounds_with_momentum_and_proximal_term_are_the_papers_in_a_plain_loop(local):
    rho, mu, nesterov, decay = (local.get(name, 0.0) for name in ("rho", "mu", "nesterov", "decay"))
    optimizer = SGD(lr=0.05, momentum=rho, nesterov=bool(nesterov), weight_decay=decay)
    for method, engine in ((fednova(fedprox(mu=mu)), "sequential"), (fedprox(fednova(), mu=mu), "stacked")):
        running = trial(method, optimizer, rounds=3, engine=engine)
        advance(running, rounds=3)
        assert largest_difference(running.server.shared, by_hand(running, 3, 0.05, **local)) <= 1e-12


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_groups_of_batches_weigh_by_the_clients_data_not_by_what_a_round_used(engine):
    running = trial(fednova(fedmmb(batches=3)), work=Work(batch_size=4, epochs=1), engine=engine)
    advance(running, rounds=4)
    for name, tensor in by_hand(running, 4, 0.05).items():
        if name in running.plan.trained:
            assert (running.server.shared[name] - tensor).abs().max() <= 1e-12, name


def test_the_proximal_term_follows_the_learning_rate_of_the_round():
    decaying = trial(fednova(fedprox(mu=2.0)), SGD(lr=0.2, schedule=StepDecay(every=1, gamma=0.5)), rounds=1)
    decaying.advance()
    uploads = {name: trained.update for name, trained in decaying.engine.train(decaying.server, dict(decaying.clients))}
    before, after = decaying.server.shared, server_round(decaying.plan, decaying.server, uploads, SIZES).shared
    lengths = {name: norm_of(update.steps, 0.1, 0.0, 2.0, nesterov=False) for name, update in uploads.items()}
    shares = {name: size / sum(SIZES.values()) for name, size in SIZES.items()}
    moves = sum(shares[k] / lengths[k] * (uploads[k].shared["0.weight"] - before["0.weight"]) for k in SIZES)
    expected = before["0.weight"] + sum(shares[k] * lengths[k] for k in SIZES) * moves
    assert (after["0.weight"] - expected).abs().max() <= 1e-14


@pytest.mark.parametrize(
    ("method", "optimizer", "message"),
    [
        (
            fednova(),
            AdamW(lr=0.1),
            "FedNova's normalization by the number of steps holds for SGD whose momentum is reset",
        ),
        (fednova(), SGD(lr=0.1, momentum=0.9, keep=True), "use sgd with keep=False"),
        (fednova(fixbn(keep_momentum=True)), SGD(lr=0.1, momentum=0.9), "use sgd with keep=False"),
        (fednova(fedprox(mu=10.0)), SGD(lr=0.1), r"lr \* mu < 1, so that .* lr=0.1 and mu=10: lower one of the two"),
    ],
    ids=["adamw", "kept momentum", "momentum that a method keeps", "overshooting"],
)
def test_local_work_whose_change_is_no_known_sum_of_gradients_is_refused(method, optimizer, message):
    with pytest.raises(UsageError, match=message):
        trial(method, optimizer)
