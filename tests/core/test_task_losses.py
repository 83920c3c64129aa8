"""Losses of masks, several labels and numbers: against torch, scikit-learn and their formulas, and one by one."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import nn

from fedshift.core.loss import (
    binary_cross_entropy,
    binary_focal,
    cross_entropy,
    dice,
    dice_cross_entropy,
    focal,
    huber,
    mae,
    make_loss,
    mse,
)
from fedshift.tasks.segmentation import LEFT_OUT
from tests.core.test_loss import EVERY, batch

K, WEIGHTS = 3, (0.5, 2.0, 1.0)
WEIGHTED = [{}, {"weights": WEIGHTS}]
OF_MASKS = [
    make_loss(cross_entropy, smoothing=0.1),
    *(make_loss(each, **given) for each in (cross_entropy, focal, dice, dice_cross_entropy) for given in WEIGHTED),
]
OF_LABELS = [make_loss(each, **given) for each in (binary_cross_entropy, binary_focal) for given in WEIGHTED]
OF_NUMBERS = [make_loss(mse), make_loss(mae), make_loss(huber, delta=0.7)]


def masks(seed=0, ignored=0.2):
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(K, (3, 2, 4), generator=random)
    y[torch.rand(y.shape, generator=random) < ignored] = LEFT_OUT
    return torch.randn(3, K, 2, 4, generator=random, dtype=torch.float64), y


def numbers(seed=0, binary=False):
    random = torch.Generator().manual_seed(seed)
    y = torch.randn(6, K, generator=random, dtype=torch.float64)
    return torch.randn(6, K, generator=random, dtype=torch.float64), (y > 0).double() if binary else y


def labels(seed=0):
    return numbers(seed, binary=True)


CASES = [
    *((loss, batch) for loss in EVERY), *((loss, masks) for loss in OF_MASKS),
    *((loss, labels) for loss in OF_LABELS), *((loss, numbers) for loss in OF_NUMBERS),
]  # fmt: skip


def soft_dice(scores, y, smooth=1.0, weights=None):
    """Dice of each class in NumPy, over the pixels that are not left out, one after another."""
    p, found = scores.softmax(1).movedim(1, -1).numpy(), []
    for k in range(K):
        both = sum(p[at][k] for at in np.ndindex(*y.shape) if y[at] == k)
        either = sum(p[at][k] + (int(y[at]) == k) for at in np.ndindex(*y.shape) if y[at] != LEFT_OUT)
        found.append((2 * both + smooth) / (either + smooth))
    return 1 - (np.mean(found[1:]) if weights is None else np.average(found, weights=weights))


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_cross_entropy_of_masks_is_torchs(weights):
    scores, y = masks()
    given = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    torchs = nn.functional.cross_entropy(scores, y, given)
    assert make_loss(cross_entropy, weights=weights)(scores, y).item() == pytest.approx(torchs.item(), rel=1e-12)
    summed = torchs.item() + soft_dice(scores, y, weights=weights)
    assert make_loss(dice_cross_entropy, weights=weights)(scores, y).item() == pytest.approx(summed, rel=1e-12)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("smooth", [0.1, 1.0])
def test_dice_is_its_formula(smooth, weights):
    scores, y = masks()
    loss = make_loss(dice, smooth=smooth, weights=weights)
    assert loss(scores, y).item() == pytest.approx(soft_dice(scores, y, smooth, weights), rel=1e-12)


def test_dice_of_certain_predictions_is_one_minus_the_f1_score_of_scikit_learn():
    scores, y = masks()
    known = y != LEFT_OUT
    expected = sk.f1_score(y[known], scores.argmax(1)[known], average=None)[1:].mean()
    assert make_loss(dice, smooth=1e-9)(1e4 * scores, y).item() == pytest.approx(1 - expected, abs=1e-6)


def test_focal_of_masks_is_that_of_their_pixels_that_are_not_left_out():
    scores, y = masks()
    known = y != LEFT_OUT
    for loss in (make_loss(focal), make_loss(focal, gamma=0.5), make_loss(focal, weights=WEIGHTS)):
        pixels = loss(scores.movedim(1, -1)[known], y[known])
        assert loss(scores, y).item() == pytest.approx(pixels.item(), rel=1e-12)


@pytest.mark.parametrize("loss", OF_MASKS, ids=str)
def test_pixels_that_are_left_out_do_not_matter(loss):
    scores, y = masks()
    changed = torch.where((y == LEFT_OUT)[:, None], scores.flip(1) + 7, scores)
    assert loss(changed, y).item() == pytest.approx(loss(scores, y).item(), rel=1e-12)
    gradient = torch.func.grad(loss)(scores, y)
    assert not gradient.movedim(1, -1)[y == LEFT_OUT].any()
    nothing = torch.full_like(y, LEFT_OUT)
    value, gradient = loss(scores, nothing), torch.func.grad(loss)(scores, nothing)
    assert math.isfinite(value)
    assert not gradient.any()


@pytest.mark.parametrize(("loss", "draw"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_losses_and_gradients_of_many_at_once_are_those_of_each(loss, draw):
    pairs = [draw(seed=seed) for seed in range(3)]
    outputs, targets = (torch.stack(each) for each in zip(*pairs, strict=True))
    gradients, values = torch.func.vmap(torch.func.grad_and_value(loss))(outputs, targets)
    for place, pair in enumerate(pairs):
        gradient, value = torch.func.grad_and_value(loss)(*pair)
        assert values[place].item() == pytest.approx(value.item(), rel=1e-12)
        torch.testing.assert_close(gradients[place], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("loss", "draw"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_gradients_are_slopes(loss, draw):
    outputs, y = draw()
    assert torch.autograd.gradcheck(lambda outputs: loss(outputs, y), outputs.clone().requires_grad_())


def test_losses_of_labels_are_torchs_and_their_formula():
    scores, y = numbers(binary=True)
    expected = np.mean([sk.log_loss(y[:, k], scores[:, k].sigmoid()) for k in range(K)])
    assert make_loss(binary_cross_entropy)(scores, y).item() == pytest.approx(expected, rel=1e-12)
    p, weight = scores.sigmoid(), torch.tensor(WEIGHTS, dtype=torch.float64)
    terms = -weight * y * p.log() - (1 - y) * (1 - p).log()
    found = make_loss(binary_cross_entropy, weights=WEIGHTS)(scores, y)
    assert found.item() == pytest.approx(terms.mean().item(), rel=1e-12)
    missing = torch.where(y == 1, 1 - p, p)
    found = make_loss(binary_focal, gamma=1.5, weights=WEIGHTS)(scores, y)
    assert found.item() == pytest.approx((missing**1.5 * terms).mean().item(), rel=1e-12)
    assert make_loss(binary_focal, gamma=0)(scores, y).item() == pytest.approx(expected, rel=1e-12)


def test_losses_of_numbers_are_their_formulas():
    outputs, y = numbers()
    error = (outputs - y).abs().numpy()
    assert make_loss(mse)(outputs, y).item() == pytest.approx(sk.mean_squared_error(y, outputs), rel=1e-12)
    assert make_loss(mae)(outputs, y).item() == pytest.approx(sk.mean_absolute_error(y, outputs), rel=1e-12)
    expected = np.where(error <= 0.7, error**2 / 2, 0.7 * (error - 0.35)).mean()
    assert make_loss(huber, delta=0.7)(outputs, y).item() == pytest.approx(expected, rel=1e-12)
