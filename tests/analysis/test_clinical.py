"""Clinical measures against scikit-learn, other programs and closed forms; intervals against simulated truth.

Numbers that are written out are of statsmodels 0.15.0 (GLM, binomial), dcurves 1.1.7 and scikit-survival 0.28.0.
"""

import math

import numpy as np
import pytest
from scipy.special import expit, logit
from scipy.stats import binomtest, t
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from fedshift.analysis.clinical import (
    AREA,
    BRIER,
    LARGE,
    SLOPE,
    bin_scores,
    choose_threshold,
    estimate,
    estimate_share,
    estimate_survival,
    find_net_benefit,
    parse_operating_point,
    share_interval,
)
from fedshift.utils.errors import UsageError

SCORE = np.array([0.04, 0.11, 0.17, 0.22, 0.29, 0.33, 0.38, 0.44, 0.52, 0.57, 0.63, 0.68, 0.74, 0.81, 0.88, 0.96])
POSITIVE = np.array([0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1]) == 1


def draw(samples, seed=0, *, seeds=1, ties=True):
    """Draw scores ``[R, N]`` in 0..1 and outcomes ``[N]``."""
    random = np.random.default_rng(seed)
    positive = random.random(samples) < 0.4
    score = expit(1.2 * positive - 0.5 + random.normal(size=(seeds, samples)))
    return (score.round(2).clip(0.01, 0.99) if ties else score), positive


@pytest.mark.parametrize("hits", [0, 9, 45])
def test_one_share_of_one_seed_has_the_interval_of_wilson(hits):
    hit, of = np.arange(50)[None] < hits, np.arange(50)[None] < 45
    share = estimate_share(hit, of)
    wilson, narrower = (binomtest(hits, 45).proportion_ci(level, "wilson") for level in (0.95, 0.9))
    assert (share.value, share.low, share.high) == pytest.approx((hits / 45, *wilson), abs=1e-6)
    assert share_interval(hit[of], level=0.9) == pytest.approx(tuple(narrower), abs=1e-6)
    assert math.isnan(estimate_share(hit, hit & ~of).value)


def draw_patients(random, patients, share, correlation, *, unequal=False):
    """Draw hits of 20 images of each patient (or 1 to 60), whose shares have a beta distribution, and their groups."""
    sizes = random.geometric(1 / 20, patients) if unequal else np.full(patients, 20)
    scale = 1 / max(correlation, 1e-9) - 1
    share_N = np.repeat(random.beta(share * scale, (1 - share) * scale, patients), sizes)
    return random.random(len(share_N)) < share_N, np.repeat(np.arange(patients), sizes)


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("correlation", [0.1, 0.4, 0.8])
@pytest.mark.parametrize(("patients", "share"), [(10, 0.8), (20, 0.8), (20, 0.95), (40, 0.95)])
def test_of_intervals_of_a_share_of_few_patients_19_in_20_contain_it(patients, share, correlation, unequal):
    random = np.random.default_rng(1)
    drawn = [draw_patients(random, patients, share, correlation, unequal=unequal) for _ in range(500)]
    assert np.mean([low <= share <= high for low, high in (share_interval(*each) for each in drawn)]) >= 0.93


def test_independent_samples_of_patients_have_nearly_the_interval_of_wilson():
    random = np.random.default_rng(2)
    widths = [np.diff(share_interval(*draw_patients(random, 20, 0.8, 0))) for _ in range(300)]
    assert 0.078 < np.mean(widths) < 1.25 * 0.078


def test_patients_who_are_all_alike_count_once_and_one_patient_has_no_interval():
    group = np.repeat(np.arange(20), 20)
    low, high = share_interval(np.ones(400, bool), group)
    assert (high, binomtest(20, 20).proportion_ci(method="wilson").low) == pytest.approx((1, low), abs=0.02)
    assert np.isnan(share_interval(np.arange(20) < 7, np.zeros(20, int))).all()


def test_samples_of_one_patient_do_not_narrow_an_interval():
    random = np.random.default_rng(0)
    hit = random.random((2, 40)) < 0.7
    whole = np.repeat(np.arange(40), 5)
    alone = estimate_share(hit, np.ones_like(hit), np.arange(40))
    copied = estimate_share(hit[:, whole], np.ones((2, 200), bool), whole)
    assert (copied.low, copied.high) == pytest.approx((alone.low, alone.high), abs=0.003)
    score, positive = draw(40, seeds=2)
    area, again = estimate(AREA, score, positive), estimate(AREA, score[:, whole], positive[whole], whole)
    assert again.value == pytest.approx(area.value)
    assert (again.low, again.high) == pytest.approx((area.low, area.high), abs=0.01)


def test_the_variance_over_patients_of_unequal_sizes_is_that_of_the_jackknife():
    x, sizes = np.repeat(np.random.default_rng(1).normal(size=10), 2), np.array([2, 4, 6, 8])
    positive, group = np.arange(20) % 2 == 1, np.repeat(np.arange(4), sizes)
    error = expit(-x) ** 2
    spread = math.sqrt(3 * np.var([error[group != left].mean() for left in range(4)]))
    half = t(20**2 / np.square(sizes).sum() - 1).ppf(0.975) * spread / (error.mean() * (1 - error.mean()))
    ours = estimate(BRIER, np.where(positive, x, -x)[None], positive, group)
    assert logit([ours.low, ours.high]) == pytest.approx(logit(error.mean()) + np.array([-half, half]))


def test_areas_and_brier_scores_are_those_of_scikit_learn():
    score, positive = draw(80, seeds=3)
    for measure, theirs in ((AREA, sk.roc_auc_score), (BRIER, sk.brier_score_loss)):
        ours = estimate(measure, logit(score), positive)
        assert ours.value == pytest.approx(np.mean([theirs(positive, each) for each in score]))
        assert 0 < ours.low < ours.value < ours.high < 1
    assert math.isnan(estimate(AREA, score, np.zeros(80, bool)).value)
    best = estimate(AREA, 80.0 * positive[None], positive)
    assert best.value == best.high == 1 > best.low > 0.8
    exact = estimate(BRIER, 1e3 * np.where(positive, 1, -1)[None], positive)
    assert (exact.value, exact.low) == pytest.approx((0, 0), abs=1e-12)
    assert 0 < exact.high < 0.2


def test_a_score_that_is_not_a_number_has_no_measure_and_is_never_right():
    lost = np.where(np.arange(16) == 2, np.nan, SCORE)
    assert bin_scores(lost, POSITIVE)["count"].sum() == 15
    threshold = choose_threshold("sensitivity>=0.85", lost, POSITIVE)
    assert threshold == pytest.approx((SCORE[4] + SCORE[5]) / 2)  # of 8 positive samples, the lost one is missed
    assert math.isnan(choose_threshold("sensitivity>=0.9", lost, POSITIVE))
    for measure in (AREA, BRIER, LARGE, SLOPE):
        assert math.isnan(estimate(measure, logit(lost)[None], POSITIVE).value)


def test_scores_of_several_models_are_measured_model_by_model():
    score, positive = draw(240, ties=False)
    owner = np.repeat(["a", "b", "c"], [120, 80, 40])
    odds = logit(score) - 5 * (owner == "b")  # another scale, the same order
    positive[owner == "c"] = True  # neither an area nor calibration is defined there
    for measure in (AREA, LARGE, SLOPE):
        single = [estimate(measure, odds[:, owner == name], positive[owner == name]) for name in "abc"]
        single = [each for each in single if not math.isnan(each.value)]
        joint = estimate(measure, odds, positive, owner_N=owner)
        assert joint.value == pytest.approx(np.mean([each.value for each in single]))
        spread = math.hypot(*(each.high - each.low for each in single)) / len(single)
        assert joint.high - joint.low == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("rule", ["youden", "sensitivity>=0.9", "specificity>=0.75"])
def test_the_operating_point_is_the_best_of_all_thresholds(rule):
    score, positive = draw(60, seed=3)
    threshold = choose_threshold(rule, score[0], positive)
    fpr, tpr, _ = sk.roc_curve(positive, score[0], drop_intermediate=False)

    def value(sensitivity, specificity):
        if rule == "youden":
            return sensitivity + specificity
        required, other = (sensitivity, specificity) if rule[:2] == "se" else (specificity, sensitivity)
        return other if required >= float(rule[-3:].lstrip("=")) else -1

    reached = value((score[0] >= threshold)[positive].mean(), (score[0] < threshold)[~positive].mean())
    assert reached == pytest.approx(max(value(hit, 1 - f) for hit, f in zip(tpr, fpr, strict=True)))
    assert threshold not in score  # it lies between two scores
    assert math.isnan(choose_threshold(rule, score[0], np.ones(60, bool)))


@pytest.mark.parametrize(
    ("rule", "threshold"), [("youden", 0.2), ("sensitivity>=1", 0.2), ("specificity>=0.9", math.nan)]
)
def test_a_threshold_is_finite_or_none(rule, threshold):
    for scores in ([0.9, 0.8, 0.2], [0.2, 0.2, 0.2]):
        found = choose_threshold(rule, np.array(scores), np.array([False, True, True]))
        assert found == pytest.approx(threshold, nan_ok=True)


@pytest.mark.parametrize("text", ["", "best", "sensitivity>=95", "sensitivity=0.9", "specificity>=1.5", "recall>=0.9"])
def test_another_operating_point_is_refused(text):
    with pytest.raises(UsageError, match=r"is no operating point: give youden, sensitivity>=0.95 or specificity>=0.9"):
        parse_operating_point(text)


def test_calibration_is_that_of_scikit_learn_and_statsmodels():
    score, positive = draw(400, ties=False)
    share, mean = calibration_curve(positive, score[0], n_bins=10)
    bins = bin_scores(score[0], positive)
    assert bins["count"].sum() == 400
    np.testing.assert_allclose(bins[["share", "score"]].dropna().T, [share, mean])
    group = np.repeat(np.arange(8), 2)
    for measure, value, error, clustered in (
        (LARGE, 0.08227279, 0.62143639, 0.54390322), (SLOPE, 0.88849683, 0.43931299, 0.38145921)
    ):  # fmt: skip
        for by, sandwich in ((None, error), (group, clustered)):
            ours = estimate(measure, logit(SCORE)[None], POSITIVE, by)
            assert ours.value == pytest.approx(value, abs=1e-6)
            assert 1 <= (ours.high - ours.low) / (2 * 1.96 * sandwich) < 1.4  # Student's quantile, units left out
        assert math.isnan(estimate(measure, logit(SCORE)[None], np.ones(16, bool)).value)
    extreme = np.where(np.arange(16) < 5, 300.0, -300.0)  # the sum of probabilities is 8: 5 + 11 x 3 / 11
    assert estimate(LARGE, extreme[None], POSITIVE).value == pytest.approx(300 + logit(3 / 11))
    assert math.isnan(estimate(SLOPE, POSITIVE[None] * 0.8 + 0.1, POSITIVE).value)


def test_net_benefit_is_that_of_dcurves():
    expected = [0.451389, 0.333333, 0.25, 0.146802, 0.1875]
    np.testing.assert_allclose(find_net_benefit(SCORE, POSITIVE, [0.1, 0.25, 0.4, 0.57, 0.8]), expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("alike", [0, 0.9])
@pytest.mark.parametrize("measure", ["share", AREA, BRIER, LARGE, SLOPE])
def test_of_intervals_over_patients_and_seeds_19_in_20_contain_the_truth(measure, alike):
    def study(patients):
        group = np.repeat(np.arange(patients), 4)
        base = math.sqrt(alike) * random.normal(size=patients)[group]
        base += math.sqrt(1 - alike) * random.normal(size=len(group))
        positive = random.random(len(group)) < expit(1.5 * base - 0.3)
        odds = 1.2 * base + 0.2 + 0.3 * random.normal(size=(4, len(group)))
        if measure == "share":
            return estimate_share(odds > 0, np.broadcast_to(positive, odds.shape), group)
        return estimate(measure, odds, positive, group)

    random = np.random.default_rng(0)
    truth, studies = study(50_000).value, [study(30) for _ in range(1000)]
    assert np.mean([each.low <= truth <= each.high for each in studies]) >= 0.93


def test_survival_is_that_of_scikit_survival():
    time = np.array([1, 2, 2, 3, 3, 3, 4, 5, 5, 6, 7, 8.0])
    event = np.array([1, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1]) == 1
    ours = estimate_survival(time, event)
    assert ours["at_risk"].to_dict() == {1: 12, 2: 11, 3: 9, 4: 6, 5: 5, 6: 3, 8: 1}
    share = [0.91666667, 0.83333333, 0.64814815, 0.54012346, 0.43209877, 0.28806584, 0]
    low = [0.53897718, 0.48171494, 0.30966223, 0.21656117, 0.14101049, 0.05276394, np.nan]
    high = [0.98782557, 0.95550937, 0.85179751, 0.78036356, 0.69807566, 0.59066461, np.nan]
    np.testing.assert_allclose(ours[["share", "low", "high"]].T, [share, low, high], atol=1e-8)


def test_without_events_everybody_survives_to_the_last_time():
    nobody = estimate_survival(np.array([3.0, 5.0]), np.array([False, False]))
    assert nobody["share"].to_dict() == {5.0: 1.0}
    assert np.isnan(nobody["low"]).all()
    censored = estimate_survival(np.array([3.0, 5.0, 9.0]), np.array([True, True, False]))
    assert censored["share"].round(9).to_dict() == {3.0: 0.666666667, 5.0: 0.333333333, 9.0: 0.333333333}
