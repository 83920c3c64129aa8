"""Variances over test samples against closed forms, and jackknives of scikit-learn's metrics."""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk

from fedshift.analysis.influence import find_bound, find_influence, vary
from fedshift.analysis.statistics import count_needed_seeds, decides, half_interval
from fedshift.results.schema import compute_metric, rows_to_frame
from fedshift.tasks import CLASSIFICATION, METRICS, Classification, Multilabel, Regression, Segmentation

MULTILABEL, REGRESSION, SEGMENTATION = Multilabel(), Regression(), Segmentation()
REQUESTED, SURFACE = Classification(requested=(METRICS.parse("f1"),)), Segmentation(surface=True)


def variance(task, metric, y, *predictions, group=None):
    """The variance of the difference of two models' ``metric``, or of one model's."""
    records = [task.record_all(outputs, y, outputs.shape[1]) for outputs in predictions]
    records = [each if group is None else {**each, "group": group} for each in records]
    influences = [find_influence(each, metric) for each in records]
    return vary(influences[0] - (influences[1] if len(influences) > 1 else 0))


def jackknife(group, measure):
    """The variance of ``measure`` of the samples that are left without a unit (Efron and Stein 1981)."""
    left = [measure(np.flatnonzero(group != unit)) for unit in np.unique(group)]
    return (len(left) - 1) ** 2 / len(left) * np.var(left, ddof=1)


def test_hits_of_one_seed_have_the_variance_of_agresti_and_min():
    d = np.array([1.0] * 7 + [-1.0] * 3 + [0.0] * 40)
    expected = ((7.5 + 3.5) - (7.5 - 3.5) ** 2 / 52) / 52**2  # half a sample more in each cell
    assert vary(d - d.mean(), d.mean(), find_bound("accuracy")) == pytest.approx(expected)
    assert vary(d - d.mean()) == pytest.approx(d.var(ddof=1) / 50)
    assert np.isnan(vary(d[:1]))


def delong(score, other, positive):
    """Variance of the difference of two areas by comparing every pair (DeLong et al. 1988, equations 4 to 6)."""
    above = [
        (s[positive][:, None] > s[~positive]) + 0.5 * (s[positive][:, None] == s[~positive]) for s in (score, other)
    ]
    gap = above[0].astype(float) - above[1]
    return gap.mean(axis=1).var(ddof=1) / positive.sum() + gap.mean(axis=0).var(ddof=1) / (~positive).sum()


def test_areas_have_the_variance_of_delong():
    random = torch.Generator().manual_seed(0)
    y = torch.randint(2, (60,), generator=random)
    ours, theirs = ((4 * torch.randn(60, 2, generator=random)).round() / 4 + torch.eye(2)[y] for _ in range(2))
    scores = [(each[:, 1] - each[:, 0]).double().numpy() for each in (ours, theirs)]
    expected = delong(*scores, y.numpy() == 1)
    assert variance(CLASSIFICATION, "auc", y, ours, theirs) == pytest.approx(expected, rel=1e-4)
    assert np.isnan(variance(CLASSIFICATION, "auc", (torch.arange(60) < 4).long(), ours))  # four of a class


def measure_masks(metric, y, p):
    counts = SURFACE.count(torch.as_tensor(p), torch.as_tensor(y).long(), 3)
    return compute_metric(rows_to_frame([counts]), metric)[0]


CASES = [
    (SEGMENTATION, "accuracy", lambda y, p: sk.accuracy_score(y.flatten(), p.argmax(1).flatten())),
    (SEGMENTATION, "balanced_accuracy", lambda y, p: sk.balanced_accuracy_score(y.flatten(), p.argmax(1).flatten())),
    *((SURFACE, name, lambda y, p, n=name: measure_masks(n, y, p)) for name in ("dice", "iou", "surface_distance")),
    (MULTILABEL, "f1", lambda y, p: sk.f1_score(y, p > 0, average="macro")),
    (MULTILABEL, "exact_match", lambda y, p: sk.accuracy_score(y, p > 0)),
    (REGRESSION, "rmse", sk.root_mean_squared_error),
    (REGRESSION, "mae", sk.mean_absolute_error),
    (REGRESSION, "r2", sk.r2_score),
    (CLASSIFICATION, "balanced_accuracy", lambda y, p: sk.balanced_accuracy_score(y, p.argmax(1))),
    (REQUESTED, "f1", lambda y, p: sk.f1_score(y, p.argmax(1), average="macro")),
    (CLASSIFICATION, "loss", lambda y, p: sk.log_loss(y, torch.as_tensor(p).softmax(1), labels=range(3))),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("task", "metric", "measure"), [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in CASES]
)
def test_other_metrics_have_the_variance_of_the_jackknife(task, metric, measure, size):
    random, samples = torch.Generator().manual_seed(1), 40
    shape = (samples, 3, 6, 6) if isinstance(task, Segmentation) else (samples, 3)
    ours, theirs = (torch.randn(shape, generator=random) for _ in range(2))
    if task == REGRESSION:
        y = 2 * ours + torch.randn(shape, generator=random)
    elif task == MULTILABEL:
        y = (ours + torch.randn(shape, generator=random) > 0).float()
    else:
        y = torch.randint(3, shape[:1] + shape[2:], generator=random)
    a, b, truth = (each.numpy().astype(float) for each in (ours, theirs, y))
    group = np.arange(samples) // size
    expected = jackknife(group, lambda kept: measure(truth[kept], a[kept]) - measure(truth[kept], b[kept]))
    assert variance(task, metric, y, ours, theirs, group=group) == pytest.approx(expected, rel=1e-5)


def test_half_of_an_interval_by_hand_and_the_seeds_that_it_needs():
    half = half_interval(0.02, 5, 0.03, 40, comparisons=4)
    tail = 1 - 0.05 / 8
    assert half == pytest.approx(np.hypot(stats.t.ppf(tail, 4) * 0.02, stats.t.ppf(tail, 39) * 0.03))
    assert half_interval(0.02, 5) == pytest.approx(stats.t.ppf(0.975, 4) * 0.02)
    assert np.isnan(half_interval(0.02, 1))
    needed = [count_needed_seeds(comparisons) for comparisons in (1, 3, 4, 9, 10, 27, 28)]
    assert needed == [4, 4, 5, 5, 6, 6, 7]
    widest = [stats.t.ppf(1 - 0.05 / (2 * m), n - 1) / np.sqrt(n) for n, m in ((3, 1), (4, 3), (5, 10), (6, 27))]
    assert [width <= 2.45 for width in widest] == [decides(*p) for p in ((3, 1), (4, 3), (5, 10), (6, 27))]
