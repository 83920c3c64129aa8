"""Normalization entries recognized by names, against selection by type, Keras and Flax names, and refusals."""

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.aggregation import FedBNAggregation
from fedshift.core.selection import batch_norm, entries, norm_statistics
from fedshift.utils.errors import UsageError


def bare(names, *vectors):
    """A model with the given names: matrices, but for vectors and statistics."""
    return {
        name: np.zeros((2,) if name in vectors or "mean" in name or "var" in name else (2, 2), np.float32)
        for name in (*names, *vectors)
    }


@pytest.mark.parametrize(
    "name",
    [
        "bn1.weight", "layer1.0.bn2.bias", "conv_bn.gamma", "BatchNorm_0/scale", "batch_normalization_3/beta:0",
        "bn1_gamma", "bn-1/scale", "SyncBatchNorm2d.weight", "convBN.weight", "BNLayer.bias", "a.batchnorm1.weight",
        "bn.0.weight", "x.running_mean", "x.running_var", "x.num_batches_tracked", "x/moving_mean",
        "x/moving_variance", "x_movingMean", "batch_stats/x/mean",
    ],
)  # fmt: skip
def test_these_names_are_batch_normalization(name):
    shapes = bare(["conv.weight", "conv1_weight", "params/Conv_0/kernel"], name, "sure.running_mean", "sure.weight")
    assert name in FedBNAggregation().local_names(shapes)


@pytest.mark.parametrize(
    "name",
    [
        "subnet.weight", "bnb.x", "SubNet.weight", "abn.weight", "LayerNorm_0/scale", "ln.weight", "norm.gamma", "beta",
        "scale.gamma", "batch.weight", "norm_batch.weight", "running.weight", "x.running_variable", "größebn.weight",
    ],
)  # fmt: skip
def test_these_names_are_not(name):
    shapes = bare(["conv.weight"], name, "bn1.running_mean", "bn1.weight")
    assert FedBNAggregation().local_names(shapes) == {"bn1.running_mean", "bn1.weight"}


def test_gamma_and_beta_count_beside_a_statistic_of_their_layer_only():
    shapes = bare(
        ["n/kernel"], "n/moving_mean", "n/gamma", "n/beta", "m/gamma", "m/beta", "n2/beta", "n_gamma", "o_moving_var",
        "o_beta",
    )  # fmt: skip
    assert FedBNAggregation().local_names(shapes) == {
        "n/moving_mean", "n/gamma", "n/beta", "o_moving_var", "o_beta",
    }  # fmt: skip


def test_names_without_layers():
    assert FedBNAggregation().local_names(bare(["conv1"], "bn1", "b")) == {"bn1"}
    shapes = bare(["conv_0_kernel"], "batch_stats_norm_0_mean", "bn_0_scale", "b")
    assert FedBNAggregation().local_names(shapes) == {"batch_stats_norm_0_mean", "bn_0_scale"}


def test_names_of_keras_and_flax():
    keras = bare(
        ["stem_bn_conv/kernel:0", "dense/kernel:0"],
        "stem_bn_conv/bias:0", "batch_normalization/gamma:0", "batch_normalization/moving_mean:0",
        "batch_normalization_1/beta:0", "batch_normalization_1/moving_variance:0", "layer_normalization/gamma:0",
        "dense/bias:0",
    )  # fmt: skip
    assert FedBNAggregation().local_names(keras) == {name for name in keras if name.startswith("batch_")}
    flax = bare(
        ["params/Block_0/Conv_0/kernel"],
        "params/ConvBN_0/PReLU_0/slope", "params/ConvBN_0/BatchNorm_0/bias", "batch_stats/ConvBN_0/BatchNorm_0/mean",
        "params/Block_0/BatchNorm_0/scale", "params/Block_0/BatchNorm_0/bias", "params/Block_0/norm_proj/scale",
        "params/LayerNorm_0/scale", "batch_stats/Block_0/BatchNorm_0/mean", "batch_stats/Block_0/norm_proj/var",
    )  # fmt: skip
    kept = {name for name in flax if not any(word in name for word in ("Conv_", "PReLU", "Layer"))}
    assert FedBNAggregation().local_names(flax) == kept
    assert FedBNAggregation(include_layer_norm=True).local_names(flax) == {*kept, "params/LayerNorm_0/scale"}
    assert FedBNAggregation(statistics_only=True).local_names(flax) == {n for n in flax if n.startswith("batch_stats")}


def test_layer_normalization_is_local_only_when_asked():
    ours = {"ln_1.weight", "a.layernorm.bias", "layer_norm.gamma", "LayerNorm_0/scale"}
    shapes = bare(["ln_head.weight", "conv.weight"], *ours, "ln_head.bias", "bn.weight", "bn.running_var")
    assert FedBNAggregation().local_names(shapes) == {"bn.weight", "bn.running_var"}
    strategy = FedBNAggregation(include_layer_norm=True)
    assert strategy.local_names(shapes) == {"bn.weight", "bn.running_var", *ours}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.subnet = nn.Conv2d(4, 8, 3)
        self.bn1 = nn.BatchNorm2d(8)
        self.downsample = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8))
        self.conv_bn = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.PReLU(8), nn.LayerNorm(8))
        self.norm = nn.GroupNorm(2, 8)
        self.untracked_bn = nn.BatchNorm2d(8, track_running_stats=False)
        self.plain = nn.BatchNorm2d(8, affine=False)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.head = nn.Linear(8, 8)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential, lambda m: nn.ModuleDict({"resnet_bn": m})])
def test_names_choose_what_types_choose(wrap):
    module = wrap(Block())
    state = module.state_dict()
    chosen = FedBNAggregation().local_names(state)
    assert chosen == batch_norm.names(entries(module))
    assert FedBNAggregation(statistics_only=True).local_names(state) == norm_statistics.names(entries(module))
    assert len(chosen) == 3 * 5 + 2 + 3


def test_a_batch_normalization_alone_and_fused_layers():
    assert len(FedBNAggregation().local_names(nn.BatchNorm1d(3).state_dict())) == 5
    fused = bare(["conv_bn/kernel"], "conv_bn/gamma", "conv_bn/moving_mean")
    assert FedBNAggregation().local_names(fused) == {"conv_bn/gamma", "conv_bn/moving_mean"}
    wide = {"conv/kernel": (3, 3), "bn/gamma": (1, 4), "bn/moving_mean": (1, 4), "bn/moving_variance": (1, 4)}
    assert FedBNAggregation().local_names({name: np.zeros(shape) for name, shape in wide.items()}) == wide.keys() - {
        "conv/kernel"
    }


@pytest.mark.parametrize("statistics_only", [False, True])
def test_a_model_without_batch_normalization_is_refused(statistics_only):
    strategy = FedBNAggregation(statistics_only=statistics_only)
    shapes = bare(["conv.weight"], "conv.bias", "norm.weight", "norm.bias", "beta")
    with pytest.raises(UsageError, match=f"{strategy.name} would keep nothing local: no entry .conv.weight, conv.bias"):
        strategy.local_names(shapes)


def test_parameters_without_statistics_are_refused_where_names_do_not_tell():
    module = Block()
    parameters = dict(module.named_parameters())
    with pytest.raises(UsageError, match=r"unclear whether downsample.1.weight, downsample.1.bias.*state_dict\(\)"):
        FedBNAggregation().local_names(parameters)
    told = bare(["conv.weight"], "conv.bias", "bn.weight", "bn.bias", "ln.weight", "ln.bias", "act.weight", "b", "c")
    told |= {"heat.a": np.array(1.0), "heat.b": np.array(1.0)}
    assert FedBNAggregation().local_names(told) == {"bn.weight", "bn.bias"}
    told = bare(["conv.weight"], "bn.weight", "bn.bias", "norm1.weight", "norm1.bias")
    assert FedBNAggregation(patterns=["norm1"]).local_names(told) == told.keys() - {"conv.weight"}
    assert FedBNAggregation({"bn.weight"}).local_names(told) == {"bn.weight"}
