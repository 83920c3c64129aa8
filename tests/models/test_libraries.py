"""Networks of libraries by name, with a module in the place of an installed one; ``make zoo`` has the libraries."""

import pickle
import sys
from types import ModuleType

import pytest
from torch import nn

from fedshift.config.expressions import trust_only
from fedshift.models import MODELS, make_network
from fedshift.utils.errors import UsageError


@pytest.fixture(autouse=True)
def timm(monkeypatch):
    made = ModuleType("timm")
    made.create_model = lambda name, *, in_chans, num_classes, width=4: nn.Sequential(
        nn.Conv2d(in_chans, width, 1), nn.Flatten(), nn.LazyLinear(num_classes)
    )
    monkeypatch.setitem(sys.modules, "timm", made)


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
    with pytest.raises(UsageError, match="pretrained downloads others: leave it out, and give a file of weights"):
        MODELS.parse("timm:resnet18(pretrained=True)")
    with trust_only(()), pytest.raises(UsageError, match="'timm:resnet18' is a function of this machine that nobody"):
        MODELS.parse("timm:resnet18")
