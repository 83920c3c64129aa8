"""Tables of decisions and classes from records, against scikit-learn on the same samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import expit, logit
from sklearn import metrics as sk

from fedshift.report.clinical import (
    ALL,
    bin_calibration,
    choose_thresholds,
    collect_scores,
    count_confusions,
    list_clinical_tables,
    list_kept,
    measure_classes,
    measure_counts,
    tabulate_benefit,
)
from fedshift.report.figures import make_figures
from fedshift.results.cases import Cases
from fedshift.results.schema import rows_to_frame
from fedshift.tasks.classification import CLASSIFICATION
from fedshift.utils.errors import UsageError
from tests.report.conftest import evaluation

SIZES = {"a": 60, "b": 40}


def draw_records(seed, classes, *, lacking=None):
    """Records of two clients under one seed; at ``b``, no sample has class ``lacking``."""
    records = {}
    for place, (client, size) in enumerate(SIZES.items()):
        truth = np.random.default_rng([place, classes]).integers(0, classes, size)
        truth[truth == (lacking if client == "b" else None)] = 0
        random = np.random.default_rng([seed, place])
        score = np.eye(classes)[truth] + random.exponential(1.0, (size, classes))
        odds = logit(score / score.sum(axis=1, keepdims=True)) + (0 if classes > 2 else [-place, place])
        chosen = odds.argmax(axis=1)
        right = chosen == truth
        records[client, "personal"] = {
            "truth": truth,
            "chosen": chosen,
            "odds": odds,
            "right": right,
            "loss": 1.0 * ~right,
        }
    return records


@pytest.fixture
def make_recorded(make_study):
    """A study of one method and two seeds with records; ``validation``: whether there are those of validation data."""

    def make(classes=2, method="fedavg", *, validation=False, lacking=None, spoil=lambda _: None, **fields):
        study = make_study({method: [{"a": 50, "b": 240}] * 2}, rounds=1, classes=classes, **fields)
        tested = {s: Cases(round=1, records=draw_records(s, classes, lacking=lacking)) for s in range(2)}
        held = {s: Cases(round=1, records=draw_records(s + 7, classes, lacking=lacking)) for s in range(2)}
        spoil(tested[0].records)
        return replace(
            study,
            read_cases=lambda _, seed: tested[seed],
            read_validation=lambda _, seed: held[seed] if validation else None,
        )

    return make


def join(study, name, client=ALL, read="read_cases"):
    """Return an array of records under each seed, of a client or of all."""
    runs = [getattr(study, read)(method, seed).records for method in study.methods for seed in range(2)]
    return [np.concatenate([run[each, "personal"][name] for each in SIZES if client in (each, ALL)]) for run in runs]


def test_each_class_is_measured_as_scikit_learn_measures_it(make_recorded):
    study = make_recorded(3, lacking=2, class_names=("mel", "nv", "bcc"))
    measured = measure_classes(study, "fedavg")
    for client in ("a", ALL):
        truth, chosen, odds = (join(study, name, client) for name in ("truth", "chosen", "odds"))
        for number, name in enumerate(study.class_names):
            row, pairs = measured.loc[client, name], list(zip(truth, chosen, strict=True))
            assert row["samples", ""] == (truth[0] == number).sum()
            for measure, expected in (
                ("sensitivity", [sk.recall_score(t == number, c == number) for t, c in pairs]),
                ("specificity", [sk.recall_score(t != number, c != number) for t, c in pairs]),
                ("PPV", [sk.precision_score(t == number, c == number) for t, c in pairs]),
                ("NPV", [sk.precision_score(t != number, c != number) for t, c in pairs]),
                ("AUC", [sk.roc_auc_score(t == number, s[:, number]) for t, s in zip(truth, odds, strict=True)]),
            ):
                assert row[measure, "value"] == pytest.approx(np.mean(expected), abs=1e-9), (client, name, measure)
                assert row[measure, "low"] < row[measure, "value"] < row[measure, "high"]
    confusions = [sk.confusion_matrix(*pair) for pair in zip(join(study, "truth"), join(study, "chosen"), strict=True)]
    np.testing.assert_allclose(count_confusions(study, "fedavg"), np.mean(confusions, axis=0))
    assert np.isnan(measured.loc["b", "bcc"]["AUC", "value"])  # no sample there, and the other classes have one
    assert measured.loc["b", "mel"]["AUC", "value"] > 0.5


def test_each_of_several_labels_is_measured_against_samples_without_it(make_recorded):
    study, runs = make_recorded(3, task="multilabel"), []
    random, given = np.random.default_rng(0), np.random.default_rng(1).random((60, 3)) < 0.4
    for _ in range(2):
        odds = random.normal(size=(60, 3))
        runs.append({"given": given, "chosen": odds > 0, "odds": odds, "loss": np.zeros(60)})
    study = replace(study, read_cases=lambda _, seed: Cases(round=1, records={("a", "personal"): runs[seed]}))
    measured = measure_classes(study, "fedavg").loc["a"]
    for number in range(3):
        expected = [sk.recall_score(given[:, number], run["chosen"][:, number]) for run in runs]
        assert measured.loc[f"label {number}"]["sensitivity", "value"] == pytest.approx(np.mean(expected))
    assert [table.file for table in list_clinical_tables(study)] == ["classes-fedavg", "recall-fedavg"]
    assert "calibration" in make_figures(study)
    with pytest.raises(UsageError, match="several labels have no confusion matrix"):
        count_confusions(study, "fedavg")


def test_two_classes_are_decided_where_validation_data_say(make_recorded):
    study = make_recorded(validation=True, operating_point="sensitivity>=0.9")
    thresholds = choose_thresholds(study, "fedavg", 1, "personal")["a"]
    row, expected = measure_classes(study, "fedavg").loc["a", "class 1"], []
    for seed, threshold in enumerate(thresholds):
        held, tested = (
            (join(study, "odds", "a", read)[seed], join(study, "truth", "a", read)[seed])
            for read in ("read_validation", "read_cases")
        )
        assert (held[0][held[1] == 1, 1] >= threshold).mean() >= 0.9
        expected.append((tested[0][tested[1] == 1, 1] >= threshold).mean())
    assert row["sensitivity", "value"] == pytest.approx(np.mean(expected))
    assert row["threshold", ""] == pytest.approx(expit(thresholds).mean())
    text = list_clinical_tables(study)[0].text
    assert text.note.startswith("Thresholds are chosen on each client's validation data (sensitivity>=0.9).")
    assert [row[0].text for row in text.rows] == ["a", "b", ALL]


def test_a_client_without_positive_validation_samples_takes_the_threshold_of_all(make_recorded):
    for method in ("fedavg", "fedbn"):
        study = make_recorded(method=method, validation=True, lacking=1)
        thresholds = choose_thresholds(study, method, 1, "personal")
        assert np.isfinite(thresholds["b"]).all()
        assert (thresholds["a"] != thresholds["b"]).any() == (method == "fedavg")  # else the mean of those of clients


def test_a_threshold_that_none_reaches_is_said_and_calls_no_sample_positive(make_recorded):
    study = make_recorded(validation=True, operating_point="specificity>=1", lacking=1)
    lowest = {"odds": np.tile([5.0, -5.0], (60, 1)), "truth": np.arange(60) % 2, "chosen": np.zeros(60, int)}
    study = replace(study, read_validation=lambda *_: Cases(round=1, records={("a", "personal"): lowest}))
    row = measure_classes(study, "fedavg").loc["a", "class 1"]
    assert np.isnan(row["threshold", ""])
    assert (row["sensitivity", "value"], row["specificity", "value"]) == (0, 1)
    text = list_clinical_tables(study)[0].text
    assert [row[2].text for row in text.rows] == ["none", "none", "-"]
    assert "none: no threshold reaches this" in text.note


def test_scores_of_own_models_are_not_ranked_together(make_recorded):
    for method in ("fedavg", "fedbn"):
        study = make_recorded(method=method)
        measured = measure_classes(study, method).droplevel("class").xs("value", axis=1, level="statistic")
        truth, odds = join(study, "truth"), join(study, "odds")
        pooled = np.mean([sk.roc_auc_score(t, s[:, 1]) for t, s in zip(truth, odds, strict=True)])
        mean = measured.loc[list(SIZES)].mean()
        assert pooled != pytest.approx(mean["AUC"], abs=1e-3)
        assert measured["AUC"][ALL] == pytest.approx(pooled if method == "fedavg" else mean["AUC"])
        for measure in ("calibration in the large", "calibration slope"):
            assert (measured[measure][ALL] == pytest.approx(mean[measure])) == (method == "fedbn")
        assert ("Clients have different models" in list_clinical_tables(study)[0].text.note) == (method == "fedbn")
        weighted = sum(tabulate_benefit(study, method, 1, client=c)["method"] * size / 100 for c, size in SIZES.items())
        np.testing.assert_allclose(tabulate_benefit(study, method, 1)["method"], weighted)


@pytest.mark.parametrize("classes", [2, 3])
def test_an_output_that_is_not_a_number_is_never_right(make_recorded, classes):
    def spoil(records):
        records["a", "personal"]["odds"][:10], records["a", "personal"]["chosen"][:10] = np.nan, -1

    study, whole = make_recorded(classes, spoil=spoil), make_recorded(classes)
    measured = measure_classes(study, "fedavg").loc["a"].iloc[-1]
    truth, chosen = (join(study, name, "a") for name in ("truth", "chosen"))
    last = classes - 1
    for measure, kind in (("sensitivity", [t == last for t in truth]), ("specificity", [t != last for t in truth])):
        hits = [
            (k & (c >= 0) & ((c == last) == (measure == "sensitivity")))[k].mean()
            for k, c in zip(kind, chosen, strict=True)
        ]
        assert measured[measure, "value"] == pytest.approx(np.mean(hits))
    assert np.isnan(measured["AUC", "value"])
    assert count_confusions(study, "fedavg")["no prediction"].sum() == 5
    assert (
        bin_calibration(study, "fedavg", None)["count"].sum()
        == bin_calibration(whole, "fedavg", None)["count"].sum() - 10
    )
    assert "Outputs that are not numbers count as wrong" in list_clinical_tables(study)[0].text.note


def test_without_validation_data_the_threshold_is_one_half_and_the_table_says_so(make_recorded):
    study = make_recorded()
    assert choose_thresholds(study, "fedavg", 1, "personal")["a"].tolist() == [0, 0]
    assert "--validation 0.2" in list_clinical_tables(study)[0].text.note
    assert {"calibration", "decision-curve"} <= make_figures(study).keys()


def test_subgroups_are_measured_over_all_clients_or_refused(make_recorded):
    study = make_recorded()
    labels = {name: ["old", "young"] * (size // 2) for name, size in SIZES.items()}
    measured = measure_classes(study, "fedavg", subgroups=labels)
    assert [name for name, _ in measured.index] == ["old", "young"]
    assert measured.loc["old", "class 1"]["samples", ""] == join(study, "truth")[0][::2].sum()
    with pytest.raises(UsageError, match="subgroups lack client 'b': give each client a label for each test sample"):
        measure_classes(study, "fedavg", subgroups={"a": labels["a"]})
    with pytest.raises(UsageError, match="subgroups of client 'b': 2 labels for 40 test samples: give each one"):
        measure_classes(study, "fedavg", subgroups=labels | {"b": [1, 2]})
    with pytest.raises(UsageError, match="class 'class 7'"):
        measure_classes(study, "fedavg", positive="class 7")


@pytest.mark.parametrize(("same_test", "patients"), [({}, 25), ({"b": "a"}, 15)])
def test_clients_share_patients_only_where_they_share_samples(make_recorded, same_test, patients):
    def spoil(records):
        for client, size in SIZES.items():
            records[client, "personal"]["group"] = np.arange(size) // 4

    scores = collect_scores(make_recorded(spoil=spoil, same_test=same_test), "fedavg", "personal", "test")
    assert len(np.unique(scores["group"])) == patients


def test_saturated_scores_have_the_area_of_the_main_table(make_recorded):
    def spoil(records):
        records["a", "personal"] |= CLASSIFICATION.record(outputs, truth, 2)

    truth = torch.from_numpy(draw_records(0, 2)["a", "personal"]["truth"])
    outputs = 200 * torch.randn(60, 2, generator=torch.Generator().manual_seed(0)) + 99 * torch.eye(2)[truth]
    area = CLASSIFICATION.count(outputs, truth, 2)["auc"]
    study = replace(make_recorded(spoil=spoil), seeds=(0,))
    assert measure_classes(study, "fedavg").loc["a", "class 1"]["AUC", "value"] == pytest.approx(area)
    assert sk.roc_auc_score(truth, outputs.softmax(dim=1)[:, 1]) != pytest.approx(area, abs=1e-3)


@pytest.mark.parametrize(("classes", "task"), [(2, "classification"), (3, "classification"), (3, "multilabel")])
def test_counts_of_sites_have_the_shares_of_their_samples(make_recorded, classes, task):
    local = replace(make_recorded(classes), seeds=(0,))
    rows = []
    for client in SIZES:
        truth, chosen = (np.eye(classes)[join(local, name, client)[0]] for name in ("truth", "chosen"))
        sums = {"hits": truth * chosen, "support": truth, "predicted": chosen}
        row = evaluation("fedavg", 0, 1, client, "test", "personal", 0, (1, 1))
        rows.append(row | {"samples": len(truth)} | {name: each.sum(axis=0).tolist() for name, each in sums.items()})
    served = replace(local, served=True, task=task, rows=rows_to_frame(rows), read_cases=lambda *_: None)
    tables = {table.file: table.frame for table in list_clinical_tables(served)}
    if classes == 2:
        assert [*tables] == ["confusion-fedavg"]
        np.testing.assert_allclose(tables["confusion-fedavg"], count_confusions(local, "fedavg"))
    else:
        assert [*tables] == ["classes-fedavg", "recall-fedavg"]
        counted = tables["classes-fedavg"].drop(columns=[("threshold", "")])
        measured = measure_classes(local, "fedavg").loc[ALL]
        np.testing.assert_allclose(counted, measured[counted.columns])
    lacking = {2: "decisions", 3: "confusion" if task == "classification" else "AUC and Brier score"}[classes]
    assert f"would give: {lacking}" in list_kept(served)[0]
    several = replace(served, seeds=(0, 1), rows=rows_to_frame([{**row, "seed": s} for row in rows for s in range(2)]))
    assert measure_counts(several, "fedavg").xs("low", axis=1, level="statistic").isna().all(axis=None)


def test_a_patient_whose_risk_is_not_a_number_is_in_no_third(make_recorded):
    risk = np.where(np.arange(12) == 4, np.nan, np.arange(12))
    record = {"time": np.arange(1.0, 13), "event": risk > 5, "risk": risk}
    case = Cases(round=1, records={("a", "personal"): record})
    (table,) = list_clinical_tables(replace(make_recorded(task="survival"), read_cases=lambda *_: case))
    assert [row[1].text for row in table.text.rows] == ["4", "3", "4"]
    assert table.text.note.endswith("Patients whose predicted risk is not a number are in no third: 1.")


def test_studies_without_records_have_no_such_tables(study):
    assert measure_classes(study, "fedavg").empty
    assert count_confusions(study, "fedavg", "a").empty
    with pytest.raises(UsageError, match="client 'c'"):
        tabulate_benefit(study, "fedavg", 1, client="c")
    assert list_clinical_tables(study) == []
    assert not {"calibration", "decision-curve"} & make_figures(study).keys()
