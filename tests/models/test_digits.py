"""Digit networks: published parameter counts and layers, any valid size and channel count."""

import pytest
from torch import nn

from fedshift.models.digits import digit_cnn_bn, digit_cnn_dropout, small_cnn


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_counts():
    # FedBN, table 3: 14,219,210. FedWon, table 5, has no BatchNorm after FC layers: 2 * (2048 + 512) fewer.
    assert count(digit_cnn_bn()) == 14_219_210
    assert count(digit_cnn_dropout()) == 14_219_210 - 2 * (2048 + 512)
    assert count(small_cnn()) == 3 * 16 * 9 + 16 + 32 + 16 * 32 * 9 + 32 + 64 + 1568 * 64 + 64 + 128 + 64 * 10 + 10


def test_layers_are_in_the_order_of_the_papers_tables():
    def kinds(model):
        return [type(layer).__name__ for layer in model]

    conv = ["Conv2d", "BatchNorm2d", "ReLU"]
    convolutions = [*conv, "MaxPool2d", *conv, "MaxPool2d", *conv, "Flatten"]
    dense = ["Linear", "BatchNorm1d", "ReLU"]
    assert kinds(digit_cnn_bn()) == [*convolutions, *dense, *dense, "Linear"]
    dropped = ["Dropout", "Linear", "ReLU"]
    assert kinds(digit_cnn_dropout()) == [*convolutions, *dropped, *dropped, "Linear"]
    first = digit_cnn_bn().conv1
    assert (first.kernel_size, first.stride, first.padding) == ((5, 5), (1, 1), (2, 2))


@pytest.mark.parametrize("make", [digit_cnn_bn, digit_cnn_dropout])
def test_convolutions_know_their_groups_of_fedwons_table_5(make):
    assert [layer.groups for layer in make() if isinstance(layer, nn.BatchNorm2d)] == [32, 32, 64]
    assert not any(hasattr(layer, "groups") for layer in small_cnn() if isinstance(layer, nn.BatchNorm2d))
