"""Networks compatible with torchvision's published weights: names, shapes, parameter counts, initial weights."""

from hashlib import sha256
from itertools import pairwise
from math import sqrt

import pytest
import torch
from torch import nn

from fedshift.models.vision import mobilenet_v2, resnet18, vgg16_fedmmb


def on_meta(make, *arguments):
    with torch.device("meta"):
        return make(*arguments)


@pytest.mark.parametrize(
    ("make", "parameters", "digest"),
    [
        (resnet18, 11_689_512, "84fb10d9c6905a1c"),
        (mobilenet_v2, 3_504_872, "37bbbce8932fd0c4"),
    ],
)
def test_names_shapes_and_their_order_are_torchvisions(make, parameters, digest):
    # Counts: "num_params" of ResNet18_Weights and MobileNet_V2_Weights in torchvision's documentation. Digests: of the
    # state dictionaries of torchvision 0.29.2, whose outputs were bitwise equal.
    model = on_meta(make)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    text = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items())
    assert sha256(text.encode()).hexdigest()[:16] == digest


def test_telling_names():
    resnet, mobile = (on_meta(make).state_dict() for make in (resnet18, mobilenet_v2))
    assert resnet["layer2.0.downsample.1.running_mean"].shape == (128,)
    assert resnet["fc.weight"].shape == (1000, 512)
    assert mobile["features.1.conv.0.0.weight"].shape == (32, 1, 3, 3)
    assert mobile["features.18.1.running_var"].shape == mobile["classifier.1.weight"].shape[1:] == (1280,)


@pytest.mark.parametrize(("make", "layers"), [(resnet18, 20), (mobilenet_v2, 52)])
def test_number_of_batch_norm_layers(make, layers):
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in on_meta(make).modules()) == layers


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


def test_dropout_layers_are_modules():
    def rates(make):
        return [layer.p for layer in on_meta(make).modules() if isinstance(layer, nn.Dropout)]

    assert rates(mobilenet_v2) == [0.2]
    assert rates(vgg16_fedmmb) == []
    assert rates(resnet18) == []


def test_an_inverted_residual_adds_its_input_only_where_it_fits():
    model = mobilenet_v2((3, 32, 32), 2)
    assert [i for i, block in enumerate(model.features) if getattr(block, "adds", False)] == [
        3, 5, 6, 8, 9, 10, 12, 13, 15, 16,
    ]  # fmt: skip
    block, x = model.features[3].eval(), torch.randn(1, 24, 4, 4)
    nn.init.zeros_(block.conv[3].weight)  # the last BatchNorm: nothing is left of the residual
    assert torch.equal(block(x), x)
