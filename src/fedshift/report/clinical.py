"""Classification as clinics read it, from the records of single samples: shares by class and client, and curves.

With two classes, or one named as positive, a sample counts as positive from a threshold of its log-odds on, which the
client's validation data choose (:func:`~fedshift.analysis.clinical.choose_threshold`), or all clients' where the client
has validation data of one class only. Without validation data, the threshold is a probability of one half. With more
classes, each class is measured against the rest, where a sample counts as the class of the highest score.

Scores of several models have no common scale. Under a method with a model for each client, all that ranks or fits the
scores of all clients is therefore the mean over clients: areas, calibration in the large, its slope, and a threshold
for clients whose validation data choose none. Decisions, Brier scores, net benefit and calibration curves add up.

Sites send counts in place of results of single samples. Shares that follow from these have intervals for one seed, and
take samples as independent: counts do not tell which samples are of one patient, nor on which of them seeds agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.special import expit

from ..analysis.clinical import (
    AREA,
    BRIER,
    LARGE,
    SLOPE,
    Bools,
    Estimate,
    Ints,
    bin_scores,
    choose_threshold,
    estimate,
    estimate_share,
    find_net_benefit,
)
from ..analysis.influence import Floats
from ..results.cases import Records
from ..results.run_directory import to_file_name
from ..results.schema import RunSummary
from ..utils.errors import UsageError, unknown_name
from .formatting import MISSING, TextTable, choose_decimals, format_mean, make_table
from .progress import remembered
from .report import ReportTable, detail_table
from .survival import list_survival_tables
from .tables import ONE_BY_ONE, find_reported_rounds, select_reported_rows

ALL = "all clients"
"""Row of the samples of all clients together."""
SHARES = ("sensitivity", "specificity", "PPV", "NPV")
CALIBRATION = (LARGE, SLOPE)
MEASURES = (*SHARES, AREA, BRIER, *CALIBRATION)
Cells = dict[tuple[str, str], float]
"""Cells of a row of :func:`measure_classes`, by measure and statistic."""
THRESHOLDS = tuple(np.round(np.arange(0.01, 1.0, 0.01), 2).tolist())
"""Probability thresholds of decision curves."""
MOST = 12
"""Largest number of classes with tables on the page."""
INTERVALS = "95 % intervals cover test samples (or groups of these) and seeds, and are not corrected for their number."
OF_COUNTS = (
    "Sites keep the results of single samples: 95 % intervals take samples as independent, and there are none of "
    "several seeds."
)
WITHOUT_RULE = "Sensitivity is the recall of the class. The class of the highest score counts as predicted."
OF_LABELS = "Sensitivity is the recall of the label, which counts as predicted from a probability of one half on."
WITHOUT_DATA = "No validation data: the threshold is 0.5; with --validation 0.2, some choose it."
WITHOUT_THRESHOLD = "none: no threshold reaches this on validation data, so that no sample counts as positive."
MODELS = "Clients have different models: AUC and calibration of all clients are means over clients."
INVALID = "Outputs that are not numbers count as wrong, and leave AUC, Brier score and calibration undefined."


@remembered
def collect_scores(summary: RunSummary, method: str, model: str, split: str) -> Records:
    """Return the results of ``method`` on N samples of ``split`` under R seeds; empty unless all seeds have records.

    ``client [N]``; ``truth [N]``, or ``[N, K]`` of labels, 0 or 1; ``chosen [N, R]``, or ``[N, R, K]``, -1 where the
    output is not a number; where recorded, ``odds [N, R, K]``, log-odds of each class, NaN likewise; ``owner [N]``, the
    client whose own model it is, empty for one that all share; ``group [N]``, which clients share where they share
    samples, if groups are known. Clients without records, or with other samples from seed to seed, are left out.
    """
    read = summary.read_cases if split == "test" else summary.read_validation
    reported, truth = find_reported_rounds(summary), "given" if summary.task == "multilabel" else "truth"
    rounds = {seed: int(reported[method, seed]) for seed in summary.seeds if (method, seed) in reported.index}
    cases = [case for seed, number in rounds.items() if (case := read(method, seed)) and case.round == number]
    grouped = bool(summary.same_test) or any("group" in r for case in cases for r in case.records.values())
    parts: list[Records] = []
    for client in summary.clients if cases and len(cases) == len(rounds) else ():
        seeds = [case.records.get((client, model), {}) for case in cases]
        first, served = seeds[0], [case.records.get((client, "global")) for case in cases]
        if not all("chosen" in r and truth in r and np.array_equal(r[truth], first[truth]) for r in seeds):
            continue
        samples, origin = len(first[truth]), list(summary.clients).index(summary.same_test.get(client, client))
        owns = not summary.methods[method].has_global or any(
            s is not None and s is not r for s, r in zip(served, seeds, strict=True)
        )
        joined = {name: np.stack([r[name] for r in seeds], axis=1) for name in ("chosen", "odds") if name in first}
        known = {"client": np.full(samples, client), "owner": np.full(samples, client if owns else "")}
        if grouped:
            known["group"] = (origin << 32) + np.asarray(first.get("group", np.arange(samples)), np.int64)
        parts.append({**joined, **known, "chosen": joined["chosen"].astype(int), "truth": first[truth].astype(int)})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}


def _list_names(scores: Records) -> list[str]:
    """Return the clients of samples, in order."""
    return list(dict.fromkeys(scores["client"].tolist())) if scores else []


def _take(scores: Records, kept_N: Bools) -> Records:
    """Return the samples in ``kept``."""
    return {name: array[kept_N] for name, array in scores.items()}


def _is_of(scores: Records, number: int) -> Bools:
    """Return whether each sample has class or label ``number``, bool ``[N]``."""
    return np.asarray(scores["truth"][:, number] == 1 if scores["truth"].ndim == 2 else scores["truth"] == number)


def _call(scores: Records, number: int, least_NR: Floats | None) -> Ints:
    """Return 1 where class or label ``number`` is predicted, 0 where it is not, -1 without a score, ``[R, N]``.

    ``least``: the lowest log-odds of a prediction, NaN if none is; None: the highest score decides.
    """
    if least_NR is not None:
        odds_NR = scores["odds"][:, :, number]
        return np.where(np.isnan(odds_NR), -1, odds_NR >= least_NR).T
    chosen = scores["chosen"]
    return (chosen[:, :, number] if chosen.ndim == 3 else np.where(chosen < 0, -1, chosen == number)).T


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
    """Return each client's threshold of the log-odds of class ``positive`` under each seed, ``[R]``; NaN: none."""
    held, tested = (collect_scores(summary, method, model, split) for split in ("validation", "test"))

    def choose(scores: Records) -> Floats | None:
        positive_N = _is_of(scores, positive)
        if positive_N.all() or not positive_N.any():
            return None
        odds_RN = scores["odds"][:, :, positive].T
        return np.array([choose_threshold(summary.operating_point, odds_N, positive_N) for odds_N in odds_RN])

    chosen = {client: choose(_take(held, held["client"] == client)) for client in _list_names(held)}
    single = {client: threshold_R for client, threshold_R in chosen.items() if threshold_R is not None}
    common = choose(held) if held and not held["owner"].any() else None
    if common is None:  # with no client's, a probability of one half
        common = pd.DataFrame(single.values()).mean().to_numpy() if single else np.zeros(tested["chosen"].shape[1])
    return {client: single.get(client, common) for client in _list_names(tested)}


def measure_classes(
    summary: RunSummary,
    method: str,
    *,
    positive: str | int | None = None,
    model: str = "personal",
    subgroups: Mapping[str, Sequence[object]] | None = None,
) -> pd.DataFrame:
    """Return each measure of each class on the test samples of each client and of all clients.

    ``subgroups``: a label for each test sample of each client, by whose values rows are then made, over all clients.

    Returns a row for each client (or subgroup) and class. Columns: ``samples`` (of the class), ``threshold`` (of the
    probability, mean over seeds that have one; NaN where none has, or the highest score decides), and for each of
    :data:`MEASURES`, of calibration only with a positive class, ``value``, ``low`` and ``high``. Empty without records.

    Raises:
        UsageError: A class or a client is unknown, or subgroups do not fit the test samples.

    """
    place = find_positive(summary, positive)
    scores = collect_scores(summary, method, model, "test")
    if not scores:
        return pd.DataFrame()
    names, classes = name_classes(summary), range(summary.classes) if place is None else [place]
    kept = {client: scores["client"] == client for client in _list_names(scores)}
    kept = {**kept, ALL: kept.get(ALL, np.ones(len(scores["client"]), bool))}
    if subgroups is not None:
        kept = _find_subgroups(scores, subgroups)
    thresholds, least_NR = dict[str, Floats](), None
    if place is not None and "odds" in scores:
        thresholds = choose_thresholds(summary, method, place, model)
        least_NR = np.stack([thresholds[client] for client in scores["client"].tolist()])
    rows: dict[tuple[str, str], Cells] = {}
    called = {number: _call(scores, number, least_NR) for number in classes}
    for row, kept_N in kept.items():
        threshold, rest = float(pd.Series(expit(thresholds.get(row, math.nan))).mean()), _take(scores, kept_N)
        for number in classes:
            estimates = _measure_scores(rest, called[number][:, kept_N], number, calibrated=place is not None)
            rows[row, names[number]] = _list_cells(_is_of(rest, number).sum(), estimates, threshold)
    return _make_frame(rows, "client" if subgroups is None else "subgroup")


def measure_counts(summary: RunSummary, method: str) -> pd.DataFrame:
    """Return :func:`measure_classes` without positive class, as far as counts from sites define it; empty without."""
    rows: dict[tuple[str, str], Cells] = {}
    for client, counts in _collect_counts(summary, method).items():
        for number, name in enumerate(name_classes(summary)):
            hits, support = counts["hits"][:, number], counts["support"][:, number]
            shares = {"sensitivity": (hits, support)}
            if "predicted" in counts:
                predicted, lacking = counts["predicted"][:, number], counts["samples"] - support
                cleared = lacking - (predicted - hits)
                shares |= {"specificity": (cleared, lacking), "PPV": (hits, predicted)}
                shares |= {"NPV": (cleared, counts["samples"] - predicted)}
            rows[client, name] = _list_cells(support[0], {name: _divide(*both) for name, both in shares.items()})
    return _make_frame(rows, "client")


def _collect_counts(summary: RunSummary, method: str) -> dict[str, dict[str, Floats]]:
    """Return the counts ``[R, K]`` of each client's test samples by class, under R seeds, and of :data:`ALL` together.

    ``predicted`` is counted of several labels, and for the metric ``f1``. Empty without counts, or for masks.
    """
    rows = select_reported_rows(summary)
    names = [name for name in ("hits", "support", "predicted") if rows[name].notna().all()]
    if summary.task not in ("classification", "multilabel") or "hits" not in names or "support" not in names:
        return {}
    counts: dict[str, dict[str, Floats]] = {}
    for client in map(str, summary.clients):
        sent = rows[(rows["method"] == method) & (rows["client"] == client)]
        if len(sent) == len(summary.seeds):
            counts[client] = {name: np.array(sent[name].tolist(), float) for name in (*names, "samples")}
    if counts:
        counts[ALL] = {name: np.sum([sent[name] for sent in counts.values()], axis=0) for name in (*names, "samples")}
    return counts


def _divide(hits_R: Floats, of_R: Floats) -> Estimate:
    """Return the mean over seeds of a share of counts; it has an interval for one seed."""
    place_N = np.arange(int(of_R.max()))
    share = estimate_share(place_N < hits_R[:, None], place_N < of_R[:, None])
    return share if len(of_R) == 1 else Estimate(value=share.value)


def _list_cells(samples: float, estimates: Mapping[str, Estimate], threshold: float = math.nan) -> Cells:
    cells = {("samples", ""): float(samples), ("threshold", ""): threshold}
    return cells | {(name, kind): value for name, known in estimates.items() for kind, value in vars(known).items()}


def _make_frame(rows: Mapping[tuple[str, str], Cells], noun: str) -> pd.DataFrame:
    """Return a row for each client or subgroup (``noun``) and class; empty without rows."""
    frame = pd.DataFrame.from_dict(dict(rows), orient="index")
    if rows:
        frame.index = pd.MultiIndex.from_tuples(rows, names=[noun, "class"])
        frame.columns = pd.MultiIndex.from_tuples(next(iter(rows.values())), names=["measure", "statistic"])
    return frame


def _find_subgroups(scores: Records, subgroups: Mapping[str, Sequence[object]]) -> dict[str, Bools]:
    """Return the samples of each subgroup, over all clients; raise :class:`UsageError` where a label is missing."""
    labels: list[str] = []
    for client in _list_names(scores):
        samples = int((scores["client"] == client).sum())
        if client not in subgroups:
            raise UsageError(f"subgroups lack client {client!r}: give each client a label for each test sample")
        if (count := len(subgroups[client])) != samples:
            raise UsageError(
                f"subgroups of client {client!r}: {count} labels for {samples} test samples: give each one"
            )
        labels += map(str, subgroups[client])
    return {label: np.array(labels) == label for label in sorted(set(labels))}


def _measure_scores(scores: Records, called_RN: Ints, number: int, *, calibrated: bool) -> dict[str, Estimate]:
    """Return the measures of class ``number`` against the rest; ``called``: from :func:`_call`."""
    positive_N, group_N = _is_of(scores, number), scores.get("group")
    positive_RN = np.broadcast_to(positive_N, called_RN.shape)
    yes_RN, no_RN = called_RN == 1, called_RN == 0
    estimates = {
        "sensitivity": estimate_share(yes_RN, positive_RN, group_N),
        "specificity": estimate_share(no_RN, ~positive_RN, group_N),
        "PPV": estimate_share(positive_RN, yes_RN, group_N),
        "NPV": estimate_share(~positive_RN, no_RN, group_N),
    }
    for measure in (AREA, BRIER, *CALIBRATION * calibrated) if "odds" in scores else ():
        owner_N = None if measure == BRIER else scores["owner"]
        estimates[measure] = estimate(measure, scores["odds"][:, :, number].T, positive_N, group_N, owner_N)
    return estimates


def count_confusions(
    summary: RunSummary, method: str, client: str | None = None, model: str = "personal"
) -> pd.DataFrame:
    """Return how many test samples of each class (rows) were predicted as each (columns), mean over seeds.

    The class of the highest score counts as predicted. ``client``: only its samples; None: all samples. Empty without
    results of single samples, unless counts of two classes tell them. Raises :class:`UsageError` for an unknown client,
    and for several labels.
    """
    if summary.task == "multilabel":
        raise UsageError("samples with several labels have no confusion matrix: classes() measures each label")
    scores, names = _select(summary, method, model, client), name_classes(summary)
    sent = _collect_counts(summary, method) if summary.served and summary.classes == 2 else {}
    if not scores and not sent:
        return pd.DataFrame()
    count = np.zeros((summary.classes, summary.classes + 1))  # the last: without a prediction
    for chosen_N in scores["chosen"].T if scores else ():
        np.add.at(count, (scores["truth"], chosen_N), 1 / scores["chosen"].shape[1])
    if sent:
        hits_K1, support_K1 = (sent[ALL][name].mean(axis=0)[:, None] for name in ("hits", "support"))
        count[:, :2] = np.where(np.eye(2), hits_K1, support_K1 - hits_K1)
    frame = pd.DataFrame(count, index=names, columns=[*names, "no prediction"])
    return frame.iloc[:, : None if count[:, -1].any() else -1].rename_axis(index="class", columns="predicted")


def bin_calibration(
    summary: RunSummary, method: str, positive: int | None, model: str = "personal", client: str | None = None
) -> pd.DataFrame:
    """Return the calibration curve over all seeds; empty without scores.

    Of the positive class, of all labels together, or with more than two classes, of the highest score and whether its
    class is right (Guo et al. 2017, "On calibration of modern neural networks", ICML).
    """
    scores = _select(summary, method, model, client)
    if "odds" not in scores:
        return pd.DataFrame()
    score_NRK = expit(scores["odds"])
    if positive is not None:
        score_NR, right_N1 = score_NRK[:, :, positive], _is_of(scores, positive)[:, None]
    elif summary.task == "multilabel":
        score_NR, right_N1 = score_NRK, scores["truth"][:, None] == 1
    else:
        score_NR, right_N1 = score_NRK.max(axis=2), scores["chosen"] == scores["truth"][:, None]
    return bin_scores(score_NR.ravel(), np.broadcast_to(right_N1, score_NR.shape).ravel())


def _select(summary: RunSummary, method: str, model: str, client: str | None) -> Records:
    """Return the results on the test samples of a client, or of all; raise :class:`UsageError` for an unknown one."""
    if client is not None and client not in summary.clients:
        raise unknown_name("client", client, summary.clients)
    scores = collect_scores(summary, method, model, "test")
    if client is None or client not in _list_names(scores):
        return scores if client is None else {}
    return _take(scores, scores["client"] == client)


def tabulate_benefit(
    summary: RunSummary, method: str, positive: int, model: str = "personal", client: str | None = None
) -> pd.DataFrame:
    """Return net benefit by threshold of the method (mean over seeds), of calling all positive, and none."""
    scores = _select(summary, method, model, client)
    if "odds" not in scores:
        return pd.DataFrame(columns=["method", "all", "none"]).rename_axis("threshold")
    positive_N, score_RN = _is_of(scores, positive), expit(scores["odds"][:, :, positive].T)
    ours = np.mean([find_net_benefit(score_N, positive_N, THRESHOLDS) for score_N in score_RN], axis=0)
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
    if len(summary.clients) > ONE_BY_ONE or summary.classes > MOST:
        return []
    tables, decides = list[ReportTable](), find_positive(summary, None) is not None
    for method in summary.methods:
        frame = measure_counts(summary, method) if summary.served else measure_classes(summary, method)
        if frame.empty:
            continue
        if not decides:
            tables += _list_class_tables(summary, method, frame)
        elif not summary.served:
            tables.append(_make_decision_table(summary, method, frame.droplevel("class")))
        counts = pd.DataFrame() if summary.task == "multilabel" else count_confusions(summary, method)
        if len(counts):
            rows = [[name, *(f"{value:,.4g}" for value in counts.loc[name])] for name in counts.index.tolist()]
            caption = "test samples of each class (rows) by predicted class (columns), mean over seeds"
            text = make_table(("class", *counts.columns), rows)
            tables.append(_make_table("confusion", method, caption, counts, text))
    return tables


def list_kept(summary: RunSummary) -> list[str]:
    """Return a sentence on the tables that a run whose samples are at sites lacks, and why; none for other runs."""
    kinds = summary.task in ("classification", "multilabel")
    if not summary.served or len(summary.clients) > ONE_BY_ONE or summary.classes > MOST:
        return []
    lacking = ["survival (it needs single patients' times)"] if summary.task == "survival" else []
    if kinds and find_positive(summary, None) is not None:
        lacking = ["decisions (thresholds need single samples' scores)"]
    elif kinds and (summary.task == "multilabel" or summary.rows["predicted"].notna().any()):
        lacking = ["AUC and Brier score in classes (they need single samples' scores)"]
    elif kinds:
        lacking = ["classes (it needs the number of predictions of each class, which the metric f1 counts)"]
    if summary.task == "classification" and find_positive(summary, None) is None:
        lacking = ["confusion (it needs single samples' predictions)", *lacking]
    tables = "; ".join(lacking)
    return [f"Tables that results of single samples, which never leave a site, would give: {tables}."] if tables else []


def _explain(summary: RunSummary, method: str) -> str:
    """Return sentences on the intervals of a method's measures, and on outputs that are not numbers."""
    scores = {} if summary.served else collect_scores(summary, method, "personal", "test")
    if "odds" not in scores:
        return OF_COUNTS if summary.served else INTERVALS
    invalid = bool(np.isnan(scores["odds"]).any())
    return " ".join([INTERVALS, *[MODELS] * bool(scores["owner"].any()), *[INVALID] * invalid])


def _make_decision_table(summary: RunSummary, method: str, frame: pd.DataFrame) -> ReportTable:
    """Return the table of decisions at each client, from :func:`measure_classes`."""
    point = summary.operating_point
    note = f"Thresholds are chosen on each client's validation data ({point})."
    if not collect_scores(summary, method, "personal", "validation"):
        note = WITHOUT_DATA
    thresholds = choose_thresholds(summary, method, 1, "personal").values()
    if any(np.isnan(threshold_R).any() for threshold_R in thresholds):
        note = f"{note} {WITHOUT_THRESHOLD}"
    text = _write_measures(frame, "client", f"{note} {_explain(summary, method)}")
    caption = f"{name_classes(summary)[1]!r} as positive, decided at {point}, in percent"
    return _make_table("decisions", method, caption, frame, text)


def _list_class_tables(summary: RunSummary, method: str, frame: pd.DataFrame) -> list[ReportTable]:
    """Return the tables of each class, if more than its recall is known, and of each class's recall at each client."""
    tables, names, note = [], name_classes(summary), _explain(summary, method)
    if "specificity" in frame.columns.get_level_values(0):
        of_all = frame.loc[[ALL]].droplevel("client")
        text = _write_measures(of_all, "class", f"{OF_LABELS if summary.task == 'multilabel' else WITHOUT_RULE} {note}")
        caption = "each class against the rest, all clients together, in percent"
        tables.append(_make_table("classes", method, caption, of_all, text))
    recall = frame["sensitivity"].unstack("class").reindex(frame.index.unique("client"))
    rows = [
        [client, *(_write_estimate(frame.loc[(client, name), "sensitivity"]) for name in names)]
        for client in recall.index
    ]
    text = make_table(("client", *names), rows, rule=len(rows) - 1, note=note)
    return [*tables, _make_table("recall", method, "recall of each class, in percent", recall, text)]


def _make_table(kind: str, method: str, caption: str, frame: pd.DataFrame, text: TextTable) -> ReportTable:
    return detail_table(f"{kind}-{to_file_name(method)}", f"{method}: {caption}", frame, text)


def _write_measures(frame: pd.DataFrame, noun: str, note: str) -> TextTable:
    """Return a row for each client or class (``noun``) in ``frame``, with a cell for each measure and its interval."""
    measures = [name for name in MEASURES if name in frame.columns.get_level_values(0)]
    rows = []
    for name, row in frame.iterrows():
        at = row["threshold", ""]
        threshold = MISSING if name == ALL else "none" if math.isnan(at) else f"{at:.3g}"
        cells = [str(name), f"{int(row['samples', '']):,}", *[threshold] * (noun == "client")]
        rows.append(cells + [_write_estimate(row[measure], measure) for measure in measures])
    header = (noun, "samples") if noun == "class" else (noun, "positive", "threshold")
    return make_table((*header, *measures), rows, rule=len(rows) - 1 if noun == "client" else 0, note=note)


def _write_estimate(known: pd.Series, measure: str = "") -> str:
    """Return a value and its interval, in percent except for Brier scores and calibration."""
    scale, digits = (1, 3) if measure in (BRIER, *CALIBRATION) else (100, 1)
    value, low, high = (scale * float(known[kind]) for kind in ("value", "low", "high"))
    digits = max(digits, choose_decimals([value], [(high - low) / 2]))
    text, *bounds = (format_mean(number, number=f".{digits}f") for number in (value, low, high))
    return text if math.isnan(low) else f"{text} ({' to '.join(bounds)})"
