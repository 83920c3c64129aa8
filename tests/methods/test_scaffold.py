"""SCAFFOLD reaches the optimum of two different quadratics, where FedAvg stops elsewhere.

Client i minimizes c_i / 2 * (w - t_i)^2 by K gradient steps a round. The sum is minimal at sum(c t) / sum(c); FedAvg's
fixed point instead weighs t_i by 1 - (1 - lr c_i)^K (closed form of K steps of gradient descent).
"""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedadam import fedadam
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedmmb import fedmmb
from fedshift.methods.scaffold import scaffold
from fedshift.utils.errors import UsageError
from tests.methods.plain import advance

SIZES = {"large": 40, "small": 5}


def regression():
    """Two clients of very different size whose labels follow the first input in opposite directions."""
    rng, data = np.random.default_rng(0), {}
    for name, (size, slope) in zip(SIZES, ((40, 1.0), (5, -2.0)), strict=True):
        x = rng.normal(size=(size, 2))
        y = (slope * x[:, 0] + 0.3 * rng.normal(size=size) > 0).astype(np.int64)
        data[name] = (x, y, x, y)
    return federation(data)


def squares(scores, labels):
    return (scores - nn.functional.one_hot(labels, 2).to(scores.dtype)).square().sum(1).mean()


def linear(shape, classes):
    return nn.Linear(2, classes, bias=False).double()


def optimum(shares):
    """The weights [2, 2] that minimize the clients' mean squares under these shares, by the normal equations."""
    left, right = np.zeros((2, 2)), np.zeros((2, 2))
    for client in regression().clients:
        x, y = client.train.x.double().numpy(), np.eye(2)[client.train.y.numpy()]
        left += shares[client.name] * x.T @ x / len(x)
        right += shares[client.name] * x.T @ y / len(x)
    return np.linalg.solve(left, right).T


def trial(method, engine="sequential", **settings):
    settings = {"work": Work(batch_size=None, epochs=10), "optimizer": SGD(lr=0.15), "rounds": 200} | settings
    return Trial(method, linear, regression(), Settings(loss=squares, engine=engine, evaluate_every=200, **settings), 0)


SHARES = {"samples": {"large": 40 / 45, "small": 5 / 45}, "uniform": {"large": 0.5, "small": 0.5}}


def invariant(running, shares):
    """How far c is from the mean of the c_i under ``shares``."""
    [variate] = running.server.memory[0].values()
    mean = sum(share * running.clients[client].memory[0]["weight"] for client, share in shares.items())
    return float((variate - mean).abs().max())


@pytest.mark.parametrize("engine", ["sequential", pytest.param("stacked", marks=pytest.mark.slow)])
@pytest.mark.parametrize("weighting", SHARES)
def test_it_minimizes_the_objective_of_the_weighting(weighting, engine):
    running, shares = trial(scaffold(fedavg(weighting=weighting)), engine), SHARES[weighting]
    advance(running, rounds=42)
    found = running.server.shared["weight"].numpy()
    assert np.abs(found - optimum(shares)).max() <= 1e-8
    assert np.abs(optimum(SHARES["samples"]) - optimum(SHARES["uniform"])).max() > 0.1
    assert invariant(running, shares) <= 1e-14


def test_a_round_without_movement_changes_no_variate():
    still = trial(scaffold(), optimizer=SGD(lr=0.0))
    still.advance()
    assert not any(
        tensor.any() for held in (still.server, *still.clients.values()) for tensor in held.memory[0].values()
    )


@pytest.mark.parametrize("method", [scaffold(), scaffold(fedmmb(batches=2, batch_size=4))], ids=["epochs", "fedmmb"])
@pytest.mark.parametrize("weighting", SHARES)
def test_the_servers_variate_is_the_weighted_mean_of_the_clients_whoever_takes_part(weighting, method):
    running = trial(fedavg(method, weighting=weighting), participation=1)
    took_part = set()
    for _ in range(8):
        took_part |= set(running.advance().participants)
        clients = {name: share for name, share in SHARES[weighting].items() if name in took_part}
        assert invariant(running, clients) <= 1e-15  # of the others c_i is zero
    assert took_part == set(SIZES)
    assert all(variate.any() for variate in running.server.memory[0].values())


def test_the_servers_step_size_stretches_the_mean_change_of_the_models_alone():
    whole, half = trial(scaffold()), trial(scaffold(server_lr=0.5))
    advance(whole, half)
    start = whole.plan.initial["weight"]
    moved, less = (running.server.shared["weight"] - start for running in (whole, half))
    assert (less - 0.5 * moved).abs().max() <= 1e-15
    assert torch.equal(*(running.server.memory[-1]["weight"] for running in (whole, half)))
    advance(half, rounds=30)
    assert np.abs(half.server.shared["weight"].numpy() - optimum(SHARES["samples"])).max() <= 1e-4


@pytest.mark.parametrize("make", [lambda: fedadam(scaffold(server_lr=0.5)), lambda: scaffold(fedadam(), server_lr=0.5)])
def test_a_step_size_and_a_server_optimizer_are_refused(make):
    with pytest.raises(UsageError, match="already has a server optimizer; choose one of the two"):
        make()
    assert scaffold(server_lr=1.0).name == "scaffold"
    assert scaffold(fedadam()).stepper is not None
    with pytest.raises(UsageError, match="server learning rate lr=0: it must be a number above 0"):
        scaffold(server_lr=0.0)
