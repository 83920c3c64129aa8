"""Measurements on finished runs for a paper's tables: final and best metrics, discordances and others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

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
from ..report.tables import metric_history, seed_table
from ..report.target_metric import find_best
from ..representations import RepresentationComparison, compare_representations
from ..results.schema import RunSummary, compute_metric, rows_to_frame
from ..results.summary import read_summary
from ..utils.threads import limit_threads
from .planning import ADAPTED, DISCORDANCE, FINAL, CellPlan
from .published_tables import Table
from .recipes import base_name, load_recipes
from .results import run_folder


def load_features(spec: RunSpec, directory: Path) -> RepresentationComparison | None:
    """Return the clients' and server's representations in a finished run in ``directory``, or None if it diverged.

    The data are read from the location in ``spec``, which may differ from the location at the time of the run.
    """
    folder = run_folder(spec, directory)
    if read_outcome(folder, {}):
        return None
    with limit_threads(spec.threads):
        return compare_representations(select_trials(make_experiment(spec)), folder, "give the same command again")


def measure_cells(
    table: Table, cells: Sequence[CellPlan], directory: Path
) -> tuple[dict[tuple[int, int], tuple[float, ...]], list[str]]:
    """Return each cell's values for all seeds, by row and column, and notes on data smaller than published.

    Missing values are NaN; cells without any are omitted.
    """
    runs = _FinishedRuns(directory)
    values = {(cell.row, cell.column): tuple(runs.measure(table, cell)) for cell in cells}
    published, sizes = load_recipes().get("published", {}), dict[str, int]()
    for cell in cells:
        count = sum(splits["train"] for splits in runs.read(cell.spec).clients.values())
        sizes[cell.spec.data] = max(count, sizes.get(cell.spec.data, 0))
    fewer = [
        f"{size:,} training samples of {base_name(data)}'s {whole:,}"
        for data, size in sizes.items()
        if size < (whole := published.get(data, published.get(base_name(data), 0)))
    ]
    return {cell: seeds for cell, seeds in values.items() if not all(map(math.isnan, seeds))}, fewer


class _FinishedRuns:
    """Finished runs in ``directory``, each read once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._summaries, self._features = cache(read_summary), cache(load_features)
        self._newcomers: dict[tuple[object, ...], ClientData] = {}

    def read(self, spec: RunSpec) -> RunSummary:
        """Return the results of the run of ``spec``."""
        return self._summaries(run_folder(spec, self._directory))

    def measure(self, table: Table, cell: CellPlan) -> list[float]:
        """Return the number of ``cell`` for each seed."""
        summary = self.read(cell.spec)
        if not (summary.rows["moment"] == "loaded").any():  # the run diverged before it was measured
            return []
        factor = 100.0 if table.unit == "percent" else 1.0
        if cell.measure == FINAL:
            return [factor * value for value in _final_metric(summary, table.metric, cell.client, cell.moment)]
        if cell.measure == "best":
            return [factor * value for value in find_best(summary)["value"]]
        if cell.measure == "rounds":
            return find_best(summary)["round"].tolist()
        if cell.measure == DISCORDANCE and cell.twin:
            pairs = pair_losses(_macro_loss(summary), _macro_loss(self.read(cell.twin)))
            return [compute_discordance(*losses) for losses in pairs]
        if cell.measure == ADAPTED:
            return [factor * value for value in self._adapted_metric(cell, table.metric)]
        comparison = self._features(cell.spec, self._directory)
        return comparison.similarity[cell.measure].tolist() if comparison else []

    def _adapted_metric(self, cell: CellPlan, metric: str) -> list[float]:
        """Return the metric on a client of the newcomer's data, which never trained, by seed.

        For a method with personal BatchNorm, statistics are estimated on the newcomer's inputs (appendix G).
        """
        experiment, name = select_trials(make_experiment(cell.spec)), str(cell.client)
        key = name, cell.newcomer, experiment.data.sample_shape
        if key not in self._newcomers:
            self._newcomers[key] = load_site(cell.newcomer, cell.spec, experiment.data.schema, name).client(name)
        newcomer, rows = self._newcomers[key], []
        for seed in experiment.seeds:
            folder = run_folder(cell.spec, self._directory)
            trial = restore_trial(experiment, folder, experiment.methods[0].label, seed)
            policies = ("reestimate",) if trial.plan.personalizes else ()
            (model,) = make_models(trial, {name: newcomer.train}, policies)
            rows.append(evaluate_model(trial, model, newcomer))
        return [float(value) for value in compute_metric(rows_to_frame(rows), metric)]


def _final_metric(summary: RunSummary, metric: str, client: str | None, moment: str) -> list[float]:
    """Return the mean metric of all clients (None), or of those that hold the data named ``client``, by seed."""
    values = seed_table(summary, metric, moment=moment)
    if client is None:
        return values.T["macro"].tolist()
    rows = [name for name in summary.clients if name == client or name.startswith(f"{client}-")]
    return values.loc[rows].mean().tolist() if rows else []


def _macro_loss(summary: RunSummary) -> pd.Series:
    """Return the macro test loss by seed and round; clients of two runs may have different names."""
    return metric_history(summary, "loss").groupby(["seed", "round"])["value"].mean()
