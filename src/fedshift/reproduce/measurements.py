"""From finished runs to the numbers that a paper's table prints: at the end, at best, against a twin and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from ..analysis.concordance import discordance
from ..config.spec import RunSpec
from ..data.federation import ClientData
from ..engines.cost_model import limit_threads
from ..experiments.factory import make_experiment
from ..experiments.restoration import restore_trial, select_trials
from ..experiments.run_queue import read_outcome
from ..new_clients.policies import evaluate_model, make_models
from ..new_clients.site_data import load_site
from ..report.concordance import pair_losses
from ..report.precision import grid_variance
from ..report.tables import metric_history, reported_rows, seed_table
from ..report.target_metric import find_best
from ..representations import RepresentationComparison, collect_comparison
from ..results.schema import RunSummary, compute_metric, rows_to_frame
from ..results.summary import read_summary
from .planning import ADAPTED, DISCORDANCE, FINAL, CellPlan
from .published_tables import Table
from .recipes import run_name


def run_folder(spec: RunSpec, place: Path) -> Path:
    """Where the run of ``spec`` is kept among those in ``place``."""
    return place / "runs" / run_name(spec)


def load_features(spec: RunSpec, place: Path) -> RepresentationComparison | None:
    """What clients and server see in the ended run of ``spec`` in ``place``; None where it diverged.

    The data are read where ``spec`` says, which need not be where they were when it was run.
    """
    folder = run_folder(spec, place)
    if read_outcome(folder, {}):
        return None
    with limit_threads(spec.threads):
        return collect_comparison(select_trials(make_experiment(spec)), folder, "give the same command again")


class FinishedRuns:
    """Finished runs in the directory ``place``, each read once."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.study: Callable[[Path], RunSummary] = cache(read_summary)
        self._features = cache(load_features)
        self._newcomers: dict[tuple[object, ...], ClientData] = {}

    def measure_cells(self, table: Table, cells: Sequence[CellPlan]) -> dict[tuple[int, int], tuple[float, ...]]:
        """Each cell under each seed, by row and column, NaN where a seed has none; without cells that no seed has."""
        found = {(cell.row, cell.column): tuple(self._values(table, cell)) for cell in cells}
        return {where: values for where, values in found.items() if not all(map(math.isnan, values))}

    def grids(self, table: Table, cells: Sequence[CellPlan]) -> dict[tuple[int, int], float]:
        """The variance that the grid of counts hides in each cell, by row and column; without what is not counted."""
        counted = (cell for cell in cells if cell.measure in (FINAL, "best"))
        return {(cell.row, cell.column): self._grid(table, cell) for cell in counted}

    def _grid(self, table: Table, cell: CellPlan) -> float:
        study = self.study(run_folder(cell.spec, self._place))
        metric, client = (table.metric, cell.client) if cell.measure == FINAL else (study.metric, None)
        rows = reported_rows(study)
        rows = rows[rows["client"].isin(_clients(study, client))] if client else rows
        variances = rows.assign(grid=grid_variance(rows, metric)).groupby("seed")["grid"]
        found = (variances.sum() / variances.count() ** 2).mean()
        return 0.0 if math.isnan(found) else float(found) * (100.0**2 if table.unit == "percent" else 1.0)

    def count_training_samples(self, cells: Sequence[CellPlan]) -> Mapping[str, int]:
        """Training samples of all clients together in the largest run on each data set."""
        sizes: dict[str, int] = {}
        for cell in cells:
            study = self.study(run_folder(cell.spec, self._place))
            count = sum(parts["train"] for parts in study.clients.values())
            sizes[cell.spec.data] = max(count, sizes.get(cell.spec.data, 0))
        return sizes

    def _values(self, table: Table, cell: CellPlan) -> list[float]:
        factor = 100.0 if table.unit == "percent" else 1.0
        folder = run_folder(cell.spec, self._place)
        study = self.study(folder)
        if not (study.rows["moment"] == "loaded").any():  # it diverged before it was measured
            return []
        if cell.measure == FINAL:
            return [factor * value for value in _final_metric(study, table.metric, cell.client, cell.moment)]
        if cell.measure == "best":
            return [factor * value for value in find_best(study)["value"]]
        if cell.measure == "rounds":
            return find_best(study)["round"].tolist()
        if cell.measure == DISCORDANCE and cell.twin:
            twin = self.study(run_folder(cell.twin, self._place))
            return [discordance(*losses) for losses in pair_losses(_macro_loss(study), _macro_loss(twin))]
        if cell.measure == ADAPTED and cell.newcomer:
            return [factor * value for value in self._adapted_metric(cell, cell.newcomer, table.metric)]
        seen = self._features(cell.spec, self._place)
        (several,) = seen.similarity.values() if seen else ([],)
        return [float(getattr(each, cell.measure)) for each in several]

    def _adapted_metric(self, cell: CellPlan, data: str, metric: str) -> list[float]:
        """The metric on a client of ``data``, which never trained, by seed.

        A method whose clients keep BatchNorm gets its statistics estimated on the newcomer's inputs (appendix G).
        """
        folder = run_folder(cell.spec, self._place)
        spec, experiment = cell.spec, select_trials(make_experiment(cell.spec))
        (method,), name = experiment.methods, str(cell.client)
        key = name, data, experiment.data.sample_shape
        if key not in self._newcomers:
            self._newcomers[key] = load_site(data, spec, experiment.data, name).client(name)
        newcomer = self._newcomers[key]
        rows = []
        for seed in experiment.seeds:
            trial = restore_trial(experiment, folder, method.name, seed)
            wanted = ("reestimate",) if trial.plan.personalizes else ()
            (model,) = make_models(trial, {name: newcomer.train}, wanted)
            rows.append(evaluate_model(trial, model, newcomer))
        return [float(value) for value in compute_metric(rows_to_frame(rows), metric)]


def _final_metric(study: RunSummary, metric: str, client: str | None, moment: str) -> list[float]:
    """The metric of ``client`` in the reported round by seed, measured at ``moment``.

    It is the mean of the clients to which a data set was dealt, or (None) of all.
    """
    values = seed_table(study, metric, moment=moment)
    if client is None:
        return _to_floats(values.loc["macro"])
    rows = _clients(study, client)
    return _to_floats(values.loc[rows].mean()) if rows else []


def _clients(study: RunSummary, client: str) -> list[str]:
    """The clients that ``client``, or the data set of that name, was dealt to."""
    return [name for name in study.clients if name == client or name.startswith(f"{client}-")]


def _to_floats(values: Any) -> list[float]:
    return [float(value) for value in values]


def _macro_loss(study: RunSummary) -> pd.Series:
    """The macro test loss by seed and round: the clients of two runs may have different names."""
    return metric_history(study, "loss").groupby(["seed", "round"])["value"].mean()
