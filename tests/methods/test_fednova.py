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

from fedshift.base.errors import UsageError
from fedshift.core.folding import server_round
from fedshift.core.kernel import Update, begin, finish, init_client, init_server, step
from fedshift.core.optimizer import SGD, AdamW
from fedshift.core.prepare import prepare
from fedshift.core.work import Work
from fedshift.data.federation import federation
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fednova import fednova
from fedshift.settings import Settings
from fedshift.trial import Trial

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
            job = begin(plan, init_client(plan), server, planned=steps[name])
            size = round(600 * SHARES[name]) // steps[name]  # samples of a step, so that all weigh as they should
            x = torch.tensor([[curve, TARGETS[name]]], dtype=torch.float64).expand(size, 2)
            for _ in range(steps[name]):
                job, _ = step(plan, job, x, torch.zeros(size), torch.tensor(0))
            updates[name] = finish(plan, job)[1]
        assert {name: update.weight / 600 for name, update in updates.items()} == SHARES
        server = server_round(plan, server, updates, len(CURVES))
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


def test_with_small_steps_fednova_minimizes_the_true_objective_and_fedavg_the_surrogate():
    optimum = balance({k: SHARES[k] * CURVES[k] for k in CURVES})
    surrogate = balance({k: SHARES[k] * STEPS[k] * CURVES[k] for k in CURVES})
    assert abs(optimum - surrogate) > 0.1
    lr = 1e-6
    for method, still, moving in ((fednova(), optimum, surrogate), (fedavg(), surrogate, optimum)):
        assert abs(federated(method, 1, lr, start=still)[0] - still) / lr < 1e-3
        assert abs(federated(method, 1, lr, start=moving)[0] - moving) / lr > 0.5


def test_clients_of_equal_steps_are_averaged_as_by_fedavg():
    equal = dict.fromkeys(CURVES, 4)
    both = zip(federated(fedavg(), 10, 0.1, equal), federated(fednova(), 10, 0.1, equal), strict=True)
    assert all(one == pytest.approx(other, abs=1e-12) for one, other in both)


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
        name: Update(shared=state, memory={}, weight=weight, steps=steps)
        for name, state, weight, steps in zip("ab", states, (1.0, 3.0), (9, 4), strict=True)
    }
    after = server_round(plan, server, updates, 2).shared
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


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), AdamW(lr=0.1)], ids=["momentum", "adamw"])
def test_optimizers_whose_path_is_not_the_sum_of_gradients_are_refused(optimizer):
    x, y = np.zeros((4, 2)), np.arange(4) % 2
    data = federation(dict.fromkeys("ab", (x, y, x, y)))
    settings = Settings(optimizer=optimizer, work=Work(batch_size=2, epochs=1))
    with pytest.raises(
        UsageError, match="FedNova's normalization by the number of steps holds for SGD without momentum"
    ):
        Trial(fednova(), lambda shape, classes: nn.Linear(2, classes), data, settings, seed=0)
