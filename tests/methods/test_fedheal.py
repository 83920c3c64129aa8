"""FedHEAL equals a plain loop that keeps every client's shares of directions, and weights that sum up its distances."""

import pytest
import torch

from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedheal import fedheal
from tests.methods.plain import SIZES, copied, largest_difference, loaded_with, mean, train, trial

THRESHOLD, BETA = 0.4, 0.3


@pytest.mark.parametrize("participation", [1.0, 1])
@pytest.mark.parametrize("base", [fedavg(), fedbn()], ids=lambda method: method.name)
def test_it_equals_a_plain_loop(base, participation):
    running = trial(fedheal(base, threshold=THRESHOLD, beta=BETA), participation=participation)
    local = ("1.",) if base.name == "fedbn" else ()
    server = {name: tensor.clone() for name, tensor in running.plan.initial.items()}
    own = {client: {name: x for name, x in server.items() if name.startswith(local or "-")} for client in SIZES}
    names = [name for name in running.plan.trained if not name.startswith(local or "-")]
    downward, passes = {client: {} for client in SIZES}, dict.fromkeys(SIZES, 0)
    weights, steps, left_out = {}, dict.fromkeys(SIZES, 0.0), 0
    for _ in range(4 if isinstance(participation, float) else 7):
        took_part = sorted(running.advance().participants)
        uploads, masks, distances = {}, {}, {}
        for client in took_part:
            number = passes[client]
            upload = copied(train(loaded_with(server | own[client]), client, number))
            own[client] = {name: upload[name] for name in own[client]}
            uploads[client], masks[client], distances[client] = upload, {}, 0.0
            for name in names:
                update = server[name] - upload[name]
                down = (update >= 0).double()
                if number == 0:
                    mask, share = torch.ones_like(update), down
                else:
                    share = downward[client][name]
                    mask = (torch.where(update >= 0, share, 1 - share) > THRESHOLD).double()
                    share = (share * number + down) / (number + 1)
                downward[client][name], masks[client][name] = share, mask
                distances[client] += float((update * mask).norm())
                left_out += int((mask == 0).sum())
            passes[client] += 1
        for client in took_part:
            steps[client] = (1 - BETA) * steps[client] + BETA * distances[client] / sum(distances.values())
            weights[client] = weights.get(client, 1 / len(took_part)) + steps[client]
        before = server
        server = mean([uploads[client] for client in took_part], [weights[client] for client in took_part])
        for name in names:
            change, total = torch.zeros_like(before[name]), torch.zeros_like(before[name])
            for client in took_part:
                weight = weights[client] * masks[client][name]
                change, total = change + weight * (uploads[client][name] - before[name]), total + weight
            server[name] = torch.where(total > 0, before[name] + change / total, before[name])
    assert left_out > 0
    found = running.server.shared
    assert largest_difference(found, {name: server[name] for name in found}) <= 1e-9
    kept = {client: running.server.kept[0][f"weight/{client}"] for client in SIZES}
    assert all(abs(float(kept[client]) - weights[client]) <= 1e-9 for client in SIZES)
