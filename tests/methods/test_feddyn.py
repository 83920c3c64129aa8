"""FedDyn equals a plain loop with autograd of the regularized loss, and reaches the optimum of the federation."""

import numpy as np
import pytest
import torch

from fedshift.methods.fedadam import fedadam
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.feddyn import feddyn
from fedshift.methods.median import median
from fedshift.utils.errors import UsageError
from tests.methods import test_scaffold
from tests.methods.plain import SHARES, copied, largest_difference, loaded_with, mean, parameters, train, trial

ALPHA = 0.3


@pytest.mark.parametrize("participation", [1.0, 1])
@pytest.mark.parametrize("base", [fedavg(), fedavg(weighting="uniform"), fedbn()], ids=lambda method: method.name)
def test_it_equals_a_plain_loop(base, participation):
    running = trial(feddyn(base, alpha=ALPHA), participation=participation)
    shares = SHARES if base.weighting != "uniform" else dict.fromkeys(SHARES, 0.5)
    local = ("1.",) if base.name == "fedbn" else ()
    server = {name: tensor.clone() for name, tensor in running.plan.initial.items()}
    kept = {client: dict(server) for client in SHARES}
    h = {name: torch.zeros_like(server[name]) for name in running.plan.trained if not name.startswith(local or "-")}
    own = {client: dict(h) for client in SHARES}
    passes = dict.fromkeys(SHARES, 0)
    for _ in range(2 if isinstance(participation, float) else 5):
        took_part = sorted(running.advance().participants)
        uploads = []
        for client in took_part:
            start = server | {name: x for name, x in kept[client].items() if name.startswith(local or "-")}
            model = loaded_with(start)

            def regularizer(model, slope=own[client], start=start):
                return sum(
                    ALPHA / 2 * (parameter - start[name]).square().sum() - (slope[name] * parameter).sum()
                    for name, parameter in model.named_parameters()
                    if name in slope
                )

            train(model, client, passes[client], regularizer)
            passes[client] += 1
            after = parameters(model)
            own[client] = {name: own[client][name] - ALPHA * (after[name] - start[name]) for name in h}
            kept[client] = copied(model)
            uploads.append(kept[client])
        for client, upload in zip(took_part, uploads, strict=True):
            h = {name: h[name] - ALPHA * shares[client] * (upload[name] - server[name]) for name in h}
        server |= mean(uploads, [shares[client] for client in took_part])
        server |= {name: server[name] - h[name] / ALPHA for name in h}
    found = running.server.shared
    assert largest_difference(found, {name: server[name] for name in found}) <= 1e-9
    assert found.keys() == {name for name in server if not name.startswith(local or "-")}
    for client in SHARES:
        memory = {name: tensor for name, tensor in running.clients[client].memory[0].items() if name in h}
        assert largest_difference(memory, own[client]) <= 1e-9


@pytest.mark.parametrize("weighting", test_scaffold.SHARES)
def test_it_minimizes_the_objective_of_the_weighting(weighting):
    """By the normal equations, with ten local steps a round on two clients that disagree."""
    running = test_scaffold.trial(feddyn(fedavg(weighting=weighting), alpha=2.0))
    for _ in range(20):
        running.advance()
    found = running.server.shared["weight"].numpy()
    assert np.abs(found - test_scaffold.optimum(test_scaffold.SHARES[weighting])).max() <= 1e-6
    assert running.clients["small"].memory[0]["weight"].abs().max() > 0.01


def test_what_would_break_the_sum_of_changes_is_refused():
    with pytest.raises(UsageError, match="already has a server optimizer"):
        feddyn(fedadam())
    with pytest.raises(
        UsageError, match=r"the mean of the clients' changes, but median does not average: remove one of the two"
    ):
        trial(median(feddyn()))
