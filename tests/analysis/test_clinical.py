"""Clinical measures against scikit-learn, loops and closed forms; intervals against simulated truth."""

import math

import numpy as np
import pytest
from scipy.special import erfinv, expit
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression

from fedshift.analysis.clinical import (
    bin_scores,
    estimate_area,
    estimate_calibration,
    estimate_mean,
    estimate_share,
    estimate_survival,
    find_net_benefit,
    parse_operating_point,
)
from fedshift.analysis.statistics import wilson_interval
from fedshift.utils.errors import UsageError


def draw(samples, seed=0, *, seeds=1, ties=True):
    """Draw scores ``[R, N]`` in 0..1 and outcomes ``[N]``."""
    random = np.random.default_rng(seed)
    positive = random.random(samples) < 0.4
    score = expit(1.2 * positive - 0.5 + random.normal(size=(seeds, samples)))
    return (score.round(2).clip(0.01, 0.99) if ties else score), positive


def test_one_share_of_one_seed_has_the_interval_of_wilson():
    hit, of = np.zeros((1, 50), bool), np.ones((1, 50), bool)
    hit[0, :9], of[0, 45:] = True, False
    found = estimate_share(hit, of)
    assert (found.value, found.samples) == (9 / 45, 45)
    assert (found.low, found.high) == pytest.approx(wilson_interval(9, 45), abs=0.01)  # Student's quantile
    none, every = estimate_share(~of, of), estimate_share(of, of)
    assert (none.low, none.high) == pytest.approx(wilson_interval(0, 45), abs=0.01)
    assert (every.low, every.high) == pytest.approx(wilson_interval(45, 45), abs=0.01)
    assert math.isnan(estimate_share(hit, np.zeros((1, 50), bool)).value)


def test_samples_of_one_patient_do_not_narrow_an_interval():
    random = np.random.default_rng(0)
    hit = random.random((2, 40)) < 0.7
    whole = np.repeat(np.arange(40), 5)
    alone = estimate_share(hit, np.ones_like(hit), np.arange(40))
    copied = estimate_share(hit[:, whole], np.ones((2, 200), bool), whole)
    assert (copied.low, copied.high) == pytest.approx((alone.low, alone.high), abs=0.003)
    score, positive = draw(40, seeds=2)
    area, again = estimate_area(score, positive), estimate_area(score[:, whole], positive[whole], whole)
    assert again.value == pytest.approx(area.value)
    assert (again.low, again.high) == pytest.approx((area.low, area.high), abs=0.01)


def test_areas_and_brier_scores_are_those_of_scikit_learn():
    score, positive = draw(80, seeds=3)
    area = estimate_area(score, positive)
    assert area.value == pytest.approx(np.mean([sk.roc_auc_score(positive, each) for each in score]))
    assert 0 < area.low < area.value < area.high < 1
    brier = estimate_mean(np.square(score - positive))
    assert brier.value == pytest.approx(np.mean([sk.brier_score_loss(positive, each) for each in score]))
    assert math.isnan(estimate_area(score, np.zeros(80, bool)).value)
    best = estimate_area(positive[None] * 1.0, positive)
    assert best.value == best.high == 1 > best.low > 0.8


@pytest.mark.parametrize("rule", ["youden", "sensitivity>=0.9", "specificity>=0.75"])
def test_the_operating_point_is_the_best_of_all_thresholds(rule):
    score, positive = draw(60, seed=3)
    found = parse_operating_point(rule)
    assert str(found) == rule
    threshold = found.choose(score[0], positive)
    fpr, tpr, _ = sk.roc_curve(positive, score[0], drop_intermediate=False)

    def value(sensitivity, specificity):
        if rule == "youden":
            return sensitivity + specificity
        required, other = (sensitivity, specificity) if rule[:2] == "se" else (specificity, sensitivity)
        return other if required >= found.least else -1

    reached = value((score[0] >= threshold)[positive].mean(), (score[0] < threshold)[~positive].mean())
    assert reached == pytest.approx(max(value(t, 1 - f) for t, f in zip(tpr, fpr, strict=True)))
    assert threshold not in score  # it lies between two scores
    assert math.isnan(found.choose(score[0], np.ones(60, bool)))


@pytest.mark.parametrize("text", ["", "best", "sensitivity>=95", "sensitivity=0.9", "specificity>=1.5", "recall>=0.9"])
def test_another_operating_point_is_refused(text):
    with pytest.raises(UsageError, match=r"is no operating point: give youden, sensitivity>=0.95 or specificity>=0.9"):
        parse_operating_point(text)


def test_calibration_is_that_of_scikit_learn():
    score, positive = draw(400, ties=False)
    share, mean = calibration_curve(positive, score[0], n_bins=10)
    found = bin_scores(score[0], positive)
    held = found.count > 0
    assert found.count.sum() == 400
    np.testing.assert_allclose(found.share[held], share)
    np.testing.assert_allclose(found.score[held], mean)
    intercept, slope = estimate_calibration(score, positive)
    logits = np.log(score[0] / (1 - score[0]))[:, None]
    fitted = LogisticRegression(C=np.inf, tol=1e-10).fit(logits, positive)
    assert (intercept.value, slope.value) == pytest.approx((fitted.intercept_[0], fitted.coef_[0, 0]), abs=1e-4)
    assert slope.low < slope.value < slope.high
    assert math.isnan(estimate_calibration(positive[None] * 0.8 + 0.1, positive)[1].value)


def test_net_benefit_is_counted_as_vickers_and_elkin_define_it():
    score, positive = draw(50)
    thresholds = (0.1, 0.35, 0.8)
    expected = []
    for t in thresholds:
        right = sum(s >= t and p for s, p in zip(score[0], positive, strict=True))
        wrong = sum(s >= t and not p for s, p in zip(score[0], positive, strict=True))
        expected.append(right / 50 - wrong / 50 * t / (1 - t))
    np.testing.assert_allclose(find_net_benefit(score[0], positive, thresholds), expected, atol=1e-12)


def cover(estimate, truth, studies=2000):
    """Share of simulated studies whose interval contains the truth, of 4 seeds that share the samples."""
    random = np.random.default_rng(0)
    found = [estimate(random) for _ in range(studies)]
    return np.mean([each.low <= truth <= each.high for each in found])


@pytest.mark.slow
@pytest.mark.parametrize(("patients", "share"), [(10, 0.8), (20, 0.95), (50, 0.7)])
def test_of_intervals_of_a_share_19_in_20_contain_it(patients, share):
    def estimate(random):
        hard, group = random.normal(size=patients), np.repeat(np.arange(patients), 3)
        mixed = 0.8 * hard[group] + 0.6 * random.normal(size=3 * patients)
        hit = mixed + 0.3 * random.normal(size=(4, 3 * patients)) < level
        return estimate_share(hit, np.ones_like(hit), group)

    level = np.sqrt(1 + 0.3**2) * float(np.sqrt(2) * erfinv(2 * share - 1))
    assert cover(estimate, share) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize("patients", [20, 50])
def test_of_intervals_of_an_area_19_in_20_contain_it(patients):
    positive = np.arange(patients) % 2 == 1

    def estimate(random):
        score = 1.4 * positive + random.normal(size=patients) + 0.3 * random.normal(size=(4, patients))
        return estimate_area(score, positive)

    truth = (1 + math.erf(1.4 / math.sqrt(2 * 1.09) / math.sqrt(2))) / 2
    assert cover(estimate, truth) >= 0.93


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of lifelines
@pytest.mark.parametrize("seed", range(3))
def test_survival_is_estimated_as_by_lifelines(seed):
    lifelines = pytest.importorskip("lifelines")
    random = np.random.default_rng(seed)
    time, event = np.ceil(random.exponential(6, 50)), random.random(50) < 0.6
    theirs = lifelines.KaplanMeierFitter().fit(time, event)
    ours = estimate_survival(time, event)
    np.testing.assert_allclose(ours.share, theirs.predict(ours.time), atol=1e-12)
    np.testing.assert_array_equal(ours.at_risk, theirs.event_table.loc[ours.time, "at_risk"])
    known = (ours.share > 0) & (ours.share < 1)
    bounds = theirs.confidence_interval_.loc[ours.time[known]].to_numpy().T
    np.testing.assert_allclose([ours.low[known], ours.high[known]], bounds, atol=1e-12)
    assert ours.end == time.max()


def test_without_events_everybody_survives_and_the_last_event_leaves_no_interval():
    nobody = estimate_survival(np.array([3.0, 5.0]), np.array([False, False]))
    assert (len(nobody.time), nobody.end) == (0, 5.0)
    everybody = estimate_survival(np.array([3.0, 5.0]), np.array([True, True]))
    assert everybody.share.tolist() == [0.5, 0.0]
    assert np.isnan([everybody.low[1], everybody.high[1]]).all()
