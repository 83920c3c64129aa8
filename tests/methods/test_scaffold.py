"""SCAFFOLD reaches the optimum of two different quadratics, where FedAvg stops elsewhere.

Client i minimizes c_i / 2 * (w - t_i)^2 by K gradient steps a round. The sum is minimal at sum(c t) / sum(c); FedAvg's
fixed point instead weighs t_i by 1 - (1 - lr c_i)^K (closed form of K steps of gradient descent).
"""

import pytest
import torch
from torch import nn

from fedshift.core.folding import server_round
from fedshift.core.kernel import begin, finish, init_client, init_server, step
from fedshift.core.optimizer import SGD
from fedshift.core.prepare import prepare
from fedshift.methods.fedavg import fedavg
from fedshift.methods.scaffold import scaffold

CURVES, TARGETS, LR, STEPS = {"a": 1.0, "b": 10.0}, {"a": 0.0, "b": 1.0}, 0.05, 10
OPTIMUM = sum(CURVES[k] * TARGETS[k] for k in CURVES) / sum(CURVES.values())


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))

    def forward(self, x):
        return x[:, 0] / 2 * (self.w - x[:, 1]) ** 2


def federated(method, rounds, clients=("a", "b")):
    plan = prepare(method, Point(), optimizer=SGD(lr=LR), loss=lambda outputs, _: outputs.mean())
    server, kept = init_server(plan), {name: init_client(plan) for name in CURVES}
    for number in range(rounds):
        updates = {}
        for name in clients if isinstance(clients, tuple) else clients(number):
            job = begin(plan, kept[name], server)
            x = torch.tensor([[CURVES[name], TARGETS[name]]], dtype=torch.float64)
            for _ in range(STEPS):
                job, _ = step(plan, job, x, torch.zeros(1), torch.tensor(0))
            kept[name], updates[name] = finish(plan, job)
        server = server_round(plan, server, updates, len(CURVES))
    return float(server.shared["w"]), plan, kept, server


def test_scaffold_reaches_the_optimum_and_fedavg_its_own_fixed_point():
    pull = {name: 1 - (1 - LR * curve) ** STEPS for name, curve in CURVES.items()}
    fixed_point = sum(pull[k] * TARGETS[k] for k in CURVES) / sum(pull.values())
    assert federated(fedavg(), 200)[0] == pytest.approx(fixed_point, abs=1e-10)
    assert federated(scaffold(), 200)[0] == pytest.approx(OPTIMUM, abs=1e-10)
    assert abs(fixed_point - OPTIMUM) > 0.1


def test_scaffold_reaches_the_optimum_when_clients_take_turns():
    assert federated(scaffold(), 1000, lambda number: ("a",) if number % 2 else ("b",))[0] == pytest.approx(
        OPTIMUM, abs=1e-6
    )


def test_the_servers_control_variate_is_the_mean_of_the_clients():
    _, _, kept, server = federated(scaffold(), 7)
    mean = sum(client.memory["0.controlvariates/w"] for client in kept.values()) / len(kept)
    assert float(server.memory["0.controlvariates/w"]) == pytest.approx(float(mean), abs=1e-12)


def test_at_the_optimum_each_variate_is_its_clients_gradient():
    w, _, kept, _ = federated(scaffold(), 300)
    for name, client in kept.items():
        assert float(client.memory["0.controlvariates/w"]) == pytest.approx(
            CURVES[name] * (w - TARGETS[name]), abs=1e-9
        )


def test_a_round_without_movement_changes_no_variate():
    plan = prepare(scaffold(), Point(), optimizer=SGD(lr=0.0), loss=lambda outputs, _: outputs.mean())
    job = begin(plan, init_client(plan), init_server(plan))
    job, _ = step(plan, job, torch.ones(1, 2, dtype=torch.float64), torch.zeros(1), torch.tensor(0))
    client, update = finish(plan, job)
    assert float(client.memory["0.controlvariates/w"]) == float(update.memory["0.controlvariates/w"]) == 0.0
