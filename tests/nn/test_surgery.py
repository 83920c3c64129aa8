"""Surgery: what is replaced, by what, what stays as it was, and what is refused. Numbers of groups are FedWon's."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fedshift.core.optimizer import SGD
from fedshift.core.preparation import apply_surgery, prepare
from fedshift.methods.fedwon import fedwon
from fedshift.methods.gn import gn
from fedshift.methods.ln import ln
from fedshift.methods.nonorm import nonorm
from fedshift.models.digits import digit_cnn_dropout
from fedshift.models.vision import alexnet_dropout, mobilenet_v2, resnet18, resnet20
from fedshift.nn.scaled_std_conv import ScaledStd
from fedshift.utils.errors import UsageError

NORMS = (
    nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm,
    nn.LocalResponseNorm, nn.CrossMapLRN2d,
)  # fmt: skip


def groups_of(method, make):
    """``(groups, channels)`` of each GroupNorm, without any memory for weights."""
    with torch.device("meta"):
        model = make()
    changed = apply_surgery(method, model)
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in changed.modules())
    return [(layer.num_groups, layer.num_channels) for layer in changed.modules() if isinstance(layer, nn.GroupNorm)]


class Everything(nn.Module):
    """A normalization layer of every type, after layers that left their bias to it or not."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 1, bias=False),
            nn.InstanceNorm2d(6, affine=True), nn.Conv2d(6, 10, 1), nn.GroupNorm(2, 10), nn.LocalResponseNorm(2),
            nn.CrossMapLRN2d(2), nn.Conv2d(10, 3, 1, bias=False),
        )  # fmt: skip
        self.line = nn.Sequential(nn.Conv1d(3, 4, 1, bias=False), nn.BatchNorm1d(4), nn.Flatten())
        self.flat = nn.Sequential(
            nn.Linear(48, 7, bias=False), nn.LayerNorm(7), nn.Linear(7, 5), nn.RMSNorm(5), nn.Linear(5, 2, bias=False)
        )
        self.deep = nn.ModuleDict({"volume": nn.Sequential(nn.BatchNorm3d(9), nn.SyncBatchNorm(9))})

    def forward(self, x):
        return self.flat(self.line(self.image(x).flatten(2)))


def test_no_normalization_of_any_type_is_left_and_biases_come_back():
    model = Everything().double()
    assert all(any(isinstance(layer, kind) for layer in model.modules()) for kind in NORMS)
    made = apply_surgery(nonorm(), model)
    assert not any(isinstance(layer, NORMS) for layer in made.modules())
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())  # the model given is left alone
    biases = {name: layer.bias for name, layer in made.named_modules() if isinstance(layer, nn.Conv1d | nn.Conv2d)}
    biases |= {name: layer.bias for name, layer in made.named_modules() if isinstance(layer, nn.Linear)}
    new = {"image.0", "image.2", "line.0", "flat.0"}
    assert all(torch.equal(biases[name], torch.zeros_like(biases[name])) for name in new)
    assert biases["image.0"].dtype == torch.float64
    # Those that had one keep it; those without one, before no normalization of their width, stay without.
    assert torch.equal(biases["image.4"], model.image[4].bias)
    assert torch.equal(biases["flat.2"], model.flat[2].bias)
    assert biases["image.8"] is None
    assert biases["flat.4"] is None

    x = torch.randn(2, 1, 3, 4, dtype=torch.float64)
    y = x
    for layer in (*model.image, *model.line, *model.flat):
        if not isinstance(layer, NORMS):
            y = layer(y.flatten(2) if isinstance(layer, nn.Conv1d) else y)
    assert torch.equal(made(x), y)


def test_a_residual_network_without_normalization_is_the_one_written_by_hand():
    torch.manual_seed(0)
    made = apply_surgery(fedwon(init="keep"), resnet20().double())
    convolutions = [layer for layer in made.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 19
    assert all(isinstance(layer, ScaledStd) and layer.bias is not None for layer in convolutions)
    x = y = torch.randn(2, 3, 8, 8, dtype=torch.float64)

    def convolved(layer, x):
        flat = layer.weight.flatten(1)
        kernel = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, keepdim=True) * flat.shape[1]).sqrt()
        return nn.functional.conv2d(x, kernel.view_as(layer.weight), None, layer.stride, layer.padding)

    y = convolved(convolutions[0], y).relu()
    for first, second in zip(convolutions[1::2], convolutions[2::2], strict=True):
        short = y
        if first.out_channels > first.in_channels:
            short = torch.cat([y[:, :, ::2, ::2], torch.zeros_like(y[:, :, ::2, ::2])], dim=1)
        y = (short + convolved(second, convolved(first, y).relu())).relu()
    assert (made.eval()(x) - made.fc(y.mean((2, 3)))).abs().max() <= 1e-10


def test_group_norm_equals_its_formula_and_starts_from_batch_norms_parameters():
    for method, groups in ((ln(), 1), (gn(groups=3), 3), (gn(groups=1), 1)):
        old = nn.BatchNorm2d(6, eps=0.01).double()
        nn.init.normal_(old.weight)
        nn.init.normal_(old.bias)
        x = torch.randn(2, 6, 4, 5, dtype=torch.float64)
        expected = np.empty(x.shape)
        for sample, image in enumerate(x.numpy()):
            for start in range(0, 6, 6 // groups):
                part = image[start : start + 6 // groups]
                normal = (part - part.mean()) / np.sqrt(part.var() + 0.01)
                expected[sample, start : start + 6 // groups] = normal
        weight, bias = (entry.detach().numpy().reshape(6, 1, 1) for entry in (old.weight, old.bias))
        found = apply_surgery(method, nn.Sequential(old)).train()(x).detach().numpy()
        assert np.abs(found - (expected * weight + bias)).max() <= 1e-12


def test_group_norm_without_affine_parameters_or_with_frozen_ones_stays_so():
    model = nn.Sequential(nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8).requires_grad_(False))
    made = apply_surgery(gn(), model)
    assert made[0].weight is None
    assert not any(parameter.requires_grad for parameter in made.parameters())


def test_numbers_of_groups_are_those_of_fedwons_tables_and_appendix():
    six_layer = [(32, 64), (32, 64), (64, 128)]
    assert groups_of(gn(), digit_cnn_dropout) == six_layer  # table 5
    assert groups_of(gn(), alexnet_dropout) == [(32, 64), (32, 192), (64, 384), (64, 256), (64, 256)]  # table 6
    residual = groups_of(gn(), resnet18)
    assert len(residual) == 20
    assert {groups for groups, _ in residual} == {32}
    expected = {16: 8, 24: 8, 144: 24}  # appendix A.2: 8 below 32 channels, 24 for 144, else 32
    mobile = groups_of(gn(), mobilenet_v2)
    assert len(mobile) == 52
    assert {channels for _, channels in mobile} >= {16, 24, 32, 96, 144, 960, 1280}
    assert all(groups == expected.get(channels, 32) for groups, channels in mobile)
    assert all(groups == 1 for groups, _ in groups_of(ln(), mobilenet_v2) + groups_of(ln(), alexnet_dropout))
    assert groups_of(gn(groups=16), digit_cnn_dropout) == [(16, channels) for _, channels in six_layer]


@pytest.mark.parametrize(
    ("kind", "channels", "wanted", "groups"),
    [
        (nn.BatchNorm2d, 31, None, 1), (nn.BatchNorm2d, 20, None, 5), (nn.BatchNorm2d, 48, None, 24),
        (nn.BatchNorm2d, 100, 32, 25), (nn.BatchNorm2d, 4, 9, 4), (nn.BatchNorm2d, 7, 3, 1),
        (nn.BatchNorm1d, 16, None, 2), (nn.BatchNorm1d, 5, None, 1), (nn.BatchNorm1d, 2048, None, 32),
    ],
)  # fmt: skip
def test_groups_divide_channels_and_have_eight_flat_features_or_more(kind, channels, wanted, groups):
    assert apply_surgery(gn(groups=wanted), kind(channels)).num_groups == groups


def test_a_layer_that_stands_in_two_places_stays_one_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
            self.again = nn.ModuleList([self.conv, self.norm])

    for method in (gn(), fedwon(), nonorm()):
        made = apply_surgery(method, Twice())
        assert made.again[0] is made.conv
        assert made.again[1] is made.norm
        assert not isinstance(made.norm, nn.BatchNorm2d)


def test_a_model_that_is_itself_a_normalization_layer_is_replaced_too():
    assert type(apply_surgery(nonorm(), nn.LayerNorm(3))) is nn.Identity
    made = apply_surgery(ln(), nn.BatchNorm1d(3))
    assert (type(made), made.num_groups) == (nn.GroupNorm, 1)
    assert isinstance(apply_surgery(fedwon(), nn.Conv2d(1, 2, 3)), ScaledStd)


def test_convolutions_over_one_value_have_no_variance_and_stay_plain():
    model = nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 1))
    made = apply_surgery(fedwon(), model)
    assert type(made[0]) is nn.Conv2d
    assert torch.equal(made[0].weight, model[0].weight)
    assert all(isinstance(layer, ScaledStd) for layer in made[1:])


def test_without_standardized_convolutions_fedwon_only_removes_normalization():
    model = resnet20()
    bare, plain = apply_surgery(fedwon(wsconv=False), model), apply_surgery(nonorm(), model)
    assert not any(isinstance(layer, ScaledStd) for layer in bare.modules())
    assert str(bare) == str(plain)


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        (gn(), nn.Conv2d(1, 2, 3), "GroupNorm replaces BatchNorm, but the model has none: remove it"),
        (ln(), nn.GroupNorm(1, 2), "replaces BatchNorm, but the model has none"),
        (nonorm(), nn.Linear(2, 2), "removes normalization, but the model has none"),
        (fedwon(wsconv=False), nn.Conv2d(1, 2, 3), "removes normalization, but the model has none"),
        (fedwon(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "fan-in above 1, but the model has none"),
        (fedwon(), nn.Sequential(weight_norm(nn.Conv2d(1, 2, 3))), "layer '0' has a parametrization, which scaled"),
        (gn(), nn.Sequential(weight_norm(nn.BatchNorm2d(2), dim=None)), "has a parametrization, which GroupNorm"),
    ],
)  # fmt: skip
def test_what_cannot_be_changed_is_refused_by_name(method, model, message):
    with pytest.raises(UsageError, match=message):
        apply_surgery(method, model)


class Functional(nn.Module):
    """A layer and a function that normalize."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.norm, self.function = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), function

    def forward(self, x):
        return self.function(self.norm(self.conv(x))).mean((2, 3))


@pytest.mark.parametrize(
    ("method", "function", "refused"),
    [
        (nonorm, lambda x: nn.functional.layer_norm(x, x.shape[1:]), "layer_norm"),
        (gn, lambda x: nn.functional.batch_norm(x, torch.zeros(4), torch.ones(4)), "batch_norm"),
        (gn, lambda x: nn.functional.layer_norm(x, x.shape[1:]), None),  # gn keeps it
        (nonorm, torch.relu, None),
    ],
)
def test_normalization_without_a_layer_is_refused_where_it_should_go(method, function, refused):
    x = torch.ones(1, 1, 8, 8)
    if refused is None:
        assert prepare(method(), Functional(function), optimizer=SGD(lr=0.1), sample=x)
        return
    with pytest.raises(
        UsageError, match=rf"also normalizes without one: it \(Functional\) calls {refused}: make a layer"
    ):
        prepare(method(), Functional(function), optimizer=SGD(lr=0.1), sample=x)
