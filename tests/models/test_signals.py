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


def train(method, engine="sequential", gains=(1, 1), rounds=2):
    settings = Settings(
        rounds=rounds, work=Work(batch_size=6, epochs=1), optimizer=SGD(lr=0.05), engine=engine, precision="float64"
    )
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


def run_by_hand(network, x, convolve, normalize):
    """The network's equations, by functions of a layer and its input."""
    for block in (network.block1, network.block2, network.block3):
        y = F.pad(x, (3, 4))
        for convolution, norm, zeros in (
            (block.conv1, block.bn1, 0),
            (block.conv2, block.bn2, 2),
            (block.conv3, block.bn3, 1),
        ):
            y = normalize(norm, convolve(convolution, F.pad(y, (zeros, zeros))))
            y = y if zeros == 1 else y.clamp(min=0)
        short = convolve(block.shortcut[0], x) if len(block.shortcut) == 2 else x
        x = (y + normalize(block.shortcut[-1], short)).clamp(min=0)
    return x.mean(2) @ network.fc.weight.T + network.fc.bias


def correlate(layer, x, *, standardized=False):
    kernel = layer.weight
    if standardized:
        flat = kernel.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, keepdim=True) * flat.shape[1]).sqrt()
        kernel = flat.view_as(kernel)
    return torch.einsum("nclk,ock->nol", x.unfold(2, kernel.shape[2], 1), kernel) + layer.bias[:, None]


def by_batch(layer, x):
    mean, var = x.mean((0, 2), keepdim=True), x.var((0, 2), keepdim=True, correction=0)
    return (x - mean) / (var + 1e-5).sqrt() * layer.weight[:, None] + layer.bias[:, None]


def by_group(layer, x):
    parts = x.unflatten(1, (layer.num_groups, -1))
    mean, var = parts.mean((2, 3), keepdim=True), parts.var((2, 3), keepdim=True, correction=0)
    return ((parts - mean) / (var + 1e-5).sqrt()).flatten(1, 2) * layer.weight[:, None] + layer.bias[:, None]


@pytest.mark.parametrize(
    ("method", "kind", "convolve", "normalize"),
    [
        ("fedbn", nn.BatchNorm1d, correlate, by_batch),
        ("gn", nn.GroupNorm, correlate, by_group),
        ("ln", nn.GroupNorm, correlate, by_group),
        ("nonorm", nn.Identity, correlate, lambda _, x: x),
        ("fedwon(init='keep')", ScaledStdConv1d, lambda *a: correlate(*a, standardized=True), lambda _, x: x),
        ("hbn", HybridBatchNorm, correlate, None),
    ],
)
def test_surgery_covers_every_layer_and_equals_the_loop_by_hand(method, kind, convolve, normalize):
    (made,) = METHODS.parse_all(method)
    network = apply_surgery(made, small((2, LENGTH), 3)).train()
    assert sum(isinstance(each, kind) for each in network.modules()) >= 11
    assert any(isinstance(each, nn.BatchNorm1d) for each in network.modules()) == (method == "fedbn")
    groups = {each.num_groups for each in network.modules() if isinstance(each, nn.GroupNorm)}
    assert groups == {"gn": {8}, "ln": {1}}.get(method, set())
    x = torch.randn(4, 2, LENGTH, dtype=torch.float64)
    if normalize is not None:
        assert (network(x) - run_by_hand(network, x, convolve, normalize)).abs().max() <= 1e-10
        return
    for layer in network.modules():
        if isinstance(layer, HybridBatchNorm):
            nn.init.constant_(layer.factor, 50)  # the batch's statistics alone: BatchNorm
    assert (network(x) - run_by_hand(network, x, convolve, by_batch)).abs().max() <= 1e-10


def test_group_norm_has_the_groups_that_images_have():
    (made,) = METHODS.parse_all("gn")
    norms = [each for each in apply_surgery(made, resnet_1d()).modules() if isinstance(each, nn.GroupNorm)]
    assert {(each.num_groups, each.num_channels) for each in norms} == {(32, 64), (32, 128)}


AGREEING = ["fedbn", "hbn", "gn", "silobn", "fixbn", "fedwon"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["stacked", "pool"])
@pytest.mark.parametrize("method", AGREEING)
def test_engines_agree(method, engine):
    expected, found = train(method), train(method, engine)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (tensor.double() - found[name].double()).abs().max() <= 1e-9, name


def test_local_batch_norm_absorbs_the_gains_of_devices():
    """A gain scales a site's inputs, which BatchNorm undoes; averaged statistics do not."""
    found = {method: [train(method, gains=gains) for gains in ((1, 1), (1, 30))] for method in ("fedbn", "fedavg")}
    far = {}
    for method, (equal, unequal) in found.items():
        shared = [name for name in equal if name.startswith("server") and equal[name].is_floating_point()]
        assert shared
        far[method] = max(float((equal[name] - unequal[name]).abs().max()) for name in shared)
    assert far["fedbn"] <= 1e-5
    assert far["fedavg"] > 1
