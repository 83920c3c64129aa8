"""Networks of libraries by name, with a module in the place of an installed one; ``make zoo`` has the libraries."""

import pickle
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.config.expressions import trust_only
from fedshift.config.spec import CompareSpec
from fedshift.experiments.factory import make_experiment
from fedshift.models import MODELS, make_network
from fedshift.utils.errors import UsageError


@pytest.fixture(autouse=True)
def timm(monkeypatch):
    """The library: pretrained weights are ones, for images scaled by its configuration, if its cache has a file."""

    def create_model(name, *, in_chans, num_classes, width=4, pretrained=False, pretrained_cfg_overlay=None):
        network = nn.Sequential(nn.Conv2d(in_chans, width, 1), nn.Flatten(), nn.LazyLinear(num_classes))
        if pretrained and not pretrained_cfg_overlay:
            raise OSError("no connection")
        if pretrained:
            nn.init.ones_(network[0].weight)
        return network

    made, data = ModuleType("timm"), ModuleType("timm.data")
    made.create_model = create_model
    made.get_pretrained_cfg = lambda _: SimpleNamespace(
        to_dict=lambda: {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.2)}
    )
    data.resolve_data_config = lambda *, pretrained_cfg: pretrained_cfg
    monkeypatch.setitem(sys.modules, "timm", made)
    monkeypatch.setitem(sys.modules, "timm.data", data)


def test_a_network_is_made_for_the_channels_and_classes_with_its_arguments():
    model = MODELS.parse("timm:resnet18(width=6)")
    network = make_network(model, (2, 5, 5), 3)
    assert network[0].weight.shape == (6, 2, 1, 1)
    assert network[2].out_features == 3
    assert MODELS.write(pickle.loads(pickle.dumps(model))) == "timm:resnet18(width=6)"


def test_what_is_absent_downloads_or_is_not_allowed_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(UsageError, match=r"model smp:Unet needs .*: pip install segmentation-models-pytorch"):
        MODELS.parse("smp:Unet")
    with pytest.raises(UsageError, match="weights is given in another way: write pretrained=True, or give a file of"):
        MODELS.parse("timm:resnet18(weights='DEFAULT')")
    with pytest.raises(UsageError, match="pretrained='mine': write pretrained=True, or give a file of weights"):
        MODELS.parse("timm:resnet18(pretrained='mine')")
    with trust_only(()), pytest.raises(UsageError, match="'timm:resnet18' is a function of this machine that nobody"):
        MODELS.parse("timm:resnet18")


CACHED = "timm:resnet18(pretrained=True, pretrained_cfg_overlay={'file': 'here'})"


def make(model, channels=3, **settings):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (4, channels, 2, 2), dtype=np.uint8), np.arange(4) % 2
    spec = CompareSpec(data={"a": (x, y, x, y)}, model=model, methods="fedavg", **settings)
    return make_experiment(spec), x


@pytest.mark.parametrize(("channels", "mean", "std"), [(3, [0.1, 0.2, 0.3], [0.5, 0.5, 0.2]), (1, [0.2], [0.4])])
def test_pretrained_weights_come_with_the_scale_of_their_images(channels, mean, std):
    experiment, x = make(CACHED, channels)
    trial = experiment.make_trial("fedavg", 0)
    assert bool((trial.plan.initial["0.weight"] == 1).all())
    expected = (torch.from_numpy(x) / 255 - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    assert torch.allclose(trial.train["a"].inputs(slice(None)), expected, atol=1e-6)
    (notice,) = experiment.data.notices
    assert notice.startswith("scaling of inputs: pixels in [0, 1] minus ")
    assert f"what {CACHED} was trained with" in notice


def test_a_scale_that_is_given_wins_and_random_weights_need_none():
    for model, settings, scale in ((CACHED, {"normalize": "unit"}, (0.0,)), ("timm:resnet18", {}, (0.5,))):
        experiment, _ = make(model, **settings)
        assert experiment.data.clients[0].train.normalization.mean == scale
        assert not experiment.data.notices


def test_weights_that_cannot_be_had_are_refused_before_training():
    experiment, _ = make("timm:resnet18(pretrained=True)")
    with pytest.raises(UsageError, match=r"its pretrained weights cannot be had .*no connection.*bring the cache here"):
        experiment.make_trial("fedavg", 0)
