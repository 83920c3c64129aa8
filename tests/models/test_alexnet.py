"""The papers' AlexNets: parameter counts, the order of layers, dropout, and groups."""

import pytest
import torch
from torch import nn

from fedshift.models.vision import alexnet_bn, alexnet_dropout


@pytest.fixture(autouse=True)
def shapes_alone():
    """Make networks without values, so that 57 million weights take no memory."""
    with torch.device("meta"):
        yield


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_counts():
    # torchvision's AlexNet, of the same convolutions and FC layers, has 61,100,840 ("num_params" of AlexNet_Weights).
    convolutions, dense = 2 * (64 + 192 + 384 + 256 + 256), 2 * (4096 + 4096)
    assert count(alexnet_dropout(classes=1000)) == 61_100_840 + convolutions
    assert count(alexnet_bn(classes=1000)) == 61_100_840 + convolutions + dense
    assert count(alexnet_bn()) == 57_063_498
    weights, biases, norms = 9216 * 1024 + 1024 * 1024 + 1024 * 10, 1024 + 1024 + 10, 4 * 1024
    assert count(alexnet_bn(width=1024)) == count(alexnet_bn()[:16]) + weights + biases + norms


def test_layers_are_in_the_order_of_the_papers_tables():
    def kinds(model):
        return [type(layer).__name__ for layer in model]

    conv = ["Conv2d", "BatchNorm2d", "ReLU"]
    pooled = [*conv, "MaxPool2d"]
    convolutions = [*pooled, *pooled, *conv, *conv, *pooled, "AdaptiveAvgPool2d", "Flatten"]
    dense, dropped = ["Linear", "BatchNorm1d", "ReLU"], ["Dropout", "Linear", "ReLU"]
    assert kinds(alexnet_bn()) == [*convolutions, *dense, *dense, "Linear"]
    assert kinds(alexnet_dropout()) == [*convolutions, *dropped, *dropped, "Linear"]


def test_convolutions_are_those_of_the_papers_tables():
    layers = [layer for layer in alexnet_bn() if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0], c.padding[0]) for c in layers] == [
        (3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("make", [alexnet_bn, alexnet_dropout])
def test_convolutions_know_their_groups_of_fedwons_table_6(make):
    layers = [layer for layer in make() if isinstance(layer, nn.BatchNorm2d)]
    assert [(layer.groups, layer.num_features) for layer in layers] == [
        (32, 64), (32, 192), (64, 384), (64, 256), (64, 256),
    ]  # fmt: skip
    assert not any(hasattr(layer, "groups") for layer in make() if isinstance(layer, nn.BatchNorm1d))


def test_the_average_pool_makes_any_picture_6_x_6():
    features = alexnet_dropout()[: list(dict(alexnet_dropout().named_children())).index("avgpool") + 1]
    for size in (63, 100, 256):
        assert features(torch.zeros(2, 3, size, size + 30)).shape == (2, 256, 6, 6)
