"""Tables of classes from the counts that sites send, in place of the results of single samples, which sites keep.

One seed's recall, and with counts of predictions also specificity and predictive values, are those of
:mod:`.clinical`. Intervals take samples as independent, since sites do not tell which of them are of one patient. Of
several seeds there are none, since counts do not tell on which samples these agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from ..analysis.influence import Floats
from ..results.schema import RunSummary
from .clinical import (
    ALL,
    MOST,
    Cells,
    Scores,
    find_positive,
    list_cells,
    list_class_tables,
    make_confusion_table,
    make_frame,
    measure_scores,
    name_classes,
)
from .report import ReportTable
from .tables import ONE_BY_ONE, select_reported_rows

COUNTS = ("hits", "support", "predicted")
INTERVALS = (
    "Sites keep the results of single samples: 95 % intervals take samples as independent, and there are none of "
)
INTERVALS += "several seeds."


def collect_counts(summary: RunSummary, method: str) -> dict[str, dict[str, Floats]]:
    """Return the counts ``[R, K]`` of each client's test samples by class, under R seeds, and of :data:`ALL` together.

    ``predicted`` is counted of several labels, and for the metric ``f1``. Empty without counts, or for masks.
    """
    rows, held = select_reported_rows(summary), dict[str, dict[str, Floats]]()
    names = [name for name in COUNTS if rows[name].notna().all()]
    if summary.task not in ("classification", "multilabel") or not {"hits", "support"} <= {*names}:
        return {}
    for client in map(str, summary.clients):
        own = rows[(rows["method"] == method) & (rows["client"] == client)]
        if len(own) == len(summary.seeds):
            held[client] = {name: np.array(own[name].tolist(), float) for name in names}
            held[client]["samples"] = own["samples"].to_numpy(float)
    if held:
        held[ALL] = {name: np.sum([counts[name] for counts in held.values()], axis=0) for name in (*names, "samples")}
    return held


def measure_counts(summary: RunSummary, method: str) -> pd.DataFrame:
    """Return :func:`~fedshift.report.clinical.measure_classes` without positive class, as far as counts define it.

    There is neither AUC nor Brier score, and without counts of predictions only sensitivity. Empty without counts.
    """
    found: dict[tuple[str, str], Cells] = {}
    for client, counts in collect_counts(summary, method).items():
        for number, name in enumerate(name_classes(summary)):
            own = {kind: counts[kind][:, number] for kind in COUNTS if kind in counts}
            estimates = measure_scores(*_place_samples(own, int(counts["samples"][0])), 1, calibrated=False)
            if "predicted" not in own:
                estimates = {"sensitivity": estimates["sensitivity"]}
            if len(summary.seeds) > 1:
                estimates = {kind: replace(each, low=math.nan, high=math.nan) for kind, each in estimates.items()}
            found[client, name] = list_cells(own["support"][0], estimates)
    return make_frame(found, "client")


def _place_samples(counts: Mapping[str, Floats], samples: int) -> tuple[Scores, np.ndarray]:
    """Return samples that have the ``counts`` of one class: first those of the class, and of these the hits first."""
    place_N, hits, support = np.arange(samples), counts["hits"][:, None], counts["support"][:, None]
    wrong = counts.get("predicted", counts["hits"])[:, None] - hits
    called_RN = (place_N < hits) | ((place_N >= support) & (place_N < support + wrong))
    truth = (place_N < support[0]).astype(np.int64)
    return Scores(truth=truth, chosen=called_RN.astype(np.int64), score=None, group=None), called_RN


def confuse_two(summary: RunSummary, method: str) -> pd.DataFrame:
    """Return :func:`~fedshift.report.clinical.count_confusions` of two classes, which their counts determine."""
    counts, names = collect_counts(summary, method)[ALL], name_classes(summary)
    right, wrong = (each.mean(axis=0) for each in (counts["hits"], counts["support"] - counts["hits"]))
    frame = pd.DataFrame([[right[0], wrong[0]], [wrong[1], right[1]]], index=names, columns=names)
    return frame.rename_axis(index="class", columns="predicted")


def list_counted_tables(summary: RunSummary) -> Iterator[ReportTable]:
    """Yield those of :func:`~fedshift.report.clinical.list_clinical_tables` that follow from counts."""
    if len(summary.clients) > ONE_BY_ONE or summary.classes > MOST:
        return
    for method in summary.methods:
        frame = measure_counts(summary, method)
        if frame.empty:
            continue
        if find_positive(summary, None) is None:
            yield from list_class_tables(summary, method, frame, INTERVALS)
        else:
            yield make_confusion_table(method, confuse_two(summary, method))


def list_kept(summary: RunSummary) -> list[str]:
    """Return a sentence on the tables that a run whose samples are at sites lacks, and why; none for other runs."""
    if not summary.served or len(summary.clients) > ONE_BY_ONE or summary.classes > MOST:
        return []
    lacking = []
    if summary.task == "survival":
        lacking = ["survival (it needs single patients' times)"]
    elif summary.task in ("classification", "multilabel"):
        if find_positive(summary, None) is not None:
            lacking = ["decisions (thresholds need single samples' scores)"]
        elif summary.task == "classification":
            lacking = ["confusion (it needs single samples' predictions)"]
            if not summary.rows["predicted"].notna().any():
                lacking.append("classes (it needs the number of predictions of each class, which the metric f1 counts)")
        if find_positive(summary, None) is None and len(lacking) < 2:
            lacking.append("AUC and Brier score in classes (they need single samples' scores)")
    if not lacking:
        return []
    return [f"Tables that results of single samples, which never leave a site, would give: {'; '.join(lacking)}."]
