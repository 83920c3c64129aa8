"""Keyed dropout: the law of dropout, masks that depend on the key alone, and vmap."""

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedshift.nn.dropout import KeyedDropout, draw_bits, draw_uniform, dropout_key, key_dropouts
from fedshift.utils.errors import UsageError


def test_bits_are_uniform_and_uncorrelated_between_keys_calls_and_neighbors():
    bits = draw_bits(torch.tensor(12345), 0, 200_000)
    assert bits.min() >= 0
    assert bits.max() < 2**32
    counts = torch.bincount(bits >> 26, minlength=64)
    assert chisquare(counts.numpy()).pvalue > 1e-4
    others = [draw_bits(torch.tensor(12346), 0, 200_000), draw_bits(torch.tensor(12345), 1, 200_000), bits.roll(1)]
    others.append(draw_bits(torch.tensor(12345 + 2**40), 0, 200_000))
    for other in others:
        correlation = torch.corrcoef(torch.stack([bits.double(), other.double()]))[0, 1]
        assert abs(correlation) < 0.012


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_uniform_numbers_are_neither_0_nor_1_so_that_their_logarithms_are_finite(bits, dtype, monkeypatch):
    monkeypatch.setitem(draw_uniform.__globals__, "draw_bits", lambda key, call, count: torch.full((count,), bits))
    drawn = draw_uniform(torch.tensor(5), 0, 3, dtype)
    assert drawn.dtype == dtype
    assert (-torch.log(-torch.log(drawn))).isfinite().all()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keeps_the_right_share_and_the_mean(p):
    layer = KeyedDropout(p)
    with dropout_key(torch.tensor(3)):
        out = layer(torch.ones(400, 500))
    assert float((out == 0).double().mean()) == pytest.approx(p, abs=0.005)
    assert torch.unique(out).tolist() == pytest.approx([0.0, 1 / (1 - p)])
    assert float(out.mean()) == pytest.approx(1.0, abs=0.02)


def test_whole_channels_are_dropped_where_torch_drops_channels():
    model = key_dropouts(nn.Dropout2d(0.5))
    with dropout_key(torch.tensor(1)):
        out = model(torch.ones(8, 16, 3, 3))
    per_channel = out.flatten(2)
    assert torch.equal(per_channel.amin(2), per_channel.amax(2))
    assert 0 < float((per_channel[..., 0] == 0).double().mean()) < 1


def test_masks_are_a_function_of_key_and_call():
    model = key_dropouts(nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5)))
    x = torch.ones(50, 50)

    def run(key):
        with dropout_key(torch.tensor(key)):
            return model(x)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    with dropout_key(torch.tensor(1)):
        assert not torch.equal(model[0](x), model[2](x))


def test_vmap_draws_each_lanes_own_mask():
    layer = KeyedDropout(0.5)

    def run(x, key):
        with dropout_key(key):
            return layer(x)

    x, keys = torch.ones(3, 4, 5), torch.tensor([5, 6, 2**50])
    lanes = torch.vmap(run)(x, keys)
    for lane in range(3):
        assert torch.equal(lanes[lane], run(x[lane], keys[lane]))


def test_edges_of_probability_and_evaluation():
    x = torch.ones(20)
    with dropout_key(torch.tensor(0)):
        assert torch.equal(KeyedDropout(0.0)(x), x)
        assert torch.equal(KeyedDropout(1.0)(x), torch.zeros(20))
    assert torch.equal(KeyedDropout(0.5).eval()(x), x)
    with pytest.raises(RuntimeError, match="outside dropout_key"):
        KeyedDropout(0.5)(x)


def test_every_plain_dropout_is_replaced_wherever_it_stands():
    class Always(nn.Dropout):
        def forward(self, x):
            return F.dropout(x, self.p, training=True)

    shared, hooked = nn.Dropout(0.3), nn.Dropout(0.5)
    hooked.register_forward_hook(lambda layer, x, out: out + 1)
    others = nn.AlphaDropout(0.1), Always(0.5), hooked
    keyed = key_dropouts(nn.Sequential(shared, nn.Sequential(nn.Dropout1d(0.2), shared), *others))
    plain = [keyed[0], *keyed[1]]
    assert all(type(layer) is KeyedDropout for layer in plain)
    assert [(layer.p, layer.channels) for layer in plain] == [(0.3, False), (0.2, True), (0.3, False)]
    assert tuple(keyed[2:]) == others


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_masks_again(reentrant):
    """The gradient of x -> x * mask is the mask, which the outputs show."""
    layers = nn.Sequential(KeyedDropout(0.5), KeyedDropout(0.3)).double()
    x = torch.full((40,), 2.0, dtype=torch.float64, requires_grad=True)
    with dropout_key(torch.tensor(4)):
        out = checkpoint(layers, x.clone(), use_reentrant=reentrant)
    out.square().sum().backward()
    assert torch.equal(x.grad, out.detach() ** 2)
    with dropout_key(torch.tensor(4)):
        out = checkpoint(lambda x: layers[0](layers[0](x)), x, use_reentrant=reentrant)
    with pytest.raises(UsageError, match="drew 2 masks in a step that checkpointing runs again"):
        out.sum().backward()
