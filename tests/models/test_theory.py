"""FedBN's theory as networks: the closed form in float64 against NumPy, and the entries that FedBN keeps local."""

import numpy as np
import pytest
import torch

from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.selection import batch_norm, entries
from fedshift.methods.fedbn import fedbn
from fedshift.models.mlp import ScaleNorm, cosine, two_layer


def inputs(samples=17, size=4, seed=0):
    """Samples [N, size] that are neither centered nor white."""
    random = np.random.default_rng(seed)
    return random.normal(0.3, 1.0, (samples, size)) @ random.normal(size=(size, size))


def closed_form(x, v, gamma, c):
    """Equation 1 for every row of ``x``, with S the second moments of the rows."""
    s = x.T @ x / len(x)
    total = np.zeros((len(x), len(c)))
    for k in range(len(v)):
        hidden = np.maximum(gamma[k] * (x @ v[k]) / np.sqrt(v[k] @ s @ v[k]), 0.0)
        total += hidden[:, None] * c[:, k]
    return total / np.sqrt(len(v))


@pytest.mark.parametrize("classes", [1, 3])
def test_two_layer_is_equation_1_on_a_full_batch_and_after_it(classes):
    torch.manual_seed(1)
    model, x = two_layer((4,), classes, width=50).double(), inputs()
    gamma = torch.linspace(-1.0, 2.0, 50, dtype=torch.float64)
    model.norm.weight.data = gamma
    expected = closed_form(x, model.hidden.weight.detach().numpy(), gamma.numpy(), model.top.weight.numpy() * 50**0.5)
    for mode in (True, False):
        np.testing.assert_allclose(model.train(mode)(torch.from_numpy(x)).detach(), expected, rtol=0, atol=1e-10)


def test_two_layer_starts_as_the_theory_does():
    torch.manual_seed(0)
    model = two_layer((30,), 2, width=4000, alpha=3.0)
    assert float(model.hidden.weight.detach().std()) == pytest.approx(3.0, rel=0.01)
    torch.testing.assert_close(model.norm.weight, model.hidden.weight.norm(dim=1) / 3.0)
    assert set((model.top.weight * 4000**0.5).round(decimals=4).unique().tolist()) == {-1.0, 1.0}
    assert abs(model.top.weight.sign().mean()) < 0.05
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["hidden.weight", "norm.weight"]


def test_cosine_divides_by_the_clients_own_deviation():
    model, x = cosine((4,), 3).double(), inputs()
    w, gamma = model.linear.weight.detach().numpy(), np.array([1.0, 2.0, -0.5, 3.0])
    model.norm.weight.data = torch.from_numpy(gamma)
    expected = np.cos((gamma * x / x.std(axis=0)) @ w.T)
    for mode in (True, False):
        np.testing.assert_allclose(model.train(mode)(torch.from_numpy(x)).detach(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("model", [two_layer((3,), 2), cosine((3,), 2)])
def test_fedbn_keeps_the_scale_on_the_client_and_one_sample_has_none(model):
    plan = prepare(fedbn(), model, optimizer=SGD(lr=0.1), sample=torch.ones(1, 3))
    kept = {"norm.weight", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert plan.personal == batch_norm.names(entries(model)) == kept
    assert plan.smallest_batch == 2


def test_statistics_average_over_batches_when_they_are_estimated_anew():
    batches, layer = [torch.from_numpy(inputs(seed=seed)) for seed in range(3)], ScaleNorm(4).double()
    layer.reset_running_stats()
    layer.momentum = None
    for x in batches:
        layer(x)
    mean = torch.stack([x.square().mean(0) for x in batches]).mean(0)
    torch.testing.assert_close(layer.running_var, mean, rtol=1e-12, atol=0)
    assert int(layer.num_batches_tracked) == 3
    assert not layer.running_mean.any()


def test_evaluation_after_a_full_batch_scales_as_training_did_even_where_inputs_are_small():
    layer, x = ScaleNorm(4), torch.from_numpy(inputs()).float() * 1e-4
    torch.testing.assert_close(layer(x), layer.eval()(x))


def test_gradients_pass_through_the_scale():
    layer = ScaleNorm(3, about_mean=True).double()
    assert torch.autograd.gradcheck(layer, torch.from_numpy(inputs(5, 3)).requires_grad_())
