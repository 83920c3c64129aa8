"""FedDG-ELCFS equals a plain loop over images, spectra, inner steps and contours; masks are eroded as scipy erodes."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.federation import ClientData, Federation
from fedshift.data.samples import Samples
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.feddg_elcfs import AROUND, _contrast, feddg_elcfs
from fedshift.methods.harmofl import harmofl
from fedshift.nn.dropout import derive_key, draw_bits
from fedshift.tasks import Segmentation
from fedshift.tasks.segmentation import IGNORED, LEFT_OUT
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream
from tests.methods.plain import largest_difference, mean
from tests.methods.plain import trial as trial_of_classes

SIZES, CLASSES, PIXELS, SEED, LR, BATCH = {"a": 6, "b": 3, "c": 4}, 3, (9, 8), 5, 0.1, 3
BETA, BOUNDARY, TAU, SAMPLES = 0.7, 0.4, 0.2, 4


def network(shape=(2, *PIXELS), classes=CLASSES):
    layers = nn.Conv2d(shape[0], 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, classes, 1)
    return nn.Sequential(*layers).double()


def masks(count):
    y = torch.zeros(count, *PIXELS, dtype=torch.uint8)
    y[:, 2:6, 1:5], y[1:, 3:5, 5:8], y[0, 0, 0] = 1, 2, IGNORED  # the first has no class 2
    return y


def data():
    made = []
    for shift, (name, size) in enumerate(SIZES.items()):
        random, y = torch.Generator().manual_seed(shift), masks(size)
        x = shift - 1 + torch.randn(size, 2, *PIXELS, generator=random, dtype=torch.float64) + (y == 1)[:, None]
        made.append(ClientData(name=name, train=Samples(x=x, y=y), test=Samples(x=x[:2], y=y[:2])))
    return Federation(name="masks", clients=tuple(made), classes=CLASSES, task=Segmentation()).check()


def trial(method):
    settings = Settings(
        rounds=9, work=Work(batch_size=BATCH, epochs=1), optimizer=SGD(lr=LR), evaluate_every=99, loss="cross_entropy"
    )
    return Trial(method, network, data(), settings, SEED)


def spectrum(images, low):
    """Complex spectra at low frequencies ``[B, C, 2 low + 1, 2 low + 1]``, by numpy."""
    places = np.arange(-low, low + 1)
    return np.fft.fft2(images.numpy())[:, :, places[:, None], places]


def amplitude(wave, low):
    size = np.abs(wave)
    size[:, :, low, low] = wave[:, :, low, low].real
    return size


def mix(x, given, share, low):
    places = np.arange(-low, low + 1)
    wave, before = np.fft.fft2(x.numpy()), amplitude(spectrum(x, low), low)
    wave[:, :, places[:, None], places] *= (share * given + (1 - share) * before) / before
    return torch.from_numpy(np.fft.ifft2(wave).real)


def contour_loss(features, y):
    """The loss of one class after another and one pair of embeddings after another."""
    total = 0.0
    for number in range(1, CLASSES):
        kinds = {"contour": [], "around": []}
        for feature in features:
            for image, mask, known in zip(feature, (y == number).numpy(), (y != LEFT_OUT).numpy(), strict=True):
                regions = {
                    "contour": mask & ~ndimage.binary_erosion(mask),
                    "around": ndimage.binary_dilation(mask, iterations=AROUND) & ~mask & known,
                }
                for kind, region in regions.items():
                    if region.any():
                        kinds[kind].append(F.normalize(image[:, torch.from_numpy(region)].mean(dim=1), dim=0))
        losses = []
        for kind, other in (("contour", "around"), ("around", "contour")):
            for i, one in enumerate(kinds[kind]):
                negatives = sum(torch.exp(one @ each / TAU) for each in kinds[other])
                for j, alike in enumerate(kinds[kind]):
                    if i != j:
                        together = torch.exp(one @ alike / TAU)
                        losses.append(-torch.log(together / (together + negatives)))
        total += torch.stack(losses).mean() if losses else 0.0
    return total


def objective(model, x, mixed, y):
    """The loss on a batch, and after a step on it the loss on mixed images and on contours."""
    features = []
    handle = model[3].register_forward_pre_hook(lambda _, given: features.append(given[0]))
    first = F.cross_entropy(model(x), y, ignore_index=LEFT_OUT)
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}  # the model's see no mixed images
    grads = torch.autograd.grad(first, list(model.parameters()), retain_graph=True)
    moved = {name: p - BETA * g for (name, p), g in zip(model.named_parameters(), grads, strict=True)}
    after = torch.func.functional_call(model, {**moved, **statistics}, (mixed,))
    handle.remove()
    return first + F.cross_entropy(after, y, ignore_index=LEFT_OUT) + BOUNDARY * contour_loss(features, y)


@pytest.mark.parametrize("low", [0, 2])
def test_rounds_equal_a_plain_loop(low):
    running = trial(feddg_elcfs(beta=BETA, boundary=BOUNDARY, tau=TAU, frequencies=low, samples=SAMPLES))
    server, bank = network(), {}
    server.load_state_dict(running.plan.initial)
    for number in range(3):
        running.advance()
        after, sent = [], {}
        for client, size in SIZES.items():
            model, samples = copy.deepcopy(server), data().client(client).train
            order = torch.from_numpy(stream(SEED, "order", client, number).permutation(size))
            order = order.sort().values if size <= BATCH else order  # one batch keeps the stored order
            seen = samples.x[order[:SAMPLES]]
            sent[client] = amplitude(spectrum(seen, low), low)[np.arange(SAMPLES) % len(seen)]
            others = [(name, each) for name, each_of in bank.items() for each in each_of]
            for step, index in enumerate(order.split(BATCH), start=number * len(order.split(BATCH))):
                x, y = samples.x[index], samples.y[index].long()
                y = y.masked_fill(y == IGNORED, LEFT_OUT)
                if number:
                    key = derive_key(running.engine.step_keys(client, [step])[0], "sentamplitudes")
                    scores = draw_bits(key, 0, len(x) * len(others)).reshape(len(x), -1)
                    allowed = [place for place, (name, _) in enumerate(others) if name != client]
                    chosen = [others[allowed[int(row[allowed].argmax())]][1] for row in scores]
                    share = (draw_bits(key, 1, len(x)).double().numpy() + 0.5) / 2**32
                    loss = objective(model, x, mix(x, np.stack(chosen), share[:, None, None, None], low), y)
                else:  # nobody has sent anything yet
                    loss = F.cross_entropy(model(x), y, ignore_index=LEFT_OUT)
                grads = torch.autograd.grad(loss, list(model.parameters()))
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter.data -= LR * grad
            after.append(model.state_dict())
        bank = sent
        server.load_state_dict(mean(after, SIZES.values()))
        assert largest_difference(running.server.shared, server.state_dict()) < 1e-9
        found = running.server.memory[0]["amplitudes"].numpy()
        assert np.abs(found - np.concatenate(list(sent.values()))).max() < 1e-9


def test_the_contrastive_loss_leaves_out_masks_without_a_contour_or_a_background():
    torch.manual_seed(0)
    features = [torch.randn(3, 4, *PIXELS, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    y = torch.zeros(3, *PIXELS, dtype=torch.long)
    y[0, 2:6, 1:5], y[1] = 1, 2  # one mask, one without a background around it, and none
    loss = _contrast(features, y, CLASSES, TAU)
    assert abs(float(loss.detach()) - float(contour_loss(features, y).detach())) < 1e-12
    for grad in torch.autograd.grad(loss, features):
        assert grad.isfinite().all()
        assert not grad[2].any()
    assert float(_contrast(features, torch.zeros_like(y), CLASSES, TAU).detach()) == 0.0


def test_classes_have_no_contours():
    first, second = (trial_of_classes(feddg_elcfs(boundary=boundary)) for boundary in (0.0, 0.5))
    for _ in range(2):
        first.advance(), second.advance()
    assert largest_difference(first.server.shared, second.server.shared) == 0


def test_what_does_not_fit_is_refused():
    for pair in (feddg_elcfs(harmofl()), harmofl(feddg_elcfs())):
        with pytest.raises(UsageError, match="but harmofl gives all images the same: use one of the two"):
            trial_of_classes(pair)
    with pytest.raises(UsageError, match="images of 4 x 4 pixels allow at most 1 in each direction"):
        trial_of_classes(feddg_elcfs(frequencies=2)).advance()
    with pytest.raises(UsageError, match="first convolution"):
        Trial(feddg_elcfs(), lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(144, 3)).double(), data(),
              Settings(rounds=1, work=Work(epochs=1), optimizer=SGD(lr=LR)), SEED)  # fmt: skip
