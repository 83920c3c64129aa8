"""MOON equals a plain PyTorch loop with two more models in evaluation mode."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedshift.core.work import Work
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.moon import moon
from fedshift.utils.state import clone, is_equal
from tests.methods.plain import LR, average, data, deep_network, largest_difference, loaded_with, passes, step, trial

SIZES, MU, TAU = {"a": 12, "b": 10}, 2.0, 0.4
DATA = data(SIZES, (4,))
GIVEN = {"model": deep_network, "clients": DATA, "work": Work(batch_size=4, epochs=2)}


@pytest.mark.parametrize("base", [fedavg(), fedbn()], ids=lambda method: method.name)
def test_rounds_equal_a_plain_loop(base):
    running = trial(moon(base, mu=MU, tau=TAU), **GIVEN)
    models = {name: loaded_with(running.plan.initial, deep_network) for name in SIZES}
    previous = {name: clone(running.plan.initial) for name in SIZES}
    for number in range(2):
        running.advance()
        for client in DATA.clients:
            model, last = models[client.name], previous[client.name]
            server, before = (loaded_with(state, deep_network).eval() for state in (model.state_dict(), last))
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            for x, y in passes(client, 2 * number, 2 * number + 1):
                z = model[:5](x)
                pull, push = (F.cosine_similarity(z, other[:5](x).detach()) for other in (server, before))
                contrast = -torch.log((pull / TAU).exp() / ((pull / TAU).exp() + (push / TAU).exp()))
                step(sgd, F.cross_entropy(model[5](z), y) + MU * contrast.mean())
            previous[client.name] = clone(model.state_dict())
        shared = average(models, SIZES, ("1.",) if base.name == "fedbn" else ())
    assert largest_difference(running.server.shared, {n: shared[n] for n in running.server.shared}) <= 1e-9
    for client in SIZES:
        assert largest_difference(running.clients[client].memory[0], previous[client]) <= 1e-9


def test_the_servers_entries_are_not_written_into():
    running = trial(moon(mu=MU), **GIVEN)
    running.advance()
    server, before = running.server, copy.deepcopy(running.server.shared)
    running.advance()
    assert is_equal(server.shared, before)
