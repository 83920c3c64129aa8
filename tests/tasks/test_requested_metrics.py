"""Metrics on request: against scikit-learn and loops, in counts, records and reports."""

import math
import re

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from fedshift.analysis.influence import find_bound, find_influence
from fedshift.experiments.settings import Settings
from fedshift.report.tables import pool_metric
from fedshift.results.schema import compute_metric, find_missing, is_lower_better, name_metric, rows_to_frame
from fedshift.tasks import METRICS, Classification, Multilabel, Regression
from fedshift.utils.errors import UsageError

NAMES = ["f1", "top_k(k=2)", "brier", "ece", "average_precision"]
TASK = Classification(requested=tuple(map(METRICS.parse, NAMES)))


def draw(samples, classes, seed=0):
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (samples,), generator=random)
    scores = torch.randn(samples, classes, generator=random, dtype=torch.float64).round(decimals=1)  # with ties
    return scores + torch.eye(classes, dtype=torch.float64)[y], y


def measure(task, outputs, y):
    frame = rows_to_frame([task.measure(outputs, y, outputs.shape[1])])
    return {name: float(compute_metric(frame, name).iloc[0]) for name in task.measured}


def calibration_error(share, y):
    """Guo et al. 2017, equations 2 and 3, bin by bin."""
    error, confidence, right = 0.0, share.max(axis=1), share.argmax(axis=1) == y
    for m in range(15):
        held = [i for i, value in enumerate(confidence) if m / 15 < value <= (m + 1) / 15]
        if held:
            error += len(held) / len(y) * abs(np.mean(right[held]) - np.mean(confidence[held]))
    return error


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_are_those_of_scikit_learn_and_of_loops(classes):
    outputs, y = draw(60, classes)
    truth, share = y.numpy(), outputs.softmax(1).numpy()
    found = measure(TASK, outputs, y)
    chosen = outputs.argmax(1).numpy()
    assert found["f1"] == pytest.approx(sk.f1_score(truth, chosen, average="macro"))
    ranked = np.argsort(-outputs.numpy(), axis=1, kind="stable")[:, :2]
    assert found["top_k(k=2)"] == pytest.approx(np.mean([y in row for y, row in zip(truth, ranked, strict=True)]))
    assert found["ece"] == pytest.approx(calibration_error(share, truth))
    squares = np.square(share - np.eye(classes)[truth]).sum(axis=1).mean()
    ties = share.round(12)  # equal probabilities tie
    one, positive = ties[:, -1], truth == classes - 1
    if classes == 2:
        assert found["brier"] == pytest.approx(sk.brier_score_loss(positive, share[:, -1]))
        assert found["average_precision"] == pytest.approx(sk.average_precision_score(positive, one))
    else:
        assert found["brier"] == pytest.approx(squares)
        each = sk.average_precision_score(np.eye(classes)[truth], ties, average="macro")
        assert found["average_precision"] == pytest.approx(each)


def test_counts_of_clients_add_up_and_what_does_not_is_not_pooled():
    outputs, y = draw(50, 3)
    parts = zip(outputs.split([30, 20]), y.split([30, 20]), strict=True)
    rows = [{"method": "m", "seed": 0, "client": str(i), **TASK.measure(*part, 3)} for i, part in enumerate(parts)]
    whole = measure(TASK, outputs, y)
    for name in NAMES[:-1]:
        assert pool_metric(rows_to_frame(rows), name).item() == pytest.approx(whole[name]), name
    assert math.isnan(pool_metric(rows_to_frame(rows), NAMES[-1]).item())


def test_an_absent_class_has_no_part_and_one_class_alone_no_precision():
    outputs, y = draw(30, 3)
    y[y == 1] = 0
    row = TASK.measure(outputs, y, 3)
    assert find_missing(row, "average_precision") == (1,)
    kept = [sk.average_precision_score(y == k, outputs.softmax(1)[:, k].round(decimals=12)) for k in (0, 2)]
    assert measure(TASK, outputs, y)["average_precision"] == pytest.approx(np.mean(kept))
    assert math.isnan(measure(TASK, outputs, y * 0)["average_precision"])


def test_outputs_that_are_not_finite_are_no_hits():
    outputs, y = draw(4, 3)
    found = measure(TASK, outputs * torch.nan, y)
    assert found["top_k(k=2)"] == 0
    assert all(math.isnan(found[name]) for name in ("brier", "ece", "average_precision"))


def test_counts_that_no_predictions_have_are_told_from_those_that_some_have():
    row = TASK.measure(*draw(12, 3), 3)
    assert TASK.plausible(row)
    for change in (
        {"predicted": [12, 1, 0]}, {"gaps": [13.0] + [0.0] * 14}, {"values": {"average_precision": 1.5}},
        {"sums": {**row["sums"], "brier": 25.0}}, {"sums": {**row["sums"], "top_k(k=2)": 13.0}},
    ):  # fmt: skip
        assert not TASK.plausible({**row, **change}), change


def test_means_over_samples_have_an_interval_on_new_ones_and_biased_metrics_none():
    records = TASK.record_all(*draw(40, 3), 3)
    assert [name for name in NAMES if find_influence(records, name) is None] == ["ece", "average_precision"]
    assert find_bound("top_k(k=2)") == 1


@pytest.mark.parametrize(
    ("metric", "task", "told"),
    [
        ("brier", Regression(), "metric brier is for classification, and the data's task is regression: use rmse"),
        ("average_precisio", Multilabel(), "did you mean 'average_precision'"),
        ("top_k(k=0)", Classification(), "give a whole number of classes"),
        ("top_k(n=3)", Classification(), "unknown argument 'n'"),
        (3, Classification(), "metric=3 is not a metric"),
    ],
)
def test_what_is_no_metric_of_the_task_is_refused(metric, task, told):
    with pytest.raises(UsageError, match=re.escape(told)) as refused:
        Settings(metric=metric).for_task(task)
    assert "metric" in refused.value.settings


def test_directions_and_names():
    assert [name for name in NAMES if is_lower_better(name)] == ["brier", "ece"]
    assert name_metric("top_k(k=2)") == "top-2 accuracy"
    assert METRICS.write(METRICS.parse("top_k(k=3)")) == "top_k(k=3)"
    assert METRICS.parse("top_k").name == "top_k(k=5)"
