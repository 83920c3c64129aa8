"""Targets of every task from arrays, .npz files, tables and frames; numbers whose spread is taken out and put back."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedshift
from fedshift.config.spec import DataSpec, RunSpec
from fedshift.data.assembly import federation
from fedshift.data.federation import encode_targets
from fedshift.data.sources import load_source, prepare_clients
from fedshift.experiments.factory import make_experiment
from fedshift.new_clients.site_data import load_site
from fedshift.tasks import CLASSIFICATION, TASKS, Multilabel, Regression, Segmentation
from fedshift.utils.errors import UsageError

RNG = np.random.default_rng(0)
X, IMAGES = RNG.normal(size=(12, 4)), RNG.integers(0, 256, (12, 5, 6), dtype=np.uint8)
NUMBERS, MASKS = 1000 + 50 * RNG.normal(size=(12, 2)), RNG.integers(0, 3, (12, 5, 6))
LABELS = RNG.integers(0, 2, (12, 3))


@dataclass(frozen=True, kw_only=True)
class Ranks(Regression):
    """A task of a user's."""

    name = "ranks"


def linear(shape, outputs):
    return nn.Linear(shape[0], outputs)


def clients(x, y):
    return {name: (x[k:8], y[k:8], x[8:], y[8:]) for k, name in enumerate("ab")}


@pytest.mark.parametrize(
    ("x", "y", "task", "kind", "classes"),
    [
        (X, LABELS[:, 0], None, CLASSIFICATION, 2),
        (X, LABELS[:, :1].astype(float), None, CLASSIFICATION, 2),
        (IMAGES, MASKS, None, Segmentation(), 3),
        (IMAGES, MASKS[:, None], "segmentation", Segmentation(), 3),
        (X, LABELS, "multilabel", Multilabel(), 3),
        (X, NUMBERS, "regression", Regression(), 2),
        (X, NUMBERS[:, 0], "regression(standardize=False)", Regression(standardize=False), 1),
        (X, np.arange(12), f"{__name__}:Ranks", Ranks(), 1),
    ],
)
def test_arrays_become_targets_of_the_task(x, y, task, kind, classes):
    made = federation(clients(x, y), task=task).check()
    assert (made.task, made.classes) == (kind, classes)
    expected = y[:8].reshape(8, *((5, 6) if kind == Segmentation() else () if kind == CLASSIFICATION else (-1,)))
    assert np.array_equal(made.client("a").train.y.numpy(), expected)
    dtypes = {"segmentation": torch.uint8, "multilabel": torch.float32, "classification": torch.int64}
    assert made.client("a").train.y.dtype == dtypes.get(kind.name, torch.float64)


@pytest.mark.parametrize(
    ("x", "y", "task", "said"),
    [
        (X, LABELS, None, r"for several numbers, name the task \(task='multilabel', each label 0 or 1, or task='regr"),
        (X, NUMBERS[:, 0], None, r"labels are not whole numbers; .* predict numbers \(task='regression'\)"),
        (IMAGES, MASKS[:, :4], None, "masks of 4 x 6 for images of 5 x 6"),
        (IMAGES, MASKS + 254, None, "masks with values from 254 to 256; give whole numbers"),
        (IMAGES, MASKS + 0.5, None, "masks with values from 0.5 to 2.5; give whole numbers"),
        (IMAGES, LABELS, "segmentation", r"masks of shape \(8, 3\) for samples of shape \(1, 5, 6\)"),
        (X, 2 * LABELS, "multilabel", "a label is 2; it must be 0 or 1"),
        (X, np.where(NUMBERS > 1000, np.nan, NUMBERS), "regression", r"the target of sample \d is NaN or infinite"),
        (IMAGES, MASKS, "regression", r"targets of shape \(8, 5, 6\); give a row of numbers for each sample"),
        (X, LABELS, "multilable", "unknown task 'multilable': did you mean 'multilabel'"),
        (X, LABELS, "torch.nn:Linear(in_features=2, out_features=2)", "is not a task: give classification"),
        (X, LABELS, 3, "task=3 is not a task"),
        (X, NUMBERS, "regression(standardize=3)", "standardize=3: give True, False, or mean and standard deviation"),
    ],
)
def test_arrays_that_are_no_such_targets_are_refused(x, y, task, said):
    with pytest.raises(UsageError, match=said):
        federation(clients(x, y), task=task).check()


def prepare(task, **changes):
    spec = DataSpec(task=task, **changes)
    return encode_targets(prepare_clients(load_source(clients(X, NUMBERS), spec), spec))


def test_numbers_are_standardized_by_all_clients_training_samples():
    made = prepare("regression")
    both = np.concatenate([NUMBERS[:8], NUMBERS[1:8]])
    np.testing.assert_allclose(made.task.scales, np.stack([both.mean(0), both.std(0)], axis=1), rtol=1e-12)
    for part, raw in (("train", NUMBERS[:8]), ("test", NUMBERS[8:])):
        y = made.client("a").splits[part].y
        assert y.dtype == torch.float32
        np.testing.assert_allclose(y, (raw - both.mean(0)) / both.std(0), atol=1e-6)
    given = prepare("regression(standardize=((1000.0, 50.0), (0.0, 1.0)))").client("b").train.y
    np.testing.assert_allclose(given, (NUMBERS[1:8] - [1000, 0]) / [50, 1], rtol=1e-6)
    raw = prepare("regression(standardize=False)")
    assert np.array_equal(raw.client("a").train.y, NUMBERS[:8])
    assert raw.task.scales == ()
    with pytest.raises(UsageError, match="mean and deviation of 1 targets, and the data have 2"):
        prepare("regression(standardize=((0.0, 1.0),))")


def test_a_client_that_never_trains_has_no_influence_on_the_scale_of_targets():
    data = {"a": clients(X, NUMBERS)["a"], "new": clients(X, 1e6 + NUMBERS)["b"]}
    spec = RunSpec(task="regression", method="fedavg", model="abide-mlp", newcomers="n*", data=data)
    made = make_experiment(spec).data
    own = NUMBERS[:8]
    np.testing.assert_allclose(made.task.scales, np.stack([own.mean(0), own.std(0)], axis=1), rtol=1e-12)
    expected = (1e6 + NUMBERS[1:8] - own.mean(0)) / own.std(0)
    np.testing.assert_allclose(made.client("new").train.y, expected, rtol=1e-6)


def test_errors_are_in_the_unit_of_the_data(tmp_path):
    """Whatever the unit, networks learn the same, and errors are those in that unit."""
    found = [
        fedshift.compare(
            data=clients(X, factor * (NUMBERS - 1000)), methods="fedavg", model=linear, task="regression", rounds=3,
            lr=0.1, out=tmp_path / str(factor), progress=False,
        ).summary.rows
        for factor in (1, 1000)
    ]  # fmt: skip
    small, large = (rows[rows["split"] == "test"] for rows in found)
    np.testing.assert_allclose(np.stack(large["squared"]), 1e6 * np.stack(small["squared"]), rtol=1e-4)
    np.testing.assert_allclose(large["loss_sum"], small["loss_sum"], rtol=1e-4)
    assert small["loss_sum"].iloc[-1] < small["loss_sum"].iloc[0]


def write_tables(place, name="ab", **columns):
    place.mkdir()
    for client in name:
        frame = pd.DataFrame({"age": range(12), "dose": X[:, 0], **{key: list(each) for key, each in columns.items()}})
        frame.to_csv(place / f"{client}.csv", index=False)
    return str(place)


def test_columns_of_tables_are_targets(tmp_path):
    path = write_tables(tmp_path / "t", price=NUMBERS[:, 0], size=NUMBERS[:, 1], ill=LABELS[:, 0], old=LABELS[:, 1] > 0)
    read = load_source(path, DataSpec(target="price, size", task="regression"))
    assert (read.classes, read.class_names, len(read.columns)) == (2, ("price", "size"), 4)
    rows = np.concatenate([read.client("a").train.y, read.client("a").test.y])
    ages = np.concatenate(
        [part.copy_rows(slice(None))[:, 0] for part in (read.client("a").train, read.client("a").test)]
    )
    np.testing.assert_array_equal(rows[ages.argsort()], NUMBERS)
    labels = load_source(path, DataSpec(target="ill,old", task="multilabel")).check()
    assert set(labels.client("b").train.y.unique().tolist()) == {0.0, 1.0}
    assert sum(len(split) for split in labels.client("b").splits.values()) == 12
    with pytest.raises(UsageError, match=r"no class: .*learn numbers"):
        load_source(path, DataSpec(target="price"))
    text = write_tables(tmp_path / "text", price=["cheap", *"12345678901"])
    with pytest.raises(UsageError, match="target 'price' is 'cheap' in some rows, no number, which regression needs"):
        load_source(text, DataSpec(target="price", task="regression"))


def test_a_new_client_is_scaled_as_those_of_the_run(tmp_path):
    path = write_tables(tmp_path / "t", price=NUMBERS[:, 0])
    spec = RunSpec(data=path, target="price", task="regression", method="fedavg", model=f"{__name__}:linear")
    run = make_experiment(spec).data
    other = write_tables(tmp_path / "new", "c", price=7 + 2 * NUMBERS[:, 0])
    new = load_site(other, spec, run.schema)
    mean, deviation = run.task.scales[0]
    both = np.concatenate([new.client("c").train.y, new.client("c").test.y])
    np.testing.assert_allclose(np.sort(both[:, 0]), np.sort((7 + 2 * NUMBERS[:, 0] - mean) / deviation), rtol=1e-5)
    with pytest.raises(UsageError, match=r"is for classification, and the run's data, .* for regression"):
        load_site(federation(clients(X[:, :2], LABELS[:, 0])), spec, run.schema)


def test_npz_files_take_any_task_and_data_by_name_one_of_their_kind(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=X[:8], y_train=LABELS[:8], x_test=X[8:], y_test=LABELS[8:])
    read = load_source(str(tmp_path), DataSpec(task="multilabel")).check()
    assert (read.task, read.classes) == (Multilabel(), 3)
    with pytest.raises(UsageError, match="task 'multilabel': digits is for classification: leave the task out"):
        load_source("digits", DataSpec(task="multilabel"))
    assert load_source("nuclei", DataSpec(task="segmentation(surface=True)")).task == Segmentation(surface=True)
    assert TASKS.parse("classification") == CLASSIFICATION


ABSURD = (2**62, np.uint64(2**63 + 5), 1e300, -(2**62), float("nan"), 0.5)


@pytest.mark.parametrize("label", ABSURD)
def test_a_label_that_is_no_class_is_refused_with_sample_and_file(label, tmp_path):
    y = np.arange(len(X), dtype=type(label) if isinstance(label, np.generic) else np.dtype(type(label))) % 2
    y[3] = label
    np.savez(tmp_path / "ann.npz", x_train=X, y_train=y, x_test=X, y_test=np.zeros(len(X), int))
    with pytest.raises(UsageError, match=r"ann\.npz, train data: .* of sample 3 is") as refused:
        load_source(str(tmp_path), DataSpec(classes=3))
    assert str(y[3]) in str(refused.value)
    torch_data = TensorDataset(torch.zeros(len(X), 4), torch.from_numpy(y.astype(np.float64)))
    with pytest.raises(UsageError, match=r"client 'ann', train data: .* of sample 3 is"):
        federation({"ann": (torch_data, torch_data)})


@pytest.mark.parametrize(("label", "samples"), [(1000, 8), (1007, 8), (1100, 1100)])
def test_more_classes_than_samples_are_meant_only_if_their_number_is_given(label, samples):
    x, y = np.zeros((samples // 2, 4)), np.arange(samples // 2) % 2
    given = {"ann": (x, np.where(np.arange(len(y)) == 2, label, y), x, y)}
    with pytest.raises(UsageError, match=rf"'ann', train data: the label of sample 2 is {label}.*classes={label + 1}"):
        federation(given)
    assert federation(given, classes=label + 1).check().classes == label + 1
    few = {"ann": (x, np.where(np.arange(len(y)) == 2, max(999, samples - 1), y), x, y)}
    assert federation(few).classes == max(1000, samples)
    with pytest.raises(UsageError, match="classes=4611686018427387904"):
        federation(given, classes=2**62)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((0, 255), "client 'ann', train data: masks hold only 0 and 255, and 255 means that a pixel is ignored"),
        ((0, 128), r"masks hold class 128, and only 2 of 0\.\.128 occur .*\(classes=129\)"),
        (range(0, 256, 5), "'ann', train data: masks hold 255 and 50 values between 0 and 255, as after smoothing"),
        ((0, 1, 200), r"masks hold class 200, and only 3 of 0\.\.200 occur"),
    ],
)
def test_masks_of_classes_that_do_not_occur_are_refused(values, said):
    masks = np.resize(np.array(values, np.uint8), IMAGES.shape)
    with pytest.raises(UsageError, match=said):
        federation({"ann": (IMAGES, masks, IMAGES, masks)})
    assert federation({"ann": (IMAGES, masks, IMAGES, masks)}, classes=255).check().classes == 255


def test_one_client_that_writes_the_foreground_as_255_is_refused():
    ones, white = (np.resize(np.array(values, np.uint8), IMAGES.shape) for values in ((0, 1), (0, 255)))
    with pytest.raises(UsageError, match="client 'bob', train data: masks hold only 0 and 255"):
        federation({"ann": (IMAGES, ones) * 2, "bob": (IMAGES, white) * 2})


def test_whole_numbers_of_a_column_are_told_apart_exactly(tmp_path):
    rows = pd.DataFrame({"client": ["a", "b"] * 8, "age": range(16), "y": ([2**53] * 2 + [2**53 + 1] * 2) * 4})
    rows.to_csv(tmp_path / "rows.csv", index=False)
    made = load_source(str(tmp_path / "rows.csv"), DataSpec(client_column="client", target="y"))
    assert made.class_names == ("9007199254740992", "9007199254740993")


@pytest.mark.parametrize(
    ("x", "y", "options", "absent"),
    [
        (X, LABELS[:, 0] + 1, {}, "sample has class 0, and networks have 3 outputs, for classes 0 to 2"),
        (X, 2 * LABELS[:, 0], {}, "sample has class 1, and networks have 3 outputs"),
        (IMAGES, MASKS + 1, {}, "pixel has class 0, and networks have 4 outputs"),
        (X, LABELS[:, 0], {}, ""),
        (X, LABELS[:, 0] + 1, {"classes": 3}, ""),
    ],
)
def test_classes_that_no_training_target_has_are_said(x, y, options, absent):
    notices = federation(clients(x, y), **options).notices
    assert [f"no training {absent}" in notice for notice in notices] == [True] * bool(absent)
