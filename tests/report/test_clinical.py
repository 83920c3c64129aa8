"""Tables of decisions and classes from records, against scikit-learn on the same samples."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit, logit
from sklearn import metrics as sk

from fedshift.report.clinical import (
    ALL,
    choose_thresholds,
    count_confusions,
    list_clinical_tables,
    measure_classes,
    tabulate_benefit,
)
from fedshift.report.figures import make_figures
from fedshift.results.cases import Cases
from fedshift.utils.errors import UsageError

SIZES = {"a": 60, "b": 40}


def draw_records(seed, classes, *, lacking=None):
    """Records of two clients under one seed; at ``b``, no sample has class ``lacking``."""
    made = {}
    for place, (client, size) in enumerate(SIZES.items()):
        truth = np.random.default_rng([place, classes]).integers(0, classes, size)
        truth[truth == (lacking if client == "b" else None)] = 0
        random = np.random.default_rng([seed, place])
        score = np.eye(classes)[truth] + random.exponential(1.0, (size, classes))
        score = score / score.sum(axis=1, keepdims=True)
        chosen = score.argmax(axis=1)
        made[client, "personal"] = {
            "truth": truth.astype(np.uint8), "chosen": chosen, "odds": logit(score),
            "right": chosen == truth, "loss": 1.0 * (chosen != truth), "area": np.zeros(size, np.float32),
        }  # fmt: skip
    return made


@pytest.fixture
def make_recorded(make_study):
    """A study of one method and two seeds with records; ``validation``: whether there are those of validation data."""

    def make(classes=2, *, validation=False, lacking=None, **fields):
        study = make_study({"fedavg": [{"a": 50, "b": 240}] * 2}, rounds=1, classes=classes, **fields)
        tested = {s: Cases(round=1, records=draw_records(s, classes, lacking=lacking)) for s in range(2)}
        held = {s: Cases(round=1, records=draw_records(s + 7, classes, lacking=lacking)) for s in range(2)}
        return replace(
            study,
            read_cases=lambda _, seed: tested[seed],
            read_validation=lambda _, seed: held[seed] if validation else None,
        )

    return make


def test_each_class_is_measured_as_scikit_learn_measures_it(make_recorded):
    study = make_recorded(3, lacking=2, class_names=("mel", "nv", "bcc"))
    found = measure_classes(study, "fedavg")
    runs = [study.read_cases("fedavg", seed).records for seed in range(2)]
    for client in ("a", ALL):
        parts = [[run[name, "personal"] for name in SIZES if client in (name, ALL)] for run in runs]
        truth, chosen, score = (
            [np.concatenate([each[key] for each in part]) for part in parts] for key in ("truth", "chosen", "odds")
        )
        for number, name in enumerate(study.class_names):
            row = found.loc[client, name]
            pairs = list(zip(truth, chosen, strict=True))
            assert row["samples", ""] == (truth[0] == number).sum()
            for measure, expected in (
                ("sensitivity", [sk.recall_score(t == number, c == number) for t, c in pairs]),
                ("specificity", [sk.recall_score(t != number, c != number) for t, c in pairs]),
                ("PPV", [sk.precision_score(t == number, c == number) for t, c in pairs]),
                ("NPV", [sk.precision_score(t != number, c != number) for t, c in pairs]),
                ("AUC", [sk.roc_auc_score(t == number, s[:, number]) for t, s in zip(truth, score, strict=True)]),
            ):
                assert row[measure, "value"] == pytest.approx(np.mean(expected), abs=1e-9), (client, name, measure)
                assert row[measure, "low"] < row[measure, "value"] < row[measure, "high"]
    confusion = sum(
        sk.confusion_matrix(run[name, "personal"]["truth"], run[name, "personal"]["chosen"], labels=range(3))
        for run in runs
        for name in SIZES
    )
    np.testing.assert_allclose(count_confusions(study, "fedavg").to_numpy(), confusion / 2)
    assert np.isnan(found.loc["b", "bcc"]["AUC", "value"])  # no sample there, and the other classes have one
    assert found.loc["b", "mel"]["AUC", "value"] > 0.5


def test_each_of_several_labels_is_measured_against_samples_without_it(make_recorded):
    study = make_recorded(3, task="multilabel")
    random = np.random.default_rng(0)
    runs = []
    for _ in range(2):
        given, score = np.random.default_rng(1).random((60, 3)) < 0.4, random.random((60, 3))
        record = {"given": given, "chosen": score > 0.5, "odds": logit(score), "loss": np.zeros(60), "area": np.zeros(60)}
        runs.append(record)
    cases = [Cases(round=1, records={("a", "personal"): run}) for run in runs]
    study = replace(study, read_cases=lambda _, seed: cases[seed])
    found = measure_classes(study, "fedavg").loc["a"]
    for number in range(3):
        expected = [sk.recall_score(run["given"][:, number], run["chosen"][:, number]) for run in runs]
        assert found.loc[f"label {number}"]["sensitivity", "value"] == pytest.approx(np.mean(expected))
    assert [table.file for table in list_clinical_tables(study)] == ["classes-fedavg", "recall-fedavg"]
    assert "calibration" in make_figures(study)
    with pytest.raises(UsageError, match="several labels have no confusion matrix"):
        count_confusions(study, "fedavg")


def test_two_classes_are_decided_where_validation_data_say(make_recorded):
    study = make_recorded(validation=True, operating_point="sensitivity>=0.9")
    thresholds = choose_thresholds(study, "fedavg", 1, "personal")
    row, expected = measure_classes(study, "fedavg").loc["a", "class 1"], []
    for seed in range(2):
        held, tested = (
            read("fedavg", seed).records["a", "personal"] for read in (study.read_validation, study.read_cases)
        )
        called = held["odds"][:, 1] >= thresholds["a"][seed]
        assert called[held["truth"] == 1].mean() >= 0.9
        expected.append((tested["odds"][:, 1] >= thresholds["a"][seed])[tested["truth"] == 1].mean())
    assert row["sensitivity", "value"] == pytest.approx(np.mean(expected))
    assert row["threshold", ""] == pytest.approx(expit(thresholds["a"]).mean())
    text = list_clinical_tables(study)[0].text
    assert text.note.startswith("Thresholds are chosen on each client's validation data (sensitivity>=0.9).")
    assert [row[0].text for row in text.rows] == ["a", "b", ALL]


def test_a_client_without_positive_validation_samples_takes_the_threshold_of_all(make_recorded):
    study = make_recorded(validation=True, lacking=1)
    thresholds = choose_thresholds(study, "fedavg", 1, "personal")
    assert np.isfinite(thresholds["b"]).all()
    assert (thresholds["a"] != thresholds["b"]).any()


def test_without_validation_data_the_threshold_is_one_half_and_the_table_says_so(make_recorded):
    study = make_recorded()
    assert choose_thresholds(study, "fedavg", 1, "personal")["a"].tolist() == [0, 0]
    assert "--validation 0.2" in list_clinical_tables(study)[0].text.note
    assert {"calibration", "decision-curve"} <= make_figures(study).keys()
    curve = tabulate_benefit(study, "fedavg", 1)
    assert curve["all"].iloc[0] == pytest.approx(curve["method"].iloc[0], abs=0.05)


def test_subgroups_are_measured_over_all_clients_or_refused(make_recorded):
    study = make_recorded()
    labels = {name: ["old", "young"] * (size // 2) for name, size in SIZES.items()}
    found = measure_classes(study, "fedavg", subgroups=labels)
    assert [name for name, _ in found.index] == ["old", "young"]
    truth = np.concatenate([study.read_cases("fedavg", 0).records[name, "personal"]["truth"][::2] for name in SIZES])
    assert found.loc["old", "class 1"]["samples", ""] == truth.sum()
    with pytest.raises(UsageError, match="subgroups lack client 'b': give each client a label for each test sample"):
        measure_classes(study, "fedavg", subgroups={"a": labels["a"]})
    with pytest.raises(UsageError, match="subgroups of client 'b': 2 labels for 40 test samples: give each one"):
        measure_classes(study, "fedavg", subgroups=labels | {"b": [1, 2]})
    with pytest.raises(UsageError, match="class 'class 7'"):
        measure_classes(study, "fedavg", positive="class 7")


def test_studies_without_records_have_no_such_tables(study):
    assert measure_classes(study, "fedavg").empty
    assert list_clinical_tables(study) == []
    assert not {"calibration", "decision-curve"} & make_figures(study).keys()
