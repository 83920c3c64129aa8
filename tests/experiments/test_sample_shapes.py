"""Samples of other shapes than gray and color images: a round against plain PyTorch, and what is refused."""

import copy
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.federation import Federation
from fedshift.data.pictures import to_pictures
from fedshift.data.preparation import UNIT, Normalization
from fedshift.data.samples import Samples
from fedshift.diagnosis.overview import make_overview
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.models import make_network
from fedshift.utils.errors import UsageError

WORDS, LENGTH = 11, 6
SHAPES = {"many channels": (5, 8, 8), "volumes": (2, 4, 6, 5), "tokens": (LENGTH,)}


def draw_clients(kind):
    """Two clients of 9 and 6 samples of three classes, which are also their test data."""
    rng = np.random.default_rng(0)
    low, high = (0, WORDS) if kind == "tokens" else (0, 256)
    parts = {name: (rng.integers(low, high, (size, *SHAPES[kind])), np.arange(size) % 3)
             for name, size in (("a", 9), ("b", 6))}  # fmt: skip
    return federation({name: part * 2 for name, part in parts.items()})


class Mean(nn.Module):
    """Mean over the words of a text, ``[N, L, F]`` to ``[N, F]``."""

    def forward(self, x):
        return x.mean(dim=1)


def network(shape, classes):
    body = {1: nn.Sequential(nn.Embedding(WORDS, 4), Mean()),
            3: nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.AdaptiveAvgPool2d(1)),
            4: nn.Sequential(nn.Conv3d(shape[0], 4, 3), nn.AdaptiveAvgPool3d(1))}[len(shape)]  # fmt: skip
    head = {"flat": nn.Flatten(), "bn": nn.BatchNorm1d(4), "out": nn.Linear(4, classes)}
    return nn.Sequential(OrderedDict(body=body, **head)).double()


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_round_is_that_of_plain_torch(kind, engine):
    data = prepare_and_fit(draw_clients(kind))
    settings = Settings(rounds=1, work=Work(batch_size=None, epochs=2), optimizer=SGD(lr=0.1), engine=engine)
    trial = Trial(fedbn(), network, data, settings, 0)
    plain = network(SHAPES[kind], 3)
    plain.load_state_dict(trial.plan.initial)
    (row,) = [row for row in trial.advance().rows if (row["client"], row["split"]) == ("a", "test")]

    models = {name: copy.deepcopy(plain).train() for name in data.names}
    for name, model in models.items():
        x, y = data.client(name).train.x, data.client(name).train.y
        x = x if kind == "tokens" else x.double() / 127.5 - 1
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            sgd.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            sgd.step()
    states = {name: model.state_dict() for name, model in models.items()}
    for entry in plain.state_dict():
        mean = (9 * states["a"][entry] + 6 * states["b"][entry]) / 15
        for name in models:
            expected = states[name][entry] if entry.startswith("bn") else mean
            assert (trial.model_state(name)[entry] - expected).abs().max() <= 1e-12, entry
    assert row["samples"] == 9


def prepare_and_fit(data: Federation) -> Federation:
    """Return the data as an experiment takes them."""
    return data.fit_images().check()


def test_volumes_are_not_resized_and_of_one_shape():
    data = draw_clients("volumes")
    assert data.fit_images().sample_shape == SHAPES["volumes"]
    with pytest.raises(UsageError, match=r"image_size=32 resizes images .*, not samples of shape \(2, 4, 6, 5\)"):
        data.fit_images(32)
    other = federation({"c": (np.zeros((2, 2, 4, 6, 6)), [0, 1]) * 2})
    mixed = Federation(name="two", clients=(*data.clients, *other.clients), classes=3)
    with pytest.raises(UsageError, match=r"samples of shape \(2, 4, 6, 6\) where others have \(2, 4, 6, 5\)"):
        prepare_and_fit(mixed)
    with pytest.raises(UsageError, match="normalization of 2 channels for images of 5"):
        draw_clients("many channels").normalize(Normalization(mean=(0.1, 0.2), std=(1.0, 1.0)))


def test_augmenting_texts_is_refused(make, tmp_path):
    experiment = make("fedavg", augment="flip()")
    object.__setattr__(experiment, "data", draw_clients("tokens"))
    object.__setattr__(experiment, "model", network)
    with pytest.raises(UsageError, match=r"augment is for images .* and volumes .*, but .*: leave augment out"):
        experiment.run(tmp_path / "run")


def test_whole_numbers_become_floats_where_other_clients_have_floats():
    whole, floats = (np.arange(12).reshape(4, 3) for _ in range(2))
    y = np.arange(4) % 2
    data = federation({"a": (whole, y, whole, y), "b": (floats + 0.5, y, floats, y)})
    assert {split.store.dtype for split in data.client("a").splits.values()} == {torch.int64}
    fitted = data.fit_images()
    assert all(split.store.is_floating_point() for client in fitted.clients for split in client.splits.values())
    assert torch.equal(fitted.client("a").train.x, torch.arange(12.0).reshape(4, 3))


def test_whole_numbers_in_a_network_of_measurements_are_refused_with_the_fix():
    def linear(shape, classes):
        return nn.Linear(shape[0], classes)

    with pytest.raises(UsageError, match=r"rejects a sample of shape \(6,\).*give measurements as floats"):
        Trial(fedavg(), linear, draw_clients("tokens"), Settings(rounds=1), 0)


def test_lazy_layers_behind_tokens_get_their_shapes():
    def lazy(shape, classes):
        return nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(), nn.LazyLinear(classes))

    assert make_network(lazy, (LENGTH,), 3)[2].weight.shape == (3, 4 * LENGTH)
    with pytest.raises(UsageError, match=r"lazy layers get no shapes from a sample of shape \(5,\)"):
        make_network(lambda shape, classes: nn.Sequential(nn.LazyConv3d(4, 3)), (5,), 3)


@pytest.mark.parametrize("kind", SHAPES)
def test_an_exported_model_scales_samples_as_the_run_did(kind):
    data = draw_clients(kind).normalize(UNIT)
    if kind != "tokens":
        data = draw_clients(kind).normalize_clients()
    train = data.clients[0].train
    scaled = data.describe_client(data.clients[0]).preparation.scale(train.copy_rows(slice(None)))
    assert scaled.dtype == (torch.int64 if kind == "tokens" else torch.float32)
    assert torch.equal(scaled, train.inputs(slice(None)))


def test_channels_that_are_no_colors_are_pictured_by_their_mean():
    x = np.arange(5 * 4 * 3, dtype=np.float32).reshape(1, 5, 4, 3)
    split = Samples(x=torch.from_numpy(x), y=torch.zeros(1, dtype=torch.int64))
    (image,) = to_pictures(split, slice(None), 2)
    expected = x[0].mean(axis=0)
    assert np.abs(image[..., 0] / 255 - (expected - expected.min()) / np.ptp(expected)).max() <= 0.5 / 255 + 1e-6
    sheet = make_overview(draw_clients("many channels"))["samples"]
    assert {picture.get_array().shape[-1] for axes in sheet.axes for picture in axes.images} <= {1, 3, 8}
