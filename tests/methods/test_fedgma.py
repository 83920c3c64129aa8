"""FedGMA equals a plain loop that counts signs in NumPy, on whole rounds and on given uploads."""

import numpy as np
import pytest
import torch

from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedgma import MaskedMean, fedgma
from tests.methods.plain import SHARES, SIZES, advance, copied, largest_difference, loaded_with, mean, train, trial
from tests.methods.received import fold


@pytest.mark.parametrize("soft", [True, False])
def test_it_equals_a_plain_loop(soft):
    running = trial(fedgma(threshold=0.7, soft=soft))
    server = {name: tensor.clone() for name, tensor in running.plan.initial.items()}
    dropped = 0
    for number in range(2):
        running.advance()
        uploads = {client: copied(train(loaded_with(server), client, number)) for client in SIZES}
        before, server = server, mean([*uploads.values()], list(SHARES.values()))
        for name in running.plan.trained:
            signs = sum(torch.sign(upload[name] - before[name]) for upload in uploads.values())
            against = signs.abs() < 2  # of two clients
            part = signs.abs() / 2 if soft else 0 * signs
            server[name] = torch.where(against, before[name] + part * (server[name] - before[name]), server[name])
            dropped += int(against.sum())
    assert dropped > 0
    assert largest_difference(running.server.shared, server) <= 1e-9


@pytest.mark.parametrize("threshold", [0.0, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("soft", [True, False])
def test_uploads_of_five_clients_are_masked_by_the_share_that_agrees(threshold, soft):
    rng = np.random.default_rng(0)
    before, changes, weights = rng.normal(size=7), rng.normal(size=(5, 7)).round(1), np.array([0.1, 0.2, 0.3, 0.3, 0.1])
    agreement = abs((changes > 0).sum(axis=0) - (changes < 0).sum(axis=0)) / 5
    mask = np.where(agreement >= threshold, 1, agreement if soft else 0)
    states = [{"w": torch.from_numpy(before + change)} for change in changes]
    rule, start = MaskedMean(threshold, soft), {"w": torch.from_numpy(before)}
    found = fold(rule, states, start, weights=weights.tolist()).entries["w"].numpy()
    assert np.abs(found - (before + mask * (weights @ changes))).max() <= 1e-12
    assert len(set(agreement)) > 2


def test_a_threshold_of_nothing_is_fedavg():
    masked, plain = trial(fedgma(threshold=0)), trial(fedavg())
    advance(masked, plain, rounds=2)
    assert largest_difference(masked.server.shared, plain.server.shared) <= 1e-12
