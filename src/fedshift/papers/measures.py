"""From finished runs to the numbers that a paper's table prints: at the end, at best, against a twin and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

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
from ..report.tables import history, reported_rounds
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
    """The metric in the reported round by seed, measured at ``moment``, NaN where it was not.

    It is that of ``client``, or where this is a data set dealt to several clients their mean, or (None) that of all.
    """
    rows = history(study, metric, moment=moment).join(reported_rounds(study).rename("reported"), on=["method", "seed"])
    rows = rows[rows["round"] == rows["reported"]]
    if client is not None:
        rows = rows[(rows["client"] == client) | rows["client"].str.startswith(f"{client}-")]
    return rows.groupby("seed")["value"].mean().reindex(study.seeds).tolist()


def _macro_loss(study: Study) -> pd.Series:
    """The macro test loss by seed and round: the clients of two runs may have different names."""
    return history(study, "loss").groupby(["seed", "round"])["value"].mean()
