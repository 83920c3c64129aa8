"""Variances over test samples against closed forms, jackknives of scikit-learn's metrics, and simulated studies."""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk

from fedshift.analysis.sampling import SampleVariance, class_values, difference_variance, mean_values
from fedshift.analysis.statistics import correct_family, include_samples, paired_difference
from fedshift.report.paired_samples import sample_values
from fedshift.results.schema import compute_metric, rows_to_frame
from fedshift.tasks import CLASSIFICATION, METRICS, Classification, Multilabel, Regression, Segmentation

MULTILABEL, REGRESSION, SEGMENTATION = Multilabel(), Regression(), Segmentation()
REQUESTED = Classification(requested=(METRICS.parse("f1"),))
SURFACE = Segmentation(surface=True)


def variance(task, metric, y, *predictions):
    """The variance of the difference of two models' ``metric``, or of one model's."""
    values = [sample_values(task.record_all(each, y, each.shape[1]), metric) for each in predictions]
    gap = values[0].x - (values[1].x if len(values) > 1 else 0)
    return difference_variance(gap, values[0].stratum, values[0].weight).variance


def jackknife(samples, measure):
    """The variance of ``measure`` of the samples that are left (Efron and Stein 1981)."""
    left = [measure(np.delete(np.arange(samples), i)) for i in range(samples)]
    return (samples - 1) ** 2 / samples * np.var(left, ddof=1)


def test_hits_of_one_seed_have_the_variance_of_agresti_and_min():
    d = np.array([1.0] * 7 + [-1.0] * 3 + [0.0] * 40)
    found = difference_variance(d, np.zeros(50, np.int64), np.ones(1), np.ones(1))
    assert found.variance == pytest.approx(((7.5 + 3.5) - (7.5 - 3.5) ** 2 / 52) / 52**2)  # half more in each cell
    assert found.freedom == pytest.approx(51)


def test_classes_are_strata_with_the_degrees_of_freedom_of_satterthwaite():
    right, truth = np.array([1, 0, 1, 1, 0, 1, 0]), np.array([0, 0, 0, 0, 2, 2, 2])
    found = class_values(right, truth, mean=True)
    assert found.weight.tolist() == [0.5, 0.5]
    d = np.array([1.0, 0, 0.5, -1, 0, 1, 0])
    each = [d[truth == k].var(ddof=1) / (truth == k).sum() / 4 for k in (0, 2)]
    made = difference_variance(d, found.stratum, found.weight)
    assert made.variance == pytest.approx(sum(each))
    assert made.freedom == pytest.approx(sum(each) ** 2 / (each[0] ** 2 / 3 + each[1] ** 2 / 2))
    assert np.isnan(difference_variance(d[:5], found.stratum[:5], found.weight).variance)  # one sample of class 2


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
    ours, theirs = (torch.randn(60, 2, generator=random).round(decimals=1) + torch.eye(2)[y] for _ in range(2))
    scores = [each.double().softmax(1)[:, 1].numpy() for each in (ours, theirs)]
    assert variance(CLASSIFICATION, "auc", y, ours, theirs) == pytest.approx(delong(*scores, y.numpy() == 1), rel=1e-5)


def measure_masks(metric, y, p):
    counts = SURFACE.count(torch.as_tensor(p), torch.as_tensor(y).long(), 3)
    return compute_metric(rows_to_frame([counts]), metric)[0]


CASES = [
    (SEGMENTATION, "dice", lambda y, p: sk.f1_score(y.flatten(), p.argmax(1).flatten(), average=None)[1:].mean()),
    (SEGMENTATION, "iou", lambda y, p: sk.jaccard_score(y.flatten(), p.argmax(1).flatten(), average=None)[1:].mean()),
    (SEGMENTATION, "accuracy", lambda y, p: sk.accuracy_score(y.flatten(), p.argmax(1).flatten())),
    (SEGMENTATION, "balanced_accuracy", lambda y, p: sk.balanced_accuracy_score(y.flatten(), p.argmax(1).flatten())),
    (SURFACE, "surface_distance", lambda y, p: measure_masks("surface_distance", y, p)),
    (SURFACE, "hausdorff95", lambda y, p: measure_masks("hausdorff95", y, p)),
    (MULTILABEL, "f1", lambda y, p: sk.f1_score(y, p > 0, average="macro")),
    (MULTILABEL, "exact_match", lambda y, p: sk.accuracy_score(y, p > 0)),
    (MULTILABEL, "auc", lambda y, p: sk.roc_auc_score(y, p, average="macro")),
    (REGRESSION, "rmse", sk.root_mean_squared_error),
    (REGRESSION, "mae", sk.mean_absolute_error),
    (REGRESSION, "r2", sk.r2_score),
    (REQUESTED, "f1", lambda y, p: sk.f1_score(y, p.argmax(1), average="macro")),
    (CLASSIFICATION, "loss", lambda y, p: sk.log_loss(y, torch.as_tensor(p).softmax(1), labels=range(3))),
]


FAST = {"dice", "rmse", "r2"}
EACH = [
    pytest.param(*case, marks=() if case[1] in FAST else pytest.mark.slow, id=f"{case[0]}-{case[1]}") for case in CASES
]


@pytest.mark.parametrize(("task", "metric", "measure"), EACH)
def test_other_metrics_have_the_variance_of_the_jackknife(task, metric, measure):
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
    expected = jackknife(samples, lambda kept: measure(truth[kept], a[kept]) - measure(truth[kept], b[kept]))
    assert variance(task, metric, y, ours, theirs) == pytest.approx(expected, rel=0.1)


def test_the_interval_on_new_samples_by_hand_and_its_p_value_is_where_it_ends_at_zero():
    gap = paired_difference([0.80, 0.82, 0.87], [0.70, 0.73, 0.71])
    fresh = include_samples(gap, SampleVariance(variance=0.0004, freedom=30.0))
    half = np.hypot(stats.t.ppf(0.975, 2) * gap.error, stats.t.ppf(0.975, 30) * 0.02)
    assert (fresh.low, fresh.high) == pytest.approx((gap.mean - half, gap.mean + half))
    assert fresh.p > gap.p
    at = paired_difference([0.80, 0.82, 0.87], [0.70, 0.73, 0.71], 1 - fresh.p)
    assert include_samples(at, fresh.sampled).low == pytest.approx(0, abs=1e-9)
    assert correct_family([fresh])[0].low == pytest.approx(fresh.low)
    assert np.isnan(include_samples(gap, SampleVariance(variance=np.nan)).p)


def cover(samples, seeds, studies, *, spread, shared=0.6):
    """Share of simulated studies whose interval contains the true difference of two methods.

    A sample has a difficulty that both methods share in part; a run has a quality, drawn anew for each method and seed.
    The truth is the difference over all samples and runs.
    """
    random = np.random.default_rng(samples + 10 * seeds)
    levels, hits = np.array([1.2, 0.9]), 0
    wide = np.sqrt(1 + spread**2)
    truth = stats.norm.cdf(levels / wide)
    for _ in range(studies):
        common, own = random.normal(size=samples), random.normal(size=(2, samples))
        hard = np.sqrt(shared) * common + np.sqrt(1 - shared) * own
        quality = levels[:, None] + spread * random.normal(size=(2, seeds))
        right = quality[:, :, None] > hard[:, None, :]
        share = right.mean(axis=2)
        gap = paired_difference(share[0].tolist(), share[1].tolist(), grid=np.sqrt(2 / 12) / samples)
        d = (right[0].astype(float) - right[1]).mean(axis=0)
        fresh = include_samples(gap, difference_variance(d, np.zeros(samples, np.int64), np.ones(1), np.ones(1)))
        hits += fresh.low <= truth[0] - truth[1] <= fresh.high
    return hits / studies


def test_of_95_percent_intervals_on_new_samples_19_in_20_contain_the_truth():
    assert cover(100, 3, 200, spread=0.1) >= 0.94


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("samples", [20, 140, 1000])
def test_they_do_for_few_and_many_samples_and_seeds(samples, seeds, spread):
    assert cover(samples, seeds, 2000, spread=spread) >= 0.94


def test_the_variance_of_hits_over_test_sets_is_that_of_simulated_ones():
    """Averaged over 2,000 test sets of 100: of paired hits, the difference's own variance."""
    random = np.random.default_rng(0)
    hard = random.normal(size=(2000, 1, 100)) + 0.5 * random.normal(size=(2000, 2, 100))
    right = hard < np.array([1.0, 0.8])[:, None]
    gaps = right[:, 0].astype(float) - right[:, 1]
    estimates = [difference_variance(d, np.zeros(100, np.int64), np.ones(1), np.ones(1)).variance for d in gaps]
    assert np.mean(estimates) == pytest.approx(gaps.mean(axis=1).var(), rel=0.12)
    assert mean_values(gaps[0]).weight.tolist() == [1.0]
