"""FedWon, GN, LN and FedAvg without BN: whole rounds equal FedAvg on a network that is written that way by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.methods.agc import agc
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedwon import fedwon
from fedshift.methods.gn import gn
from fedshift.methods.ln import ln
from fedshift.methods.nonorm import nonorm
from fedshift.methods.scaffold import scaffold
from tests.methods import plain
from tests.methods.plain import advance, data, largest_difference


class WSConv(nn.Conv2d):
    """FedWon's listing 1, word for word but for its constants, which need not be buffers."""

    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True,
        padding_mode="zeros",
    ):  # fmt: skip
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        nn.init.xavier_normal_(self.weight)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def standardized_weights(self):
        fan_in = torch.tensor(self.weight.shape[1:].numel()).type_as(self.weight)
        mean = torch.mean(self.weight, axis=[1, 2, 3], keepdims=True)
        var = torch.var(self.weight, axis=[1, 2, 3], keepdims=True)
        scale = torch.rsqrt(torch.maximum(var * fan_in, torch.tensor(1e-4)))
        return (self.weight - mean) * scale * self.gain

    def forward(self, x):
        return F.conv2d(
            input=x, weight=self.standardized_weights(), bias=self.bias, stride=self.stride, padding=self.padding,
            dilation=self.dilation, groups=self.groups,
        )  # fmt: skip


def network(conv, norm, bias):
    """The same network with a normalization of choice; ``norm(channels)`` may be None."""

    def make(shape, classes):
        return nn.Sequential(
            conv(shape[0], 16, 3, bias=bias), norm(16), nn.ReLU(), conv(16, 32, 2, stride=2, groups=2, bias=bias),
            norm(32), nn.ReLU(), nn.Flatten(), nn.Linear(128, classes),
        ).double()  # fmt: skip

    return make


WITH_BN = network(nn.Conv2d, nn.BatchNorm2d, bias=False)


DATA = data({"a": 12, "b": 8}, (1, 6, 6))


def trial(method, model):
    return plain.trial(method, model, DATA)


CASES = [
    (gn(), nn.Conv2d, lambda channels: nn.GroupNorm(8 if channels < 32 else 32, channels), False, fedavg()),
    (gn(groups=4), nn.Conv2d, lambda channels: nn.GroupNorm(4, channels), False, fedavg()),
    (ln(), nn.Conv2d, lambda channels: nn.GroupNorm(1, channels), False, fedavg()),
    (nonorm(), nn.Conv2d, lambda _: nn.Identity(), True, fedavg()),
    (fedwon(agc=None), WSConv, lambda _: nn.Identity(), True, fedavg()),
    (fedwon(agc=None, init="keep"), WSConv, lambda _: nn.Identity(), True, fedavg()),
    (fedwon(), WSConv, lambda _: nn.Identity(), True, agc(clip=0.64)),
    (fedwon(agc=0.01), WSConv, lambda _: nn.Identity(), True, agc(clip=0.01)),
    (fedwon(wsconv=False), nn.Conv2d, lambda _: nn.Identity(), True, agc(clip=0.64)),
    (fedwon(scaffold(), agc=None), WSConv, lambda _: nn.Identity(), True, scaffold()),
    (ln(scaffold()), nn.Conv2d, lambda channels: nn.GroupNorm(1, channels), False, scaffold()),
]


@pytest.mark.parametrize(("method", "conv", "norm", "bias", "base"), CASES, ids=[case[0].name for case in CASES])
def test_rounds_equal_those_on_the_network_written_by_hand(method, conv, norm, bias, base):
    changed = trial(method, WITH_BN)
    initial = changed.plan.initial

    def by_hand(shape, classes):
        model = network(conv, norm, bias)(shape, classes)
        model.load_state_dict(initial)
        return model

    written = trial(base, by_hand)
    advance(changed, written, rounds=3)
    assert largest_difference(changed.server.shared, written.server.shared) <= 1e-12
    assert not any(torch.equal(tensor, initial[name]) for name, tensor in changed.server.shared.items())


def test_biases_that_come_back_begin_at_zero_and_weights_as_the_paper_draws_them():
    bare, changed = trial(nonorm(), WITH_BN), trial(fedwon(), WITH_BN)
    for running in (bare, changed):
        assert not running.plan.initial["0.bias"].any()
        assert not running.plan.initial["3.bias"].any()
    before = trial(fedavg(), WITH_BN).plan.initial
    for name in ("0.weight", "3.weight"):
        assert torch.equal(bare.plan.initial[name], before[name])
        assert not torch.equal(changed.plan.initial[name], before[name])
    assert torch.equal(changed.plan.initial["7.weight"], before["7.weight"])
