"""Layers computed in bfloat16: inexact, and only they; everything that is kept stays float32."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work, iterate_batches
from fedshift.data.assembly import federation
from fedshift.data.digits import digits
from fedshift.engines.engine import Diverged
from fedshift.engines.half_precision import list_underflows
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.experiments.trial_notices import list_notices_before
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.utils.errors import UsageError


def network(shape, classes):
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(144, classes)
    return nn.Sequential(*layers)


def dense(shape, classes):
    """A network whose kernels do not depend on the memory format; autocast keeps its LayerNorm in float32."""
    layers = nn.Flatten(), nn.Linear(3 * 28 * 28, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, classes)
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


@pytest.mark.parametrize(
    ("precision", "dtype", "network", "tolerance"),
    [
        ("bfloat16", torch.bfloat16, dense, 1e-7),
        ("float16", torch.float16, dense, 1e-7),
        ("float64", None, network, 1e-12),
    ],
)
def test_rounds_equal_a_plain_loop_in_the_same_precision(precision, dtype, network, tolerance):
    data = digits().limit_samples(20).select_clients(["pen"])
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10))
    settings = Settings(rounds=2, work=Work(batch_size=10, epochs=1), loss=loss, precision=precision)
    made = Trial(fedavg(), network, data, settings, 0)
    plain = network((3, 28, 28), 10).to(torch.float32 if dtype else torch.float64)
    plain.load_state_dict(made.plan.initial)
    sgd, (client,) = torch.optim.SGD(plain.parameters(), lr=settings.optimizer.lr), data.clients
    x, y = client.train.inputs(slice(None), torch.float32 if dtype else torch.float64), client.train.targets()
    criterion = nn.CrossEntropyLoss(weight=loss.weight.to(x.dtype))
    for step, index in iterate_batches(0, "pen", 20, ((0, 10), (10, 20)), range(4)):
        if step % 2 == 0:
            made.advance()
        sgd.zero_grad()
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            outputs = plain(x[index])
        criterion(outputs.to(x.dtype), y[index]).backward()
        sgd.step()
    for name, tensor in plain.state_dict().items():
        assert made.server.shared[name].dtype == tensor.dtype
        assert (made.server.shared[name] - tensor).abs().max() <= tolerance, name


def test_a_network_in_float64_is_float64_wherever_it_is_used():
    made = trial("float64")
    assert all(t.dtype == torch.float64 for t in made.make_network().state_dict().values() if t.is_floating_point())
    made.advance()
    tensors, _ = made.to_tensors()
    kept = {name: t.dtype for name, t in tensors.items() if name.startswith("server/shared")}
    assert set(kept.values()) == {torch.float64}


def scaled_trial(scale, weight, engine="sequential"):
    """A linear layer of equal ``weight``, and samples of ``scale``."""

    def scaled(shape, classes):
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, classes))
        for layer in (model[0], model[2]):
            nn.init.constant_(layer.weight, weight)
            nn.init.zeros_(layer.bias)
        return model

    x, y = np.full((8, 4), scale, np.float32), np.arange(8) % 4 // 3
    settings = Settings(
        rounds=1, work=Work(batch_size=8, epochs=1), optimizer=SGD(lr=0.1), engine=engine, precision="float16"
    )
    return Trial(fedavg(), scaled, federation({"a": (x, y, x, y)}), settings, 0)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(
    ("scale", "weight", "cause"),
    [
        (1e5, 1e-3, "inputs of layer '0' reach 1e+05, beyond its range, 65504: scale the data, or compute in bfloat16"),
        (2e4, 1.0, "outputs of layer '0' reach 8e+04, beyond its range"),  # 4 x 2e4
        (1e4, 1.0, "outputs of layer '2' reach 1.2e+05, beyond its range"),  # 3 x 4 x 1e4
        (1.0, float("nan"), "a value may lie beyond its range, 65504: scale the data, lower the learning rate, or"),
    ],
)
def test_values_beyond_float16_are_the_cause_that_is_said(scale, weight, cause, engine):
    with pytest.raises(Diverged, match=r"client 'a', round 1, step 1 of 1: loss nan. With precision=float16, ") as said:
        scaled_trial(scale, weight, engine).advance()
    assert cause in str(said.value)


@pytest.mark.parametrize(("scale", "lost"), [(1e-4, []), (1e-8, ["2.weight"])])
def test_gradients_below_float16_are_said_to_be_lost(scale, lost):
    """Those of the last layer are 0.25 x 4 x scale: of the classes, one has a quarter of the samples, predicted half.

    Those of the first layer are zero.
    """
    running = scaled_trial(scale, 1.0)
    step = running.engine.begin_step("a", running.clients["a"], running.server)
    assert list_underflows(running.plan, step) == lost
    notices = [text for text in list_notices_before(SimpleNamespace(make_engine=None), running) if "float16" in text]
    assert ["client 'a': float16 loses most of the gradient of 2.weight" in text for text in notices] == [True] * len(
        lost
    )


def test_a_run_is_not_resumed_in_another_precision():
    begun = trial("float32")
    begun.advance()
    with pytest.raises(UsageError, match="begun with another precision: then 'float32', now 'bfloat16'"):
        trial("bfloat16").restore(*begun.to_tensors())
