"""What stays on clients, method by method, against a plain PyTorch loop that is told the entries by name."""

import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedper import fedper
from fedshift.methods.partialfed_fix import partialfed_fix
from fedshift.methods.silobn import silobn
from fedshift.methods.single import single
from fedshift.utils.errors import UsageError
from tests.methods.plain import LR, average, data, largest_difference, loaded_with, passes, step, trial

SIZES = {"a": 14, "b": 8, "c": 10}
GIVEN = {"clients": data(SIZES, (1, 5, 5)), "optimizer": SGD(lr=LR, momentum=0.9)}
STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
LOCAL = [
    (fedavg(), ()),
    (fedbn(), ("1.",)),
    (fedbn(keep="statistics"), STATISTICS),
    (fedbn(keep="affine"), ("1.weight", "1.bias")),
    (fedbn(keep="norm_layers"), ("1.", "4.", "7.")),
    (fedbn(also="9.*"), ("1.", "9.")),
    (fedbn(keep="statistics", also="*.bias|last"), (*STATISTICS, *(f"{i}.bias" for i in (0, 1, 3, 4, 6, 7)), "9.")),
    (silobn(), STATISTICS),
    (fedper(), ("9.",)),
    (fedper(layers=2), ("7.", "9.")),
    (fedper(layers="6.*|9.bias"), ("6.", "9.bias")),
    (fedper(fedbn()), ("1.", "9.")),
    (partialfed_fix(), ("9.",)),
    (partialfed_fix(layers="batch_norm"), ("1.",)),
    (partialfed_fix(layers="norm_statistics|0.*"), (*STATISTICS, "0.")),
    (single(), ("",)),
]
SENDS_ALL = ("fedavg", "partialfed_fix")


def network(shape=(1, 5, 5), classes=3):
    """BatchNorm at 1, GroupNorm at 4, LayerNorm at 7, the head at 9; entries in order."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4),
        nn.Flatten(), nn.Linear(36, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, classes),
    ).double()  # fmt: skip


def plain(initial, rounds, local):
    """Clients' models after the last aggregation, and the mean of all that they had trained, in plain PyTorch."""
    models = {name: loaded_with(initial, network) for name in SIZES}
    for number in range(rounds):
        for client in GIVEN["clients"].clients:
            model = models[client.name]
            sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
            for x, y in passes(client, number):
                step(sgd, nn.functional.cross_entropy(model(x), y))
        mean = average(models, SIZES, local)
    return models, mean


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("method", "local"), LOCAL, ids=[method.name for method, _ in LOCAL])
def test_three_rounds_equal_a_plain_loop_that_keeps_these_entries(method, local):
    running = trial(method, network, **GIVEN)
    models, mean = plain(running.plan.initial, 3, local)
    for _ in range(3):
        running.advance()
    kept = {name for name in running.plan.initial if name.startswith(local)}
    assert running.plan.personal == kept
    sends_all = method.name.startswith(SENDS_ALL)
    assert running.plan.sent == running.plan.initial.keys() - (set() if sends_all else kept)
    for name, model in models.items():
        assert largest_difference(running.model_state(name), model.state_dict()) <= 1e-12
    assert (running.model_state() is not None) == sends_all
    shared = running.server.shared
    assert not shared or largest_difference(shared, {name: mean[name] for name in shared}) <= 1e-12


def test_partialfed_fix_alone_has_a_global_model_whose_kept_layers_no_client_loads():
    running = trial(partialfed_fix(), network, **GIVEN)
    running.advance()
    head = running.model_state()["9.weight"]
    assert not any(torch.equal(running.model_state(name)["9.weight"], head) for name in SIZES)


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        (fedbn(also="head.*"), network(), r"'head\.\*' matches no entry"),
        (partialfed_fix(layers="fc"), network(), "'fc' matches no entry"),
        (fedbn(fedper(), also="last"), network(), "kept on the client twice"),
        (fedper(silobn(), layers="norm_statistics"), network(), "kept on the client twice"),
        (fedbn(), network()[6:], r"batch_norm matches no entry .*LayerNorm"),
        (silobn(), network()[6:], "matches no entry"),
        (fedbn(keep="affine"), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)), "matches no entry"),
        (silobn(), nn.BatchNorm1d(3, track_running_stats=False), "matches no entry"),
    ],
)
def test_what_a_model_has_not_or_is_kept_already_is_refused(method, model, message):
    with pytest.raises(UsageError, match=message):
        prepare(method, model, optimizer=SGD(lr=0.1))
