"""Measurements on finished runs for a paper's tables: final and best metrics, discordances and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from ..analysis.similarity import compute_discordance
from ..config.spec import RunSpec
from ..data.federation import ClientData
from ..experiments.factory import make_experiment
from ..experiments.restoration import restore_trial, select_trials
from ..experiments.run_queue import read_outcome
from ..new_clients.policies import evaluate_model, make_models
from ..new_clients.site_data import load_site
from ..report.concordance import pair_losses
from ..report.tables import metric_history, seed_table, select_reported_rows
from ..report.target_metric import find_best
from ..representations import RepresentationComparison, collect_comparison
from ..results.schema import TOP_K, RunSummary, compute_metric, rows_to_frame
from ..results.summary import read_summary
from ..utils.threads import limit_threads
from .planning import ADAPTED, DISCORDANCE, FINAL, CellPlan
from .published_tables import Table
from .recipes import run_name


def run_folder(spec: RunSpec, directory: Path) -> Path:
    """Return the folder in ``directory`` for the run of ``spec``."""
    return directory / "runs" / run_name(spec)


def load_features(spec: RunSpec, directory: Path) -> RepresentationComparison | None:
    """Return the clients' and server's representations in a finished run in ``directory``, or None if it diverged.

    The data are read from the location in ``spec``, which may differ from the location at the time of the run.
    """
    folder = run_folder(spec, directory)
    if read_outcome(folder, {}):
        return None
    with limit_threads(spec.threads):
        return collect_comparison(select_trials(make_experiment(spec)), folder, "give the same command again")


class FinishedRuns:
    """Finished runs in ``directory``, each read once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.read: Callable[[Path], RunSummary] = cache(read_summary)
        self._features = cache(load_features)
        self._newcomers: dict[tuple[object, ...], ClientData] = {}

    def measure_cells(self, table: Table, cells: Sequence[CellPlan]) -> dict[tuple[int, int], tuple[float, ...]]:
        """Return each cell's values for all seeds, by row and column; missing values are NaN, empty cells omitted."""
        values = {(cell.row, cell.column): tuple(self._values(table, cell)) for cell in cells}
        return {key: seeds for key, seeds in values.items() if not all(map(math.isnan, seeds))}

    def measure_grids(self, table: Table, cells: Sequence[CellPlan]) -> dict[tuple[int, int], float]:
        """Return the variance due to the grid of counts by row and column, for cells with measures based on counts."""
        counted = (cell for cell in cells if cell.measure in (FINAL, "best"))
        return {(cell.row, cell.column): self._grid(table, cell) for cell in counted}

    def _grid(self, table: Table, cell: CellPlan) -> float:
        summary = self.read(run_folder(cell.spec, self._directory))
        metric, client = (table.metric, cell.client) if cell.measure == FINAL else (summary.metric, None)
        rows = select_reported_rows(summary)
        rows = rows[rows["client"].isin(_clients(summary, client))] if client else rows
        variances = rows.assign(grid=grid_variance(rows, metric)).groupby("seed")["grid"]
        mean = (variances.sum() / variances.count() ** 2).mean()
        return 0.0 if math.isnan(mean) else float(mean) * (100.0**2 if table.unit == "percent" else 1.0)

    def count_training_samples(self, cells: Sequence[CellPlan]) -> Mapping[str, int]:
        """Return the total number of training samples in the largest run on each data set."""
        sizes: dict[str, int] = {}
        for cell in cells:
            summary = self.read(run_folder(cell.spec, self._directory))
            count = sum(parts["train"] for parts in summary.clients.values())
            sizes[cell.spec.data] = max(count, sizes.get(cell.spec.data, 0))
        return sizes

    def _values(self, table: Table, cell: CellPlan) -> list[float]:
        factor = 100.0 if table.unit == "percent" else 1.0
        folder = run_folder(cell.spec, self._directory)
        summary = self.read(folder)
        if not (summary.rows["moment"] == "loaded").any():  # the run diverged before it was measured
            return []
        if cell.measure == FINAL:
            return [factor * value for value in _final_metric(summary, table.metric, cell.client, cell.moment)]
        if cell.measure == "best":
            return [factor * value for value in find_best(summary)["value"]]
        if cell.measure == "rounds":
            return find_best(summary)["round"].tolist()
        if cell.measure == DISCORDANCE and cell.twin:
            twin = self.read(run_folder(cell.twin, self._directory))
            return [compute_discordance(*losses) for losses in pair_losses(_macro_loss(summary), _macro_loss(twin))]
        if cell.measure == ADAPTED and cell.newcomer:
            return [factor * value for value in self._adapted_metric(cell, cell.newcomer, table.metric)]
        comparison = self._features(cell.spec, self._directory)
        (seeds,) = comparison.similarity.values() if comparison else ([],)
        return [float(getattr(similarity, cell.measure)) for similarity in seeds]

    def _adapted_metric(self, cell: CellPlan, data: str, metric: str) -> list[float]:
        """Return the metric on a client of ``data`` that never trained, by seed.

        For a method with personal BatchNorm, statistics are estimated on the newcomer's inputs (appendix G).
        """
        folder = run_folder(cell.spec, self._directory)
        spec, experiment = cell.spec, select_trials(make_experiment(cell.spec))
        (method,), name = experiment.methods, str(cell.client)
        key = name, data, experiment.data.sample_shape
        if key not in self._newcomers:
            self._newcomers[key] = load_site(data, spec, experiment.data.schema, name).client(name)
        newcomer = self._newcomers[key]
        rows = []
        for seed in experiment.seeds:
            trial = restore_trial(experiment, folder, method.label, seed)
            policies = ("reestimate",) if trial.plan.personalizes else ()
            (model,) = make_models(trial, {name: newcomer.train}, policies)
            rows.append(evaluate_model(trial, model, newcomer))
        return [float(value) for value in compute_metric(rows_to_frame(rows), metric)]


def grid_variance(rows: pd.DataFrame, metric: str) -> np.ndarray:
    """Return the variance h^2 / 12 of a uniform error within one step h of the grid of ``metric``, for each row.

    A step is one sample: 1/n of (top-k) accuracy; of balanced accuracy 1/n_k of the recall of class k, weighted by 1/K;
    of AUC one pair, 1 / (n_k (n - n_k)) for each class k against the rest, likewise averaged. Others count as
    continuous: 0.
    """
    if metric.startswith(TOP_K):
        return np.asarray(1 / (12 * rows["samples"].to_numpy(float) ** 2))
    if metric not in ("accuracy", "balanced_accuracy", "auc") or rows.empty:
        return np.zeros(len(rows))
    support_NK = np.array(rows["support"].tolist(), dtype=float)
    n_N1 = support_NK.sum(axis=1, keepdims=True)
    if metric == "accuracy":
        return np.asarray(1 / (12 * n_N1[:, 0] ** 2))
    rest_NK = n_N1 - support_NK if metric == "auc" else np.ones_like(support_NK)
    defined_NK = (support_NK > 0) & (rest_NK > 0)
    steps_NK = np.divide(1, support_NK * rest_NK, out=np.zeros_like(support_NK), where=defined_NK)
    return np.asarray((steps_NK**2).sum(axis=1) / (12 * np.maximum(1, defined_NK.sum(axis=1)) ** 2))


def _final_metric(summary: RunSummary, metric: str, client: str | None, moment: str) -> list[float]:
    """Return the metric of ``client`` in the reported round at ``moment``, by seed.

    It is the mean over the clients of the data set with that name, or (None) over all clients.
    """
    values = seed_table(summary, metric, moment=moment)
    if client is None:
        return values.T["macro"].tolist()
    rows = _clients(summary, client)
    return values.loc[rows].mean().tolist() if rows else []


def _clients(summary: RunSummary, client: str) -> list[str]:
    """Return the clients named ``client``, or with parts of the data set of that name."""
    return [name for name in summary.clients if name == client or name.startswith(f"{client}-")]


def _macro_loss(summary: RunSummary) -> pd.Series:
    """Return the macro test loss by seed and round; clients of two runs may have different names."""
    return metric_history(summary, "loss").groupby(["seed", "round"])["value"].mean()
