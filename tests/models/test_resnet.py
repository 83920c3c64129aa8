"""ResNet-20: its published size, its shortcuts without parameters, and one block by hand."""

from math import sqrt

import pytest
import torch
from torch import nn

from fedshift.models.vision import resnet20


def test_parameters_and_layers():
    # He et al. 2016, table 6: 0.27 M. A block of n channels after m has 9 n (m + n) weights and two BatchNorms of 2 n.
    stages = [6 * 9 * 16 * 16, 9 * 32 * (16 + 5 * 32), 9 * 64 * (32 + 5 * 64)]
    norms = 2 * (16 + 6 * 16 + 6 * 32 + 6 * 64)
    expected = 9 * 3 * 16 + sum(stages) + norms + 64 * 10 + 10
    model = resnet20()
    assert sum(parameter.numel() for parameter in model.parameters()) == expected == 269_722
    layers = list(model.modules())
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in layers) == 20
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in layers) == 19


def test_a_halving_block_adds_every_second_pixel_and_zero_channels():
    block, x = resnet20().layer2[0].eval(), torch.rand(1, 16, 5, 7)
    nn.init.zeros_(block.bn2.weight)
    y = block(x)
    assert y.shape == (1, 32, 3, 4)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert not y[:, 16:].any()


def test_an_equal_block_by_hand():
    block, x = resnet20().layer1[1].eval(), torch.randn(2, 16, 4, 4)
    for convolution in (block.conv1, block.conv2):  # each channel times 3
        nn.init.zeros_(convolution.weight)
        convolution.weight.data[range(16), range(16), 1, 1] = 3.0
    scale = 3 / sqrt(1 + block.bn1.eps)  # running statistics are still 0 and 1
    expected = (x + scale * (scale * x).relu()).relu()
    torch.testing.assert_close(block(x), expected)


def test_first_weights_follow_he_2015():
    torch.manual_seed(0)
    model = resnet20(classes=1000)
    for layer in (model.layer3[2].conv2, model.fc):
        fan_in = layer.weight[0].numel()
        assert float(layer.weight.detach().std()) * sqrt(fan_in / 2) == pytest.approx(1, abs=0.02)
    assert not model.fc.bias.any()
