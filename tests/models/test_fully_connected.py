"""Networks of FedSMB and FedMMB, and FedBN's fully connected ones: counts, layers, initial weights."""

import pytest
import torch
from torch import nn

from fedshift.models.fedmmb import cfnn3, cfnn4, fnn2
from fedshift.models.mlp import abide_mlp, synthetic_mlp


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_counts():
    # McMahan et al. 2017 (arXiv:1602.05629), section 3: 199,210 and 1,663,370. The other papers give layers alone.
    assert count(fnn2()) == 199_210
    assert count(cfnn3()) == 1_663_370
    convolutions = (3 * 128 + 128 * 256 + 256 * 512) * 9 + 128 + 256 + 512
    assert count(cfnn4()) == convolutions + (512 * 4 * 4 + 1) * 1024 + 1025 * 10 == 9_878_794
    assert count(abide_mlp()) == 5996 * 16 + 2 * 16 + 17 * 16 + 2 * 16 + 17 * 2 == 96_306
    assert count(synthetic_mlp()) == 11 * 100 + 2 * 100 + 101 * 2


def test_layers_are_in_the_order_of_the_papers():
    def kinds(model):
        return [type(layer).__name__ for layer in model]

    conv, end = ["Conv2d", "ReLU", "MaxPool2d"], ["Linear", "ReLU", "Linear"]
    assert kinds(cfnn3()) == [*conv, *conv, "Flatten", *end]
    assert kinds(cfnn4()) == [*conv, *conv, *conv, "Flatten", *end]
    assert kinds(fnn2()) == ["Flatten", "Linear", "ReLU", *end]
    assert kinds(abide_mlp()) == ["Flatten", *["Linear", "BatchNorm1d", "ReLU"] * 2, "Linear"]
    assert kinds(synthetic_mlp()) == ["Flatten", "Linear", "BatchNorm1d", *end[1:]]


@pytest.mark.parametrize("make", [fnn2, cfnn3, cfnn4])
def test_fedmmbs_networks_hold_nothing_but_weights(make):
    with torch.device("meta"):
        model = make((3, 9, 14), 5)
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    assert all(not isinstance(layer, nn.Dropout) for layer in model)


def test_the_synthetic_experiments_weights_are_wide():
    torch.manual_seed(0)
    model = synthetic_mlp((500,), 50)
    for parameter in (*model.fc1.parameters(), *model.fc2.parameters()):
        assert float(parameter.detach().std()) == pytest.approx(10, rel=0.2)
        assert abs(float(parameter.detach().mean())) < 3
