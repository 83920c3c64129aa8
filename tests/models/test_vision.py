"""Networks of pictures: torchvision's names, shapes and initial weights, published sizes, and blocks by hand."""

from hashlib import sha256
from itertools import pairwise
from math import sqrt

import pytest
import torch
from torch import nn

from fedshift.models.vision import mobilenet_v2, resnet18, resnet20, vgg16_fedmmb


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


def test_fedmmbs_vgg16_has_the_parameters_of_its_paper():
    # arXiv:2011.07006, section 4: about 82 million for 150 x 200 pictures of seven classes. VGG16's 13 convolutions
    # and three FC layers; 150 x 200 leaves 4 x 6 pixels of 512 channels after five poolings.
    assert sum(p.numel() for p in on_meta(vgg16_fedmmb, (3, 150, 200), 7).parameters()) == 81_860_423
    dense = (4 * 6 * 512 + 1) * 4096 + 4097 * 4096 + 4097 * 7
    widths = (3, 64, 64, 128, 128, 256, 256, 256, *[512] * 6)
    assert 81_860_423 - dense == sum((9 * before + 1) * after for before, after in pairwise(widths))


def test_first_weights_have_torchvisions_spread():
    torch.manual_seed(0)
    resnet, mobile = resnet18(classes=10), mobilenet_v2(classes=1000)
    for convolution in (resnet.conv1, resnet.layer3[0].conv2, mobile.features[18][0]):
        fan_out = convolution.out_channels * convolution.kernel_size[0] ** 2
        assert float(convolution.weight.detach().std()) * sqrt(fan_out / 2) == pytest.approx(1, abs=0.03)
    assert float(mobile.classifier[1].weight.detach().std()) == pytest.approx(0.01, rel=0.01)
    assert not mobile.classifier[1].bias.any()
    assert resnet.fc.weight.abs().max() <= 1 / sqrt(512)  # PyTorch's own


def test_an_inverted_residual_adds_its_input_only_where_it_fits():
    model = mobilenet_v2((3, 32, 32), 2)
    assert [i for i, block in enumerate(model.features) if getattr(block, "adds", False)] == [
        3, 5, 6, 8, 9, 10, 12, 13, 15, 16,
    ]  # fmt: skip
    block, x = model.features[3].eval(), torch.randn(1, 24, 4, 4)
    nn.init.zeros_(block.conv[3].weight)  # the last BatchNorm: nothing is left of the residual
    assert torch.equal(block(x), x)


def test_parameters_and_layers_of_resnet20():
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
