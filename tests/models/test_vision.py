"""Networks of pictures: torchvision's names, shapes and initial weights, published sizes, and blocks by hand."""

from hashlib import sha256
from math import sqrt

import pytest
import torch
from torch import nn

from fedshift.models.vision import mobilenet_v2, resnet18, resnet20


def on_meta(make, *arguments):
    with torch.device("meta"):
        return make(*arguments)


@pytest.mark.parametrize(
    ("make", "parameters", "digest", "dropouts"),
    [(resnet18, 11_689_512, "84fb10d9c6905a1c", []), (mobilenet_v2, 3_504_872, "37bbbce8932fd0c4", [0.2])],
)
def test_names_shapes_and_their_order_are_torchvisions(make, parameters, digest, dropouts):
    # Counts: "num_params" of ResNet18_Weights and MobileNet_V2_Weights in torchvision's documentation. Digests: of the
    # state dictionaries of torchvision 0.29.2, whose outputs were bitwise equal.
    model = on_meta(make)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    text = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items())
    assert sha256(text.encode()).hexdigest()[:16] == digest
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == dropouts


def test_first_weights_have_the_spread_of_torchvision_and_of_the_paper():
    torch.manual_seed(0)
    resnet, mobile, small = resnet18(classes=10), mobilenet_v2(classes=1000), resnet20(classes=1000)
    for convolution in (resnet.conv1, resnet.layer3[0].conv2, mobile.features[18][0]):
        fan_out = convolution.out_channels * convolution.kernel_size[0] ** 2
        assert float(convolution.weight.detach().std()) * sqrt(fan_out / 2) == pytest.approx(1, abs=0.03)
    assert float(mobile.classifier[1].weight.detach().std()) == pytest.approx(0.01, rel=0.01)
    assert not mobile.classifier[1].bias.any()
    assert resnet.fc.weight.abs().max() <= 1 / sqrt(512)  # PyTorch's own
    for layer in (small.layer3[2].conv2, small.fc):  # He et al. 2015: by incoming connections
        assert float(layer.weight.detach().std()) * sqrt(layer.weight[0].numel() / 2) == pytest.approx(1, abs=0.02)
    assert not small.fc.bias.any()


def test_an_inverted_residual_adds_its_input_only_where_it_fits():
    model = mobilenet_v2((3, 32, 32), 2)
    assert [i for i, block in enumerate(model.features) if getattr(block, "adds", False)] == [
        3, 5, 6, 8, 9, 10, 12, 13, 15, 16,
    ]  # fmt: skip
    block, x = model.features[3].eval(), torch.randn(1, 24, 4, 4)
    nn.init.zeros_(block.conv[3].weight)  # the last BatchNorm: nothing is left of the residual
    assert torch.equal(block(x), x)


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
