"""Tables as data frames: measurements at the reported round, by client and method, over seeds.

The reported round of a run is its last evaluated one, or the one with the best macro validation metric of the personal
model. Test data never choose a round. Values are shares in 0..1 (loss: nats); :mod:`fedshift.report.formatting` turns
them into text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..results.cases import measure_cases
from ..results.schema import (
    BY_CASE,
    COUNTS,
    DISTANCES,
    MOMENTS,
    RANKINGS,
    REESTIMATED,
    Row,
    RunSummary,
    add_rows,
    adds_up,
    compute_metric,
    find_missing,
    is_lower_better,
    is_of_numbers,
    name_metric,
    select_class,
)
from ..utils.errors import UsageError, unknown_name
from ..utils.words import join_some
from .progress import describe_partial, find_reached_rounds, remembered

MODELS = ("personal", "global")
ONE_BY_ONE = 50
"""Largest number of clients listed one by one; beyond it, pages show their distribution, and CSV files hold all."""
QUANTILES = {"5 % quantile": 0.05, "25 % quantile": 0.25, "median": 0.5, "75 % quantile": 0.75, "95 % quantile": 0.95}
"""Rows that summarize many clients, with the share of clients below each value."""
SERVER = "the server"
"""Row of the server's model in tables of clients' models."""
AFTER_WORK = "just after local work, before aggregation, of clients that took part in the round"
"""Caption of a table with ``moment="trained"``."""
NAMED = 10
"""Largest number of clients that a remark names, and of classes of each."""
_PREDICTED = "absent from a client's data, and counted as {} where predicted, otherwise left out"
MISSING_PARTS = {
    **dict.fromkeys(
        RANKINGS, ("the mean over the classes or labels that some samples of a client have and others lack", "left out")
    ),
    "balanced_accuracy": ("the mean over the classes in a client's data", "absent"),
    "r2": ("the mean over the targets that vary in a client's data", "constant"),
    **{
        name: ("the mean over classes or labels", _PREDICTED.format("0"))
        for name in ("dice", "iou", "pooled_dice", "pooled_iou", "f1")
    },
    **{name: ("the mean over classes", _PREDICTED.format("an image's diagonal")) for name in DISTANCES},
}
"""Metrics that a client's samples may not define for a class, label or target: what they are, and its fate."""


def metric_history(
    summary: RunSummary,
    metric: str | None = None,
    model: str | None = "personal",
    split: str = "test",
    moment: str = "loaded",
) -> pd.DataFrame:
    """Return ``metric`` of every client in every round: columns method, seed, round, client and value.

    The defaults select evaluations of the summary's own metric on test data. The training loss is ``metric="loss",
    split="train", moment="trained", model=None``.
    """
    metric = _resolve_metric(summary, metric)
    rows = _select(summary, model, split, moment)
    return rows[["method", "seed", "round", "client"]].assign(value=compute_metric(rows, metric).astype(float))


@remembered
def find_reported_rounds(summary: RunSummary) -> pd.Series:
    """Return the round reported for each evaluated run: a series over (method, seed).

    ``last`` is the run's last evaluated round. ``best`` is the round with the best macro metric of the personal model
    on validation data, the earliest on ties, among the rounds that measured the run's largest number of clients. The
    metric is over the clients that define it. Raises :class:`UsageError` if ``best`` is used with a run without
    validation data.
    """
    tested = _select(summary, None, "test", "loaded").groupby(["method", "seed"])["round"].max().astype(int)
    if summary.select == "last":
        return tested.rename("round")
    if summary.select != "best":
        raise unknown_name("select", summary.select, ("last", "best"))
    per_round = (
        metric_history(summary, split="validation").groupby(["method", "seed", "round"])["value"].agg(["mean", "size"])
    )
    best_rounds: dict[Any, int] = {}
    for run in tested.index:
        if run not in per_round.index:
            raise UsageError(
                f"select='best' needs validation data, and {run[0]!r} (seed {run[1]}) has none: "
                "hold out a part of the training data, or use select='last'"
            )
        rounds = per_round.loc[run]
        means = rounds.loc[rounds["size"] == rounds["size"].max(), "mean"]
        if means.isna().all():
            raise UsageError(
                f"select='best': no client's validation data define {summary.metric_name} (method {run[0]!r}, seed "
                f"{run[1]}): use another metric, or select='last'"
            )
        best_rounds[run] = int(means.idxmin() if is_lower_better(summary.metric) else means.idxmax())
    return pd.Series(best_rounds, index=tested.index, name="round", dtype=int)


@remembered
def select_reported_rows(
    summary: RunSummary, model: str = "personal", split: str = "test", moment: str | None = None
) -> pd.DataFrame:
    """Return the records of ``model`` on ``split`` at each run's reported round; ``moment``: see :func:`seed_table`."""
    moment = moment or summary.moment
    _require_known(model, split, moment)
    rows = _select(summary, model, split, moment)
    rows = rows.join(find_reported_rounds(summary).rename("reported"), on=["method", "seed"])
    return rows[rows["round"] == rows["reported"]]


def seed_table(
    summary: RunSummary,
    metric: str | None = None,
    model: str = "personal",
    split: str = "test",
    moment: str | None = None,
    number: int | None = None,
) -> pd.DataFrame:
    """Return ``metric`` on ``split`` at the reported round: clients and aggregates x (method, seed); NaN where missing.

    ``macro`` is the mean over clients; ``pooled`` takes all test samples together (absent for metrics that do not add
    up, such as ``auc``); ``worst client`` is the lowest value (highest loss). Each is over the clients of
    :func:`mask_incomparable`; beyond :data:`ONE_BY_ONE` clients, :data:`QUANTILES` and the best client follow.
    ``moment="trained"`` measures the models of that round's participants after their local work, ``"loaded"`` models
    with running BatchNorm statistics, ``"reestimated"`` models with re-estimated statistics; None: as
    ``summary.statistics`` chooses of the last two. The global model's table contains only methods with a global model.
    ``number``: class of masks to measure; None: the mean over classes.
    """
    if number is not None and not ("dice" in summary.metrics and 0 < number < summary.classes):
        raise UsageError(f"class {number}: give one of the classes of masks, from 1 (0 is the background)")
    return _make_seed_table(summary, _resolve_metric(summary, metric), model, split, moment, number)


@remembered
def _make_seed_table(
    summary: RunSummary, metric: str, model: str, split: str, moment: str | None, number: int | None
) -> pd.DataFrame:
    rows = select_reported_rows(summary, model, split, moment)
    rows = rows if number is None else select_class(rows, number)
    methods = [name for name, method in summary.methods.items() if model == "personal" or method.has_global]
    runs = pd.MultiIndex.from_product([methods, summary.seeds], names=["method", "seed"])
    row_N = pd.Index(list(summary.clients)).get_indexer(pd.Index(rows["client"]))
    column_N = runs.get_indexer(pd.MultiIndex.from_frame(rows[["method", "seed"]]))
    known_N = (row_N >= 0) & (column_N >= 0)
    value_CR = np.full((len(summary.clients), len(runs)), np.nan)
    value_CR[row_N[known_N], column_N[known_N]] = compute_metric(rows, metric).to_numpy(dtype=float)[known_N]
    clients = pd.DataFrame(value_CR, index=list(summary.clients), columns=runs)
    common = mask_incomparable(clients)
    rows = rows[known_N & ~np.isnan(common.to_numpy()[row_N, column_N])]
    aggregates = {"macro": common.mean()}
    if adds_up(rows, metric):
        aggregates["pooled"] = pool_metric(rows, metric).reindex(runs)
    worst, best = (common.max(), common.min()) if is_lower_better(metric) else (common.min(), common.max())
    aggregates["worst client"] = worst
    if len(clients) > ONE_BY_ONE:
        aggregates |= {name: common.quantile(share) for name, share in QUANTILES.items()} | {"best client": best}
    return pd.concat([clients, pd.DataFrame(aggregates).T]).rename_axis("client")


def mask_incomparable(clients: pd.DataFrame) -> pd.DataFrame:
    """Return ``clients`` x (method, seed) with NaN for each client that another method lacks for the same seed.

    Aggregates of all methods are then over the same clients. A method without any measurement for a seed is ignored.
    """
    missing_CR, seeds = clients.isna().to_numpy(dtype=bool), clients.columns.get_level_values(1).to_numpy()
    lacking_CR = missing_CR & ~missing_CR.all(axis=0)
    for seed in np.unique(seeds):
        lacking_CR[:, seeds == seed] = lacking_CR[:, seeds == seed].any(axis=1, keepdims=True)
    return clients.mask(lacking_CR)


def accuracy_table(
    summary: RunSummary,
    metric: str | None = None,
    model: str = "personal",
    split: str = "test",
    moment: str | None = None,
    number: int | None = None,
) -> pd.DataFrame:
    """Return :func:`seed_table` over seeds: clients and aggregates x (method, mean | std | seeds).

    ``std`` is the sample standard deviation; ``seeds`` is the number of seeds that mean and std cover.
    """
    return summarize_seeds(seed_table(summary, metric, model, split, moment, number))


def tabulate_history(
    summary: RunSummary,
    metric: str | None = None,
    model: str = "personal",
    split: str = "test",
    moment: str = "loaded",
) -> pd.DataFrame:
    """Return ``metric`` at every evaluated round: columns ``method``, ``seed``, ``round``, ``client`` and ``value``."""
    metric = _resolve_metric(summary, metric)
    _require_known(model, split, moment)
    rows = _select(summary, model, split, moment)
    values = compute_metric(rows, metric).astype(float)
    table = rows[["method", "seed", "round", "client"]].assign(value=values.to_numpy())
    order = {name: place for place, name in enumerate([*summary.methods, *summary.clients])}
    by_place = table.assign(method=table["method"].map(order), client=table["client"].map(order))
    return table.loc[by_place.sort_values(["method", "seed", "round", "client"]).index].reset_index(drop=True)


def measure_majority(summary: RunSummary) -> pd.Series:
    """Return the accuracy of predicting one class for all test samples of a client: clients, ``macro`` and ``pooled``.

    The class is the most frequent class of the client's training samples (``RunSummary.majority``), or of its test
    samples for all clients if that is not recorded. It needs no model, so a similar accuracy may be due to class
    frequencies. Clients without test samples at a reported round are excluded; ``macro`` is the mean over clients,
    ``pooled`` takes all test samples together.
    """
    if summary.task != "classification":
        return pd.Series(dtype=float)
    rows = select_reported_rows(summary).dropna(subset="support").drop_duplicates("client").set_index("client")
    by_client: dict[Any, list[int]] = dict(zip(rows.index, rows["support"].tolist(), strict=True))
    support = {name: by_client[name] for name in summary.clients if name in by_client}
    if not support:
        return pd.Series({"macro": math.nan, "pooled": math.nan})
    trained = all(name in summary.majority for name in support)
    right = {name: counts[summary.majority[name]] if trained else max(counts) for name, counts in support.items()}
    shares = [right[name] / sum(counts) for name, counts in support.items()]
    pooled = sum(right.values()) / sum(map(sum, support.values()))
    return pd.Series([*shares, np.mean(shares), pooled], index=[*support, "macro", "pooled"], dtype=float)


def describe_majority(summary: RunSummary) -> str:
    """Return a sentence on :func:`measure_majority`, for the note of a table of accuracies."""
    values = 100 * measure_majority(summary)
    named, clients = list(values.index), values.iloc[:-2]
    if not len(clients):
        return ""
    each = zip(named, values, strict=True) if len(clients) <= NAMED else zip(named[-2:], values.iloc[-2:], strict=True)
    text = ", ".join(f"{name} {value:.2f}" for name, value in each)
    if len(clients) > NAMED:
        low, high = clients.idxmin(), clients.idxmax()
        text += f"; lowest {low} {clients.min():.2f}, highest {high} {clients.max():.2f}"
    data = "training" if all(name in summary.majority for name in clients.index) else "test"
    return f"Predicting each client's most frequent class ({data} data) for all its test samples: {text}."


def add_majority(summary: RunSummary, table: pd.DataFrame) -> pd.DataFrame:
    """Return an accuracy table with :func:`measure_majority` in column ``most frequent class``; NaN where not defined.

    ``table``: table of :func:`accuracy_table`, whose rows are all clients, then the aggregates.
    """
    known, count = measure_majority(summary), len(summary.clients)
    clients, aggregates = known.iloc[:-2].reindex(list(summary.clients)), known.iloc[-2:].reindex(table.index[count:])
    wider = table.copy()
    wider["most frequent class", ""] = [*clients, *aggregates]
    return wider


def summarize_seeds(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return mean, std and number of ``seeds``: columns (method, seed) become (method, mean | std | seeds)."""
    methods = seeds.columns.get_level_values(0).unique()
    columns = pd.MultiIndex.from_product([methods, ["mean", "std", "seeds"]], names=["method", "statistic"])
    cells = {}
    for method in methods:
        runs = seeds[method]
        cells[method, "mean"], cells[method, "std"] = runs.mean(axis=1).to_numpy(), runs.std(axis=1).to_numpy()
        cells[method, "seeds"] = runs.count(axis=1).to_numpy()
    return pd.DataFrame(cells, index=seeds.index, columns=columns, dtype=float)


def describe_seeds(summary: RunSummary) -> str:
    """Return the statistics that a table of ``summary`` prints, for its caption."""
    reached = find_reached_rounds(summary)
    counts = {sum(reached[method, seed] > 0 for seed in summary.seeds) for method in summary.methods} - {0}
    low, high = min(counts, default=len(summary.seeds)), max(counts, default=len(summary.seeds))
    number = f"{low} to {high}" if low < high else f"{high}"
    return f"mean (std) over {number} seeds" if high > 1 else "one seed"


def describe_round(summary: RunSummary) -> str:
    """Return which round a table of ``summary`` reports, for its caption."""
    if summary.select == "last" and describe_partial(summary):
        return "last evaluated round of each"
    return f"{summary.select} round"


def measures_trained(summary: RunSummary) -> bool:
    """Return whether the clients' models were also measured just after their local work."""
    return len(_select(summary, "personal", "test", "trained")) > 0


def select_crossed(summary: RunSummary, method: str, moment: str) -> pd.DataFrame:
    """Return the records of cross-site validation of ``method`` at ``moment``."""
    rows = summary.crossed
    return rows[(rows["method"] == method) & (rows["moment"] == moment)]


def cross_table(summary: RunSummary, method: str, moment: str = "loaded", metric: str | None = None) -> pd.DataFrame:
    """Return ``metric`` of each client's model (rows) on each client's test data: columns (client, mean | std | seeds).

    The row of the server's model is named :data:`SERVER`. There must be records of cross-site validation of ``method``
    at ``moment``.
    """
    rows = select_crossed(summary, method, moment)
    values = rows[["seed", "client"]].assign(
        owner=rows["owner"].where(rows["owner"].notna(), SERVER),
        value=compute_metric(rows, _resolve_metric(summary, metric)).astype(float),
    )
    owners = [name for name in (*summary.clients, SERVER) if name in set(values["owner"])]
    clients = [name for name in summary.clients if name in set(values["client"])]
    table = values.groupby(["owner", "client"])["value"].agg(mean="mean", std="std", seeds="count").unstack("client")
    columns = pd.MultiIndex.from_product([clients, ["mean", "std", "seeds"]], names=["client", "statistic"])
    return table.swaplevel(axis=1).reindex(index=owners, columns=columns).rename_axis("model of")


def traffic_table(summary: RunSummary) -> pd.DataFrame:
    """Return the bytes that all clients exchanged, by method, per round and in total: down, up, both (seed means)."""
    moved = summary.traffic.assign(both=summary.traffic["down"] + summary.traffic["up"])
    runs = moved.groupby(["method", "seed"])[["down", "up", "both"]]
    per_round, total = runs.mean().groupby("method").mean(), runs.sum().groupby("method").mean()
    table = per_round.add_suffix(" per round").join(total.add_suffix(" in total")).astype(float)
    return table.reindex(list(summary.methods)).rename_axis("method")


def list_shortfalls(summary: RunSummary) -> list[str]:
    """Return sentences on the limits of the tables: runs cut short and clients without a measurement."""
    reported, sentences = find_reported_rounds(summary), []
    evaluated = _select(summary, None, "test", "loaded").groupby(["method", "seed"])["round"].max()
    for run in ((method, seed) for method in summary.methods for seed in summary.seeds):
        if run not in reported.index:
            sentences.append(f"{run[0]}, seed {run[1]}: no round was evaluated; the run is left out of every figure.")
        elif run in summary.stopped:
            sentences.append(
                f"{run[0]}, seed {run[1]}: stopped after round {evaluated[run]} of {summary.rounds}: "
                f"{summary.stopped[run]}."
            )
        elif evaluated[run] < summary.rounds:
            sentences.append(f"{run[0]}, seed {run[1]}: evaluated up to round {evaluated[run]} of {summary.rounds}.")
    total = len(summary.clients)
    known = "accuracy" if "accuracy" in summary.metrics else "loss"  # defined for every measurement
    clients, counted = (seed_table(summary, metric).iloc[:total] for metric in (summary.metric, known))
    for method in summary.methods:
        seeds = [seed for seed in summary.seeds if (method, seed) in reported.index]
        for table, reason in (
            (counted, "not measured at the reported round"),
            (clients[counted.notna()].where(counted.notna(), 0.0), f"{summary.metric_name} is not defined there"),
        ):
            lacking = pd.DataFrame({seed: table[method, seed].isna() for seed in seeds}, index=table.index)
            names = [str(name) for name in table.index[lacking.any(axis=1)]]
            if names:
                which = ", ".join(map(str, lacking.columns[lacking.any(axis=0)]))
                affected = f"client{'s' * (len(names) > 1)} {join_some(names, shown=NAMED)}"
                sentences.append(f"{method}, {affected}: {reason} (seeds {which}).")
    sentences += [*_describe_empty(summary), *_describe_invalid(summary)]
    common = mask_incomparable(clients).notna().sum()[clients.notna().any()]
    if common.any() and common.min() < len(clients):
        count = f"{common.min()}" if common.min() == common.max() else f"{common.min()} to {common.max()} (by seed)"
        sentences.append(
            f"Aggregates of every method are over the same {count} of {len(clients)} clients, those that have a value "
            "under every method; differences are over the clients that both methods have."
        )
    return sentences


def _describe_empty(summary: RunSummary) -> Iterator[str]:
    """Yield sentences on the clients for whose test images methods predict only the background, with every seed."""
    rows = select_reported_rows(summary)
    rows = rows[rows["predicted"].notna()] if "dice" in summary.metrics else rows.iloc[:0]
    blank = pd.Series([not sum(counts[1:]) for counts in rows["predicted"]], index=rows.index, dtype=bool)
    empty = blank.groupby([rows["method"], rows["client"]], sort=False).all()
    methods: dict[tuple[str, ...], list[str]] = {}
    for method in summary.methods:
        names = tuple(str(name) for of, name in empty.index[empty] if of == method)
        methods.setdefault(names, []).append(method)
    for names, several in methods.items():
        which = f"client{'s' * (len(names) > 1)} {join_some(names, shown=NAMED)}"
        if names:
            yield (
                f"{', '.join(several)}, {which}: every predicted mask is empty. Train for more rounds or at another "
                "learning rate."
            )


def _describe_invalid(summary: RunSummary) -> Iterator[str]:
    """Yield sentences on the test samples for which a method's output is not a number, over all seeds."""
    rows = select_reported_rows(summary)
    for method in summary.methods:
        own = rows[(rows["method"] == method) & (rows["invalid"].fillna(0) > 0)]
        counts = own.groupby("client", sort=False)[["invalid", "samples"]].sum().to_dict("index")
        where = [f"{client} {count['invalid']:,.0f} of {count['samples']:,.0f}" for client, count in counts.items()]
        if where:
            yield (
                f"{method}: outputs that are not numbers (NaN or infinite) count as wrong, and losses, errors and "
                f"ranks with them are not defined. Test samples, of all seeds: {join_some(where, shown=NAMED)}."
            )


def patient_table(summary: RunSummary, metric: str | None = None, model: str = "personal") -> pd.DataFrame:
    """Return ``metric`` of masks by patient: clients x (method, mean | std | patients); empty without groups.

    A patient's value is the mean of its cases; mean and standard deviation are over patients, then averaged over seeds.
    """
    metric, rows = _resolve_metric(summary, metric), []
    reported = find_reported_rounds(summary) if metric in BY_CASE else pd.Series(dtype=int)
    for (method, seed), number in zip(reported.index.tolist(), reported.tolist(), strict=True):
        cases = summary.read_cases(method, seed)
        for (client, of), records in cases.records.items() if cases and cases.round == number else ():
            if of == model and "group" in records:
                value_G = pd.Series(measure_cases(records, metric)).groupby(records["group"]).mean().dropna()
                rows.append((client, method, value_G.mean(), value_G.std(), len(value_G)))
    frame = pd.DataFrame(rows, columns=["client", "method", "mean", "std", "patients"])
    means = frame.groupby(["method", "client"], sort=False).mean()
    columns = {method: means.loc[method] for method in means.index.unique("method")}
    return pd.concat(columns, axis=1) if columns else pd.DataFrame()


def _describe_cases(rows: pd.DataFrame, metric: str, number: int | None) -> str:
    """Return a sentence on the cases whose true masks lack a class, and on those left out, if any."""
    if metric not in BY_CASE or not {"method", "present"} <= {*rows} or rows["present"].isna().any() or rows.empty:
        return ""
    first, fate = rows.drop_duplicates("client"), "an image's diagonal" if metric in DISTANCES else "0"
    total, present_K = first["samples"].sum(), np.sum(first["present"].tolist(), axis=0)
    left_NK = rows["samples"].to_numpy()[:, None] - np.array(rows["cases"].tolist())
    left = pd.DataFrame(left_NK).groupby([rows["method"].to_numpy(), rows["client"].to_numpy()], sort=False).mean()
    by_method = left.groupby(level=0, sort=False).sum()
    named = [
        f"class {k} in {total - present_K[k]} of {total} "
        f"({', '.join(f'{method} {count:.3g}' for method, count in by_method[k].items())})"
        for k in (range(min(1, len(present_K) - 1), len(present_K)) if number is None else [number])
        if present_K[k] < total
    ]
    text = f"Cases whose true mask lacks a class count as {fate} where it is predicted, and are left out (by method) "
    return f"{text}otherwise: {join_some(named, shown=NAMED)}." if named else ""


def describe_missing(rows: pd.DataFrame, metric: str, number: int | None = None) -> str:
    """Return sentences on the classes, labels or targets that clients' samples leave undefined, if any.

    Args:
        rows: Records of one split, of any models.
        metric: The metric.
        number: The only class of masks that is measured, if any.

    """
    if metric not in MISSING_PARTS or rows.empty:
        return ""
    what, fate = MISSING_PARTS[metric]
    missing: dict[str, tuple[int, ...]] = {}
    without = []
    records: list[Row] = rows.drop_duplicates("client").to_dict("records")  # type: ignore[assignment]
    for row in records:
        parts = find_missing(row, metric)
        if number is not None:
            parts = (number,) if number in parts else ()
        if parts:
            name = str(row["client"])
            noun = "target" if is_of_numbers(row) else "label" if pd.notna(row.get("exact")) else "class"
            missing[name] = parts
            counted = row["square"] if metric == "r2" else row["support"]
            if len(parts) == len(counted) and metric in (*RANKINGS, "r2"):
                without.append(name)
    cases = _describe_cases(rows, metric, number)
    if not missing:
        return cases
    named = [f"{name} {_number_parts(parts, noun)}" for name, parts in list(missing.items())[:NAMED]]
    more = f", and {len(missing) - NAMED} more clients" if len(missing) > NAMED else ""
    text = f"{name_metric(metric)[0].upper()}{name_metric(metric)[1:]} is {what}; {fate}: {', '.join(named)}{more}."
    if without:
        text += f" It is not defined for {join_some(without, shown=NAMED)}, and means are over the other clients."
    return f"{text} {cases}".strip()


def _number_parts(parts: Sequence[int], noun: str) -> str:
    """Return class, label or target numbers in words: ``class 2``, ``labels 0, 3`` or ``12 classes``."""
    plural = f"{noun}{'es' if noun == 'class' else 's'}"
    if len(parts) > NAMED:
        return f"{len(parts)} {plural}"
    return f"{noun if len(parts) == 1 else plural} {', '.join(map(str, parts))}"


def _resolve_metric(summary: RunSummary, metric: str | None) -> str:
    """Return ``metric``, or the summary's own for None, once it is known to exist."""
    metric = summary.metric if metric is None else metric
    if metric not in summary.metrics:
        raise unknown_name("metric", metric, summary.metrics)
    return metric


def _require_known(model: str, split: str, moment: str) -> None:
    for key, value, known in (
        ("model", model, MODELS), ("split", split, ("test", "validation")), ("moment", moment, (*MOMENTS, REESTIMATED)),
    ):  # fmt: skip
        if value not in known:
            raise unknown_name(key, value, known)


def _select(summary: RunSummary, model: str | None, split: str, moment: str) -> pd.DataFrame:
    rows = summary.lag if moment == REESTIMATED else summary.rows
    keep = (rows["split"] == split) & (rows["moment"] == moment)
    return rows[keep] if model is None else rows[keep & (rows["model"] == model)]


def pool_metric(rows: pd.DataFrame, metric: str) -> pd.Series:
    """Return ``metric``, which :func:`adds_up`, of all clients' samples together: a series over (method, seed)."""
    known = rows[["method", "seed"]].join(rows.reindex(columns=[*COUNTS, "reference"]).dropna(axis="columns"))
    totals = {
        run: add_rows(group.to_dict("records"))  # type: ignore[arg-type]
        for run, group in known.groupby(["method", "seed"])
    }
    return compute_metric(pd.DataFrame.from_dict(totals, orient="index").reindex(columns=COUNTS), metric).astype(float)
