"""The papers' feed-forward networks: parameter counts, layers in their order, groups, and first weights."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from fedshift.models.digits import cfnn3, cfnn4, digit_cnn_bn, digit_cnn_dropout, small_cnn
from fedshift.models.mlp import abide_mlp, fnn2, synthetic_mlp
from fedshift.models.vision import alexnet_bn, alexnet_dropout, resnet20, vgg16_fedmmb

# torchvision's AlexNet, of the same convolutions and FC layers, has 61,100,840 ("num_params" of AlexNet_Weights).
NORMS = 2 * (64 + 192 + 384 + 256 + 256)
COUNTS = [
    # FedBN, table 3. FedWon, table 5, has no BatchNorm after FC layers: 2 * (2048 + 512) fewer.
    (digit_cnn_bn, {}, 14_219_210),
    (digit_cnn_dropout, {}, 14_219_210 - 2 * (2048 + 512)),
    (small_cnn, {}, 3 * 16 * 9 + 16 + 32 + 16 * 32 * 9 + 32 + 64 + 1568 * 64 + 64 + 128 + 64 * 10 + 10),
    (alexnet_dropout, {"classes": 1000}, 61_100_840 + NORMS),
    (alexnet_bn, {"classes": 1000}, 61_100_840 + NORMS + 2 * (4096 + 4096)),
    (alexnet_bn, {}, 57_063_498),
    # McMahan et al. 2017 (arXiv:1602.05629), section 3. The other papers give layers alone.
    (fnn2, {}, 199_210),
    (cfnn3, {}, 1_663_370),
    (cfnn4, {}, (3 * 128 + 128 * 256 + 256 * 512) * 9 + 896 + (512 * 4 * 4 + 1) * 1024 + 1025 * 10),
    (abide_mlp, {}, 5996 * 16 + 2 * 16 + 17 * 16 + 2 * 16 + 17 * 2),
    (synthetic_mlp, {}, 11 * 100 + 2 * 100 + 101 * 2),
    # arXiv:2011.07006, section 4: VGG16's 13 convolutions; five poolings leave 4 x 6 pixels for three FC layers.
    (
        vgg16_fedmmb,
        {},
        sum((9 * a + 1) * b for a, b in pairwise((3, 64, 64, 128, 128, 256, 256, 256, *[512] * 6)))
        + (4 * 6 * 512 + 1) * 4096 + 4097 * 4096 + 4097 * 7,
    ),
    # He et al. 2016, table 6: 0.27 M. A block of n channels after m has 9 n (m + n) weights and two BatchNorms of 2 n.
    (
        resnet20,
        {},
        9 * (3 * 16 + 6 * 16 * 16 + 32 * (16 + 5 * 32) + 64 * (32 + 5 * 64)) + 2 * (16 + 6 * (16 + 32 + 64)) + 65 * 10,
    ),
]  # fmt: skip
CONV, POOL = ["Conv2d", "BatchNorm2d", "ReLU"], "MaxPool2d"
DENSE, DROPPED = ["Linear", "BatchNorm1d", "ReLU"], ["Dropout", "Linear", "ReLU"]
DIGITS = [*CONV, POOL, *CONV, POOL, *CONV, "Flatten"]
ALEXNET = [*CONV, POOL, *CONV, POOL, *CONV, *CONV, *CONV, POOL, "AdaptiveAvgPool2d", "Flatten"]
PLAIN, END = ["Conv2d", "ReLU", POOL], ["Linear", "ReLU", "Linear"]
KINDS = {
    digit_cnn_bn: [*DIGITS, *DENSE, *DENSE, "Linear"],
    digit_cnn_dropout: [*DIGITS, *DROPPED, *DROPPED, "Linear"],
    alexnet_bn: [*ALEXNET, *DENSE, *DENSE, "Linear"],
    alexnet_dropout: [*ALEXNET, *DROPPED, *DROPPED, "Linear"],
    cfnn3: [*PLAIN, *PLAIN, "Flatten", *END],
    cfnn4: [*PLAIN, *PLAIN, *PLAIN, "Flatten", *END],
    fnn2: ["Flatten", "Linear", "ReLU", *END],
    abide_mlp: ["Flatten", *DENSE, *DENSE, "Linear"],
    synthetic_mlp: ["Flatten", *DENSE, "Linear"],
}


@pytest.fixture
def shapes_alone():
    """Make networks without values, so that 57 million weights take no memory."""
    with torch.device("meta"):
        yield


@pytest.mark.usefixtures("shapes_alone")
@pytest.mark.parametrize(("make", "options", "parameters"), COUNTS)
def test_parameter_counts(make, options, parameters):
    assert sum(parameter.numel() for parameter in make(**options).parameters()) == parameters


@pytest.mark.usefixtures("shapes_alone")
@pytest.mark.parametrize("make", KINDS)
def test_layers_are_in_the_order_of_the_papers_tables(make):
    assert [type(layer).__name__ for layer in make()] == KINDS[make]


@pytest.mark.usefixtures("shapes_alone")
def test_convolutions_are_those_of_the_papers_tables():
    layers = [layer for layer in alexnet_bn() if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0], c.padding[0]) for c in layers] == [
        (3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1),
    ]  # fmt: skip
    first = digit_cnn_bn().conv1
    assert (first.kernel_size, first.stride, first.padding) == ((5, 5), (1, 1), (2, 2))
    thin = alexnet_bn(width=1024)
    assert (thin.fc1.out_features, thin.fc2.out_features) == (1024, 1024)


@pytest.mark.usefixtures("shapes_alone")
@pytest.mark.parametrize(
    ("make", "groups"),
    [(make, [32, 32, 64]) for make in (digit_cnn_bn, digit_cnn_dropout)]
    + [(make, [32, 32, 64, 64, 64]) for make in (alexnet_bn, alexnet_dropout)],
)
def test_convolutions_know_their_groups_of_fedwons_tables_5_and_6(make, groups):
    assert [layer.groups for layer in make() if isinstance(layer, nn.BatchNorm2d)] == groups
    assert not any(hasattr(layer, "groups") for layer in [*make(), *small_cnn()] if isinstance(layer, nn.BatchNorm1d))


def test_the_synthetic_experiments_weights_are_wide():
    torch.manual_seed(0)
    model = synthetic_mlp((500,), 50)
    for parameter in (*model.fc1.parameters(), *model.fc2.parameters()):
        assert float(parameter.detach().std()) == pytest.approx(10, rel=0.2)
        assert abs(float(parameter.detach().mean())) < 3
