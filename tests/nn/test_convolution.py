"""Fast convolutions: torch's values and gradients, and torch's own layers wherever that is not for them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

from fedshift.core.architecture import architecture
from fedshift.nn import convolution
from fedshift.nn.convolution import FastConv2d, differentiate_kernels, use_fast_convolutions
from fedshift.nn.scaled_std_conv import ScaledStdConv2d
from fedshift.nn.surgery import ScaledStandardization
from tests.nn.operations import assert_equal

CHANNELS = 6
SMALL = [  # image, kernel, stride, padding
    ((1, 1), 3, 1, 1), ((2, 2), 3, 1, 1), ((2, 3), 3, 2, 1), ((3, 3), 3, 2, 1), ((1, 8), 3, 1, 1),
    ((4, 4), 5, 1, 2), ((4, 3), 5, 2, 2), ((2, 2), (3, 5), (1, 2), (1, 2)), ((3, 2), 7, 3, 3), ((2, 5), 3, 1, 2),
]  # fmt: skip


@pytest.fixture(autouse=True)
def sums(monkeypatch):
    """The kernels whose gradients were sums."""
    made = []

    def count(x, grad, kernel, *how):
        made.append(tuple(kernel))
        return differentiate_kernels(x, grad, kernel, *how)

    monkeypatch.setattr(convolution, "differentiate_kernels", count)
    return made


def layer(kernel=3, stride=1, padding=1, **options):
    torch.manual_seed(0)
    return nn.Conv2d(CHANNELS, CHANNELS, kernel, stride, padding, **{"groups": CHANNELS, **options}).double()


def inputs(*size, batch=5):
    return torch.randn(batch, CHANNELS, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def differentiate(module, x):
    """Value, gradients (inputs, parameters), and second derivatives."""
    x = x.detach().requires_grad_()
    wanted = [x, *module.parameters()]
    made = module(x)
    grads = torch.autograd.grad((made * made.detach().cos()).sum(), wanted, create_graph=True)
    twice = torch.autograd.grad(sum(grad.square().sum() for grad in grads), wanted, materialize_grads=True)
    return [made, *grads, *twice]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("size", "kernel", "stride", "padding"), SMALL)
def test_values_and_gradients_are_torchs(sums, size, kernel, stride, padding, bias):
    plain = layer(kernel, stride, padding, bias=bias)
    quick = use_fast_convolutions(copy.deepcopy(plain))
    assert type(quick) is FastConv2d
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = inputs(*size).contiguous(memory_format=memory_format)
        assert_equal(differentiate(quick, x), differentiate(plain, x))
    assert sums == [quick.kernel_size] * 2


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, (3, 3)), ({}, (8, 2)), ({"stride": 2}, (4, 4)), ({"padding": 0}, (3, 3)), ({"padding": "same"}, (2, 2)),
        ({"groups": 3}, (2, 2)), ({"groups": 1}, (2, 2)), ({"padding_mode": "circular"}, (2, 2)),
        ({"dilation": 2, "padding": 2}, (2, 2)), ({"kernel": 1, "padding": 1}, (1, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_other_convolutions_are_torchs_bit_for_bit(sums, options, size):
    plain = layer(**options)
    quick, x = use_fast_convolutions(copy.deepcopy(plain)), inputs(*size)
    for one, other in zip(differentiate(quick, x), differentiate(plain, x), strict=True):
        assert torch.equal(one, other)
    assert not sums


def test_low_precision_and_clients_side_by_side_are_torchs(sums):
    quick, plain, x = use_fast_convolutions(layer()), layer(), inputs(2, 2)
    side_by_side = vmap(quick)(x[:, None])
    assert_equal([side_by_side], [vmap(plain)(x[:, None])])
    with torch.autocast("cpu", torch.bfloat16):
        low = quick.float()(x.float())
        assert torch.equal(low, plain.float()(x.float()))
    (side_by_side.sum() + low.sum()).backward()
    assert not sums


def test_standardized_kernels_on_small_images(sums):
    net = ScaledStandardization()(nn.Sequential(layer()))
    x = inputs(2, 2)
    made = net(x)
    found = torch.autograd.grad(made.sin().sum(), list(net.parameters()))
    assert isinstance(net[0], ScaledStdConv2d)
    assert sums == [(3, 3)]
    plain = F.conv2d(x, net[0].standardized_weight(), net[0].bias, padding=1, groups=CHANNELS)
    assert_equal([made, *found], [plain, *torch.autograd.grad(plain.sin().sum(), list(net.parameters()))])


def test_names_and_appearance_stay():
    net = nn.Sequential(layer(), nn.BatchNorm2d(CHANNELS), layer(groups=1))
    before = copy.deepcopy(net)
    assert use_fast_convolutions(net) is net
    assert [type(each) for each in net] == [FastConv2d, nn.BatchNorm2d, nn.Conv2d]
    assert str(net) == str(before)
    assert architecture(net) == architecture(before)
    assert list(net.state_dict()) == list(before.state_dict())
    assert type(copy.deepcopy(net)[0]) is FastConv2d
