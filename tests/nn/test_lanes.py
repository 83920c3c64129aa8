"""Layers of clients side by side: the values, gradients and statistics of torch's own layers under ``torch.vmap``."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedshift.nn.lanes import MergedLanes, _Merged
from tests.nn.operations import assert_equal

LANES, BATCH, CHANNELS = 3, 5, 4
LAYERS = [
    (nn.BatchNorm1d(CHANNELS), ()), (nn.BatchNorm1d(CHANNELS, momentum=0.3, eps=0.1), (7,)),
    (nn.BatchNorm2d(CHANNELS), (3, 6)), (nn.BatchNorm2d(CHANNELS, affine=False), (3, 6)),
    (nn.BatchNorm2d(CHANNELS, track_running_stats=False), (3, 6)), (nn.BatchNorm3d(CHANNELS), (2, 3, 4)),
    (nn.GroupNorm(2, CHANNELS), (3, 6)), (nn.GroupNorm(1, CHANNELS, eps=0.1), ()),
    (nn.MaxPool2d(2), (6, 8)), (nn.MaxPool2d(3, 2, 1, ceil_mode=True), (6, 7)),
    (nn.MaxPool2d((2, 3), 1, dilation=2), (8, 8)), (nn.AdaptiveAvgPool2d(1), (3, 5)),
    (nn.AdaptiveAvgPool2d((2, 3)), (5, 7)),
    (nn.Conv2d(CHANNELS, 6, 3), (5, 6)), (nn.Conv2d(CHANNELS, 6, (3, 1), 2, (1, 0), bias=False), (5, 6)),
    (nn.Conv2d(CHANNELS, 6, 3, padding="same", dilation=2, groups=2), (5, 6)),
    (nn.Conv2d(CHANNELS, 8, 1, groups=CHANNELS), (5, 6)),
]  # fmt: skip
CONVOLUTION = nn.Conv2d(CHANNELS, 6, 3), (5, 6)
POOLING = nn.MaxPool2d(2), (6, 8)
FROZEN = nn.BatchNorm2d(CHANNELS).eval(), (3, 3)


@pytest.fixture(autouse=True)
def merged(monkeypatch):
    """Shapes of the inputs of lanes that were merged."""
    shapes, vmap = [], _Merged.vmap

    def count(info, in_dims, function, x, *given):
        def run(x, *given):
            shapes.append(tuple(x.shape))
            return function(x, *given)

        return vmap(info, in_dims, run, x, *given)

    monkeypatch.setattr(_Merged, "vmap", staticmethod(count))
    return shapes


def inputs(*size):
    return torch.randn(LANES, BATCH, CHANNELS, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def stack(layer, shared=()):
    torch.manual_seed(2)
    state = {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}
    return {
        name: tensor if name in shared else torch.stack([tensor + lane for lane in range(LANES)])
        for name, tensor in state.items()
    }


def run(layer, state, x, shared=(), block=MergedLanes):
    """Outputs, buffers, gradients of inputs and parameters, and second derivatives."""
    leaves = {
        name: tensor.clone().requires_grad_() if name in dict(layer.named_parameters()) else tensor.clone()
        for name, tensor in state.items()
    }
    x = x.clone().requires_grad_()

    def lane(state, x):
        state = {name: tensor.clone() if not tensor.requires_grad else tensor for name, tensor in state.items()}
        return functional_call(layer, state, (x,)), state

    with block():
        made, after = torch.vmap(lane, ({name: None if name in shared else 0 for name in leaves}, 0))(leaves, x)
    wanted = [x, *(tensor for tensor in leaves.values() if tensor.requires_grad)]
    grads = torch.autograd.grad((made * made.detach().cos()).sum(), wanted, create_graph=True)
    bent = sum(grad.square().sum() for grad in grads)
    twice = torch.autograd.grad(bent, wanted, materialize_grads=True) if bent.requires_grad else []
    buffers = [after[name] for name, _ in layer.named_buffers()]
    return [made, *buffers, *grads, *twice]


@pytest.mark.filterwarnings("ignore:.*batching rule")  # of torch's own
@pytest.mark.parametrize(
    ("layer", "size", "shared"),
    [(*pair, ()) for pair in [*LAYERS, FROZEN]] + [(*pair, ("weight", "bias")) for pair in (LAYERS[2], CONVOLUTION)],
    ids=str,
)
def test_a_layer_of_lanes_is_torchs_under_vmap(layer, size, shared, merged):
    layer, x = copy.deepcopy(layer).double(), inputs(*size)
    state = stack(layer, shared)
    found = run(layer, state, x, shared)
    assert merged == [(BATCH, LANES * CHANNELS, *size)]
    assert_equal(found, run(layer, state, x, shared, block=nullcontext))


@pytest.mark.parametrize(("layer", "size"), [LAYERS[2], LAYERS[6], CONVOLUTION, POOLING], ids=str)
def test_lanes_are_merged_channels_last(layer, size):
    x = inputs(*size)
    made = run(copy.deepcopy(layer).double(), stack(layer.double()), x)[0]
    assert made.movedim(0, 1).flatten(1, 2).is_contiguous(memory_format=torch.channels_last)


def test_functions_are_merged_as_layers_are_and_others_are_torchs(merged):
    def network(x):
        pooled, index = F.max_pool2d(F.relu(x), 2, return_indices=True)
        return F.adaptive_avg_pool2d(F.max_pool2d(input=pooled, kernel_size=1), (1, 1)).flatten(1), index

    x = inputs(6, 8)
    with MergedLanes():
        found = torch.vmap(network)(x)
    assert merged == 2 * [(BATCH, LANES * CHANNELS, 3, 4)]
    assert_equal(found, torch.vmap(network)(x))


@pytest.mark.parametrize(("layer", "size"), [LAYERS[2], LAYERS[6], CONVOLUTION, POOLING], ids=str)
def test_gradients_by_torch_func_are_not_merged(layer, size, merged):
    layer, x = copy.deepcopy(layer).double().eval(), inputs(*size)[0]
    differentiate = torch.vmap(torch.func.grad(lambda x: layer(x[None]).square().sum()))
    with MergedLanes():
        found = differentiate(x)
    assert torch.equal(found, differentiate(x))
    assert not merged


def test_inputs_that_do_not_fit_are_refused_in_torchs_words():
    with pytest.raises(ValueError, match="expected 4D input"), MergedLanes():
        torch.vmap(nn.BatchNorm2d(CHANNELS))(torch.ones(LANES, BATCH, CHANNELS))
