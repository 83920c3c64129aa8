"""Losses: against their formulas in NumPy, scikit-learn's weights, and torch's own derivatives."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from fedshift.core.loss import LOSSES, cross_entropy, focal, make_loss
from fedshift.experiments.settings import Settings
from fedshift.utils.errors import UsageError

WEIGHTS = (0.5, 2.0, 1.0, 3.0)
EVERY = [
    make_loss(cross_entropy, **arguments)
    for arguments in ({}, {"smoothing": 0.1}, {"weights": WEIGHTS}, {"weights": WEIGHTS, "smoothing": 0.2})
] + [make_loss(focal, **arguments) for arguments in ({}, {"gamma": 0.5}, {"gamma": 0}, {"weights": WEIGHTS})]

NAMED = ("cross_entropy(weights='balanced')", "focal(weights='inverse_frequency', gamma=1.0)")


def batch(count=7, classes=4, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, classes, generator=random, dtype=dtype)
    return logits, torch.randint(classes, (count,), generator=random)


def log_softmax(logits):
    z = logits.numpy()
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_cross_entropy_is_torchs_bit_for_bit(dtype):
    compute = torch.func.grad_and_value
    for seed in range(20):
        given = batch(33, 10, seed, dtype)
        ours, torchs = compute(make_loss(cross_entropy))(*given), compute(nn.functional.cross_entropy)(*given)
        assert all(map(torch.equal, ours, torchs))


@pytest.mark.parametrize("given", [{}, {"weight": torch.tensor(WEIGHTS)}, {"label_smoothing": 0.2}])
def test_torchs_own_module_is_the_loss_that_it_is(given):
    torchs, (logits, y) = nn.CrossEntropyLoss(**given).double(), batch()
    assert LOSSES.parse(torchs)(logits, y).item() == pytest.approx(torchs(logits, y).item(), rel=1e-12)
    assert LOSSES.parse(nn.CrossEntropyLoss()) == make_loss(cross_entropy) == LOSSES.parse("cross_entropy")


def squared(logits, y, power=2):
    return (1 - logits.softmax(1).gather(1, y[:, None])).pow(power).mean()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (nn.MultiMarginLoss(margin=2.0), "torch.MultiMarginLoss(margin=2.0) weight: none"),
        (nn.MultiMarginLoss, "torch.MultiMarginLoss() weight: none"),
        (nn.functional.multi_margin_loss, "torch.nn.functional:multi_margin_loss"),
        (partial(nn.functional.multi_margin_loss, margin=2.0), "torch.nn.functional:multi_margin_loss(margin=2.0)"),
        (squared, f"{__name__}:squared"),
    ],
)
def test_losses_of_torch_and_functions_are_called_and_named_alike_in_every_process(given, text):
    (logits, y), loss = batch(), LOSSES.parse(given)
    called = given() if isinstance(given, type) else given
    assert torch.equal(loss(logits, y), called(logits, y))
    assert torch.equal(torch.func.grad(loss)(logits, y), torch.func.grad(called)(logits, y))
    assert (str(loss), repr(loss)) == (text, text)
    assert loss.resolve(torch.ones(4)) is loss


def test_a_function_by_name_takes_the_arguments_in_brackets():
    logits, y = batch()
    loss = LOSSES.parse("torch.nn.functional:multi_margin_loss(margin=2.0)")
    assert loss(logits, y) == nn.functional.multi_margin_loss(logits, y, margin=2.0)
    assert str(loss) == "torch.nn.functional:multi_margin_loss(margin=2.0)"
    assert LOSSES.parse("torch.nn:CrossEntropyLoss(label_smoothing=0.1)") == make_loss(cross_entropy, smoothing=0.1)
    assert LOSSES.parse(nn.functional.cross_entropy) == make_loss(cross_entropy)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "loss=CrossEntropyLoss(reduction='sum'): a batch needs one number"),
        (nn.MultiMarginLoss(reduction="none"), "loss=MultiMarginLoss(reduction='none'): a batch needs one number"),
        (nn.CrossEntropyLoss(ignore_index=0), "loss=CrossEntropyLoss(ignore_index=0): every sample counts here"),
        (nn.Linear(2, 2), "loss=Linear(...) has parameters, which would never be trained"),
    ],
)
def test_another_loss_is_refused_by_what_is_accepted(given, said):
    with pytest.raises(UsageError) as refused:
        Settings(loss=given)
    assert said in str(refused.value)


def divide(logits, y):
    return logits.sum() / 0 if torch.is_tensor(y) and y.unknown else logits


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (nn.MSELoss(), "called with logits [6, 3] and labels [6], failed: "),
        (len, "len (builtins), called with logits [6, 3] and labels [6], failed: len() takes exactly one argument"),
        (divide, f"test_loss.py, line {divide.__code__.co_firstlineno + 1}, in divide. Give a function of logits"),
        (lambda logits, y: 3.0, "returned a float instead of one number"),
        (lambda logits, y: logits, "returned a Tensor of shape [6, 3] instead of one number"),
        (lambda logits, y: logits.detach().sum(), "returned a Tensor of shape [] instead of one number with"),
    ],
)
def test_a_function_that_is_no_loss_is_refused_where_the_classes_are_known(given, said):
    with pytest.raises(UsageError) as refused:
        LOSSES.parse(given).try_out(3, torch.device("cpu"))
    assert said in str(refused.value)


def test_weighted_and_smoothed_cross_entropy_is_its_formula_and_torchs():
    logits, y = batch()
    log_p, w = log_softmax(logits), np.array(WEIGHTS)
    target = 0.8 * np.eye(4)[y] + 0.2 / 4
    smoothed = -(target * log_p).sum() / 7
    assert make_loss(cross_entropy, smoothing=0.2)(logits, y).item() == pytest.approx(smoothed, rel=1e-12)
    expected = -(target * w * log_p).sum() / w[y].sum()
    found = make_loss(cross_entropy, weights=WEIGHTS, smoothing=0.2)(logits, y)
    assert found.item() == pytest.approx(expected, rel=1e-12)
    torchs = nn.functional.cross_entropy(logits, y, torch.tensor(w), label_smoothing=0.2)
    assert found.item() == pytest.approx(torchs.item(), rel=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_focal_loss_is_its_formula(gamma, weights):
    logits, y = batch()
    log_p = log_softmax(logits)[np.arange(7), y]
    alpha = np.ones(7) if weights is None else np.array(weights)[y]
    expected = (-alpha * (1 - np.exp(log_p)) ** gamma * log_p).mean()
    assert make_loss(focal, gamma=gamma, weights=weights)(logits, y).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss", EVERY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_far_apart_give_finite_losses_and_derivatives(loss, dtype):
    logits = torch.tensor([[900.0, 0, 0, 0], [0, 900, 0, 0], [0, 0, 0, 0], [30, 0, 0, 0]], dtype=dtype)
    y = torch.tensor([0, 2, 1, 0])
    slope, found = torch.func.grad_and_value(loss)(logits, y)
    assert (found.dtype, found.shape) == (dtype, ())
    assert found.isfinite()
    assert slope.isfinite().all()


@pytest.mark.parametrize("loss", EVERY, ids=str)
def test_weights_are_made_where_the_logits_are(loss):
    found = loss(torch.zeros(5, 4, device="meta"), torch.zeros(5, dtype=torch.int64, device="meta"))
    assert found.device.type == "meta"


def test_a_class_without_samples_has_no_weight_and_the_others_are_balanced_among_themselves():
    y = np.repeat([0, 2, 3], [5, 30, 14])
    loss = make_loss(focal, weights="balanced", gamma=1).resolve(torch.tensor([5, 0, 30, 14]))
    expected = compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=y)
    assert loss.weights == pytest.approx((expected[0], 0, *expected[1:]))
    assert str(loss).endswith("gamma=1.0)")
    assert sum(loss.weights[label] for label in y) == pytest.approx(len(y))
    assert loss(*batch()).isfinite()


def test_weights_by_inverse_frequency_are_flambys_for_fed_isic2019():
    alpha = np.array([5.5813, 2.0472, 7.0204, 26.1194, 9.5369, 101.0707, 92.5224, 38.3443])
    counts = torch.from_numpy((18_597 / alpha).round()).long()
    found, balanced = (
        make_loss(focal, weights=name).resolve(counts).weights for name in ("inverse_frequency", "balanced")
    )
    assert found == pytest.approx(alpha, rel=1e-3)
    assert np.array(found) == pytest.approx(8 * np.array(balanced), rel=1e-14)


def test_a_batch_of_classes_without_weight_counts_nothing():
    logits, y = batch()[0], torch.zeros(7, dtype=torch.int64)
    for function in (cross_entropy, focal):
        slope, found = torch.func.grad_and_value(make_loss(function, weights=(0, 1, 1, 1)))(logits, y)
        assert not found
        assert not slope.any()


@pytest.mark.parametrize("loss", [*EVERY, *map(LOSSES.parse, (*LOSSES.entries, *NAMED))], ids=str)
def test_a_loss_is_read_back_from_its_text(loss):
    assert str(LOSSES.parse("focal(weights=[1, 2], gamma=2)")) == "focal(weights=(1.0, 2.0))"
    assert LOSSES.parse(str(loss)) == loss
    assert hash(LOSSES.parse(str(loss))) == hash(loss)
    resolved = loss.resolve(torch.tensor([3, 0, 7, 11]))
    assert LOSSES.parse(str(resolved)) == resolved
    assert (resolved == loss) == (not loss.uses_counts)


def test_weights_must_be_resolved_before_use_and_one_for_each_class():
    with pytest.raises(UsageError, match=r"cross_entropy\(weights='balanced'\): .* call resolve\(counts\) first"):
        make_loss(cross_entropy, weights="balanced")(*batch())
    with pytest.raises(UsageError, match="focal: 2 weights for 3 classes: give a number for each class"):
        make_loss(focal, weights=(1, 2)).resolve(torch.tensor([4, 4, 4]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("focal_loss", "unknown loss 'focal_loss': did you mean 'focal'? allowed are binary_cross_entropy, "),
        ("focal, cross_entropy", "loss 'focal, cross_entropy': give one, not 2"),
        ("", "loss='' is not a loss"),
        ("focal(gamma=-1)", "focal: gamma=-1 must be a number of 0 or more"),
        ("focal(gamma=1e999)", "focal: gamma=inf must be a number of 0 or more"),
        ("cross_entropy(smoothing=1)", "cross_entropy: smoothing=1 must lie in [0, 1)"),
        ("cross_entropy(smoothing=-0.1)", "cross_entropy: smoothing=-0.1 must lie in [0, 1)"),
        ("cross_entropy(weights=(1, -2))", "cross_entropy: weights=(1.0, -2.0): they must be 0 or more"),
        ("cross_entropy(weights=(0, 0))", "one of them above 0"),
        ("cross_entropy(weights=())", "one of them above 0"),
        ("focal(weights='equal')", "weights='equal' is unknown: give 'balanced', 'inverse_frequency', a number for"),
        ("focal(weights=3)", "focal takes weights=None, gamma=2.0"),
        ("mse(weights=(1.0,))", "unknown argument 'weights'; mse takes no arguments"),
        ("huber(delta=0)", "huber: delta=0 must be a number above 0"),
        ("dice(smooth=0)", "dice: smooth=0 must be a number above 0"),
        ("binary_focal(weights='balanced')", "binary_focal: weights='balanced' is unknown: give a number for"),
        ("focal(alpha=3)", "unknown argument 'alpha'; focal takes weights=None, gamma=2.0"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_and_said(text, said):
    with pytest.raises(UsageError) as refused:
        LOSSES.parse(text)
    assert said in str(refused.value)
