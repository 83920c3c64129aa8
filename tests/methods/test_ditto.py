"""Ditto: w is FedAvg's; v equals a plain PyTorch loop on F(v) + lam / 2 * ||v - w||^2 with statistics of its own."""

import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.methods.ditto import ditto
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedmmb import fedmmb
from fedshift.methods.single import single
from fedshift.utils.state import is_equal
from tests.methods import plain
from tests.methods.plain import LR, data, largest_difference, loaded_with, network, passes, step

SIZES, ROUNDS = {"a": 12, "b": 8, "c": 9}, 3
DATA = data(SIZES)


def trial(method, **settings):
    return plain.trial(method, network, DATA, **{"optimizer": SGD(lr=LR, momentum=0.9), **settings})


def after_rounds(method, rounds=ROUNDS, **settings):
    running = trial(method, **settings)
    for _ in range(rounds):
        running.advance()
    return running


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("lam", "epochs"), [(0.0, None), (0.1, None), (3.0, None), (0.1, 3)])
@pytest.mark.parametrize(("base", "loaded"), [(fedavg(), ("",)), (fedbn(), ("0.", "4."))], ids=["fedavg", "fedbn"])
def test_personal_models_equal_a_plain_loop_with_autograd_of_the_objective(base, loaded, lam, epochs):
    running = trial(ditto(base, lam=lam, epochs=epochs))
    models = {name: loaded_with(running.plan.initial) for name in SIZES}
    for number in range(ROUNDS):
        sent = {name: tensor.clone() for name, tensor in running.server.shared.items()}
        running.advance()
        for client in DATA.clients:
            v = models[client.name]
            sgd = torch.optim.SGD(v.parameters(), lr=LR, momentum=0.9)
            for x, y in passes(client, *range(number * (epochs or 1), (number + 1) * (epochs or 1))):
                objective = nn.functional.cross_entropy(v(x), y)
                for name, parameter in v.named_parameters():
                    if name.startswith(loaded):  # under FedBN there is no global normalization to be near
                        objective = objective + lam / 2 * (parameter - sent[name]).square().sum()
                step(sgd, objective)
    for name, model in models.items():
        assert largest_difference(running.model_state(name), model.state_dict()) <= 1e-12


def test_a_client_that_sits_out_keeps_its_personal_model():
    running = trial(ditto(), participation=1, rounds=6)
    seen = set()
    for _ in range(6):
        before = {name: client.memory[0] for name, client in running.clients.items()}
        (took_part,) = running.advance().participants
        seen.add(took_part)
        for name, client in running.clients.items():
            assert is_equal(client.memory[0], before[name]) == (name != took_part)
        for name in seen:
            assert is_equal(running.clients[name].memory[0], running.model_state(name))
    assert len(seen) > 1


def test_epochs_of_its_own_are_counted_where_a_round_is_a_group_of_batches():
    """Each round is one of a pass's two or three batches; the personal model takes two passes a round."""
    running = after_rounds(fedmmb(ditto(lam=0.0, epochs=2), batches=1), rounds=5, optimizer=SGD(lr=LR))
    alone = after_rounds(single(), rounds=10, optimizer=SGD(lr=LR))
    assert {name: client.steps for name, client in running.clients.items()} == dict.fromkeys(SIZES, 5)
    assert all(is_equal(running.model_state(name), alone.model_state(name)) for name in SIZES)
