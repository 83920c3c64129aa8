"""From finished runs to the numbers that a paper's table prints: at the end, at best, against a twin and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from ..adaptation.policies import measured_on, models
from ..adaptation.site import site
from ..analysis.concordance import discordance
from ..build import experiment_of
from ..config import RunSpec
from ..data.federation import ClientData
from ..engines.cost import at_most
from ..features import Findings, findings
from ..records import Study, frame, measured
from ..report.concordance import paired
from ..report.precision import grid_variance
from ..report.tables import history, reported_rows, seed_table
from ..report.target import best
from ..series import ending
from ..study import read_study
from ..trained import narrowed, restored
from .plan import ADAPTED, DISCORDANCE, FINAL, Cell
from .recipe import run_name
from .tables import Table


def run_folder(spec: RunSpec, place: Path) -> Path:
    """Where the run of ``spec`` is kept among those in ``place``."""
    return place / "runs" / run_name(spec)


def features_of(spec: RunSpec, place: Path) -> Findings | None:
    """What clients and server see in the ended run of ``spec`` in ``place``; None where it diverged.

    The data are read where ``spec`` says, which need not be where they were when it was run.
    """
    folder = run_folder(spec, place)
    if ending(folder, {}):
        return None
    with at_most(spec.threads):
        return findings(narrowed(experiment_of(spec)), folder, "give the same command again")


class Runs:
    """Finished runs in the directory ``place``, each read once."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.study: Callable[[Path], Study] = cache(read_study)
        self._features = cache(features_of)
        self._newcomers: dict[tuple[object, ...], ClientData] = {}

    def numbers(self, table: Table, cells: Sequence[Cell]) -> dict[tuple[int, int], tuple[float, ...]]:
        """Each cell under each seed, by row and column, NaN where a seed has none; without cells that no seed has."""
        found = {(cell.row, cell.column): tuple(self._values(table, cell)) for cell in cells}
        return {where: values for where, values in found.items() if not all(map(math.isnan, values))}

    def grids(self, table: Table, cells: Sequence[Cell]) -> dict[tuple[int, int], float]:
        """The variance that the grid of counts hides in each cell, by row and column; without what is not counted."""
        counted = (cell for cell in cells if cell.measure in (FINAL, "best"))
        return {(cell.row, cell.column): self._grid(table, cell) for cell in counted}

    def _grid(self, table: Table, cell: Cell) -> float:
        study = self.study(run_folder(cell.spec, self._place))
        metric, client = (table.metric, cell.client) if cell.measure == FINAL else (study.metric, None)
        rows = reported_rows(study)
        rows = rows[rows["client"].isin(_clients(study, client))] if client else rows
        variances = rows.assign(grid=grid_variance(rows, metric)).groupby("seed")["grid"]
        found = (variances.sum() / variances.count() ** 2).mean()
        return 0.0 if math.isnan(found) else float(found) * (100.0**2 if table.unit == "percent" else 1.0)

    def trained_on(self, cells: Sequence[Cell]) -> Mapping[str, int]:
        """Training samples of all clients together in the largest run on each data set."""
        sizes: dict[str, int] = {}
        for cell in cells:
            study = self.study(run_folder(cell.spec, self._place))
            count = sum(parts["train"] for parts in study.clients.values())
            sizes[cell.spec.data] = max(count, sizes.get(cell.spec.data, 0))
        return sizes

    def _values(self, table: Table, cell: Cell) -> list[float]:
        factor = 100.0 if table.unit == "percent" else 1.0
        folder = run_folder(cell.spec, self._place)
        study = self.study(folder)
        if not (study.rows["moment"] == "loaded").any():  # it diverged before it was measured
            return []
        if cell.measure == FINAL:
            return [factor * value for value in _final(study, table.metric, cell.client, cell.moment)]
        if cell.measure == "best":
            return [factor * value for value in best(study)["value"]]
        if cell.measure == "rounds":
            return best(study)["round"].tolist()
        if cell.measure == DISCORDANCE and cell.twin:
            twin = self.study(run_folder(cell.twin, self._place))
            return [discordance(*losses) for losses in paired(_macro_loss(study), _macro_loss(twin))]
        if cell.measure == ADAPTED and cell.newcomer:
            return [factor * value for value in self._adapted(cell, cell.newcomer, table.metric)]
        seen = self._features(cell.spec, self._place)
        (several,) = seen.similarity.values() if seen else ([],)
        return [float(getattr(each, cell.measure)) for each in several]

    def _adapted(self, cell: Cell, data: str, metric: str) -> list[float]:
        """The metric on a client of ``data``, which never trained, by seed.

        A method whose clients keep BatchNorm gets its statistics estimated on the newcomer's inputs (appendix G).
        """
        folder = run_folder(cell.spec, self._place)
        spec, experiment = cell.spec, narrowed(experiment_of(cell.spec))
        (method,), name = experiment.methods, str(cell.client)
        key = name, data, experiment.data.sample_shape
        if key not in self._newcomers:
            self._newcomers[key] = site(data, spec, experiment.data, name).client(name)
        newcomer = self._newcomers[key]
        rows = []
        for seed in experiment.seeds:
            trial = restored(experiment, folder, method.name, seed)
            wanted = ("reestimate",) if trial.plan.personalizes else ()
            (model,) = models(trial, {name: newcomer.train}, wanted)
            rows.append(measured_on(trial, model, newcomer))
        return [float(value) for value in measured(frame(rows), metric)]


def _final(study: Study, metric: str, client: str | None, moment: str) -> list[float]:
    """The metric of ``client`` in the reported round by seed, measured at ``moment``.

    It is the mean of the clients to which a data set was dealt, or (None) of all.
    """
    values = seed_table(study, metric, moment=moment)
    if client is None:
        return _floats(values.loc["macro"])
    rows = _clients(study, client)
    return _floats(values.loc[rows].mean()) if rows else []


def _clients(study: Study, client: str) -> list[str]:
    """The clients that ``client``, or the data set of that name, was dealt to."""
    return [name for name in study.clients if name == client or name.startswith(f"{client}-")]


def _floats(values: Any) -> list[float]:
    return [float(value) for value in values]


def _macro_loss(study: Study) -> pd.Series:
    """The macro test loss by seed and round: the clients of two runs may have different names."""
    return history(study, "loss").groupby(["seed", "round"])["value"].mean()
