"""FixBN: FedAvg until the switch; then statistics stand still, and gradients are those of BatchNorm in evaluation."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fixbn import fixbn
from fedshift.methods.gn import gn
from fedshift.methods.single import single
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.methods import plain
from tests.methods.plain import LR, advance, data, largest_difference, loaded_with, passes, step

DATA = data({"a": 13, "b": 8, "c": 10}, (1, 5, 5))
STATISTICS = {f"{layer}.{name}" for layer in (1, 5) for name in ("running_mean", "running_var", "num_batches_tracked")}
AFFINE = {f"{layer}.{name}" for layer in (1, 5) for name in ("weight", "bias")}


def network(shape=(1, 5, 5), classes=3):
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6), nn.BatchNorm1d(6),
        nn.Linear(6, classes),
    ).double()  # fmt: skip


def trial(method, rounds=6, **optimizer):
    return plain.trial(method, network, DATA, rounds=rounds, optimizer=SGD(lr=LR, **optimizer))


def test_clients_keep_their_own_statistics_standing_still_under_fedbn():
    fixed = trial(fixbn(fedbn(), switch=2))
    advance(fixed, rounds=2)
    before = {name: dict(client.personal) for name, client in fixed.clients.items()}
    fixed.advance()
    for name, client in fixed.clients.items():
        for entry in STATISTICS:
            assert torch.equal(client.personal[entry], before[name][entry])
        for entry in AFFINE:
            assert not torch.equal(client.personal[entry], before[name][entry])
    assert not torch.equal(before["a"]["1.running_mean"], before["b"]["1.running_mean"])


def test_alone_and_fixed_after_a_round_is_a_loop_that_never_leaves_evaluation_mode_again():
    """What FedBN's authors released as singleset/single_digits.py: one model.eval(), at the first test."""

    fixed = trial(single(fixbn(switch=1)))
    clients = DATA.clients[1:]  # the first has a last batch of one sample, from which the loop has no statistics
    models = {client.name: loaded_with(fixed.plan.initial, network) for client in clients}
    for number in range(3):
        fixed.advance()
        for client in clients:
            model = models[client.name]
            sgd = torch.optim.SGD(model.parameters(), lr=LR)
            for x, y in passes(client, number):
                step(sgd, nn.functional.cross_entropy(model(x), y))
            model.eval()
    for name, model in models.items():
        assert largest_difference(fixed.model_state(name), model.state_dict()) <= 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("switch", "rounds", "before"),
    [(0.5, 4, 2), (0.5, 5, 3), (0.25, 4, 1), (0.9, 5, 5), (0, 3, 0), (2, 3, 2), (7, 3, 3)],
)
def test_a_share_of_all_rounds_or_a_number_says_how_many_come_before(switch, rounds, before):
    running = trial(fixbn(switch=switch), rounds)
    counters = [0]
    for _ in range(rounds):
        running.advance()
        counters.append(int(running.server.shared["1.num_batches_tracked"]))
    moving = [after > ahead for ahead, after in pairwise(counters)]
    assert moving == [True] * before + [False] * (rounds - before)


def test_momentum_is_kept_from_round_to_round_where_asked():
    reset, kept = trial(fixbn(), momentum=0.9), trial(fixbn(keep_momentum=True), momentum=0.9)
    same = trial(fixbn(), momentum=0.9, keep=True)
    advance(reset, kept, same, rounds=2)
    assert is_equal(kept.server.shared, same.server.shared)
    assert not is_equal(kept.server.shared, reset.server.shared)
    assert {name: bool(client.optimizer) for name, client in kept.clients.items()} == dict.fromkeys("abc", True)
    assert not any(client.optimizer for client in reset.clients.values())


@pytest.mark.parametrize(
    ("method", "model", "why"),
    [
        (fixbn(), nn.Sequential(nn.Linear(2, 2)), "matches no entry of the model"),
        (fixbn(), nn.BatchNorm1d(2, track_running_stats=False), "matches no entry of the model"),
        (fixbn(gn()), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "fixbn needs BatchNorm, which gn replaces"),
    ],
    ids=["no normalization", "no statistics", "group normalization"],
)
def test_a_model_without_statistics_is_refused(method, model, why):
    with pytest.raises(UsageError, match=why):
        prepare(method, model, optimizer=SGD(lr=0.1))
