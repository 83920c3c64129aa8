"""Classification as clinics read it, from the records of single samples: shares by class and client, and curves.

With two classes, or one named as positive, a sample counts as positive from a threshold of its score on, which each
client's validation data choose (:class:`~fedshift.analysis.clinical.OperatingPoint`); validation data of one kind alone
cannot, and then those of all clients do, each under its own model. Without validation data the threshold is 0.5. With
more classes, each class is measured against the rest, where a sample counts as the class of the highest score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..analysis.clinical import (
    Bools,
    CalibrationBins,
    Estimate,
    Ints,
    bin_scores,
    estimate_area,
    estimate_calibration,
    estimate_mean,
    estimate_share,
    find_net_benefit,
    parse_operating_point,
)
from ..analysis.influence import Floats
from ..results.run_directory import to_file_name
from ..results.schema import RunSummary
from ..utils.errors import UsageError, unknown_name
from .formatting import MINUS, MISSING, TextTable, make_table
from .progress import remembered
from .report import ReportTable, detail_table
from .survival import list_survival_tables
from .tables import ONE_BY_ONE, find_reported_rounds

ALL = "all clients"
"""Row of the samples of all clients together."""
MEASURES = ("sensitivity", "specificity", "PPV", "NPV", "AUC", "Brier score")
CALIBRATION = ("calibration intercept", "calibration slope")
Cells = dict[tuple[str, str], float]
"""Cells of a row of :func:`measure_classes`, by measure and statistic."""
THRESHOLDS = tuple(np.round(np.arange(0.01, 1.0, 0.01), 2).tolist())
"""Probability thresholds of decision curves."""
WITHOUT_VALIDATION = 0.5
"""Threshold of a score where no validation data choose one."""
MOST = 12
"""Largest number of classes with tables on the page."""
INTERVALS = "95 % intervals cover test samples (or groups of these) and seeds, and are not corrected for their number."
WITHOUT_RULE = "Sensitivity is the recall of the class. The class of the highest score counts as predicted."
OF_LABELS = "Sensitivity is the recall of the label, which counts as predicted from a probability of one half on."
WITHOUT_DATA = f"No validation data: the threshold is {WITHOUT_VALIDATION}; with --validation 0.2, some choose it."


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Results on N samples under R seeds: ``truth [N]``, ``chosen [R, N]`` and, up to ten classes, ``score [R, N, K]``.

    Of several labels, ``truth [N, K]`` and ``chosen [R, N, K]`` say whether a sample has a label, 0 or 1. ``group
    [N]``: numbers of groups; None: none are known.
    """

    truth: Ints
    chosen: Ints
    score: Floats | None
    group: Ints | None

    @property
    def labeled(self) -> bool:
        """Whether a sample may have several labels."""
        return self.truth.ndim == 2

    def is_of(self, number: int) -> Bools:
        """Return whether each sample has class or label ``number``, bool ``[N]``."""
        return np.asarray(self.truth[:, number] == 1 if self.labeled else self.truth == number)

    def is_called(self, number: int) -> Bools:
        """Return whether class or label ``number`` is predicted of each sample, bool ``[R, N]``."""
        return np.asarray(self.chosen[:, :, number] == 1 if self.labeled else self.chosen == number)

    def take(self, kept_N: Bools) -> Scores:
        """Return the samples in ``kept``."""
        return Scores(
            truth=self.truth[kept_N],
            chosen=self.chosen[:, kept_N],
            score=None if self.score is None else self.score[:, kept_N],
            group=None if self.group is None else self.group[kept_N],
        )


@remembered
def collect_scores(summary: RunSummary, method: str, model: str, split: str) -> dict[str, Scores]:
    """Return the results of ``method`` on each client's samples of ``split``; empty unless all its seeds have records.

    Clients without records, or with other samples from seed to seed, are left out.
    """
    read = summary.read_cases if split == "test" else summary.read_validation
    reported = find_reported_rounds(summary)
    cases = [read(method, seed) for seed in summary.seeds if (method, seed) in reported.index]
    rounds = [int(reported[method, seed]) for seed in summary.seeds if (method, seed) in reported.index]
    if not cases or any(each is None or each.round != number for each, number in zip(cases, rounds, strict=True)):
        return {}
    made: dict[str, Scores] = {}
    for client in map(str, summary.clients):
        found = [each.records.get((client, model)) for each in cases if each is not None]
        if any(each is None or "chosen" not in each for each in found):
            continue
        known = [each for each in found if each is not None]
        first = known[0]
        truth = "given" if "given" in first else "truth"
        if truth not in first or any(not np.array_equal(each[truth], first[truth]) for each in known):
            continue
        made[client] = Scores(
            truth=first[truth].astype(np.int64),
            chosen=np.stack([each["chosen"].astype(np.int64) for each in known]),
            score=np.stack([each["score"].astype(float) for each in known]) if "score" in first else None,
            group=first["group"].astype(np.int64) if "group" in first else None,
        )
    return made


def join_scores(parts: Mapping[str, Scores], same_test: Mapping[str, str]) -> Scores:
    """Return the samples of all clients, of which two share groups only where they share test data (``same_test``)."""
    own = {
        name: np.arange(len(each.truth)) if each.group is None else each.group
        for name, each in parts.items()
        if same_test.get(name, name) not in parts or same_test.get(name, name) == name
    }
    starts = np.cumsum([0, *(int(group.max(initial=-1)) + 1 for group in own.values())]).tolist()
    numbers = {name: group + start for (name, group), start in zip(own.items(), starts, strict=False)}
    scores = [each.score for each in parts.values() if each.score is not None]
    grouped = len(own) < len(parts) or any(each.group is not None for each in parts.values())
    return Scores(
        truth=np.concatenate([each.truth for each in parts.values()]),
        chosen=np.concatenate([each.chosen for each in parts.values()], axis=1),
        score=np.concatenate(scores, axis=1) if len(scores) == len(parts) else None,
        group=np.concatenate([numbers[name if name in own else same_test[name]] for name in parts])
        if grouped
        else None,
    )


def name_classes(summary: RunSummary) -> list[str]:
    """Return the name of each class or label: its number if it has none."""
    known, noun = len(summary.class_names) == summary.classes, "label" if summary.task == "multilabel" else "class"
    return list(summary.class_names) if known else [f"{noun} {number}" for number in range(summary.classes)]


def find_positive(summary: RunSummary, positive: str | int | None) -> int | None:
    """Return the number of the class that counts as positive: of two, the second; else one that is named, or None.

    Raises :class:`UsageError` for a class that is unknown.
    """
    if positive is None:
        return 1 if summary.classes == 2 and summary.task != "multilabel" else None
    names = name_classes(summary)
    if isinstance(positive, str) and positive in names:
        return names.index(positive)
    if isinstance(positive, int) and 0 <= positive < summary.classes:
        return positive
    raise unknown_name("class", str(positive), names).about("positive")


@remembered
def choose_thresholds(summary: RunSummary, method: str, positive: int, model: str) -> dict[str, Floats]:
    """Return each client's threshold of the score of class ``positive`` under each seed, float64 ``[R]``."""
    rule = parse_operating_point(summary.operating_point)
    held = {
        name: each
        for name, each in collect_scores(summary, method, model, "validation").items()
        if each.score is not None
    }

    def choose(scores: Scores) -> Floats:
        assert scores.score is not None
        return np.array([rule.choose(each[:, positive], scores.is_of(positive)) for each in scores.score])

    together = choose(join_scores(held, {})) if held else None
    made: dict[str, Floats] = {}
    for client, tested in collect_scores(summary, method, model, "test").items():
        own = choose(held[client]) if client in held else np.full(len(tested.chosen), math.nan)
        if together is not None:
            own = np.where(np.isnan(own), together, own)
        made[client] = np.where(np.isnan(own), WITHOUT_VALIDATION, own)
    return made


def measure_classes(
    summary: RunSummary,
    method: str,
    *,
    positive: str | int | None = None,
    model: str = "personal",
    subgroups: Mapping[str, Sequence[object]] | None = None,
) -> pd.DataFrame:
    """Return each measure of each class on each client's test samples, and on those of all together.

    ``subgroups``: a label for each test sample of each client, by whose values rows are then made, over all clients.

    Returns a row for each client (or subgroup) and class. Columns: ``samples`` (of the class), ``threshold`` (mean over
    seeds; NaN where the highest score decides), and for each of :data:`MEASURES`, and with a positive class of
    :data:`CALIBRATION`, ``value``, ``low`` and ``high``. Empty without records.

    Raises:
        UsageError: A class or a client is unknown, or subgroups do not fit the test samples.

    """
    place = find_positive(summary, positive)
    held = collect_scores(summary, method, model, "test")
    if not held:
        return pd.DataFrame()
    rows = {**dict.fromkeys(held), ALL: None} if subgroups is None else _find_subgroups(held, subgroups)
    names, classes = name_classes(summary), range(summary.classes) if place is None else [place]
    thresholds = {} if place is None else choose_thresholds(summary, method, place, model)
    joined = join_scores(held, summary.same_test)
    called = {number: _call_samples(summary, method, number, place, model) for number in classes}
    owner_N = np.repeat(list(held), [len(each.truth) for each in held.values()])
    found: dict[tuple[str, str], Cells] = {}
    for row, kept_N in rows.items():
        if kept_N is None:
            kept_N = np.ones(len(owner_N), bool) if row == ALL and row not in held else owner_N == row
        scores = joined.take(kept_N)
        for number in classes:
            threshold = float(np.mean(thresholds[row])) if row in thresholds else math.nan
            estimates = measure_scores(scores, called[number][:, kept_N], number, calibrated=place is not None)
            found[row, names[number]] = list_cells(scores.is_of(number).sum(), estimates, threshold)
    return make_frame(found, "client" if subgroups is None else "subgroup")


def list_cells(samples: float, estimates: Mapping[str, Estimate], threshold: float = math.nan) -> Cells:
    """Return the cells of a row of :func:`measure_classes`."""
    cells = {("samples", ""): float(samples), ("threshold", ""): threshold}
    for measure, each in estimates.items():
        cells |= {(measure, "value"): each.value, (measure, "low"): each.low, (measure, "high"): each.high}
    return cells


def make_frame(found: dict[tuple[str, str], Cells], what: str) -> pd.DataFrame:
    """Return a row for each ``what`` (client or subgroup) and class; empty without rows."""
    frame = pd.DataFrame.from_dict(found, orient="index")
    if frame.empty:
        return frame
    frame.index = pd.MultiIndex.from_tuples(list(found), names=[what, "class"])
    keys = dict.fromkeys(key for cells in found.values() for key in cells)
    frame.columns = pd.MultiIndex.from_tuples(list(keys), names=["measure", "statistic"])
    return frame


def _find_subgroups(held: Mapping[str, Scores], subgroups: Mapping[str, Sequence[object]]) -> dict[str, Bools]:
    """Return the samples of each subgroup, of all clients' samples together; raise :class:`UsageError` for others."""
    labels: list[str] = []
    for client, scores in held.items():
        if client not in subgroups:
            raise UsageError(f"subgroups lack client {client!r}: give each client a label for each test sample")
        own = [str(label) for label in subgroups[client]]
        if len(own) != len(scores.truth):
            raise UsageError(
                f"subgroups of client {client!r}: {len(own)} labels for {len(scores.truth)} test samples: give each one"
            )
        labels += own
    label_N = np.array(labels)
    return {str(label): label_N == label for label in sorted(set(labels))}


def _call_samples(summary: RunSummary, method: str, number: int, positive: int | None, model: str) -> Bools:
    """Return whether class ``number`` counts as predicted of each sample of all clients, ``[R, N]``."""
    held = collect_scores(summary, method, model, "test")
    if positive is None or any(scores.score is None for scores in held.values()):
        return np.concatenate([scores.is_called(number) for scores in held.values()], axis=1)
    at = choose_thresholds(summary, method, positive, model)
    parts = [(client, scores.score) for client, scores in held.items() if scores.score is not None]
    return np.concatenate([score[:, :, positive] >= at[client][:, None] for client, score in parts], axis=1)


def measure_scores(scores: Scores, called_RN: Bools, number: int, *, calibrated: bool) -> dict[str, Estimate]:
    """Return the measures of class ``number``, predicted of the samples ``called``, against the rest."""
    positive_N, group_N = scores.is_of(number), scores.group
    positive_RN = np.broadcast_to(positive_N, called_RN.shape)
    made = {
        "sensitivity": estimate_share(called_RN, positive_RN, group_N),
        "specificity": estimate_share(~called_RN, ~positive_RN, group_N),
        "PPV": estimate_share(positive_RN, called_RN, group_N),
        "NPV": estimate_share(~positive_RN, ~called_RN, group_N),
    }
    if scores.score is not None:
        score_RN = scores.score[:, :, number]
        made["AUC"] = estimate_area(score_RN, positive_N, group_N)
        made["Brier score"] = estimate_mean(np.square(score_RN - positive_N), group_N)
        if calibrated:
            made |= dict(zip(CALIBRATION, estimate_calibration(score_RN, positive_N, group_N), strict=True))
    return made


def count_confusions(
    summary: RunSummary, method: str, client: str | None = None, model: str = "personal"
) -> pd.DataFrame:
    """Return how many test samples of each class (rows) were predicted as each (columns), mean over seeds.

    The class of the highest score counts as predicted. ``client``: only its samples; None: all samples. Raises
    :class:`UsageError` for an unknown client, and for several labels.
    """
    held = collect_scores(summary, method, model, "test")
    if client is not None and client not in held:
        raise unknown_name("client", client, held)
    names, classes = name_classes(summary), summary.classes
    parts = list(held.values()) if client is None else [held[client]]
    if any(scores.labeled for scores in parts):
        raise UsageError("samples with several labels have no confusion matrix: classes() measures each label")
    count = np.zeros(classes * classes)
    for scores in parts:
        for chosen_N in scores.chosen:
            count += np.bincount(scores.truth * classes + chosen_N, minlength=classes**2) / len(scores.chosen)
    frame = pd.DataFrame(count.reshape(classes, classes), index=names, columns=names)
    return frame.rename_axis(index="class", columns="predicted")


def bin_calibration(
    summary: RunSummary, method: str, positive: int | None, model: str = "personal", client: str | None = None
) -> CalibrationBins | None:
    """Return the calibration curve over all seeds; None without scores.

    Of the positive class, of all labels together, or with more than two classes, of the highest score and whether its
    class is right (Guo et al. 2017, "On calibration of modern neural networks", ICML).
    """
    held = collect_scores(summary, method, model, "test")
    parts = {name: each for name, each in held.items() if client in (None, name) and each.score is not None}
    if not parts:
        return None
    scores = join_scores(parts, summary.same_test)
    assert scores.score is not None
    if positive is None and scores.labeled:
        score_RN, right_RN = scores.score, np.broadcast_to(scores.truth == 1, scores.score.shape)
    elif positive is None:
        score_RN, right_RN = scores.score.max(axis=2), scores.chosen == scores.truth
    else:
        score_RN = scores.score[:, :, positive]
        right_RN = np.broadcast_to(scores.is_of(positive), score_RN.shape)
    return bin_scores(score_RN.ravel(), right_RN.ravel())


def tabulate_benefit(
    summary: RunSummary, method: str, positive: int, model: str = "personal", client: str | None = None
) -> pd.DataFrame:
    """Return net benefit by threshold of the method (mean over seeds), of calling all positive, and none."""
    held = collect_scores(summary, method, model, "test")
    parts = {name: each for name, each in held.items() if client in (None, name) and each.score is not None}
    if not parts:
        return pd.DataFrame(columns=["method", "all", "none"]).rename_axis("threshold")
    scores = join_scores(parts, summary.same_test)
    assert scores.score is not None
    positive_N = scores.is_of(positive)
    ours = np.mean([find_net_benefit(each[:, positive], positive_N, THRESHOLDS) for each in scores.score], axis=0)
    every = find_net_benefit(np.ones(len(positive_N)), positive_N, THRESHOLDS)
    index = pd.Index(THRESHOLDS, name="threshold")
    return pd.DataFrame({"method": ours, "all": every, "none": 0.0}, index=index)


@remembered
def list_clinical_tables(summary: RunSummary) -> list[ReportTable]:
    """Return a run's tables of decisions and classes, or of survival, for page and files.

    There are none of classes beyond :data:`~fedshift.report.tables.ONE_BY_ONE` clients, nor of more than :data:`MOST`.
    """
    if summary.task == "survival":
        return list_survival_tables(summary)
    tables: list[ReportTable] = []
    if len(summary.clients) > ONE_BY_ONE or summary.classes > MOST:
        return tables

    for method in summary.methods:
        frame = measure_classes(summary, method)
        if frame.empty:
            continue
        if find_positive(summary, None) is None:
            tables += list_class_tables(summary, method, frame, INTERVALS)
        else:
            by_client, point = frame.droplevel("class"), summary.operating_point
            held = collect_scores(summary, method, "personal", "validation")
            note = f"Thresholds are chosen on each client's validation data ({point})." if held else WITHOUT_DATA
            text = _write_measures(by_client, "client", f"{note} {INTERVALS}")
            caption = f"{name_classes(summary)[1]!r} as positive, decided at {point}, in percent"
            tables.append(_make_table("decisions", method, caption, by_client, text))
        if summary.task != "multilabel":
            tables.append(make_confusion_table(method, count_confusions(summary, method)))
    return tables


def list_class_tables(summary: RunSummary, method: str, frame: pd.DataFrame, note: str) -> list[ReportTable]:
    """Return the tables of each class, if more than its recall is known, and of each class's recall at each client.

    ``frame``: from :func:`measure_classes`. ``note``: about its intervals.
    """
    tables, names = [], name_classes(summary)
    if "specificity" in frame.columns.get_level_values(0):
        of_all = frame.loc[[ALL]].droplevel("client")
        text = _write_measures(of_all, "class", f"{OF_LABELS if summary.task == 'multilabel' else WITHOUT_RULE} {note}")
        caption = "each class against the rest, all clients together, in percent"
        tables.append(_make_table("classes", method, caption, of_all, text))
    order = list(dict.fromkeys(frame.index.get_level_values("client")))
    recall = frame["sensitivity"].unstack("class").reindex(order)
    rows = [[client, *(_format_share(recall.loc[client], name) for name in names)] for client in order]
    text = make_table(("client", *names), rows, rule=len(rows) - 1, note=note)
    return [*tables, _make_table("recall", method, "recall of each class, in percent", recall, text)]


def make_confusion_table(method: str, counts: pd.DataFrame) -> ReportTable:
    """Return the table of ``counts`` from :func:`count_confusions`."""
    rows = [[name, *(f"{value:,.4g}" for value in counts.loc[name])] for name in counts.index.tolist()]
    caption = "test samples of each class (rows) by predicted class (columns), mean over seeds"
    return _make_table("confusion", method, caption, counts, make_table(("class", *counts.columns), rows))


def _make_table(kind: str, method: str, caption: str, frame: pd.DataFrame, text: TextTable) -> ReportTable:
    return detail_table(f"{kind}-{to_file_name(method)}", f"{method}: {caption}", frame, text)


def _write_measures(frame: pd.DataFrame, what: str, note: str) -> TextTable:
    """Return a row for each entry of ``frame``, with a cell for each measure and its interval."""
    measures = [name for name in (*MEASURES, *CALIBRATION) if name in frame.columns.get_level_values(0)]
    decided = frame["threshold", ""].notna().any()
    rows = [
        [
            str(name),
            f"{int(row['samples', '']):,}",
            *([MISSING if math.isnan(at := row["threshold", ""]) else f"{at:.3f}"] if decided else []),
            *(_format_estimate(row, measure) for measure in measures),
        ]
        for name, row in frame.iterrows()
    ]
    header = (what, "samples" if what == "class" else "positive", *(["threshold"] if decided else []), *measures)
    return make_table(header, rows, rule=len(rows) - 1 if what == "client" else 0, note=note)


def _format_estimate(row: pd.Series, measure: str) -> str:
    value, low, high = (float(row[measure, statistic]) for statistic in ("value", "low", "high"))
    scale, digits = (1.0, 3) if measure in ("Brier score", *CALIBRATION) else (100.0, 1)
    if math.isnan(value):
        return MISSING
    between = "" if math.isnan(low) else f" ({scale * low:.{digits}f} to {scale * high:.{digits}f})"
    return f"{scale * value:.{digits}f}{between}".replace("-", MINUS)


def _format_share(row: pd.Series, name: str) -> str:
    value, low, high = (100 * float(row[statistic, name]) for statistic in ("value", "low", "high"))
    return MISSING if math.isnan(value) else f"{value:.1f} ({low:.1f} to {high:.1f})"
