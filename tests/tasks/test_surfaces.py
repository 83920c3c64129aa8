"""Distances between surfaces: against closed forms, and against all pairs of surface pixels."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

import fedshift
from fedshift.report.page import make_report
from fedshift.results.schema import compute_metric, rows_to_frame
from fedshift.tasks import Segmentation, describe_task, restore_task
from fedshift.tasks.segmentation import LEFT_OUT
from fedshift.utils.errors import UsageError

METRICS = ("surface_distance", "hausdorff95")


def scores(masks, classes):
    """Network outputs of which the largest is at the class of each pixel."""
    return torch.nn.functional.one_hot(masks, classes).movedim(-1, 1).float()


def measure(predicted, truth, classes=2, **options):
    counts = Segmentation(surface=True, **options).count(scores(predicted, classes), truth, classes)
    frame = rows_to_frame([counts])
    return [float(compute_metric(frame, metric).iloc[0]) for metric in METRICS]


def square(size, start, end):
    mask = torch.zeros(1, size, size, dtype=torch.int64)
    mask[:, start:end, start:end] = 1
    return mask


@pytest.mark.parametrize("step", [1.0, 0.25])
@pytest.mark.parametrize(("side", "gap"), [(5, 3), (8, 1), (1, 4)])
def test_a_square_around_a_square_has_the_distances_of_the_closed_form(side, gap, step):
    inner, outer = square(24, 6, 6 + side), square(24, 6 - gap, 6 + side + gap)
    edge = 4 * (side - 1) if side > 1 else 1
    beyond = [math.hypot(gap, along) for along in range(1, gap)] * 8 + [math.hypot(gap, gap)] * 4
    outward = [gap] * 4 * side + beyond
    assert len(outward) == 4 * (side + 2 * gap - 1)
    average = (edge * gap + sum(outward)) / (edge + len(outward))
    expected = [step * average, step * max(gap, np.percentile(outward, 95))]
    assert measure(inner, outer, spacing=(step, step)) == pytest.approx(expected)
    assert measure(outer, inner, spacing=(step, step)) == pytest.approx(expected)


def list_surface(mask, spacing):
    """Places of the pixels that have a neighbor outside of the mask."""
    padded = np.pad(mask, 1)
    near = [np.roll(padded, way, axis) for axis in range(mask.ndim) for way in (-1, 1)]
    return (np.argwhere(padded & ~np.logical_and.reduce(near)) - 1) * spacing


def measure_by_pairs(predicted, truth, classes, spacing):
    """Both metrics, from the distances of all pairs of surface pixels."""
    found = []
    for number in range(1, classes):
        values = []
        for guess, true in zip(predicted.numpy(), truth.numpy(), strict=True):
            ends = [list_surface(mask, spacing) for mask in ((guess == number) & (true != LEFT_OUT), true == number)]
            if all(map(len, ends)):
                pairs = cdist(*ends)
                both = pairs.min(axis=1), pairs.min(axis=0)
                values.append([np.concatenate(both).mean(), max(np.percentile(each, 95) for each in both)])
            elif any(map(len, ends)):
                values.append([math.hypot(*(np.array(true.shape) - 1) * spacing)] * 2)
        found += [np.mean(values, axis=0)] if values else []
    return np.mean(found, axis=0) if found else [math.nan] * 2


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(6, 5), (1, 7), (3, 4, 3)]), st.booleans())
def test_surfaces_are_measured_as_by_all_pairs_of_pixels(seed, shape, spaced):
    random = torch.Generator().manual_seed(seed)
    predicted, truth = (torch.randint(3, (2, *shape), generator=random) for _ in range(2))
    predicted[0] *= (torch.rand(shape, generator=random) < 0.4).long()
    truth[1] *= bool(seed % 2)
    truth = truth.masked_fill(torch.rand(truth.shape, generator=random) < 0.1, LEFT_OUT)
    spacing = (0.5, 2.0, 1.25)[: len(shape)] if spaced else ()
    found = measure(predicted, truth, 3, spacing=spacing)
    assert found == pytest.approx(measure_by_pairs(predicted, truth, 3, spacing or (1.0,) * len(shape)), nan_ok=True)


def test_a_class_that_is_missed_or_invented_counts_as_far_as_the_corners_are_apart():
    nothing, something = square(4, 0, 0), square(4, 1, 3)
    assert measure(nothing, something, spacing=(1.0, 2.0)) == pytest.approx([math.hypot(3, 6)] * 2)
    assert measure(something, nothing, spacing=(1.0, 2.0)) == pytest.approx([math.hypot(3, 6)] * 2)
    assert np.isnan(measure(nothing, nothing)).all()
    both = torch.cat((nothing, something))
    assert measure(both, both) == [0.0, 0.0]


def test_counts_of_parts_add_up_and_are_possible_and_others_are_not():
    task, random = Segmentation(surface=True), torch.Generator().manual_seed(0)
    predicted, truth = (torch.randint(3, (5, 6, 4), generator=random) for _ in range(2))
    parts = [task.count(scores(a, 3), b, 3) for a, b in zip(predicted.split([2, 3]), truth.split([2, 3]), strict=True)]
    whole = task.count(scores(predicted, 3), truth, 3)
    for name in whole:
        np.testing.assert_allclose(np.sum([part[name] for part in parts], axis=0), whole[name], rtol=1e-6)
    perfect = task.count(scores(truth, 3), truth, 3)
    assert task.is_possible(whole)
    assert task.is_possible(perfect)
    assert task.is_possible(task.count(scores(predicted * 0, 3), truth * 0, 3))
    for counts, change in (
        (whole, {"distances": [0.0, -1.0, 0.0]}),
        (whole, {"cases": [0, 6, 5]}),
        (whole, {"present": [0, 0, 5]}),
        (whole, {"case_dice": [0.0, 5.1, 1.0]}),
        (whole, {"hausdorff": [1.0, 1.0, 1.0]}),
        (perfect, {"distances": [0.0, 1.0, 0.0]}),
    ):
        assert not task.is_possible(counts | change)


def test_surfaces_are_counted_where_they_are_asked_for_and_an_answer_names_the_option():
    assert set(METRICS) & set(Segmentation().metrics) == set()
    assert set(METRICS) < set(Segmentation(surface=True).metrics)
    described = json.loads(json.dumps(describe_task(Segmentation(surface=True, spacing=(2, 0.5)))))
    assert restore_task(described) == Segmentation(surface=True, spacing=(2.0, 0.5))
    with pytest.raises(UsageError, match=r"counted with task='segmentation\(surface=True\)'"):
        fedshift.compare(data="nuclei", methods="fedavg", metric="hausdorff95", rounds=1)


@pytest.mark.parametrize("options", [{"spacing": (1.0, 0.0)}, {"spacing": (1.0,)}, {"spacing": "a"}, {"surface": 1}])
def test_a_spacing_that_is_none_is_refused(options):
    with pytest.raises(UsageError, match=r"^segmentation: surface=.* spacing=.*: give True or False"):
        Segmentation(**options)


def test_a_spacing_of_other_axes_than_the_masks_is_refused():
    with pytest.raises(UsageError, match=r"^a: masks of 4 x 4, and spacing=\(1.0, 1.0, 1.0\) of 3 axes"):
        Segmentation(spacing=(1, 1, 1)).check_targets(torch.zeros(2, 4, 4, dtype=torch.uint8), (1, 4, 4), 2, "a")


@pytest.mark.slow
def test_a_comparison_reports_surface_distances_by_client_and_class():
    draw = np.random.default_rng(0)
    x = draw.random((12, 1, 8, 8), np.float32)
    y = np.digitize(x[:, 0], [0.3, 0.6]).astype(np.uint8)
    data = {name: (x[at:6], y[at:6], x[6:], y[6:]) for name, at in {"north": 0, "south": 2}.items()}
    run = fedshift.compare(
        data=data, task="segmentation(surface=True)", metric="surface_distance", methods="fedavg, fedbn",
        model="unet-small(width=2)", rounds=1,
    )  # fmt: skip
    table = run.table().xs("mean", axis=1, level="statistic")
    assert (table.loc[["north", "south", "macro", "pooled"]] > 0).all(axis=None)
    names = ["north", "south", "pooled"]
    for metric in ("dice", *METRICS):
        each = [run.table(metric, number=number).loc[names, ("fedbn", "mean")] for number in (1, 2)]
        assert np.mean(each, axis=0) == pytest.approx(run.table(metric).loc[names, ("fedbn", "mean")])
    with pytest.raises(UsageError, match=r"class 3: give one of the classes of masks, from 1"):
        run.table(number=3)
    titles = [table.title for table in make_report(run.summary).list_tables("page", "metrics")]
    assert [title for title in titles if "of class" in title][:3] == [
        f"{name}, personal model" for name in ("Dice of class 1", "Dice of class 2", "Surface distance of class 1")
    ]
    assert "surface distance" in str(run)
    assert "units of the pixel spacing" in str(run)
