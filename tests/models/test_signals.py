"""Signals [N, C, L]: the residual network, surgery of it, engines, export, and gains of devices under FedBN."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedshift.core.optimizer import SGD
from fedshift.core.preparation import apply_surgery
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.factory import name_model
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.models.signals import resnet_1d
from fedshift.nn.hybrid_batch_norm import HybridBatchNorm
from fedshift.nn.scaled_std_conv import ScaledStdConv1d
from fedshift.utils.errors import UsageError

LENGTH = 12


def signals(gains=(1, 1), kind=np.float64):
    """Sites of 12 and 16 slow or fast waves in two channels, each amplified by its gain."""
    random, made = np.random.default_rng(0), {}
    for place, gain in enumerate(gains):
        y = np.arange(12 + 4 * place) % 2
        waves = np.sin((0.5 + 0.8 * y[:, None, None]) * np.arange(LENGTH) + random.uniform(0, 6, (len(y), 2, 1)))
        x = (gain * 10 * (waves + random.normal(size=waves.shape) / 4)).astype(kind)
        made[f"site {place}"] = (x, y, x, y)
    return made


def small(shape, classes):
    torch.manual_seed(0)
    return resnet_1d(shape, classes, width=8).double()


def train(method, gains, rounds=2):
    work, optimizer = Work(batch_size=6, epochs=1), SGD(lr=0.05)
    settings = Settings(rounds=rounds, work=work, optimizer=optimizer, engine="sequential", precision="float64")
    (made,) = METHODS.parse_all(method)
    trial = Trial(made, small, federation(signals(gains)), settings, 0)
    for _ in range(rounds):
        trial.advance()
    return trial.to_tensors()[0]


def test_arrays_of_signals_are_kept_and_get_the_network_of_signals():
    data = federation(signals(kind=np.float32))
    assert (data.sample_shape, data.clients[0].train.dtype) == ((2, LENGTH), torch.float32)
    assert name_model("auto", data.sample_shape) == "resnet-1d"
    assert any("are signals with 2 channels" in notice for notice in data.notices)
    pixels = np.zeros((4, 8, 16))
    for x in (pixels.astype(np.uint8), turned := pixels.swapaxes(1, 2), pixels[..., :8], pixels[:, None]):
        read = federation({"a": (x, np.arange(4) % 2, x, np.arange(4) % 2)})
        assert len(read.sample_shape) == 3
        assert any("give signals of 8 channels as [N, 8, 16]" in said for said in read.notices) == (x is turned)
    with pytest.raises(
        UsageError, match=r"masks of shape .*gray images are \[N, 1, H, W\], floats \[N, 8, 16\] signals"
    ):
        federation({"a": (pixels, pixels.astype(int)) * 2})


def test_layers_are_those_of_the_papers_figure():
    layers = [each for each in resnet_1d((3, 50), 5).modules() if isinstance(each, nn.Conv1d)]
    main = [(layer.out_channels, *layer.kernel_size) for layer in layers if layer.kernel_size != (1,)]
    assert main == [(channels, kernel) for channels in (64, 128, 128) for kernel in (8, 5, 3)]
    assert [(layer.in_channels, layer.out_channels) for layer in layers if layer.kernel_size == (1,)] == [
        (3, 64),
        (64, 128),
    ]
    for shape in ((12,), (1, 2, 12), (0, 12)):
        with pytest.raises(UsageError, match=r"resnet-1d takes signals .*choose another model"):
            resnet_1d(shape)


def correlate(layer, x):
    return torch.einsum("nclk,ock->nol", x.unfold(2, layer.weight.shape[2], 1), layer.weight) + layer.bias[:, None]


def normalize(layer, x):
    mean, var = x.mean((0, 2), keepdim=True), x.var((0, 2), keepdim=True, correction=0)
    return (x - mean) / (var + 1e-5).sqrt() * layer.weight[:, None] + layer.bias[:, None]


def run_by_hand(network, x):
    """The network's equations, by functions of a layer and its input."""
    for block in (network.block1, network.block2, network.block3):
        y = normalize(block.bn1, correlate(block.conv1, F.pad(x, (3, 4)))).clamp(min=0)
        y = normalize(block.bn2, correlate(block.conv2, F.pad(y, (2, 2)))).clamp(min=0)
        y = normalize(block.bn3, correlate(block.conv3, F.pad(y, (1, 1))))
        short = correlate(block.shortcut[0], x) if len(block.shortcut) == 2 else x
        x = (y + normalize(block.shortcut[-1], short)).clamp(min=0)
    return x.mean(2) @ network.fc.weight.T + network.fc.bias


def test_scores_are_those_of_the_papers_equations():
    network, x = small((2, LENGTH), 3).train(), torch.randn(4, 2, LENGTH, dtype=torch.float64)
    assert (network(x) - run_by_hand(network, x)).abs().max() <= 1e-10


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("gn", nn.GroupNorm),
        ("ln", nn.GroupNorm),
        ("nonorm", nn.Identity),
        ("fedwon", ScaledStdConv1d),
        ("hbn", HybridBatchNorm),
    ],
)
def test_surgery_reaches_every_layer(method, kind):
    (made,) = METHODS.parse_all(method)
    layers = list(apply_surgery(made, small((2, LENGTH), 3)).modules())
    assert sum(isinstance(each, kind) for each in layers) >= 11
    assert not any(isinstance(each, nn.BatchNorm1d) for each in layers)
    groups = {each.num_groups for each in layers if isinstance(each, nn.GroupNorm)}
    assert groups == {"gn": {8}, "ln": {1}}.get(method, set())  # as of images, 32 where there are as many channels


def test_local_batch_norm_absorbs_the_gains_of_devices():
    """A gain scales a site's inputs, which BatchNorm undoes; averaged statistics do not."""
    found = {method: [train(method, gains) for gains in ((1, 1), (1, 30))] for method in ("fedbn", "fedavg")}
    far = {}
    for method, (equal, unequal) in found.items():
        shared = [name for name in equal if name.startswith("server") and equal[name].is_floating_point()]
        assert shared
        far[method] = max(float((equal[name] - unequal[name]).abs().max()) for name in shared)
    assert far["fedbn"] <= 1e-5
    assert far["fedavg"] > 1
