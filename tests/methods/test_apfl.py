"""APFL equals a plain loop: w is FedAvg's, v and alpha follow autograd of the loss of their mixture."""

import pytest
import torch
from torch import nn

from fedshift.methods.apfl import apfl
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.utils.state import is_equal
from tests.methods.plain import LR, SIZES, batches, largest_difference, loaded_with, network, trial


def mixed_loss(w, v, statistics, alpha, x, y):
    """The loss of the mixture on a batch, in training, which moves ``statistics``."""
    mixture = {name: alpha * own + (1 - alpha) * w[name].detach() for name, own in v.items()}
    return nn.functional.cross_entropy(torch.func.functional_call(network().train(), {**mixture, **statistics}, x), y)


@pytest.mark.parametrize(("start", "learned"), [(0.3, False), (0.5, True), (0.999, True)])
@pytest.mark.parametrize("base", [fedavg(), fedbn()], ids=lambda method: method.name)
def test_it_equals_a_plain_loop(base, start, learned):
    running, plain = trial(apfl(base, alpha=start, learned=learned)), trial(base)
    initial = running.plan.initial
    own = {c: {n: p.detach().clone() for n, p in loaded_with(initial).named_parameters()} for c in SIZES}
    statistics = {c: {n: t.clone() for n, t in initial.items() if n not in own[c]} for c in SIZES}
    alphas = {client: torch.tensor(start, dtype=torch.float64) for client in SIZES}
    for number in range(2):
        loaded = {client: plain.model_state(client) if number else initial for client in SIZES}
        running.advance()
        plain.advance()
        for client in SIZES:
            model = loaded_with(loaded[client])
            v = own[client]
            for x, y in batches(client, number):
                w = {name: p.detach().clone() for name, p in model.named_parameters()}
                leaves = {name: tensor.requires_grad_() for name, tensor in v.items()}
                alpha = alphas[client].requires_grad_()
                loss = mixed_loss(w, leaves, statistics[client], alpha, x, y)
                *grads, slope = torch.autograd.grad(loss, (*leaves.values(), alpha))
                v = {name: v[name].detach() - LR * grad for name, grad in zip(leaves, grads, strict=True)}
                if learned:
                    alphas[client] = (alpha.detach() - LR * slope).clamp(0, 1)
                step(model, x, y)
            own[client] = v
    assert is_equal(running.server.shared, plain.server.shared)
    for client in SIZES:
        shared, alpha = plain.model_state(client), alphas[client].detach()
        expected = {
            name: alpha * own[client][name] + (1 - alpha) * tensor if name in own[client] else statistics[client][name]
            for name, tensor in shared.items()
        }
        assert largest_difference(running.model_state(client), expected) <= 1e-9
        assert not is_equal(running.model_state(client), shared)
        if learned:
            found = running.clients[client].memory[0]["alpha"]
            assert abs(found - alpha) <= 1e-9
            assert found != start
            assert 0 <= found <= 1


def step(model, x, y):
    """Take one plain gradient step."""
    loss = nn.functional.cross_entropy(model(x), y)
    for parameter, grad in zip(model.parameters(), torch.autograd.grad(loss, tuple(model.parameters())), strict=True):
        parameter.data -= LR * grad
