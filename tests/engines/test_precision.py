"""Layers computed in bfloat16: inexact, and only they; everything that is kept stays float32."""

import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.digits import digits
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedbn import fedbn
from fedshift.utils.errors import UsageError


def network(shape, classes):
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(144, classes)
    return nn.Sequential(*layers)


def trial(precision, engine="sequential", **changes):
    settings = {"rounds": 2, "work": Work(batch_size=10, epochs=1), "optimizer": SGD(lr=0.05), "evaluate_every": 1}
    settings |= {"engine": engine, "precision": precision, **changes}
    return Trial(fedbn(), network, digits().limit_samples(20).select_clients(["pen", "photo"]), Settings(**settings), 0)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_bfloat16_is_near_float32_and_what_is_kept_stays_float32(engine):
    exact, low = trial("float32", engine), trial("bfloat16", engine)
    for _ in range(2):
        expected, found = exact.advance(), low.advance()
    for row, near in zip(expected.rows, found.rows, strict=True):
        assert row["loss_sum"] != near["loss_sum"]
        assert abs(row["loss_sum"] - near["loss_sum"]) <= 0.03 * row["loss_sum"]
    for name, tensor in exact.server.shared.items():
        assert low.server.shared[name].dtype == tensor.dtype
        assert (low.server.shared[name] - tensor).abs().max() <= 0.02
    client = low.clients["pen"].personal
    assert all(tensor.dtype == exact.clients["pen"].personal[name].dtype for name, tensor in client.items())
    assert any(tensor.dtype == torch.float32 for tensor in client.values())


def test_bfloat16_repeats_itself_bit_for_bit():
    first, second = trial("bfloat16"), trial("bfloat16")
    assert first.advance().rows == second.advance().rows


def test_a_run_is_not_resumed_in_another_precision():
    begun = trial("float32")
    begun.advance()
    with pytest.raises(UsageError, match="begun with another precision: then 'float32', now 'bfloat16'"):
        trial("bfloat16").restore(*begun.to_tensors())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "float16"}, "unknown value of precision 'float16'.*bfloat16, float32"),
        ({"engine": "vectorised"}, "unknown engine 'vectorised'.*auto, identity, pool, ray, sequential, stacked"),
        ({"workers": 0}, "workers=0: should be greater than or equal to 1"),
    ],
)
def test_settings_that_do_not_exist_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        Settings(**changes)
