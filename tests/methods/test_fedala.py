"""FedALA equals a plain loop that learns the weights of the top layers by autograd before it trains the model."""

import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.methods.fedala import fedala
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedper import fedper
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.methods.plain import (
    LR,
    SHARES,
    SIZES,
    batches,
    copied,
    largest_difference,
    loaded_with,
    mean,
    network,
    train,
    trial,
)  # fmt: skip

RATE = 40.0


@pytest.mark.parametrize(
    ("base", "layers", "epochs"),
    [(fedavg(), 1, 2), (fedavg(), 2, 1), (fedbn(), 1, 1)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_it_equals_a_plain_loop(base, layers, epochs):
    running = trial(fedala(base, layers=layers, rate=RATE, epochs=epochs))
    top = ("4.weight", "4.bias", *(("1.weight", "1.bias") if layers == 2 else ()))
    local = ("1.",) if base.name == "fedbn" else ()
    server = {name: tensor.clone() for name, tensor in running.plan.initial.items()}
    last = {client: dict(server) for client in SIZES}
    weights = {client: {name: torch.ones_like(server[name]) for name in top} for client in SIZES}
    for number in range(3):
        running.advance()
        uploads = []
        for client in SIZES:
            start = server | {name: x for name, x in last[client].items() if name.startswith(local or "-")}
            own = last[client] if number else server
            for e in range(epochs):
                for x, y in batches(client, number * epochs + e):
                    leaves = {name: weight.requires_grad_() for name, weight in weights[client].items()}
                    mixed = {name: own[name] + (server[name] - own[name]) * leaves[name] for name in top}
                    state = {**{name: tensor.clone() for name, tensor in start.items()}, **mixed}
                    loss = nn.functional.cross_entropy(torch.func.functional_call(network().train(), state, x), y)
                    grads = torch.autograd.grad(loss, tuple(leaves.values()))
                    weights[client] = {
                        name: (weights[client][name].detach() - RATE * LR * grad).clamp(0, 1)
                        for name, grad in zip(top, grads, strict=True)
                    }
            mixed = {name: own[name] + (server[name] - own[name]) * weights[client][name] for name in top}
            last[client] = copied(train(loaded_with(start | mixed), client, number))
            uploads.append(last[client])
        server = mean(uploads, list(SHARES.values()))
    found = running.server.shared
    assert largest_difference(found, {name: server[name] for name in found}) <= 1e-9
    inside = 0
    for client in SIZES:
        memory = running.clients[client].memory[0]
        assert largest_difference({name: memory[name] for name in top}, weights[client]) <= 1e-9
        inside += sum(int(((weight > 0) & (weight < 1)).sum()) for weight in weights[client].values())
        mixed = {name: last[client][name] + (server[name] - last[client][name]) * weights[client][name] for name in top}
        expected = server | {name: x for name, x in last[client].items() if name.startswith(local or "-")} | mixed
        assert largest_difference(running.model_state(client), expected) <= 1e-9
    assert inside > 0


def test_a_client_that_begins_late_starts_from_the_shared_model():
    running, plain = (trial(method, participation=1) for method in (fedala(rate=RATE), fedavg()))
    seen = set()
    while len(seen) < 2:  # until then the shared model is the last client's
        seen |= set(running.advance().participants)
        plain.advance()
        assert largest_difference(running.server.shared, plain.server.shared) <= 1e-12


def test_weights_stay_between_0_and_1_under_large_steps():
    running = trial(fedala(rate=1e4), optimizer=SGD(lr=LR, momentum=0.9))
    for _ in range(3):
        running.advance()
    values = torch.cat([running.clients[client].memory[0]["4.weight"].flatten() for client in SIZES])
    assert values.min() == 0
    assert values.max() == 1


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="fedala: rate=0 and epochs=1: give a rate above 0"):
        fedala(rate=0)
    with pytest.raises(UsageError, match=r"FedALA learns weights .*, but fedper keeps '4.bias' on clients"):
        trial(fedala(fedper()))
    assert is_equal(trial(fedala(fedper(), layers=2)).server.shared, trial(fedper()).server.shared)
