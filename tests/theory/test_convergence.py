"""Gradient descent of FedBN's theory: its steps, whole rounds against fedshift's kernel, and predictions."""

import copy

import numpy as np
import pytest
import torch

from fedshift.core.kernel import client_final, client_init, init_client, init_server, personal_state
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.server_round import server_round
from fedshift.core.step import client_step_
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.models.mlp import two_layer
from fedshift.theory.checks import draw_inputs
from fedshift.theory.ntk import (
    Network,
    compute_jacobians,
    compute_outputs,
    descend,
    descent_step,
    gram_matrices,
    guaranteed_residual,
    init_network,
    linear_prediction,
    measure_inputs,
    smallest_eigenvalue,
)

CLIENTS, COUNT, SIZE, STEPS, LR = 3, 6, 4, 8, 0.4


def federation():
    rng = np.random.default_rng(0)
    x = draw_inputs(CLIENTS, COUNT, SIZE, 1.5, rng)[0]
    return x, measure_inputs(x), rng.uniform(-1, 1, CLIENTS * COUNT)


@pytest.mark.parametrize("local", [False, True])
def test_a_step_follows_the_jacobian(local):
    _, samples, targets = federation()
    network = init_network(20, SIZE, np.random.default_rng(1), clients=CLIENTS if local else 0)
    residual = compute_outputs(samples, network) - targets
    by_v, by_gamma = compute_jacobians(samples, network)
    after = descent_step(samples, network, residual, 0.01, weight=2.0)
    np.testing.assert_allclose(after.v, network.v - 0.01 * np.einsum("pkd,p->kd", by_v, residual), atol=1e-14)
    owned = by_gamma * residual[:, None]
    moved = np.stack([owned[samples.client == n].sum(0) for n in range(CLIENTS)]) if local else owned.sum(0)
    np.testing.assert_allclose(after.gamma, network.gamma - 0.02 * moved, atol=1e-14)
    np.testing.assert_array_equal(after.c, network.c)


def mean_square(outputs, y):
    return (outputs[:, 0] - y).square().mean()


def federated(method, model, x, targets):
    """Residuals before each round and after the last: E = 1, full batches, mean squared error, in float64."""
    plan = prepare(method, model, optimizer=SGD(lr=LR), loss=mean_square, precision="float64")
    x, y = torch.from_numpy(x), torch.from_numpy(targets).view(CLIENTS, COUNT)
    server, clients = init_server(plan), {str(client): init_client(plan) for client in range(CLIENTS)}
    residuals = []
    for number in range(STEPS + 1):
        now, updates = [], {}
        for name in clients:
            state = personal_state(plan, clients[name], server)
            net = copy.deepcopy(model)
            net.load_state_dict(state)
            now.append(net.train()(x[int(name)])[:, 0].detach() - y[int(name)])
            job, _ = client_step_(
                plan, client_init(plan, clients[name], server), x[int(name)], y[int(name)], torch.tensor(number)
            )
            clients[name], updates[name] = client_final(plan, job)
        residuals.append(torch.cat(now).numpy())
        server = server_round(plan, server, updates, dict.fromkeys(clients, COUNT))
    return np.stack(residuals)


@pytest.mark.parametrize(("method", "weight"), [(fedavg(), 1), (fedbn(), CLIENTS)], ids=["fedavg", "fedbn"])
def test_rounds_of_the_kernel_are_gradient_descent_and_fedbn_steps_gamma_once_for_each_client(method, weight):
    torch.manual_seed(0)
    model = two_layer((SIZE,), 1, width=30, alpha=1.5).double()
    model.norm.eps = 0.0
    x, samples, targets = federation()
    gamma = model.norm.weight.detach().numpy()
    network = Network(
        v=model.hidden.weight.detach().numpy().copy(),
        gamma=np.tile(gamma, (CLIENTS, 1)) if weight > 1 else gamma.copy(),
        c=model.top.weight[0].numpy() * 30**0.5,
    )
    rate = 2 * LR / len(targets)
    expected = federated(method, model, x, targets)
    found = descend(samples, network, targets, rate=rate, steps=STEPS, weight=weight)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    other = descend(samples, network, targets, rate=rate, steps=STEPS, weight=1 if weight > 1 else CLIENTS)
    assert np.abs(other - expected).max() > 1e-2


def test_the_linear_prediction_is_repeated_multiplication():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(5, 5))
    evolution, residual = root @ root.T, rng.normal(size=5)
    found = linear_prediction(evolution, residual, rate=0.05, steps=6)
    for row in found:
        np.testing.assert_allclose(row, residual, atol=1e-12)
        residual = residual - 0.05 * evolution @ residual


def courses(width, method, alpha=3.0, steps=60):
    """Measured and predicted residuals of one method: its weight, and whether gamma is local."""
    _, samples, targets = federation()
    weight = CLIENTS if method == "fedbn" else 1
    network = init_network(
        width, SIZE, np.random.default_rng(4), alpha=alpha, clients=0 if method == "fedavg" else CLIENTS
    )
    evolution = gram_matrices(samples, network, alpha=alpha).evolution(alpha, weight=weight)
    measured = descend(samples, network, targets, rate=0.05, steps=steps, weight=weight)
    return measured, linear_prediction(evolution, measured[0], rate=0.05, steps=steps), evolution


@pytest.mark.parametrize("method", ["fedavg", "fedbn, joint", "fedbn"])
def test_wider_networks_follow_the_prediction_more_closely(method):
    errors = []
    for width in (30, 10_000):
        measured, predicted, _ = courses(width, method)
        errors.append(np.linalg.norm(measured - predicted, axis=1).max() / np.linalg.norm(measured[0]))
    assert errors[0] > 5 * errors[1]
    assert errors[1] < 0.01


def test_convergence_is_linear_within_the_guarantee_and_every_eigenvalue_of_fedbn_is_at_least_fedavgs():
    evolutions = {}
    for method in ("fedavg", "fedbn, joint", "fedbn"):
        measured, _, evolution = courses(2000, method, alpha=10.0, steps=400)
        share = np.square(measured).sum(axis=1) / np.square(measured[0]).sum()
        least = smallest_eigenvalue(evolution)
        assert (share <= guaranteed_residual(least, rate=0.05, steps=400)).all()
        assert (np.diff(share) < 0).all()
        evolutions[method] = evolution
    full, local = (np.linalg.eigvalsh(evolutions[method]) for method in ("fedavg", "fedbn"))
    assert (local >= full).all()
    assert smallest_eigenvalue(evolutions["fedbn"] - evolutions["fedavg"]) > -1e-12
    assert np.linalg.eigvalsh(evolutions["fedbn, joint"])[-1] < full[-1]
