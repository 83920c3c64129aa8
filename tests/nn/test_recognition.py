"""Layers that libraries derive from torch's: surgery keeps their other parts, or refuses.

Outputs are compared with those of the same network whose operations are exchanged instead of its layers.
"""

import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.config.expressions import list_catalog
from fedshift.core.network import compute_features, forward
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import apply_surgery, prepare
from fedshift.evaluation.batch_norm import reestimate_statistics
from fedshift.evaluation.policy import POLICIES
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedsr import fedsr
from fedshift.methods.fedwon import fedwon
from fedshift.methods.fixbn import fixbn
from fedshift.methods.gn import gn
from fedshift.methods.hbn import hbn
from fedshift.methods.ln import ln
from fedshift.methods.nonorm import nonorm
from fedshift.nn.dropout import KeyedDropout
from fedshift.nn.recognition import find_parts
from fedshift.tasks import CLASSIFICATION
from fedshift.utils.errors import UsageError
from tests.nn.operations import Exchanged

KEPT = (nn.ReLU, nn.ELU, nn.PReLU, nn.Tanh, nn.Dropout, nn.Conv2d, nn.Linear)


class NormAct(nn.BatchNorm2d):
    """Batch normalization that drops and activates, in the manner of timm's: it is a BatchNorm2d and holds the rest."""

    def __init__(self, channels, act, drop=None):
        super().__init__(channels)
        self.drop, self.act = drop or nn.Identity(), act

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(self.drop(x))


class GroupAct(nn.GroupNorm):
    def __init__(self, groups, channels):
        super().__init__(groups, channels)
        self.act = nn.Tanh()

    def forward(self, x):
        return self.act(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x.movedim(1, -1), self.normalized_shape, self.weight, self.bias, self.eps).movedim(-1, 1)


class Shallow(nn.Module):
    """A network with a layer of each kind; ``order`` holds two of them again, where torch does not look."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), NormAct(16, nn.ReLU(inplace=True))
        self.conv2, self.norm2 = nn.Conv2d(16, 6, 1, bias=False), NormAct(6, nn.PReLU(), nn.Dropout(0.5))
        self.norm3, self.norm4, self.norm5 = GroupAct(2, 6), ChannelsFirst(6), nn.SyncBatchNorm(6)
        self.head = nn.Linear(6, 3)
        self.order = {"stages": [(self.conv1, self.norm1)]}
        with torch.no_grad():
            for layer in (self.norm1, self.norm2, self.norm5):
                for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                    tensor.uniform_(0.5, 1.5)

    def forward(self, x):
        for conv, norm in self.order["stages"]:
            x = norm(conv(x))
        x = self.norm5(self.norm4(self.norm3(self.norm2(self.conv2(x)))))
        return self.head(x.mean((2, 3)))


@pytest.fixture
def shallow():
    torch.manual_seed(0)
    return Shallow().double().eval()


def count(model):
    return Counter(kind for layer in model.modules() for kind in KEPT if isinstance(layer, kind))


X = torch.linspace(-2, 3, 2 * 36, dtype=torch.float64).reshape(2, 1, 6, 6).sin()


@pytest.mark.parametrize(
    ("name", "method"),
    [("gn", gn()), ("ln", ln()), ("nonorm", nonorm()), ("fedwon", fedwon(init="keep")), ("hbn", hbn())],
)
def test_surgery_gives_the_outputs_of_the_network_whose_operations_are_exchanged(name, method, shallow):
    """HBN evaluates as BatchNorm does, so that nothing is exchanged for it."""
    generator = torch.get_rng_state()
    made = apply_surgery(method, shallow)
    assert torch.equal(torch.get_rng_state(), generator)
    with torch.no_grad(), Exchanged(name) as exchanged:
        expected = shallow(X)
    assert len(exchanged.training) == 3
    assert (made(X) - expected).abs().max() <= 1e-12
    assert count(made) == count(shallow)
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in made.modules())
    plan = prepare(method, shallow.float(), optimizer=SGD(lr=0.1), sample=torch.zeros(1, 1, 6, 6))
    assert any(isinstance(layer, KeyedDropout) for layer in plan.layers)


@pytest.mark.parametrize("name", list_catalog("methods"))
def test_no_method_loses_a_part(name, shallow):
    method = list_catalog("methods")[name](None)
    made = apply_surgery(method, shallow)
    assert not count(shallow) - count(made)


class Shifted(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


class Before(nn.BatchNorm2d):
    """It activates before it normalizes."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return super().forward(self.act(x))


class Never(nn.BatchNorm2d):
    """It always normalizes by the batch, and writes its statistics in evaluation too."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum)


class Unused(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU()


class Scaled(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return super().forward(x) * self.scale.view(-1, 1, 1)


class Frozen(nn.Module):
    """Constants in place of statistics, as in networks for detection."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        return x / self.running_var.view(-1, 1, 1).sqrt()


hooked, patched = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
hooked.register_forward_hook(lambda layer, x, out: out + 1)
patched.forward = functools.partial(F.relu)


def net(*layers):
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.Flatten(), nn.LazyLinear(2))


@pytest.mark.parametrize("method", [gn(), ln(), nonorm(), fedwon(), hbn()], ids=lambda method: method.name)
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Shifted(4), "layer '1' is a Shifted, which computes something else than torch's BatchNorm2d"),
        (Before(4), "layer '1' is a Before, which computes something else than"),
        (Never(4), "layer '1' is a Never, which computes something else than"),
        (Scaled(4), "layer '1' is a Scaled, which computes something else than"),
        (patched, "layer '1' is a BatchNorm2d, which computes something else than"),
        (Unused(4), "layer '1' is a Unused with submodule 'act', which its replacement by .* would lose"),
        (hooked, "layer '1' is a BatchNorm2d with hooks, which its replacement by"),
    ],
    ids=["shifted", "before", "never", "scaled", "patched", "unused", "hooked"],
)
def test_what_is_not_understood_is_refused_by_name(method, layer, message):
    with pytest.raises(UsageError, match=message):
        apply_surgery(method, net(layer))


def test_a_normalization_that_is_none_of_torchs_is_not_called_gone():
    for method in (nonorm(), fedwon()):
        with pytest.raises(UsageError, match="layer '2' is a Frozen, which seems to normalize"):
            apply_surgery(method, net(nn.BatchNorm2d(4), Frozen(4)))


def test_convolutions_that_scale_their_kernels_already_are_left_as_they_are():
    class Scaled(nn.Conv2d):  # in the manner of timm's
        scaled = True

        def forward(self, x):
            flat, size = self.weight.flatten(1)[None], self.weight[0].numel()
            scale = torch.full((self.out_channels,), 1.7139 * size**-0.5 if self.scaled else 1.0).to(flat)
            weight = F.batch_norm(flat.transpose(0, 1).reshape(1, self.out_channels, -1), None, None, scale, None, True)
            return F.conv2d(x, weight.view_as(self.weight), self.bias, self.stride, self.padding)

    class Standardized(Scaled):
        scaled = False

    class Renamed(nn.Conv2d):
        pass

    kept = apply_surgery(fedwon(init="keep"), net(Scaled(4, 4, 3), Renamed(4, 4, 1)))
    assert [type(layer).__name__ for layer in kept[:3]] == ["ScaledStdConv2d", "Scaled", "ScaledStdConv2d"]
    with pytest.raises(UsageError, match="layer '1' is a Standardized, which computes something else"):
        apply_surgery(fedwon(), net(Standardized(4, 4, 3)))


def test_a_classifier_that_is_no_plain_product_is_not_taken_for_one():
    class Cosine(nn.Linear):
        def forward(self, x):
            return F.linear(F.normalize(x), F.normalize(self.weight))

    with pytest.raises(UsageError, match="needs a linear classifier as the model's last layer, which is a Cosine"):
        apply_surgery(fedsr(), nn.Sequential(nn.Linear(4, 3), Cosine(3, 2)))


def test_groups_of_one_value_are_refused_and_of_two_are_not():
    pooled = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2)
    )
    sample = torch.zeros(1, 1, 6, 6)
    with pytest.raises(UsageError, match=r"layer '2' has 8 groups for \(8, 1, 1\) values, and a group of one value"):
        prepare(gn(), pooled, optimizer=SGD(lr=0.1), sample=sample)
    prepare(gn(groups=4), pooled, optimizer=SGD(lr=0.1), sample=sample)


def test_a_network_that_reads_its_replaced_layers_is_refused_with_that_reason():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.BatchNorm1d(16), nn.Linear(16, 2)

        def forward(self, x):
            return self.fc(self.norm(x) + self.norm.running_mean)

    with pytest.raises(UsageError, match=r"gn'.*but not after the method replaced some of its layers .*running_mean"):
        prepare(gn(), Reads(), optimizer=SGD(lr=0.1), sample=torch.zeros(1, 16))


def act_after(model):
    """The same network in torch's own layers."""
    plain = nn.BatchNorm2d(4).double()
    plain.load_state_dict({name: x for name, x in model[1].state_dict().items() if name in plain.state_dict()})
    return nn.Sequential(model[0], plain, nn.ELU(), *model[2:])


def test_policies_treat_a_layer_with_an_activation_as_the_two_layers(tiny):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4, nn.ELU()), nn.Flatten(), nn.Linear(144, 3)).double()
    model[1].running_mean.normal_()
    found = []
    for network in (model, act_after(model)):
        plan = prepare(fedbn(), network, optimizer=SGD(lr=0.1))
        data = tiny.client("bob").train
        x = data.inputs(torch.arange(6), torch.float64)
        state = reestimate_statistics(plan, plan.initial, data)
        with torch.no_grad():
            outputs, _ = compute_features(plan, plan.initial, x, {}, training=True, frozen=True)
        found.append([*state.values(), outputs])
    assert len(found[0]) == len(found[1])
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(*found, strict=True))


def test_freezing_and_statistics_of_layers_that_use_them_otherwise_are_refused():
    sample = torch.zeros(1, 1, 4, 4)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), Never(4), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(UsageError, match=r"'1.running_mean' belongs to a Never, which writes into it"):
        prepare(fixbn(), model, optimizer=SGD(lr=0.1), sample=sample)
    plan = prepare(fedbn(), model, optimizer=SGD(lr=0.1), sample=sample)
    for policy in ("reestimate", "mixed", "tent", "finetune_bn"):
        assert "layer '1' is a Never" in POLICIES.parse(policy).excuse(plan, CLASSIFICATION)
    for policy in ("average", "nearest", "finetune"):
        assert not POLICIES.parse(policy).excuse(plan, CLASSIFICATION)


def test_a_dropout_inside_a_normalization_stays_as_it_is_where_statistics_are_frozen():
    plan = prepare(fixbn(), Shallow(), optimizer=SGD(lr=0.1))
    forward(plan, {**plan.initial}, X.float(), training=True, frozen=True)
    assert [plan.module.norm2.training, plan.module.norm2.drop.training] == [False, True]


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        (nn.BatchNorm1d(3), []),
        (NormAct(3, nn.ReLU()), ["drop", "act"]),
        (GroupAct(1, 3), ["act"]),
        (ChannelsFirst(3), []),
    ],
)
def test_parts_are_found_on_any_device(layer, parts):
    assert list(find_parts(layer)) == parts
    assert list(find_parts(layer.to("meta"))) == parts


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def test_a_batch_norm_with_a_parametrization_is_still_batch_norm():
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    nn.utils.parametrize.register_parametrization(network[1], "weight", Double())
    plan = prepare(fedbn(), network, optimizer=SGD(lr=0.1))
    assert {name.split(".")[0] for name in plan.personal} == {"1"}
    assert "1.parametrizations.weight.original" in plan.personal
    with pytest.raises(UsageError, match="'1' has a parametrization"):
        prepare(gn(), network, optimizer=SGD(lr=0.1))
