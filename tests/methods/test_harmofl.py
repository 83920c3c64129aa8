"""HarmoFL equals a plain loop over images, spectra and perturbed weights; amplitudes change and phases stay."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift.methods.fedprox import fedprox
from fedshift.methods.harmofl import harmofl
from fedshift.nn.amplitude_norm import AmplitudeNorm
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from tests.methods.plain import LR, SEED, SHARES, SIZES, batches, data, largest_difference, mean, network, trial

ALPHA, SAMPLES = 0.5, 5


def normalize(x, amplitude, low):
    """Each image by itself, in numpy: its spectrum's low frequencies get ``amplitude``, the zero one with its sign."""
    if not amplitude.any():
        return x
    made = []
    for image in x.numpy():
        wave = np.fft.fft2(image)
        for channel in range(image.shape[0]):
            for row in range(-low, low + 1):
                for column in range(-low, low + 1):
                    angle = np.angle(wave[channel, row, column])
                    angle = angle if (row, column) != (0, 0) else 0.0
                    wave[channel, row, column] = amplitude[channel, row + low, column + low] * np.exp(1j * angle)
        made.append(np.fft.ifft2(wave).real)
    return torch.from_numpy(np.stack(made))


def measure(client, number, low):
    order = stream(SEED, "order", client, number).permutation(SIZES[client])[:SAMPLES]
    waves = [np.fft.fft2(image) for image in data().client(client).train.x[order].numpy()]
    spectra = [np.abs(wave) for wave in waves]
    for wave, spectrum in zip(waves, spectra, strict=True):
        spectrum[:, 0, 0] = wave[:, 0, 0].real
    places = range(-low, low + 1)
    return np.mean([[[[s[c, u, v] for v in places] for u in places] for c in range(1)] for s in spectra], axis=0)


def descend(model, client, number, amplitude, low, mu):
    """A client's epoch: the gradient at w + alpha g / |g|, BatchNorm's statistics as they were at w."""
    start = copy.deepcopy(model)
    for x, y in batches(client, number):
        x = normalize(x, amplitude, low)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()])
        kept = copy.deepcopy(model.state_dict())
        length = torch.sqrt(sum((grad**2).sum() for grad in grads))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter += ALPHA * grad / length
        there = torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()])
        model.load_state_dict(kept)
        with torch.no_grad():
            for parameter, old, grad, anchor in zip(model.parameters(), before, there, start.parameters(), strict=True):
                parameter -= LR * (grad + mu * (old - anchor))
    return model


@pytest.mark.parametrize(("low", "mu"), [(0, 0.0), (1, 0.0), (0, 0.7)])
def test_rounds_equal_a_plain_loop(low, mu):
    method = harmofl(alpha=ALPHA, frequencies=low, samples=SAMPLES)
    running = trial(fedprox(method, mu=mu) if mu else method)
    server, amplitude = network(), np.zeros((1, 2 * low + 1, 2 * low + 1))
    names = {name.replace("0.1.", "0."): name for name in running.plan.initial if "amplitude" not in name}
    server.load_state_dict({name: running.plan.initial[own] for name, own in names.items()})
    for number in range(3):
        running.advance()
        after = [descend(copy.deepcopy(server), client, number, amplitude, low, mu).state_dict() for client in SIZES]
        if not number:
            amplitude = sum(measure(client, 0, low) for client in SIZES) / 2
        server.load_state_dict(mean(after, SHARES.values()))
        assert np.abs(running.server.shared["0.0.amplitude"].numpy() - amplitude).max() < 1e-12
        found = {name: running.server.shared[own] for name, own in names.items()}
        assert largest_difference(found, server.state_dict()) < 1e-9


@pytest.mark.parametrize(("low", "size"), [(0, (5, 4)), (1, (3, 6)), (2, (5, 5)), (3, (8, 9))])
def test_low_frequencies_take_the_amplitudes_and_all_phases_stay(low, size):
    torch.manual_seed(0)
    layer = AmplitudeNorm(2, low).double()
    x, others = torch.randn(3, 2, *size, dtype=torch.float64), torch.randn(40, 2, *size, dtype=torch.float64)
    assert torch.equal(layer(x), x)  # nothing is measured yet
    layer.amplitude.copy_(layer.measure(others).mean(dim=0))
    before, after = torch.fft.fft2(x), torch.fft.fft2(layer(x))
    assert torch.allclose(layer.measure(layer(x)), layer.amplitude.expand(3, -1, -1, -1), atol=1e-12)
    assert torch.allclose(after[..., 0, 0].real, layer.amplitude[:, low, low].expand(3, -1), atol=1e-12)
    before[..., 0, 0] = after[..., 0, 0]  # of which the sign is part of what is given
    assert torch.allclose(after / after.abs(), before / before.abs(), atol=1e-9)
    before = torch.fft.fft2(x)
    changed = (after - before).abs().amax(dim=(0, 1)) > 1e-9
    assert changed.sum() == (2 * low + 1) ** 2


@pytest.mark.parametrize("scale", [lambda x: x, lambda x: 2 * x - 1, lambda x: (x - 0.45) / 0.2])
@pytest.mark.parametrize("low", [0, 1])
def test_sites_get_one_brightness_at_any_scale_of_inputs(scale, low):
    """Looks are mixed as they are for pixels in [0, 1], where the authors' code has its inputs."""
    torch.manual_seed(0)
    sites = torch.rand(5, 8, 3, 6, 6, dtype=torch.float64) * torch.linspace(0.2, 1, 5)[:, None, None, None, None]
    layers = [AmplitudeNorm(3, low).double() for _ in range(2)]
    for layer, x in zip(layers, (sites, scale(sites)), strict=True):
        layer.amplitude.copy_(torch.stack([layer.measure(site).mean(dim=0) for site in x]).mean(dim=0))
    bare, scaled = (torch.stack([*map(layer, x)]) for layer, x in zip(layers, (sites, scale(sites)), strict=True))
    assert sites.mean(dim=(1, 2, 3, 4)).std() > 0.1
    assert scaled.mean(dim=(1, 2, 3, 4)).std() < 1e-12
    assert torch.allclose(scale(bare), scaled, atol=1e-9)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="images of 4 x 4 pixels allow at most 1 in each direction"):
        trial(harmofl(frequencies=2))
    with pytest.raises(UsageError, match="first convolution"):
        trial(harmofl(), lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double())
