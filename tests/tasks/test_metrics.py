"""Tasks' counts and the metrics from them: against scikit-learn, and sums over splits against the whole."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from sklearn import metrics as sk

from fedshift.analysis.clinical import AREA, estimate
from fedshift.report.tables import MISSING_PARTS, describe_missing
from fedshift.results.cases import measure_cases
from fedshift.results.schema import COUNTS, METRICS, add_rows, compute_metric, find_missing, rows_to_frame
from fedshift.tasks import CLASSIFICATION, Multilabel, Regression, Segmentation, Survival
from fedshift.tasks.segmentation import LEFT_OUT
from fedshift.utils.errors import UsageError

SEGMENTATION, MULTILABEL, REGRESSION = Segmentation(), Multilabel(), Regression()
TASKS = [CLASSIFICATION, SEGMENTATION, MULTILABEL, REGRESSION]


def draw(task, samples, outputs, seed):
    """Draw predictions and targets as losses take them, a tenth of masks' pixels left out."""
    random = torch.Generator().manual_seed(seed)
    if task == SEGMENTATION:
        y = torch.randint(outputs, (samples, 5, 4), generator=random)
        left_out = torch.rand(y.shape, generator=random) < 0.1
        return torch.randn(samples, outputs, 5, 4, generator=random), y.masked_fill(left_out, LEFT_OUT)
    predictions = torch.randn(samples, outputs, generator=random)
    if task == CLASSIFICATION:
        return predictions, torch.randint(outputs, (samples,), generator=random)
    if task == MULTILABEL:
        return predictions, torch.randint(2, (samples, outputs), generator=random).float()
    return predictions, 3 + 2 * torch.randn(samples, outputs, generator=random)


def measure(task, predictions, y):
    frame = rows_to_frame([task.count(predictions, y, predictions.shape[1])])
    return {metric: float(compute_metric(frame, metric).iloc[0]) for metric in METRICS}


@pytest.mark.parametrize("seed", range(3))
def test_classes_are_measured_as_by_scikit_learn(seed):
    predictions, y = draw(CLASSIFICATION, 50, 4, seed)
    chosen = predictions.argmax(1)
    found = measure(CLASSIFICATION, predictions, y)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y, chosen))
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, chosen))
    scores = predictions.double().softmax(1)
    assert found["auc"] == pytest.approx(sk.roc_auc_score(y, scores, multi_class="ovr"))
    assert found["loss"] == pytest.approx(sk.log_loss(y, scores), rel=1e-5)


@pytest.mark.parametrize("classes", [2, 3])
def test_areas_rank_scores_that_a_softmax_makes_equal(classes):
    """One area in counts and in the table of decisions, of scores on a grid so that log-odds by hand tie as ours do."""
    y = torch.arange(80) % classes
    scores = 50 * torch.randint(-4, 5, (80, classes), generator=torch.Generator().manual_seed(0)).float()
    scores[:, 0] += 400 * torch.rand(80, generator=torch.Generator().manual_seed(1)).round(decimals=2)
    exact = scores.numpy().astype(np.longdouble)
    odds = [exact[:, k] - np.logaddexp.reduce(np.delete(exact, k, 1), axis=1) for k in range(classes)]
    areas = [sk.roc_auc_score(y == k, each.astype(float).round(9)) for k, each in enumerate(odds)]
    assert measure(CLASSIFICATION, scores, y)["auc"] == pytest.approx(np.mean(areas), abs=1e-12)
    assert abs(sk.roc_auc_score(y == 0, scores.double().softmax(1)[:, 0]) - areas[0]) > 0.01
    records = CLASSIFICATION.record(scores, y, classes)
    of_decisions = [estimate(AREA, records["odds"][None, :, k], (y == k).numpy()).value for k in range(classes)]
    assert of_decisions == pytest.approx(areas, abs=1e-12)
    np.testing.assert_allclose(expit(records["odds"]), scores.double().softmax(1), atol=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_masks_are_measured_as_by_scikit_learn_over_the_pixels_that_are_not_ignored(seed):
    predictions, y = draw(SEGMENTATION, 6, 3, seed)
    y[:2][y[:2] == 2] = 1  # two images without class 2, which the first has not in its prediction either
    predictions[0, 2] = -9
    known = y != LEFT_OUT
    assert not known.all()
    chosen, pixels = predictions.argmax(1)[known], y[known]
    found = measure(SEGMENTATION, predictions, y)
    assert found["pooled_dice"] == pytest.approx(np.mean(sk.f1_score(pixels, chosen, average=None)[1:]))
    assert found["pooled_iou"] == pytest.approx(np.mean(sk.jaccard_score(pixels, chosen, average=None)[1:]))
    images = [(m[k].numpy(), p.argmax(0)[k].numpy()) for m, p, k in zip(y, predictions, known, strict=True)]
    sums = [[((t == k).sum() + (p == k).sum(), ((t == k) & (p == k)).sum()) for t, p in images] for k in (1, 2)]
    dice = [[2 * hits / both for both, hits in each if both] for each in sums]
    assert [len(each) for each in dice] == [6, 5]
    assert found["dice"] == pytest.approx(np.mean([np.mean(each) for each in dice]), abs=1e-15)
    iou = [np.mean([hits / (both - hits) for both, hits in each if both]) for each in sums]
    assert found["iou"] == pytest.approx(np.mean(iou), abs=1e-15)
    counts = SEGMENTATION.count(predictions, y, 3)
    assert (counts["cases"], counts["present"]) == ([0, 6, 5], [0, 6, 4])
    of_cases = measure_cases(SEGMENTATION.record(predictions, y, 3), "dice")
    assert of_cases[0] == pytest.approx(dice[0][0])
    assert of_cases[1:] == pytest.approx(np.mean([dice[0][1:], dice[1]], axis=0))
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(pixels, chosen))
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(pixels, chosen))
    of_images = [
        sk.log_loss(mask[mask != LEFT_OUT], scores.double().softmax(0)[:, mask != LEFT_OUT].T, labels=range(3))
        for scores, mask in zip(predictions, y, strict=True)
    ]
    assert found["loss"] == pytest.approx(np.mean(of_images), rel=1e-5)
    assert math.isnan(found["auc"])
    y[5] = LEFT_OUT  # a mask without known pixels counts nothing beside others
    whole, others = SEGMENTATION.count(predictions, y, 3), SEGMENTATION.count(predictions[:5], y[:5], 3)
    assert whole.pop("samples") == others.pop("samples") + 1
    assert whole.pop("loss_sum") == pytest.approx(others.pop("loss_sum"))
    assert whole == others


@pytest.mark.parametrize("seed", range(3))
def test_several_labels_are_measured_as_by_scikit_learn(seed):
    predictions, y = draw(MULTILABEL, 40, 3, seed)
    chosen = predictions > 0
    found = measure(MULTILABEL, predictions, y)
    assert found["f1"] == pytest.approx(sk.f1_score(y, chosen, average="macro"))
    assert found["auc"] == pytest.approx(sk.roc_auc_score(y, predictions, average="macro"))
    assert found["exact_match"] == pytest.approx(sk.accuracy_score(y, chosen))
    each = [sk.log_loss(y[:, k], predictions[:, k].double().sigmoid()) for k in range(3)]
    assert found["loss"] == pytest.approx(np.mean(each), rel=1e-5)


@pytest.mark.parametrize("scales", [(), ((10.0, 3.0), (-1.0, 0.5))])
def test_numbers_are_measured_as_by_scikit_learn_in_the_unit_of_the_data(scales):
    predictions, y = draw(REGRESSION, 40, 2, 0)
    found = measure(Regression(scales=scales), predictions, y)
    mean, std = np.array(scales or ((0, 1), (0, 1))).T
    raw_y, raw = y.numpy().astype(float) * std + mean, predictions.numpy().astype(float) * std + mean
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(raw_y, raw))
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(raw_y, raw))
    assert found["r2"] == pytest.approx(sk.r2_score(raw_y, raw))
    assert found["loss"] == pytest.approx(sk.mean_squared_error(y, predictions))


@pytest.mark.parametrize("offset", [1e6, -1e9])
def test_targets_far_from_zero_have_the_r2_of_scikit_learn_alone_and_pooled(offset):
    task, noise = Regression(scales=((offset, 1.0),)), torch.randn(2, 40, 1, generator=torch.Generator().manual_seed(2))
    predictions, y = noise[0], noise[0] + 0.4 * noise[1]
    y[:10] += 7  # another site's level
    expected = sk.r2_score(y.double(), predictions.double())
    assert measure(task, predictions, y)["r2"] == pytest.approx(expected, rel=1e-6)
    parts = [task.count(*part, 1) for part in zip(predictions.split([10, 30]), y.split([10, 30]), strict=True)]
    pooled = compute_metric(rows_to_frame([add_rows(parts)]), "r2").item()
    assert pooled == pytest.approx(expected, rel=1e-6)
    own = compute_metric(rows_to_frame(parts[:1]), "r2").item()
    assert own == pytest.approx(sk.r2_score(y[:10].double(), predictions[:10].double()), rel=1e-6)


@pytest.mark.parametrize("level", [0.1, 1e6])
def test_a_constant_target_has_no_part_in_r2(level):
    predictions, y = draw(REGRESSION, 40, 3, 0)
    y[:, 1] = level  # the sums of its squares differ from the square of its sum by rounding
    row = REGRESSION.count(predictions, y, 3)
    two = [0, 2]
    assert measure(REGRESSION, predictions, y)["r2"] == pytest.approx(sk.r2_score(y[:, two], predictions[:, two]))
    assert find_missing(row, "r2") == (1,)
    y[:] = level
    assert math.isnan(measure(REGRESSION, predictions, y)["r2"])
    assert find_missing(add_rows([REGRESSION.count(predictions, y, 3)] * 2), "r2") == (0, 1, 2)


CASES = [
    (task, metric)
    for task in (CLASSIFICATION, Segmentation(surface=True), MULTILABEL, REGRESSION)
    for metric in task.metrics
]


@pytest.mark.parametrize(("task", "metric"), CASES, ids=lambda value: str(value))
def test_what_a_metric_leaves_out_neither_makes_the_rest_undefined_nor_counts(task, metric):
    predictions, y = draw(SEGMENTATION if isinstance(task, Segmentation) else task, 12, 4, 0)
    if task == REGRESSION:
        y[:, 2] = 5.0
    elif task == MULTILABEL:
        y[:, 2], predictions[:, 2] = 0, -1.0
    else:
        y[y == 2], predictions[:, 2] = 1, -9.0
    row = task.count(predictions, y, 4)
    whole = measure(task, predictions, y)[metric]
    if metric not in MISSING_PARTS:
        assert find_missing(row, metric) == ()
        assert math.isfinite(whole)
        return
    assert find_missing(row, metric) == (2,)
    kept = [0, 1, 3]  # the same without the class, label or target
    if task in (MULTILABEL, REGRESSION):
        rest = measure(task, predictions[:, kept], y[:, kept])[metric]
    elif metric == "auc":
        scores = predictions.double().softmax(1)
        rest = np.mean([sk.roc_auc_score(y == k, scores[:, k]) for k in kept])
    else:
        rest = measure(task, predictions[:, kept], torch.where(y == 3, 2, y))[metric]
    assert whole == pytest.approx(rest)
    said = describe_missing(rows_to_frame([{"client": "b", **row}]), metric)
    assert f"b {task.output} 2" in said


@settings(max_examples=8)
@given(st.sampled_from(TASKS), st.integers(0, 10**6), st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_counts_of_parts_add_up_to_those_of_the_whole(task, seed, sizes):
    predictions, y = draw(task, sum(sizes), 3, seed)
    whole = task.count(predictions, y, 3)
    summed = add_rows([task.count(*part, 3) for part in zip(predictions.split(sizes), y.split(sizes), strict=True)])
    for metric in set(task.metrics) - {"auc"}:
        values = [compute_metric(rows_to_frame([row]), metric).item() for row in (summed, whole)]
        assert values[0] == pytest.approx(values[1], rel=1e-5, nan_ok=True), metric
    assert whole.keys() - set(COUNTS) <= {"auc", "reference"}


@pytest.mark.parametrize("task", [*TASKS, Regression(scales=((3.0, 2.0),) * 3)], ids=str)
def test_records_of_single_samples_are_the_counts_of_each_alone(task):
    predictions, y = draw(task, 9, 3, 0)
    records = task.record(predictions, y, 3)
    assert {len(each) for each in records.values()} == {9}
    for place in range(9):
        row = task.count(predictions[place : place + 1], y[place : place + 1], 3)
        each = {name: array[place] for name, array in records.items()}
        assert each["loss"] == pytest.approx(row["loss_sum"], rel=1e-5)
        if isinstance(task, Regression):
            assert np.square(each["error"]) == pytest.approx(row["squared"])
            assert each["target"] == pytest.approx(row["reference"])
        elif task == MULTILABEL:
            assert each["given"].tolist() == [bool(n) for n in row["support"]]
            assert each["chosen"].tolist() == [bool(n) for n in row["predicted"]]
        elif task == CLASSIFICATION:
            assert row["support"][each["truth"]] == 1
            assert each["right"] == sum(row["hits"])
        else:
            assert all(each[name].tolist() == row[name] for name in ("hits", "support", "predicted"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("task", [*TASKS, Survival()], ids=str)
def test_an_output_that_is_no_number_is_right_of_none_and_counted(task, value):
    predictions, y = draw(task, 12, 3, 0) if task in TASKS else (torch.randn(12, 1), torch.ones(12, 2).double())
    y[:4] = 0  # what the first index of a row of NaN would mean
    if task == Survival():
        y[:, 0], y[:, 1] = torch.arange(12.0) + 1, 1
    outputs = predictions.shape[1]
    whole, sound = task.count(predictions, y, outputs), task.count(predictions[4:], y[4:], outputs)
    predictions[:4] = value
    row, records = (call(predictions, y, outputs) for call in (task.count, task.record))
    assert (whole["invalid"], row["invalid"]) == (0, 4)
    assert task.is_possible(row)
    assert task.is_possible(row | {"invalid": 0}) == (row["loss_sum"] == math.inf)
    assert math.isnan(compute_metric(rows_to_frame([row]), "loss").item())
    assert row.get("auc") is None
    if task == REGRESSION:
        assert all(math.isnan(compute_metric(rows_to_frame([row]), metric).item()) for metric in ("rmse", "mae", "r2"))
    elif task == Survival():
        assert row["concordant"] == sound["concordant"]
        assert row["comparable"] == whole["comparable"]
    else:
        assert row["hits"] == sound["hits"]
        assert row["support"] == whole["support"]
        assert row.get("exact") == sound.get("exact")
    if task == CLASSIFICATION:
        assert records["chosen"][:4].tolist() == [-1] * 4
        assert not records["right"][:4].any()
    if task == MULTILABEL:
        assert (records["chosen"] != records["given"])[:4].all()


IMAGE = (1, 2, 2)


@pytest.mark.parametrize(
    ("task", "y", "message"),
    [
        (SEGMENTATION, torch.zeros(2, 2, 2).long(), "masks of type torch.int64; they must be uint8"),
        (SEGMENTATION, torch.tensor([[[0, 7], [1, 255]]], dtype=torch.uint8), "a mask holds class 7; classes must be"),
        (SEGMENTATION, torch.full((1, 2, 2), 255, dtype=torch.uint8), "every pixel is ignored"),
        (MULTILABEL, torch.zeros(2, 2), r"targets of shape \(2, 2\); they must be \[samples, 3 labels\]"),
        (MULTILABEL, torch.tensor([[0, 1, math.nan]]), "a label is nan; it must be 0 or 1"),
        (REGRESSION, torch.zeros(2), r"targets of shape \(2,\) and type torch.float32"),
        (REGRESSION, torch.zeros(2, 3).long(), r".* type torch.int64; they must be numbers, \[samples, 3 targets\]"),
    ],
)
def test_targets_that_cannot_be_trained_on_are_refused(task, y, message):
    with pytest.raises(UsageError, match=f"^client 'a': {message}"):
        task.check_targets(y, IMAGE, 3, "client 'a'")
