"""Networks compatible with torchvision's published weights: names, shapes, parameter counts, initial weights."""

from hashlib import sha256
from math import sqrt

import pytest
import torch
from torch import nn

from fedshift.models.vision import mobilenet_v2, resnet18, vgg16, vgg16_bn, vgg16_fedmmb


def on_meta(make, *arguments):
    with torch.device("meta"):
        return make(*arguments)


@pytest.mark.parametrize(
    ("make", "parameters", "digest"),
    [
        (resnet18, 11_689_512, "84fb10d9c6905a1c"),
        (mobilenet_v2, 3_504_872, "37bbbce8932fd0c4"),
        (vgg16, 138_357_544, "35c4623e0cd4a39d"),
        (vgg16_bn, 138_365_992, "347371586a8ea365"),
    ],
)
def test_names_shapes_and_their_order_are_torchvisions(make, parameters, digest):
    # Counts: "num_params" of ResNet18_Weights, MobileNet_V2_Weights, VGG16_Weights, VGG16_BN_Weights in torchvision's
    # documentation. Digests: taken of the state dictionaries of torchvision 0.29.2, whose outputs were bitwise equal.
    model = on_meta(make)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    text = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items())
    assert sha256(text.encode()).hexdigest()[:16] == digest


def test_telling_names():
    resnet, mobile, vgg = (on_meta(make).state_dict() for make in (resnet18, mobilenet_v2, vgg16_bn))
    assert resnet["layer2.0.downsample.1.running_mean"].shape == (128,)
    assert resnet["fc.weight"].shape == (1000, 512)
    assert mobile["features.1.conv.0.0.weight"].shape == (32, 1, 3, 3)
    assert mobile["features.18.1.running_var"].shape == mobile["classifier.1.weight"].shape[1:] == (1280,)
    assert vgg["features.1.running_mean"].shape == (64,)
    assert vgg["classifier.6.bias"].shape == (1000,)


@pytest.mark.parametrize(("make", "layers"), [(resnet18, 20), (mobilenet_v2, 52), (vgg16, 0), (vgg16_bn, 13)])
def test_number_of_batch_norm_layers(make, layers):
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in on_meta(make).modules()) == layers


def test_fedmmbs_vgg16_is_another_one():
    # arXiv:2011.07006, section 4: about 82 million parameters for 150 x 200 pictures of seven classes. Without the
    # average pool, 150 x 200 leaves 4 x 6 pixels of 512 channels after five poolings.
    counts = [sum(p.numel() for p in on_meta(make, (3, 150, 200), 7).parameters()) for make in (vgg16, vgg16_fedmmb)]
    assert counts == [134_289_223, 81_860_423]
    assert counts[0] - counts[1] == (7 * 7 - 4 * 6) * 512 * 4096


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
    assert rates(vgg16) == rates(vgg16_bn) == [0.5, 0.5]
    assert rates(resnet18) == []


def test_an_inverted_residual_adds_its_input_only_where_it_fits():
    model = mobilenet_v2((3, 32, 32), 2)
    assert [i for i, block in enumerate(model.features) if getattr(block, "adds", False)] == [
        3, 5, 6, 8, 9, 10, 12, 13, 15, 16,
    ]  # fmt: skip
    block, x = model.features[3].eval(), torch.randn(1, 24, 4, 4)
    nn.init.zeros_(block.conv[3].weight)  # the last BatchNorm: nothing is left of the residual
    assert torch.equal(block(x), x)
