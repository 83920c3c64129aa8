"""Features of a frozen backbone in place of samples: trials are those on samples; what is not fixed is not cut out."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.augmentation import flip
from fedshift.data.preparation import UNIT
from fedshift.engines import frozen
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS


def stem():
    return [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]


class Named(nn.Module):
    """A network that calls its parts by name, as torchvision's do."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(*stem())
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, x):
        return self.classifier(self.features(x))


class Batchwise(nn.Module):
    """A layer without entries that sees the rest of the batch."""

    def forward(self, x):
        return x - x.mean(dim=0)


class Residual(Named):
    """A network that uses the samples after its last layer, too."""

    def forward(self, x):
        return super().forward(x) + x.mean(dim=(1, 2, 3))[:, None]


class Limited(Named):
    """A network that limits its last layer's weights, which are small at first."""

    def forward(self, x):
        self.classifier[1].weight.data.clamp_(-1, 1)
        return super().forward(x)


class Drawing(Named):
    """A network that draws from Python's generator, which changes no output."""

    def forward(self, x):
        return self.classifier(self.features(x) * (random.random() < 2 if self.training else 1))


class Switching(Named):
    """A network that acts when its mode changes."""

    def train(self, mode=True):
        return super().train(mode)


def freeze(network, *trained):
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for layer in network.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2)
    return network


NETWORKS = {
    "named": lambda: freeze(Named(), "classifier"),
    "sequential": lambda: freeze(nn.Sequential(*stem(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)), "5", "7"),
    "norm": lambda: freeze(
        nn.Sequential(stem()[0], *stem()[2:], nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), "4", "5", "6"
    ),
}
UNFIT = {
    "all": lambda: freeze(Named(), ""),
    "ends": lambda: freeze(Named(), "features.0", "classifier"),
    "batchwise": lambda: freeze(nn.Sequential(*stem(), Batchwise(), nn.Linear(16, 3)), "6"),
    "residual": lambda: freeze(Residual(), "classifier"),
    "limited": lambda: freeze(Limited(), "classifier"),
    "drawing": lambda: freeze(Drawing(), "classifier"),
    "switching": lambda: freeze(Switching(), "classifier"),
    "dropout": lambda: freeze(nn.Sequential(nn.Dropout(0.5), *stem(), nn.Linear(16, 3)), "6"),
}  # fmt: skip


def data(dtype):
    rng = np.random.default_rng(0)
    x = {name: rng.uniform(-1, 1, (size, 3, 8, 8)).astype(dtype) for name, size in (("a", 30), ("b", 17), ("c", 9))}
    return federation({name: (x, np.arange(len(x)) % 3, x[:5], np.arange(5) % 3) for name, x in x.items()})


def make(text, network, dtype="float64", **settings):
    (method,) = METHODS.parse_all(text)
    settings = {"engine": "sequential"} | settings
    made = Settings(rounds=3, work=Work(batch_size=8, epochs=1), optimizer=SGD(lr=0.1), **settings)
    return Trial(method, lambda shape, classes: network().to(getattr(torch, dtype)), data(dtype), made, seed=1)


def run(trial):
    rows = [trial.advance().rows for _ in range(trial.settings.rounds)]
    return trial.server.shared, [(row["hits"], row["loss_sum"]) for row in rows[-1]]


@pytest.mark.parametrize(
    ("text", "network", "engine"),
    [
        ("fixbn(switch=0)", "named", "sequential"),
        pytest.param("fixbn(switch=0)+fedprox(mu=0.1)", "sequential", "stacked", marks=pytest.mark.slow),
        ("fedbn+scaffold", "norm", "sequential"),
        pytest.param("fedbn", "norm", "pool", marks=pytest.mark.slow),
    ],
)
def test_trials_on_features_are_those_on_samples(text, network, engine, monkeypatch):
    on_features = make(text, NETWORKS[network], engine=engine)
    shared, rows = run(on_features)
    assert on_features.inputs.backbone
    on_features.close()
    monkeypatch.setattr(frozen, "find_backbone", lambda *_: None)
    plain = make(text, NETWORKS[network])
    expected, expected_rows = run(plain)
    assert not plain.inputs.backbone
    assert shared.keys() == expected.keys()
    assert all(torch.allclose(shared[name], tensor, rtol=0, atol=1e-12) for name, tensor in expected.items())
    assert not any(
        torch.equal(tensor, expected[name]) for name, tensor in plain.plan.params.items() if name in expected
    )
    assert [hits for hits, _ in rows] == [hits for hits, _ in expected_rows]


@pytest.mark.parametrize(
    ("text", "network", "settings"),
    [
        *(("fixbn(switch=0)", network, {}) for network in UNFIT.values()),
        ("fixbn(switch=1)", NETWORKS["named"], {}),  # statistics move in the first round
        ("fedavg", NETWORKS["named"], {}),
        ("fixbn(switch=0)+moon", NETWORKS["named"], {}),  # a rule runs the network itself
        ("fixbn(switch=0)", NETWORKS["named"], {"augment": flip()}),
        ("fixbn(switch=0)", NETWORKS["named"], {"precision": "bfloat16"}),
    ],
)
def test_what_is_not_fixed_is_trained_on_samples(text, network, settings):
    trial = make(text, network, "float32", **settings)
    trial.advance()
    assert trial.inputs.backbone is None


def test_features_are_extracted_once_for_all_trials_and_the_oldest_are_dropped(monkeypatch):
    frozen._KEPT.clear()
    shared, calls = data("float64"), []
    extract = frozen.Backbone.run
    monkeypatch.setattr(frozen.Backbone, "run", lambda self, x: calls.append(len(x)) or extract(self, x))
    (method,) = METHODS.parse_all("fixbn(switch=0)")

    settings = Settings(rounds=1, work=Work(batch_size=8, epochs=1), optimizer=SGD(lr=0.1), engine="sequential")
    network = freeze(Named(), "classifier").double()

    def trial(seed):
        Trial(method, lambda shape, classes: network, shared, settings, seed=seed).advance()
        return sum(calls)

    samples, probed = 30 + 17 + 9 + 3 * 5, 3
    assert trial(1) == samples + probed
    assert trial(2) == samples + 2 * probed
    shared = shared.normalize(UNIT)  # the same arrays
    assert trial(3) == 2 * samples + 3 * probed
    assert len(frozen._KEPT) == 12
    monkeypatch.setattr(frozen, "LIMIT", samples * 16 * 8)  # the features of one trial, without their samples
    done = trial(4)
    kept = [each for split, x in frozen._KEPT.values() for each in (split.store, x)]
    assert sum(each.nbytes for each in kept) <= frozen.LIMIT
    monkeypatch.setattr(frozen, "SPLIT_LIMIT", 30 * 16 * 8 - 1)  # the features of a's training samples
    assert trial(5) == done + probed


def test_entries_that_the_server_moves_after_all_end_the_use_of_features():
    trial = make("fixbn(switch=0)", NETWORKS["named"])
    trial.advance()
    assert trial.inputs.backbone
    trial.server.shared["features.0.bias"] = trial.server.shared["features.0.bias"] + 1
    trial.advance()
    assert trial.inputs.backbone is None
    assert trial.engine.plan is trial.plan
