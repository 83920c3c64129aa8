"""Server optimizers against torch.optim and against Algorithm 2 of Reddi et al. 2021 written out in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.kernel import init_server
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.server_round import server_round
from fedshift.core.states import Update
from fedshift.evaluation.communication import downlink_bytes
from fedshift.methods.fedadagrad import fedadagrad
from fedshift.methods.fedadam import fedadam
from fedshift.methods.fedavgm import fedavgm
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedyogi import fedyogi
from fedshift.methods.median import median
from fedshift.utils.state import clone, is_equal, nbytes

SAMPLES, ROUNDS = {"a": 5.0, "b": 2.0, "c": 3.0}, 6
STEPPING = [fedavgm(), fedavgm(lr=0.5, beta=0.3), fedadagrad(), fedadam(), fedyogi()]
EACH = pytest.mark.parametrize("method", STEPPING, ids=lambda method: method.name)


def network(shape=(3,), classes=2):
    return nn.Sequential(nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, classes)).double()


def plan_of(method):
    torch.manual_seed(0)
    return prepare(method, network(), optimizer=SGD(lr=0.1))


def uploads(shared, number):
    """What three clients might send: the server's entries, moved; counters that differ."""
    generator = torch.Generator().manual_seed(number)
    updates = {}
    for client, samples in SAMPLES.items():
        state = {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if tensor.is_floating_point()
            else tensor + int(samples)
            for name, tensor in shared.items()
        }
        updates[client] = Update(shared=state, memory=({}, {}), weight=samples, steps=1)
    return updates


def rounds(method, count=ROUNDS):
    """The server after each round, and in NumPy the mean change of every entry in it."""
    plan = plan_of(method)
    server, changes = init_server(plan), []
    servers = [server]
    for number in range(count):
        updates = uploads(server.shared, number)
        mean = {
            name: sum(SAMPLES[client] * update.shared[name].double().numpy() for client, update in updates.items()) / 10
            for name in server.shared
        }
        changes.append({name: mean[name] - server.shared[name].double().numpy() for name in mean})
        server = server_round(plan, server, updates, SAMPLES)
        servers.append(server)
    return plan, servers, changes


@pytest.mark.parametrize(("lr", "beta"), [(1.0, 0.9), (0.3, 0.5), (2.0, 0.0)])
def test_fedavgm_is_torchs_sgd_with_momentum_on_the_change_with_its_sign_turned(lr, beta):
    plan, servers, changes = rounds(fedavgm(lr=lr, beta=beta))
    parameters = {name: nn.Parameter(plan.initial[name].clone()) for name in plan.trained}
    sgd = torch.optim.SGD(parameters.values(), lr=lr, momentum=beta)
    for server, change in zip(servers[1:], changes, strict=True):
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(-change[name])
        sgd.step()
        for name, parameter in parameters.items():
            assert (server.shared[name] - parameter).abs().max() <= 1e-12, name


@pytest.mark.parametrize("kind", [fedadagrad, fedadam, fedyogi], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("set_by_hand", [False, True], ids=["defaults", "others"])
def test_adaptive_servers_are_algorithm_2(kind, set_by_hand):
    lr, beta1, beta2, tau = (0.2, 0.6, 0.7, 0.05) if set_by_hand else (0.01, 0.9, 0.99, 1e-3)
    given = {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau} if set_by_hand else {}
    if kind is fedadagrad:
        given.pop("beta2", None)
        beta1 = given.get("beta1", 0.0)
    plan, servers, changes = rounds(kind(**given))
    for name in plan.trained:
        x = plan.initial[name].numpy().copy()
        m, v = np.zeros_like(x), np.full_like(x, tau**2)
        for server, change in zip(servers[1:], changes, strict=True):
            delta = change[name]
            m = beta1 * m + (1 - beta1) * delta
            if kind is fedadagrad:
                v = v + delta**2
            elif kind is fedyogi:
                v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
            else:
                v = beta2 * v + (1 - beta2) * delta**2
            x = x + lr * m / (np.sqrt(v) + tau)
            assert np.abs(server.shared[name].numpy() - x).max() <= 1e-12, name


def test_a_step_follows_what_was_aggregated_however_methods_are_composed():
    plain, *stepped = (
        rounds(each, 2)[1][-1].shared for each in (median(), fedavgm(median(), beta=0.0), median(fedavgm(beta=0.0)))
    )
    assert is_equal(*stepped)
    assert all((plain[name] - tensor).abs().max() <= 1e-14 for name, tensor in stepped[0].items())


@EACH
def test_statistics_and_counters_are_the_mean_and_never_pass_the_optimizer(method):
    plan, servers, changes = rounds(method)
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert buffers == plan.sent - plan.trained
    for before, after, change in zip(servers, servers[1:], changes, strict=False):
        for name in ("1.running_mean", "1.running_var"):
            assert np.abs(after.shared[name].numpy() - before.shared[name].numpy() - change[name]).max() <= 1e-15
        counter = after.shared["1.num_batches_tracked"]
        assert counter.dtype == torch.int64
        assert counter == before.shared["1.num_batches_tracked"] + round((5 * 5 + 2 * 2 + 3 * 3) / 10)
    assert {name.rpartition("/")[2] for name in servers[-1].kept[0]} == plan.trained


@EACH
def test_the_state_stays_on_the_server_and_a_round_changes_nothing_that_it_is_given(method):
    plan, servers, _ = rounds(method, 2)
    server = servers[-1]
    assert nbytes(server.kept[0]) > 0
    assert not any(server.memory)
    assert downlink_bytes(plan, server) == nbytes(server.shared)
    before = clone(server.shared), clone(server.kept[0])
    after = server_round(plan, server, uploads(server.shared, 9), SAMPLES)
    assert all(map(is_equal, before, (server.shared, server.kept[0])))
    assert not is_equal(after.kept[0], server.kept[0])


def test_entries_kept_on_clients_have_no_state():
    plan = plan_of(fedbn(fedadam()))
    assert {name.rpartition("/")[2] for name in init_server(plan).kept[0]} == plan.trained & plan.sent
