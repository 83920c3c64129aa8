"""Reports by metrics on request, whose counts have no column of their own, honor the direction of each."""

from dataclasses import replace

import pandas as pd
import pytest

from fedshift.report.differences import compare_methods, count_verdicts
from fedshift.report.formatting import format_metric_table
from fedshift.report.tables import accuracy_table, find_reported_rounds
from fedshift.report.target_metric import find_reached
from fedshift.results.schema import is_lower_better, rows_to_frame

LOWER = "own.module:distance(lower_is_better=True)"


def in_sums(summary, metric):
    """Return ``summary`` by ``metric``, which is one less than the accuracy where a higher value is better."""
    rows = summary.rows.to_dict("records")
    for row in rows:
        if row["hits"] is not None:
            hits = float(sum(row["hits"]))
            row["sums"] = {metric: hits if metric == "own.module:likeness" else row["samples"] - hits}
    return replace(summary, rows=rows_to_frame(rows), metric=metric, metrics=("accuracy", metric, "loss"))


@pytest.mark.parametrize("metric", ["brier", LOWER, "own.module:likeness"])
def test_the_better_direction_is_that_of_the_metric_everywhere(make_study, metric):
    held = {"fedavg": [{"a": [60, 40, 10], "b": [200, 100, 50]}], "fedbn": [{"a": [30, 90, 50], "b": [99, 290, 200]}]}
    held = {name: runs * 3 for name, runs in held.items()}
    plain = make_study(rounds=3, validation=held)
    study = in_sums(plain, metric)
    assert find_reported_rounds(replace(study, select="best")).groupby("method").first().to_dict() == {
        "fedavg": 1,
        "fedbn": 2,
    }
    table = format_metric_table(accuracy_table(study), metric)
    macro = next(row for row in table.rows if row[0].text == "macro")
    assert [cell.best for cell in macro[1:]] == [False, True]
    worst = accuracy_table(study).loc["worst client", ("fedavg", "mean")]
    ends = accuracy_table(study).iloc[:2][("fedavg", "mean")]
    assert worst == (ends.min() if metric == "own.module:likeness" else ends.max())
    ours, theirs = (compare_methods(each, metric=name) for each, name in ((study, metric), (plain, "accuracy")))
    sign = -1 if is_lower_better(metric) else 1
    assert ours["difference"].tolist() == pytest.approx((sign * theirs["difference"]).tolist())
    worst = [count_verdicts(each, lower=lower)["worst"].item() for each, lower in ((ours, sign < 0), (theirs, False))]
    assert worst[0] == worst[1]
    target = 0.65 if metric == "own.module:likeness" else 0.35  # a macro accuracy of 65 %
    pd.testing.assert_frame_equal(find_reached(study, target), find_reached(plain, 0.65))
