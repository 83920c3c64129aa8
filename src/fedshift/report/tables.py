"""Tables as data frames: what was measured at the reported round, by client and method, over seeds.

The round reported for a run is its last evaluated one, or the one of the best macro validation metric of the personal
model. Test data never choose a round. Values are shares in 0..1 (loss: nats); text, Markdown, LaTeX and CSV come from
:mod:`fedshift.report.formatting`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ..results.schema import METRICS, MOMENTS, RunSummary, compute_metric
from ..utils.errors import UsageError, unknown_name

MODELS = ("personal", "global")
ONE_BY_ONE = 50
"""Clients that a page names one by one; of more it shows how they are distributed, and data frames and CSV hold all."""
QUANTILES = {"5 % quantile": 0.05, "25 % quantile": 0.25, "median": 0.5, "75 % quantile": 0.75, "95 % quantile": 0.95}
"""What tells of many clients, with the share of them that has a lower value."""
AFTER_WORK = "just after local work, before aggregation, of clients that took part in the round"
"""Of what a table with ``moment="trained"`` is."""
NAMED = 10
"""Clients that a remark names."""


def metric_history(
    study: RunSummary,
    metric: str | None = None,
    model: str | None = "personal",
    split: str = "test",
    moment: str = "loaded",
) -> pd.DataFrame:
    """``metric`` of every client in every round: columns method, seed, round, client and value.

    The defaults are evaluations of the study's metric on test data; ``split="train", moment="trained", model=None``
    with ``metric="loss"`` is the training loss.
    """
    metric = _resolve_metric(study, metric)
    rows = _select(study, model, split, moment)
    return rows[["method", "seed", "round", "client"]].assign(value=compute_metric(rows, metric).astype(float))


def find_reported_rounds(study: RunSummary) -> pd.Series:
    """The round reported for each run that was evaluated: a series over (method, seed).

    ``last`` is the run's last evaluated round. ``best`` is the round of the best macro metric on validation data of
    the personal model, the earliest on ties, among the rounds that measured as many clients as the run ever did.
    Raises :class:`UsageError` where ``best`` finds a run without validation data.
    """
    tested = _select(study, None, "test", "loaded").groupby(["method", "seed"])["round"].max().astype(int)
    if study.select == "last":
        return tested.rename("round")
    if study.select != "best":
        raise unknown_name("select", study.select, ("last", "best"))
    per_round = (
        metric_history(study, split="validation").groupby(["method", "seed", "round"])["value"].agg(["mean", "count"])
    )
    chosen: dict[Any, int] = {}
    for run in tested.index:
        if run not in per_round.index:
            raise UsageError(
                f"select='best' needs validation data, and {run[0]!r} (seed {run[1]}) has none: "
                "hold out a part of the training data, or use select='last'"
            )
        rounds = per_round.loc[run]
        chosen[run] = int(rounds.loc[rounds["count"] == rounds["count"].max(), "mean"].idxmax())
    return pd.Series(chosen, index=tested.index, name="round", dtype=int)


def reported_rows(
    study: RunSummary, model: str = "personal", split: str = "test", moment: str = "loaded"
) -> pd.DataFrame:
    """The records of ``model`` on ``split`` at each run's reported round."""
    if model not in MODELS:
        raise unknown_name("model", model, MODELS)
    if split not in ("test", "validation"):
        raise unknown_name("split", split, ("test", "validation"))
    if moment not in MOMENTS:
        raise unknown_name("moment", moment, MOMENTS)
    rows = _select(study, model, split, moment)
    rows = rows.join(find_reported_rounds(study).rename("reported"), on=["method", "seed"])
    return rows[rows["round"] == rows["reported"]]


def seed_table(
    study: RunSummary, metric: str | None = None, model: str = "personal", split: str = "test", moment: str = "loaded"
) -> pd.DataFrame:
    """``metric`` on ``split`` at the reported round: clients and aggregates x (method, seed); NaN where missing.

    ``macro`` is the mean over clients; ``pooled`` takes all test samples together (absent for ``auc``); ``worst
    client`` is the lowest value (highest loss). Each is over the clients of :func:`comparable`; beyond
    :data:`ONE_BY_ONE` clients come :data:`QUANTILES` and the best. ``moment="trained"``: the clients' models just after
    their local work of that round, of those that took part in it. The global model's table holds only methods that have
    one.
    """
    metric = _resolve_metric(study, metric)
    rows = reported_rows(study, model, split, moment)
    methods = [name for name, facts in study.methods.items() if model == "personal" or facts.has_global]
    runs = pd.MultiIndex.from_product([methods, study.seeds], names=["method", "seed"])
    rows = rows.assign(value=compute_metric(rows, metric).astype(float))
    clients = rows.pivot(index="client", columns=["method", "seed"], values="value")
    clients = clients.reindex(index=list(study.clients)).reindex(columns=runs).astype(float)
    common = comparable(clients)
    row = common.index.get_indexer(pd.Index(rows["client"]))
    column = runs.get_indexer(rows.set_index(["method", "seed"]).index)
    pooled = _pooled_metric(rows[~np.isnan(common.to_numpy()[row, column])], metric)
    aggregates = {"macro": common.mean(), "pooled": pooled.reindex(runs)}
    worst, best = (common.max(), common.min()) if metric == "loss" else (common.min(), common.max())
    aggregates["worst client"] = worst
    if len(clients) > ONE_BY_ONE:
        aggregates |= {name: common.quantile(share) for name, share in QUANTILES.items()} | {"best client": best}
    if metric == "auc":
        del aggregates["pooled"]
    return pd.concat([clients, pd.DataFrame(aggregates).T]).rename_axis("client")


def comparable(clients: pd.DataFrame) -> pd.DataFrame:
    """``clients`` x (method, seed) with NaN at clients that another method lacks under the same seed.

    So aggregates of all methods are over the same clients. A method that measured nobody under a seed is left out.
    """
    begun, seeds = clients.notna().any(), clients.columns.get_level_values(1)
    common = clients.copy()
    for seed in seeds.unique():
        runs = clients.columns[begun & (seeds == seed)]
        common.loc[clients[runs].isna().any(axis=1), runs] = np.nan
    return common


def accuracy_table(
    study: RunSummary, metric: str | None = None, model: str = "personal", split: str = "test", moment: str = "loaded"
) -> pd.DataFrame:
    """:func:`seed_table` over seeds: clients and aggregates x (method, mean | std | seeds).

    ``std`` is the sample standard deviation; ``seeds`` says how many seeds the two are over.
    """
    seeds = seed_table(study, metric, model, split, moment)
    methods = seeds.columns.get_level_values("method").unique()
    columns = pd.MultiIndex.from_product([methods, ["mean", "std", "seeds"]], names=["method", "statistic"])
    cells: dict[tuple[str, str], np.ndarray] = {}
    for method in methods:
        runs = seeds[method]
        cells[method, "mean"], cells[method, "std"] = runs.mean(axis=1).to_numpy(), runs.std(axis=1).to_numpy()
        cells[method, "seeds"] = np.isfinite(runs.to_numpy()).sum(axis=1)
    return pd.DataFrame(cells, index=seeds.index, columns=columns, dtype=float)


def measures_trained(study: RunSummary) -> bool:
    """Whether clients' models were measured just after their local work too."""
    return len(_select(study, "personal", "test", "trained")) > 0


def traffic_table(study: RunSummary) -> pd.DataFrame:
    """Bytes that all clients together moved, by method, per round and in total: down, up, both (means over seeds)."""
    moved = study.traffic.assign(both=study.traffic["down"] + study.traffic["up"])
    runs = moved.groupby(["method", "seed"])[["down", "up", "both"]]
    per_round, total = runs.mean().groupby("method").mean(), runs.sum().groupby("method").mean()
    table = per_round.add_suffix(" per round").join(total.add_suffix(" in total")).astype(float)
    return table.reindex(list(study.methods)).rename_axis("method")


def list_shortfalls(study: RunSummary) -> list[str]:
    """What a reader must know of the tables: runs cut short and clients that were not measured, in plain sentences."""
    reported, found = find_reported_rounds(study), []
    evaluated = _select(study, None, "test", "loaded").groupby(["method", "seed"])["round"].max()
    for run in ((method, seed) for method in study.methods for seed in study.seeds):
        if run not in reported.index:
            found.append(f"{run[0]}, seed {run[1]}: no round was evaluated; the run is left out of every figure.")
        elif evaluated[run] < study.rounds:
            found.append(f"{run[0]}, seed {run[1]}: evaluated up to round {evaluated[run]} of {study.rounds}.")
    clients, counted = (seed_table(study, metric).iloc[: len(study.clients)] for metric in (study.metric, "accuracy"))
    for method in study.methods:
        seeds = [seed for seed in study.seeds if (method, seed) in reported.index]
        for table, fate in (
            (counted, "not measured at the reported round"),
            (clients[counted.notna()].where(counted.notna(), 0.0), f"{study.metric_name} is not defined there"),
        ):
            lacking = pd.DataFrame({seed: table[method, seed].isna() for seed in seeds}, index=table.index)
            names = [str(name) for name in table.index[lacking.any(axis=1)]]
            if names:
                which = ", ".join(map(str, lacking.columns[lacking.any(axis=0)]))
                more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
                who = f"client{'s' * (len(names) > 1)} {', '.join(names[:NAMED])}{more}"
                found.append(f"{method}, {who}: {fate} (seeds {which}).")
    held = comparable(clients).notna().sum()[clients.notna().any()]
    if held.any() and held.min() < len(clients):
        count = f"{held.min()}" if held.min() == held.max() else f"{held.min()} to {held.max()} (by seed)"
        found.append(
            f"Aggregates of every method are over the same {count} of {len(clients)} clients, those that have a value "
            "under every method; differences are over the clients that both methods have."
        )
    return found


def _resolve_metric(study: RunSummary, metric: str | None) -> str:
    """``metric``, or the study's own."""
    metric = study.metric if metric is None else metric
    if metric not in METRICS:
        raise unknown_name("metric", metric, METRICS)
    return metric


def _select(study: RunSummary, model: str | None, split: str, moment: str) -> pd.DataFrame:
    rows = study.rows
    keep = (rows["split"] == split) & (rows["moment"] == moment)
    return rows[keep] if model is None else rows[keep & (rows["model"] == model)]


def _pooled_metric(rows: pd.DataFrame, metric: str) -> pd.Series:
    """``metric`` of all clients' samples together, over (method, seed)."""
    if metric == "auc":
        return pd.Series(dtype=float)
    totals = {
        run: {
            "samples": group["samples"].sum(),
            "loss_sum": group["loss_sum"].sum(),
            "hits": np.sum(group["hits"].tolist(), axis=0).tolist(),
            "support": np.sum(group["support"].tolist(), axis=0).tolist(),
        }
        for run, group in rows.groupby(["method", "seed"])
    }
    frame = pd.DataFrame.from_dict(totals, orient="index", columns=["samples", "loss_sum", "hits", "support"])
    return compute_metric(frame, metric).astype(float)
