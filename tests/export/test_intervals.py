"""Intervals of the card: the jackknife over patients by hand with scikit-learn, and coverage by simulation."""

import numpy as np
import pytest
from scipy.stats import binomtest, t
from sklearn import metrics as sklearn

from fedshift.export.intervals import add_intervals, find_interval
from fedshift.results.schema import compute_metric, rows_to_frame

RNG = np.random.default_rng(0)
GROUP = np.repeat(np.arange(12), RNG.integers(1, 9, 12))
TRUTH, CHOSEN = RNG.integers(0, 2, (2, len(GROUP)))
Y, X = RNG.normal(size=(2, len(GROUP)))
CLASSES = {"truth": TRUTH, "chosen": CHOSEN, "right": TRUTH == CHOSEN, "group": GROUP}
NUMBERS = {"error": (X - Y)[:, None], "target": Y[:, None], "group": GROUP}
BY_HAND = {
    "balanced_accuracy": (CLASSES, lambda i: sklearn.balanced_accuracy_score(TRUTH[i], CHOSEN[i])),
    "f1": (CLASSES, lambda i: sklearn.f1_score(TRUTH[i], CHOSEN[i], average="macro")),
    "rmse": (NUMBERS, lambda i: sklearn.root_mean_squared_error(Y[i], X[i])),
    "mae": (NUMBERS, lambda i: sklearn.mean_absolute_error(Y[i], X[i])),
    "r2": (NUMBERS, lambda i: sklearn.r2_score(Y[i], X[i])),
}


@pytest.mark.parametrize("metric", BY_HAND)
def test_intervals_are_those_of_leaving_out_each_patient(metric):
    records, score = BY_HAND[metric]
    value, left = score(GROUP >= 0), np.array([score(patient != GROUP) for patient in range(12)])
    sizes = np.bincount(GROUP)
    error = np.sqrt(11 / 12 * np.square(left - left.mean()).sum())
    half = t(sizes.sum() ** 2 / (sizes**2).sum() - 1).ppf(0.975) * error
    if metric in ("balanced_accuracy", "f1"):  # Wilson's bounds p: (value - p)^2 = half^2 p (1 - p) / value (1 - value)
        low, high = find_interval(records, metric, value)
        assert low < value - 0.8 * half < value + 0.8 * half < high
        for bound in (low, high):
            widened = (value - bound) ** 2 * value * (1 - value) / (half**2 * bound * (1 - bound))
            assert 1 - 1e-9 <= widened <= 1.2
        return
    if metric == "r2":
        expected = [1 - (1 - value) * np.exp(side * half / (1 - value)) for side in (1, -1)]
    else:
        expected = [value * np.exp(side * half / value) for side in (-1, 1)]
    assert find_interval(records, metric, value) == pytest.approx(expected)


def test_at_its_bounds_a_share_has_the_interval_of_as_many_patients_and_one_patient_none():
    right = {**CLASSES, "chosen": TRUTH, "right": TRUTH == TRUTH}
    for metric in ("accuracy", "balanced_accuracy", "f1"):
        low, high = find_interval(right, metric, 1.0)
        assert high == 1
        assert 0.5 < low < binomtest(12, 12).proportion_ci(method="wilson").low
        assert find_interval({**right, "group": 0 * GROUP}, metric, 1.0) is None
    assert find_interval(CLASSES, "own:score", 0.5) is None


@pytest.mark.slow
@pytest.mark.parametrize("patients", [10, 20])
@pytest.mark.parametrize("task", ["accuracy", "f1"])
def test_of_intervals_19_in_20_contain_the_value(task, patients):
    """20 images of each patient, alike: a correlation of 0.5."""
    rng, group, covered = np.random.default_rng(0), np.repeat(np.arange(patients), 20), 0
    for _ in range(400):
        truth = rng.integers(0, 2, len(group))
        right = rng.random(len(group)) < rng.beta(0.8, 0.2, patients)[group]
        records = {"truth": truth, "chosen": np.where(right, truth, 1 - truth), "right": right, "group": group}
        value = right.mean() if task == "accuracy" else sklearn.f1_score(truth, records["chosen"], average="macro")
        low, high = find_interval(records, task, value)
        covered += low <= 0.8 <= high
    assert covered >= 0.93 * 400


def test_rows_without_records_of_single_samples_have_no_interval():
    row = {"client": "a", "split": "test", "model": "global", "samples": 4, "hits": [1, 2], "support": [2, 2]}
    assert list(add_intervals([row], ["accuracy"], {})) == [row]
    records = {"truth": np.array([0, 0, 1, 1]), "right": np.array([1, 0, 1, 1], bool), "group": np.array([3, 3, 5, 6])}
    (made,) = add_intervals([row], ["accuracy"], {("test", "a", "global"): records})
    assert made["patients"] == 3
    low, high = made["intervals"]["accuracy"]
    assert low < compute_metric(rows_to_frame([row]), "accuracy").item() < high
