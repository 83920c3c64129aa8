"""Scaled weight standardization against FedWon's listing 1 written out in NumPy, and a convolution in plain loops."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.preparation import apply_surgery
from fedshift.methods.fedwon import fedwon
from fedshift.methods.gn import gn
from fedshift.nn.scaled_std_conv import ScaledStd
from fedshift.utils.errors import UsageError

LAYERS = [
    nn.Conv1d(3, 4, 3, stride=2, padding=1),
    nn.Conv1d(4, 6, 3, groups=2, dilation=2, bias=False),
    nn.Conv2d(3, 4, 3),
    nn.Conv2d(4, 8, (3, 2), stride=(1, 2), padding=(2, 1), groups=4),
    nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular", stride=2),
    nn.Conv2d(2, 4, 3, padding=(2, 0), padding_mode="replicate", dilation=(2, 1)),
    nn.Conv3d(2, 4, (2, 3, 1), padding=1, groups=2),
    nn.Conv3d(1, 2, 2, stride=2, padding=1, padding_mode="replicate"),
]
NUMPY_MODES = {"zeros": "constant", "reflect": "reflect", "circular": "wrap", "replicate": "edge"}


def standardized(weight, gain):
    """Listing 1, lines 12 to 15, one output channel at a time."""
    rows = []
    for kernel, factor in zip(weight, gain.ravel(), strict=True):
        fan_in = kernel.size
        mean = sum(kernel.ravel()) / fan_in
        var = sum((value - mean) ** 2 for value in kernel.ravel()) / (fan_in - 1)
        rows.append((kernel - mean) / np.sqrt(max(var * fan_in, 1e-4)) * factor)
    return np.stack(rows)


def convolved(layer, x, weight, bias):
    """Convolution from its definition, with the hyperparameters of ``layer``."""
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    width = [(0, 0), (0, 0), *((p, p) for p in layer.padding)]
    x = np.pad(x, width, mode=NUMPY_MODES[layer.padding_mode])
    size = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)]
    inputs, outputs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    y = np.zeros((len(x), layer.out_channels, *size))
    for channel in range(layer.out_channels):
        first = channel // outputs * inputs
        for at in np.ndindex(*size):
            window = tuple(
                slice(i * s, i * s + d * (k - 1) + 1, d)
                for i, s, d, k in zip(at, stride, dilation, kernel, strict=True)
            )
            patch = x[(slice(None), slice(first, first + inputs), *window)]
            y[(slice(None), channel, *at)] = (patch * weight[channel]).reshape(len(x), -1).sum(1) + bias[channel]
    return y


def changed(layer, init="keep"):
    """``layer`` standardized, in float64, with a gain that is not one and a bias that is not zero."""
    torch.manual_seed(0)
    made = apply_surgery(fedwon(init=init), nn.Sequential(layer))[0].double()
    assert isinstance(made, ScaledStd)
    assert torch.equal(made.gain, torch.ones(layer.out_channels, 1, *[1] * len(layer.kernel_size), dtype=torch.float64))
    nn.init.normal_(made.gain)
    return made


def arrays(layer):
    bias = np.zeros(layer.out_channels) if layer.bias is None else layer.bias.detach().numpy()
    return layer.weight.detach().numpy(), layer.gain.detach().numpy(), bias


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_equals_listing_1_and_a_convolution_written_out(layer):
    made = changed(layer)
    shape = (2, layer.in_channels, *(7, 6, 5)[: len(layer.kernel_size)])
    x = torch.randn(shape, dtype=torch.float64)
    weight, gain, bias = arrays(made)
    expected = convolved(layer, x.numpy(), standardized(weight, gain), bias)
    assert np.abs(made(x).detach().numpy() - expected).max() <= 1e-12
    assert (made.bias is None) == (layer.bias is None)


def test_a_kernel_of_almost_one_value_is_scaled_by_100_at_most():
    layer = changed(nn.Conv2d(2, 2, 3))
    with torch.no_grad():
        layer.weight.fill_(0.3)
        layer.weight[1, 0, 0, 0] += 1e-4
        layer.gain.fill_(1.0)
    kernel = layer.standardized_weight().detach()
    assert kernel[0].abs().max() <= 1e-13
    assert kernel[1, 0, 0, 0] == pytest.approx(100 * 1e-4 * 17 / 18, rel=1e-9)


def test_gradients_of_weights_and_gain_are_those_of_listing_1():
    layer = changed(nn.Conv2d(2, 3, 2, groups=1))
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    layer(x).square().sum().backward()
    weight, gain, bias = arrays(layer)

    def loss():
        return (convolved(layer, x.numpy(), standardized(weight, gain), bias) ** 2).sum()

    for values, found in ((weight, layer.weight.grad), (gain, layer.gain.grad)):
        for at in np.ndindex(*values.shape):
            kept = values[at]
            values[at] = kept + 1e-5
            above = loss()
            values[at] = kept - 1e-5
            slope = (above - loss()) / 2e-5
            values[at] = kept
            assert float(found[at]) == pytest.approx(slope, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("gain", [1.0, math.sqrt(2 / (1 - 1 / math.pi))])
def test_the_first_gain_decides_what_becomes_of_a_signal_behind_relus(gain):
    """Of a standard normal z, relu(z) has the variance (1 - 1/pi) / 2, all that a kernel of mean zero passes on."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(32, 256, 3, padding=1, padding_mode="circular", bias=False)]
    for _ in range(3):
        layers += [nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1, padding_mode="circular", bias=False)]
    made = apply_surgery(fedwon(gain=gain), nn.Sequential(*layers))
    with torch.no_grad():
        found = made(torch.randn(8, 32, 6, 6)).var()
    assert float(found) == pytest.approx(gain**8 * ((1 - 1 / math.pi) / 2) ** 3, rel=0.15)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [(fedwon, {"gain": gain}, "gain=.*: give a number above 0") for gain in (0.0, math.nan, math.inf)]
    + [(fedwon, {"init": "zeros"}, "init='zeros': give 'xavier' or 'keep'"), (gn, {"groups": 0}, "groups=0: give 1")],
)
def test_options_out_of_range_are_refused(method, options, message):
    with pytest.raises(UsageError, match=message):
        method(**options)


@pytest.mark.parametrize(
    ("layer", "fans"),
    [
        (nn.Conv2d(64, 96, 3), 64 * 9 + 96 * 9),
        (nn.Conv2d(64, 96, 3, groups=4), 16 * 9 + 96 * 9),
        (nn.Conv1d(128, 256, 3), 128 * 3 + 256 * 3),
        (nn.Conv3d(16, 32, 3), 16 * 27 + 32 * 27),
    ],
    ids=repr,
)
def test_weights_begin_xavier_normal_whatever_the_model_had(layer, fans):
    nn.init.constant_(layer.weight, 5.0)
    made = changed(layer, init="xavier").weight.detach()
    assert float(made.mean()) == pytest.approx(0.0, abs=5 * (2 / fans / made.numel()) ** 0.5)
    assert float(made.std()) == pytest.approx((2 / fans) ** 0.5, rel=0.02)
    within = (made.abs() < (2 / fans) ** 0.5).double().mean()
    assert float(within) == pytest.approx(0.6827, abs=0.02)  # a normal distribution's, not a uniform one's


def test_keeping_takes_the_weights_of_the_model_and_draws_nothing():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, bias=False))
    state = torch.get_rng_state()
    made = apply_surgery(fedwon(init="keep"), model)
    assert torch.equal(torch.get_rng_state(), state)
    for old, new in zip(model, made, strict=True):
        assert torch.equal(old.weight, new.weight)
        assert old.weight is not new.weight
        assert (old.bias is None) == (new.bias is None)
    assert {name.rpartition(".")[2] for name, _ in made.named_parameters()} == {"weight", "bias", "gain"}


@pytest.mark.parametrize(
    "layer",
    [
        nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2),
        nn.ConvTranspose2d(3, 4, (3, 2), stride=2, padding=(1, 0), output_padding=1, bias=False),
        nn.ConvTranspose3d(2, 3, 2, dilation=(2, 1, 1)),
    ],
    ids=repr,
)
def test_a_transposed_kernel_is_standardized_for_each_of_its_output_channels(layer):
    made = changed(layer)
    weight, gain, _ = arrays(made)
    expected, (outputs, inputs) = np.empty_like(weight), (weight.shape[1], len(weight) // layer.groups)
    for channel in range(layer.out_channels):
        group, place = divmod(channel, outputs)
        rows = slice(group * inputs, (group + 1) * inputs)
        expected[rows, place] = standardized(weight[None, rows, place], gain[channel : channel + 1])[0]
    plain = layer.double()
    plain.weight.data = torch.from_numpy(expected)
    x = torch.randn(2, layer.in_channels, *(5, 4, 3)[: len(layer.kernel_size)], dtype=torch.float64)
    torch.testing.assert_close(made(x), plain(x), rtol=1e-12, atol=1e-12)
