"""U-Nets: published sizes, the network by hand, any size of image, surgery, and a round against plain PyTorch."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.core.preparation import apply_surgery
from fedshift.methods.fedwon import fedwon
from fedshift.methods.gn import gn
from fedshift.methods.ln import ln
from fedshift.methods.nonorm import nonorm
from fedshift.models.unet import unet, unet_small
from fedshift.nn.scaled_std_conv import ScaledStdConv2d, ScaledStdConv3d
from fedshift.utils.errors import UsageError

IMAGE, VOLUME = (2, 9, 6), (2, 3, 6, 5)


def narrow(shape=IMAGE, width=2):
    """A network of ``width`` channels at the size of the input, for three classes."""
    torch.manual_seed(0)
    return unet_small(shape, 3, width=width)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def on_meta(make, *arguments):
    with torch.device("meta"):
        return make(*arguments)


def count_by_hand(channels, classes, widths, kernel, doubled):
    """Weights of figure 1 of arXiv:1505.04597, or, ``doubled``, of figure 2 of arXiv:1606.06650, with BatchNorm's."""
    twice = [(a, b // 2 if doubled else b, b) for a, b in pairwise((channels, *widths))]
    rises = [(a, a if doubled else b, b) for a, b in pairwise(reversed(widths))]
    twice += [(r + b, b, b) for _, r, b in rises]
    weights = sum(3**kernel * (a * b + b * c) + 2 * (b + c) for a, b, c in twice)
    return weights + sum(2**kernel * a * r for a, r, _ in rises) + widths[0] * classes + classes


def test_parameters_of_the_network_of_images():
    widths = (64, 128, 256, 512, 1024)
    made = on_meta(unet)
    assert count(made) == count_by_hand(1, 2, widths, 2, doubled=False) == 31_035_586
    # "In total the network has 23 convolutional layers."
    assert sum(isinstance(layer, nn.Conv2d) for layer in made.modules()) == 23
    small = count_by_hand(1, 2, [width // 8 for width in widths], 2, doubled=False)
    assert count(on_meta(unet_small)) == small == 486_298


def test_parameters_of_the_network_of_volumes():
    widths, made = (64, 128, 256, 512), on_meta(unet, (3, 8, 8, 8), 3)
    assert count(made) == count_by_hand(3, 3, widths, 3, doubled=True)
    # "The architecture has 19069955 parameters in total", of three channels and classes: one a channel in place of two.
    channels = sum(layer.num_features for layer in made.modules() if isinstance(layer, nn.BatchNorm3d))
    assert count(made) - channels == 19_069_955
    # Without normalization convolutions have biases, and the three of the way up (512, 256, 128) get them as well.
    assert count(apply_surgery(nonorm(), made)) == 19_069_955 + 512 + 256 + 128
    small = count_by_hand(1, 2, [width // 8 for width in widths], 3, doubled=True)
    assert count(on_meta(unet_small, (1, 8, 8, 8))) == small == 298_598


def compute_by_hand(state, x):
    """Scores of a network without normalization, by slices, repetitions and maxima in place of its layers."""
    convolve = F.conv2d if x.ndim == 4 else F.conv3d
    axes = range(2, x.ndim)

    def twice(x, at):
        for i in (1, 2):
            x = convolve(x, state[f"{at}.conv{i}.weight"], state[f"{at}.conv{i}.bias"], padding=1).relu()
        return x

    skips = [twice(x, "down.0")]
    depth = max(int(name.split(".")[1]) for name in state if name.startswith("down"))
    for level in range(1, depth + 1):
        x = skips[-1]
        for axis in axes:
            even, odd = (x[(slice(None),) * axis + (slice(start, None, 2),)] for start in (0, 1))
            missing = even.shape[axis] - odd.shape[axis]
            x = even.maximum(torch.cat([odd, even.narrow(axis, -1, 1)], axis) if missing else odd)
        skips.append(twice(x, f"down.{level}"))
    x = skips.pop()
    for level in range(depth):
        skip = skips.pop()
        for axis in axes:
            x = x.repeat_interleave(2, axis)
            x = torch.cat([x, torch.zeros_like(x.narrow(axis, 0, 1))], axis).narrow(axis, 0, skip.shape[axis] + 1)
        x = convolve(x, state[f"up.{level}.rise.weight"], state[f"up.{level}.rise.bias"])
        x = twice(torch.cat([skip, x], 1), f"up.{level}.convs")
    return convolve(x, state["out.weight"], state["out.bias"])


@pytest.mark.parametrize("size", [(16, 32), (1, 1), (7, 9), (33, 2), (3, 5, 6), (1, 1, 1), (8, 8, 16)], ids=str)
def test_scores_of_any_size_are_those_computed_by_hand(size):
    network = apply_surgery(nonorm(), narrow((2, *size))).double().eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(3, 2, *size, dtype=torch.float64)
    with torch.no_grad():
        scores, expected = network(x), compute_by_hand(network.state_dict(), x)
    assert scores.shape == (3, 3, *size)
    assert expected.std() > 0.1
    assert (scores - expected).abs().max() <= 1e-12


def test_first_weights_have_the_spread_of_the_paper():
    made = unet(classes=3, width=32)  # deviation sqrt(2 / N), N the number of incoming values
    for layer in (made.down[4].conv2, made.up[0].rise, made.up[0].convs.conv1):
        fan_in = layer.weight[0].numel()
        assert float(layer.weight.detach().std()) * (fan_in / 2) ** 0.5 == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("shape", "convolution"), [(IMAGE, ScaledStdConv2d), (VOLUME, ScaledStdConv3d)])
def test_surgery_reaches_every_layer(shape, convolution):
    network, samples = narrow(shape), torch.zeros(2, *shape)
    norms, convolutions = (
        sum(isinstance(layer, kind) for layer in network.modules())
        for kind in (nn.modules.batchnorm._BatchNorm, nn.modules.conv._ConvNd)
    )
    for method, kind, number in ((gn(), nn.GroupNorm, norms), (ln(), nn.GroupNorm, norms),
                                 (fedwon(), convolution, convolutions)):  # fmt: skip
        made = apply_surgery(method, network)
        assert sum(type(layer) is kind for layer in made.modules()) == number
        assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in made.modules())
        assert made(samples).shape == (2, 3, *shape[1:])
    assert (norms, convolutions) == ((18, 23) if shape == IMAGE else (14, 18))


@pytest.mark.parametrize("make", [unet, unet_small])
def test_what_has_no_places_and_odd_widths_are_refused(make):
    name = make.__name__.replace("_", "-")
    for shape in ((5,), (28, 28), (1, 2, 3, 4, 5), (0, 4, 4)):
        with pytest.raises(UsageError, match=rf"model {name} takes images \(C, H, W\) or volumes .*choose another"):
            make(shape, 2)
    for width in (0, 3):
        with pytest.raises(UsageError, match=f"width={width}: give an even number"):
            make((1, 4, 4), 2, width=width)
