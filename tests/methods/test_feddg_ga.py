"""FedDG-GA equals a plain loop in which each client also runs the shared model and its own last one on every batch."""

import pytest
import torch
from torch import nn

from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.feddg_ga import GeneralizationGap, feddg_ga
from tests.methods.plain import SIZES, batches, copied, largest_difference, loaded_with, mean, train, trial
from tests.methods.received import fold

STEP = 0.9


def loss_in_training(state, x, y):
    with torch.no_grad():
        return float(nn.functional.cross_entropy(loaded_with(state)(x), y))


@pytest.mark.parametrize(("participation", "rounds"), [(1.0, None), (1.0, 3), (1, None)])
@pytest.mark.parametrize("base", [fedavg(), fedbn()], ids=lambda method: method.name)
def test_it_equals_a_plain_loop(base, participation, rounds):
    running = trial(feddg_ga(base, step_size=STEP, rounds=rounds), participation=participation)
    local = ("1.",) if base.name == "fedbn" else ()
    server = {name: tensor.clone() for name, tensor in running.plan.initial.items()}
    last = {client: dict(server) for client in SIZES}
    weights, passes, seen = {}, dict.fromkeys(SIZES, 0), []
    for number in range(3 if isinstance(participation, float) else 6):
        took_part = sorted(running.advance().participants)
        uploads, gaps = {}, {}
        for client in took_part:
            start = server | {name: x for name, x in last[client].items() if name.startswith(local or "-")}
            found = [
                loss_in_training(start, x, y) - loss_in_training(last[client], x, y)
                for x, y in batches(client, passes[client])
            ]
            gaps[client] = sum(found) / len(found)
            uploads[client] = last[client] = copied(train(loaded_with(start), client, passes[client]))
            passes[client] += 1
        largest = max(map(abs, gaps.values()))
        step = STEP * (1 - number / rounds if rounds else 1) / len(took_part)
        for client in took_part:
            weights.setdefault(client, 1 / len(took_part))
            weights[client] = min(1, max(0, weights[client] + (step * gaps[client] / largest if largest else 0)))
        total = sum(weights[client] for client in took_part)
        weights |= {client: weights[client] / total for client in took_part}
        seen.append(weights.get("a"))
        server = mean([uploads[client] for client in took_part], [weights[client] for client in took_part])
    if isinstance(participation, float):
        assert seen[0] == 0.5
        assert len(set(seen)) == 3
    found = running.server.shared
    assert largest_difference(found, {name: server[name] for name in found}) <= 1e-9
    for client in SIZES:
        assert abs(float(running.server.kept[0][client]) - weights[client]) <= 1e-9


def test_weights_stay_between_0_and_1_and_keep_their_sum():
    rule, states = GeneralizationGap(step_size=1.0, rounds=None), [{"w": torch.tensor([float(k)])} for k in range(3)]
    uploads, kept = [{"gap": torch.tensor(gap)} for gap in (1.0, -2.0, 0.5)], {}
    for _ in range(8):
        made = fold(rule, states, {"w": torch.zeros(1)}, uploads=uploads, kept=kept)
        kept = made.kept
        values = [float(kept[client]) for client in "abc"]
        assert all(0 <= value <= 1 for value in values)
        assert sum(values) == pytest.approx(1)
        assert float(made.entries["w"]) == pytest.approx(values[1] + 2 * values[2], abs=1e-6)
    assert values[1] == 0
    assert values[0] > values[2] > 0
