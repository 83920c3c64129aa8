"""FedProx: the closed-form gradient against autograd of equation 2."""

import pytest
import torch
from torch import nn

from fedshift.core.kernel import client_init, init_client, init_server
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.step import client_step, compute_gradients
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedprox import fedprox

MU = 0.3


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()


@pytest.mark.parametrize("method", [fedprox(mu=MU), fedbn(fedprox(mu=MU))], ids=lambda method: method.name)
def test_gradients_are_those_of_the_proximal_objective(method):
    model = network()
    plan = prepare(method, model, optimizer=SGD(lr=0.5))
    server = init_server(plan)
    job = client_init(plan, init_client(plan), server)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 2
    for _ in range(3):
        job, _ = client_step(plan, job, x, y, torch.tensor(0))
    found, _, _ = compute_gradients(plan, job, x, y, torch.tensor(0))

    model.load_state_dict({**job.params, **job.rest})
    model.train()
    objective = nn.functional.cross_entropy(model(x), y)
    for name, parameter in model.named_parameters():
        if name in server.shared:  # under FedBN, normalization has no global value to stay near
            objective = objective + MU / 2 * (parameter - server.shared[name]).square().sum()
    objective.backward()
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter.grad).abs().max() <= 1e-12, name
    assert ("1.weight" in server.shared) == (method.name == "fedprox(mu=0.3)")


def test_name_says_a_strength_that_is_not_the_default():
    assert [fedprox().name, fedprox(mu=0.2).name, fedbn(fedprox()).name] == [
        "fedprox", "fedprox(mu=0.2)", "fedbn+fedprox",
    ]  # fmt: skip
