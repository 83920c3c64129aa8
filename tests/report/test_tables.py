"""Every number of a table against the same number worked out by hand; the choice of the reported round."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from fedshift.report import accuracy_table
from fedshift.report.differences import MEAN, compare_methods
from fedshift.report.page import make_metric_table
from fedshift.report.tables import (
    ONE_BY_ONE,
    QUANTILES,
    describe_majority,
    describe_missing,
    find_reported_rounds,
    list_shortfalls,
    metric_history,
    patient_table,
    seed_table,
    traffic_table,
)
from fedshift.results.cases import Cases
from fedshift.results.schema import rows_to_frame
from fedshift.tasks import Segmentation
from fedshift.utils.errors import UsageError
from tests.report.conftest import in_errors


def percent(table, row, method):
    return tuple(100 * table.loc[row, method][["mean", "std"]])


def test_accuracy_table_by_hand(study):
    table = accuracy_table(study)
    assert list(table.index) == ["a", "b", "macro", "pooled", "worst client"]
    assert table.columns.tolist() == [(m, s) for m in ("fedavg", "fedbn") for s in ("mean", "std", "seeds")]
    assert set(table.xs("seeds", axis=1, level="statistic").to_numpy().flat) == {3}
    assert percent(table, "a", "fedavg") == pytest.approx((52, 2))
    assert percent(table, "b", "fedavg") == pytest.approx((82, 2))
    assert percent(table, "macro", "fedavg") == pytest.approx((67, 2))
    assert percent(table, "pooled", "fedavg") == pytest.approx((74.5, 2))  # 290, 298 and 306 of 400
    assert percent(table, "worst client", "fedavg") == pytest.approx((52, 2))
    assert percent(table, "macro", "fedbn") == pytest.approx((73, 3))
    assert percent(table, "pooled", "fedbn") == pytest.approx((78, 3))  # 300, 312 and 324 of 400


def test_worst_client_is_taken_within_each_seed(make_study):
    table = accuracy_table(make_study({"fedavg": [{"a": 50, "b": 240}, {"a": 90, "b": 210}]}))
    assert percent(table, "worst client", "fedavg")[0] == pytest.approx((50 + 70) / 2)


def test_balanced_accuracy_by_hand(study):
    seeds = seed_table(study, "balanced_accuracy")["fedavg"][0]
    assert seeds["a"] == pytest.approx((50 / 80 + 0 / 20) / 2)
    assert seeds["b"] == pytest.approx((150 / 150 + 90 / 150) / 2)
    assert seeds["pooled"] == pytest.approx((200 / 230 + 90 / 170) / 2)


def test_loss_of_the_worst_client_is_the_highest(study):
    seeds = seed_table(study, "loss")["fedavg"][0]
    assert seeds.to_dict() == pytest.approx({"a": 0.5, "b": 0.2, "macro": 0.35, "pooled": 0.275, "worst client": 0.5})


def test_a_table_or_series_that_is_changed_changes_no_later_one(study):
    seeds, rounds = seed_table(study), find_reported_rounds(study)
    seeds.iloc[:], rounds.iloc[:] = 0, 0
    assert percent(accuracy_table(study), "macro", "fedavg") == pytest.approx((67, 2))
    assert set(find_reported_rounds(study)) == {2}


def test_of_many_clients_there_are_quantiles_within_each_seed(make_crowd):
    crowd = make_crowd(202, seeds=2)
    crowd.rows.loc[crowd.rows["seed"] == 1, "hits"] = pd.Series([[0, 0]] * len(crowd.rows), index=crowd.rows.index)
    seeds = seed_table(crowd)["fedavg"]
    assert seeds.index[202:].tolist() == ["macro", "pooled", "worst client", *QUANTILES, "best client"]
    assert seeds[0].iloc[202:].tolist() == pytest.approx([0.5, 0.5, 0, 0.05, 0.25, 0.5, 0.75, 0.95, 1])
    assert percent(accuracy_table(crowd), "best client", "fedavg")[0] == pytest.approx(50)
    loss = seed_table(crowd, "loss")["fedavg"][0]
    assert loss[["worst client", "5 % quantile", "best client"]].tolist() == pytest.approx([1, 0.05, 0])
    assert "median" not in seed_table(make_crowd(ONE_BY_ONE)).index


def test_auc_has_no_pooled_row(study):
    study.rows.loc[study.rows["client"] == "a", "auc"] = 0.9
    seeds = seed_table(study, "auc")
    assert list(seeds.index) == ["a", "b", "macro", "worst client"]
    assert seeds["fedbn"][0]["macro"] == pytest.approx(0.9)


def test_global_table_holds_only_methods_with_a_global_model(study):
    table = accuracy_table(study, model="global")
    assert table.columns.get_level_values("method").unique().tolist() == ["fedavg"]
    assert percent(table, "a", "fedavg")[0] == pytest.approx(42)


def test_one_seed_has_no_deviation(make_study):
    table = accuracy_table(make_study({"fedavg": [{"a": 50, "b": 240}]}))
    assert table["fedavg"]["std"].isna().all()
    assert table.loc["macro", ("fedavg", "mean")] == pytest.approx(0.65)


def test_a_missing_client_is_nan_and_aggregates_are_over_the_rest(make_study):
    study = make_study(keep=lambda row: (row["method"], row["client"]) != ("fedbn", "a"))
    table = accuracy_table(study)
    assert math.isnan(table.loc["a", ("fedbn", "mean")])
    assert table.loc["a", ("fedbn", "seeds")] == 0
    assert percent(table, "macro", "fedbn") == pytest.approx(percent(table, "b", "fedbn"))
    for name in ("macro", "pooled", "worst client"):
        assert percent(table, name, "fedavg") == pytest.approx(percent(table, "b", "fedavg")), name
    assert not math.isnan(table.loc["a", ("fedavg", "mean")])
    assert list_shortfalls(study) == [
        "fedbn, client a: not measured at the reported round (seeds 0, 1, 2).",
        "Aggregates of every method are over the same 1 of 2 clients, those that have a value under every method; "
        "differences are over the clients that both methods have.",
    ]


def test_common_clients_are_those_of_each_seed_and_a_method_that_measured_nobody_takes_none_away(make_study):
    lacking = {("fedbn", 0, "a"), ("fedavg", 1, "b"), ("fedbn", 2, "a"), ("fedbn", 2, "b")}
    study = make_study(keep=lambda row: (row["method"], row["seed"], row["client"]) not in lacking)
    seeds = seed_table(study)
    assert math.isnan(seeds.loc["macro", ("fedbn", 2)])
    assert (100 * seeds.loc["macro", "fedavg"]).tolist() == pytest.approx([80, 52, 69])
    assert (100 * seeds.loc["pooled", "fedavg"]).tolist() == pytest.approx([80, 52, 76.5])
    assert (100 * seeds.loc["macro", "fedbn"][:2]).tolist() == pytest.approx([80, 63])
    assert any("over the same 1 to 2 (by seed) of 2 clients" in sentence for sentence in list_shortfalls(study))


def test_a_metric_that_is_not_defined_is_not_called_unmeasured(make_study):
    study = replace(make_study(), metric="auc")
    study.rows.loc[study.rows["client"] == "a", "auc"] = None
    said = list_shortfalls(study)
    assert any("AUC is not defined there" in sentence for sentence in said)
    assert not any("not measured" in sentence for sentence in said)


def test_an_area_that_one_client_does_not_define_is_averaged_over_the_others(make_study):
    study = replace(make_study(), metric="auc")
    support = study.rows["client"].map({"a": [100, 0], "b": [150, 150]})
    study.rows["support"] = support.where(study.rows["split"] != "train", None)
    for place, (client, seed, method) in study.rows[["client", "seed", "method"]].iterrows():
        study.rows.loc[place, "auc"] = None if client == "a" else 0.8 + 0.01 * seed + 0.05 * (method == "fedbn")
    table = make_metric_table(study)
    assert [row[1].text for row in table.text.rows][:3] == ["-", "81.00 (1.00)", "81.00 (1.00)"]
    assert table.text.note.endswith(
        "AUC is the mean over the classes or labels that some samples of a client have and others lack; left out: a "
        "classes 0, 1. It is not defined for a, and means are over the other clients."
    )
    assert compare_methods(study).loc[("fedbn", MEAN), "difference"] == pytest.approx(0.05)
    assert any("fedavg, client a: AUC is not defined there" in said for said in list_shortfalls(study))


def test_best_round_does_not_prefer_rounds_that_define_the_metric_for_more_clients(make_study):
    held = {"fedbn": [{"a": [100, 0], "b": [200, 160]}]}  # in round 1 client a's is undefined, and rightly so
    study = make_study({"fedbn": [{"a": 60, "b": 240}]}, select="best", validation=held)
    first = (study.rows["round"] == 1) & (study.rows["client"] == "a") & (study.rows["split"] == "validation")
    study.rows["case_dice"] = [[0.0, counts[1]] if counts else None for counts in study.rows["hits"]]
    study.rows["cases"] = study.rows["support"]
    for place in study.rows.index[first]:
        study.rows.at[place, "case_dice"] = study.rows.at[place, "cases"] = [100, 0]
    masks = replace(study, task="segmentation", metric="dice", metrics=("dice", "loss"))
    assert find_reported_rounds(masks).tolist() == [1]


def test_clients_without_any_predicted_mask_are_named(study):
    rows = study.rows[study.rows["split"] == "test"].copy()
    kept = rows["support"].tolist()
    empty = (rows["client"] == "b") & (rows["method"] == "fedbn")
    empty |= (rows["client"] == "a") & (rows["method"] == "fedavg") & (rows["seed"] == 0)
    rows["predicted"] = [[sum(counts), 0] if none else counts for counts, none in zip(kept, empty, strict=True)]
    masks = replace(study, rows=rows, task="segmentation", metric="dice", metrics=("dice", "loss"))
    said = "fedbn, client b: every predicted mask is empty. Train for more rounds or at another learning rate."
    assert [text for text in list_shortfalls(masks) if "empty" in text] == [said]


def test_difference_is_over_the_clients_that_both_have(make_study):
    study = make_study(keep=lambda row: (row["method"], row["client"]) != ("fedbn", "a"))
    assert 100 * compare_methods(study).loc[("fedbn", MEAN), "difference"] == pytest.approx(83 - 82)


def test_difference_is_over_the_seeds_that_both_have(make_study):
    study = make_study(keep=lambda row: (row["method"], row["seed"]) != ("fedbn", 2))
    row = compare_methods(study).loc[("fedbn", MEAN)]
    assert row["seeds"] == 2
    assert 100 * row["difference"] == pytest.approx(5.5)


def test_baseline(make_study):
    study = make_study({name: [{"a": 50, "b": 240}] for name in ("silobn", "fedbn")})
    assert [*compare_methods(study).index.unique("method")] == ["fedbn"]
    assert [*compare_methods(study, "fedbn").index.unique("method")] == ["silobn"]
    with pytest.raises(UsageError, match="unknown baseline 'fedavg'"):
        compare_methods(study, "fedavg")


def test_last_round_is_each_run_s_own(make_study):
    study = make_study(keep=lambda row: (row["method"], row["seed"]) != ("fedbn", 2) or row["round"] == 1)
    rounds = find_reported_rounds(study)
    assert rounds["fedavg"].tolist() == [2, 2, 2]
    assert rounds["fedbn"].tolist() == [2, 2, 1]
    assert list_shortfalls(study) == ["fedbn, seed 2: evaluated up to round 1 of 2."]
    assert 100 * seed_table(study).loc["a", ("fedbn", 2)] == pytest.approx(33)


BEST = {"a": [10, 20, 20], "b": [30, 60, 60]}  # rounds 2 and 3 tie


def test_of_errors_the_round_of_the_lowest_is_the_best(make_study):
    study = in_errors(make_study(select="best"))
    assert set(find_reported_rounds(study)) == {1}  # a half of the last round's
    table = accuracy_table(study)
    assert table.loc["macro", ("fedavg", "mean")] == pytest.approx((5.2 / 2 + 24.6 / 2) / 2)


def test_best_is_the_earliest_round_of_the_best_validation_accuracy(make_study):
    study = make_study({"fedavg": [{"a": 50, "b": 240}]}, rounds=3, select="best", validation={"fedavg": [BEST]})
    assert find_reported_rounds(study).to_dict() == {("fedavg", 0): 2}


def test_best_never_looks_at_test_data(make_study):
    study = make_study({"fedavg": [{"a": 50, "b": 240}]}, rounds=3, select="best", validation={"fedavg": [BEST]})
    before = find_reported_rounds(study)
    tested = study.rows["split"] == "test"
    study.rows.loc[tested, "hits"] = pd.Series([[0, 0]] * tested.sum(), index=study.rows.index[tested])
    study.rows.loc[tested & (study.rows["round"] == 1), "hits"] = study.rows["support"]
    pd.testing.assert_series_equal(find_reported_rounds(study), before)
    assert seed_table(study).loc["macro", ("fedavg", 0)] == 0


def test_best_is_chosen_among_rounds_that_measured_every_client(make_study):
    study = make_study(
        {"fedavg": [{"a": 50, "b": 240}]},
        rounds=3,
        select="best",
        validation={"fedavg": [{"a": [10, 11, 12], "b": [300, 30, 33]}]},
        keep=lambda row: (row["client"], row["round"]) != ("a", 1),
    )
    assert find_reported_rounds(study).to_dict() == {("fedavg", 0): 3}


def test_best_without_validation_data_is_refused(make_study):
    with pytest.raises(UsageError, match="needs validation data"):
        find_reported_rounds(make_study(select="best", keep=lambda row: row["split"] != "validation"))


def test_history_and_traffic(study):
    loss = metric_history(study, "loss", model=None, split="train", moment="trained")
    assert loss.groupby("round")["value"].mean().to_dict() == pytest.approx({1: 1, 2: 0.5})
    totals = traffic_table(study).loc["fedavg"]
    assert totals[["down per round", "up in total", "both in total"]].tolist() == [1000, 1000, 3000]


@pytest.mark.parametrize("wrong", [{"metric": "f1"}, {"model": "local"}])
def test_unknown_choices_are_refused(study, wrong):
    with pytest.raises(UsageError, match=f"unknown {next(iter(wrong))}"):
        accuracy_table(study, **wrong)


def test_unknown_metric_and_rule_are_refused(make_study):
    with pytest.raises(UsageError, match="unknown metric"):
        metric_history(make_study(), "f1")
    with pytest.raises(UsageError, match="unknown select"):
        find_reported_rounds(make_study(select="first"))


def test_edge_cases(edge_case):
    table = accuracy_table(edge_case)
    assert len(table) == 5
    assert len(compare_methods(edge_case)) == 3 * (len(edge_case.methods) - 1)
    assert all(isinstance(sentence, str) for sentence in list_shortfalls(edge_case))


# The accuracy of one class for all


def test_the_majority_class_is_that_of_the_training_data_where_known(make_study):
    # test data: client a has 80 and 20 samples of its two classes, b 150 and 150
    assert describe_majority(make_study(majority={"a": 1, "b": 0})) == (
        "Predicting each client's most frequent class (training data) for all its test samples: "
        "a 20.00, b 50.00, macro 35.00, pooled 42.50."
    )
    unknown = describe_majority(make_study())
    assert "(test data)" in unknown
    assert "a 80.00, b 50.00, macro 65.00, pooled 57.50." in unknown


def test_the_majority_class_of_many_clients_is_given_by_its_extremes(make_crowd):
    crowd = make_crowd(12)
    first = crowd.rows["client"] == "client 0"
    rows = crowd.rows.assign(support=[[90, 10] if mark else [40, 60] for mark in first])
    said = describe_majority(replace(crowd, rows=rows))
    assert said.endswith("macro 62.50, pooled 62.50; lowest client 1 60.00, highest client 0 90.00.")


def test_only_tables_of_accuracy_name_the_majority_class(study):
    for metric in study.metrics:
        note = make_metric_table(study, metric=metric).text.note
        assert ("most frequent class" in note) == (metric == "accuracy")


def test_outputs_that_are_not_numbers_are_counted_by_method_and_client(study):
    assert not any("not numbers" in said for said in list_shortfalls(study))
    broken = (study.rows["method"] == "fedavg") & (study.rows["client"] == "a") & (study.rows["split"] == "test")
    broken = replace(study, rows=study.rows.assign(invalid=3 * broken))
    (said,) = (said for said in list_shortfalls(broken) if "not numbers" in said)
    assert said.startswith("fedavg: outputs that are not numbers (NaN or infinite) count as wrong")
    assert said.endswith("Test samples, of all seeds: a 9 of 300.")


def test_masks_are_summarized_by_patient_and_cases_without_a_class_are_counted(study):
    """Class 2 is in the first of four truths; two patients with three cases and one."""
    random = torch.Generator().manual_seed(0)
    predictions, y = torch.randn(4, 3, 5, 5, generator=random), torch.randint(2, (4, 5, 5), generator=random)
    predictions[3, 2], y[0, 0] = -9, 2
    task, patients = Segmentation(), {"group": np.array([0, 0, 0, 1])}
    records = {**task.record(predictions, y, 3), **patients}
    masks = replace(
        study, task="segmentation", metric="dice", metrics=("dice", "loss"),
        read_cases=lambda *_: Cases(round=2, records={("a", "personal"): records}),
    )  # fmt: skip
    chosen, each = predictions.argmax(1), []
    for guess, truth in zip(chosen, y, strict=True):
        sizes = [int((guess == k).sum() + (truth == k).sum()) for k in (1, 2)]
        hits = [int(((guess == k) & (truth == k)).sum()) for k in (1, 2)]
        each.append(np.mean([2 * right / size for right, size in zip(hits, sizes, strict=True) if size]))
    values = [np.mean(each[:3]), each[3]]
    row = patient_table(masks).loc["a", "fedbn"]
    assert row.tolist() == pytest.approx([np.mean(values), np.std(values, ddof=1), 2])
    assert patient_table(study).empty
    rows = rows_to_frame([{"method": "m", "client": "a", **task.count(predictions, y, 3)}])
    assert describe_missing(rows, "dice").endswith("left out (by method) otherwise: class 2 in 3 of 4 (m 1).")
    assert describe_missing(rows, "dice", 1) == ""
