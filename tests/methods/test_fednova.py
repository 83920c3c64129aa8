"""FedNova on quadratics in closed form: clients that take more steps do not pull the federation to themselves.

Client i minimizes c_i / 2 * (w - t_i)^2 by tau_i gradient steps, which multiply its distance to t_i by
1 - d_i = (1 - lr c_i)^tau_i. FedAvg then stands still where sum p_i d_i (w - t_i) = 0, FedNova (Wang et al. 2020,
equation 6) where sum p_i d_i / tau_i (w - t_i) = 0. As lr goes to 0, d_i = lr c_i tau_i: FedAvg minimizes the surrogate
sum p_i tau_i F_i, FedNova the true objective sum p_i F_i.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.kernel import client_final, client_init, init_client, init_server
from fedshift.core.optimizer import SGD, AdamW
from fedshift.core.preparation import prepare
from fedshift.core.schedule import StepDecay
from fedshift.core.server_round import server_round
from fedshift.core.states import Update
from fedshift.core.step import client_step
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedmmb import fedmmb
from fedshift.methods.fednova import fednova
from fedshift.methods.fedprox import fedprox
from fedshift.methods.fixbn import fixbn
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from tests.methods.plain import advance

CURVES, TARGETS = {"a": 1.0, "b": 4.0, "c": 2.0}, {"a": 0.0, "b": 1.0, "c": -2.0}
STEPS, SHARES = {"a": 12, "b": 2, "c": 5}, {"a": 0.3, "b": 0.5, "c": 0.2}
START = 3.0


class Point(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, x):
        return x[:, 0] / 2 * (self.w - x[:, 1]) ** 2


def federated(method, rounds, lr, steps=STEPS, start=START):
    """The server's w after each round; client i's uploads weigh SHARES[i] whatever its number of steps."""
    plan = prepare(method, Point(start), optimizer=SGD(lr=lr), loss=lambda outputs, _: outputs.mean())
    server, path = init_server(plan), []
    for _ in range(rounds):
        updates = {}
        for name, curve in CURVES.items():
            job = client_init(plan, init_client(plan), server, planned_steps=steps[name])
            size = round(600 * SHARES[name]) // steps[name]  # samples of a step, so that all weigh as they should
            x = torch.tensor([[curve, TARGETS[name]]], dtype=torch.float64).expand(size, 2)
            for _ in range(steps[name]):
                job, _ = client_step(plan, job, x, torch.zeros(size), torch.tensor(0))
            updates[name] = client_final(plan, job)[1]
        assert {name: update.weight / 600 for name, update in updates.items()} == SHARES
        server = server_round(plan, server, updates, {name: round(600 * share) for name, share in SHARES.items()})
        path.append(float(server.shared["w"]))
    return path


def balance(weights):
    """Where the clients' pulls, of these strengths, are equal."""
    return sum(weights[k] * TARGETS[k] for k in CURVES) / sum(weights.values())


def pulls(lr, steps=STEPS):
    return {k: 1 - (1 - lr * CURVES[k]) ** steps[k] for k in CURVES}


@pytest.mark.parametrize("lr", [0.05, 0.2])
def test_each_stands_still_at_the_fixed_point_of_its_own_closed_form(lr):
    d = pulls(lr)
    biased = balance({k: SHARES[k] * d[k] for k in CURVES})
    normalized = balance({k: SHARES[k] * d[k] / STEPS[k] for k in CURVES})
    assert abs(biased - normalized) > 0.1
    for method, still, moving in ((fedavg(), biased, normalized), (fednova(), normalized, biased)):
        assert federated(method, 3, lr, start=still) == pytest.approx([still] * 3, abs=1e-12)
        assert abs(federated(method, 1, lr, start=moving)[0] - moving) > 0.01
        # The distance to it shrinks by the same factor each round, so that it is reached from anywhere.
        first, second, third = (w - still for w in federated(method, 3, lr))
        assert third / second == pytest.approx(second / first, rel=1e-9)
        assert abs(second / first) < 0.8


def test_every_round_is_equation_6():
    lr, w = 0.1, START
    d, tau = pulls(lr), sum(SHARES[k] * STEPS[k] for k in CURVES)
    for found in federated(fednova(), 8, lr):
        w -= tau * sum(SHARES[k] * d[k] * (w - TARGETS[k]) / STEPS[k] for k in CURVES)
        assert found == pytest.approx(w, abs=1e-12)


def test_statistics_and_counters_are_the_mean_in_their_own_dtype():
    plan = prepare(fednova(), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), optimizer=SGD(lr=0.1))
    server, rng = init_server(plan), np.random.default_rng(0)
    states = [
        {name: torch.tensor(rng.normal(size=tensor.shape)).to(tensor.dtype) for name, tensor in server.shared.items()}
        for _ in range(2)
    ]
    for state, count in zip(states, (9, 4), strict=True):
        state["1.num_batches_tracked"] = torch.tensor(count)
    updates = {
        name: Update(shared=state, memory=({},), weight=weight, steps=steps)
        for name, state, weight, steps in zip("ab", states, (1.0, 3.0), (9, 4), strict=True)
    }
    after = server_round(plan, server, updates, {"a": 1, "b": 3}).shared
    assert after["1.num_batches_tracked"].dtype == torch.int64
    assert int(after["1.num_batches_tracked"]) == round((9 + 3 * 4) / 4)
    for name, tensor in after.items():
        one, other, before = (s[name].double().numpy() for s in (*states, server.shared))
        if name in plan.trained:
            tau = (9 + 3 * 4) / 4
            expected = before + tau * ((one - before) / 4 / 9 + (other - before) * 3 / 4 / 4)
        else:
            expected = (one + 3 * other) / 4
        assert tensor.dtype == server.shared[name].dtype
        assert name.endswith("tracked") or np.abs(tensor.numpy() - expected).max() <= 1e-6, name


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
            elif before.is_floating_point():
                server[name] = sum(weights[k] * after[k][name] for k in SIZES)
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
        for name, tensor in by_hand(running, 3, 0.05, **local).items():
            if tensor.is_floating_point():
                assert (running.server.shared[name] - tensor).abs().max() <= 1e-12, name


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
