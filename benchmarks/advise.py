"""Regret of ``fedshift advise``: how much better the best of all methods is on test data than the one it names.

For each of twenty-two federations, every method trains at every learning rate, as ``benchmarks/methods.py`` does, whose
results in OUT are used where they are there: a method counts at the rate that is best on validation data. The search of
``fedshift.advise`` is then made from the same trials, which changes nothing: a trial goes on from its checkpoint. Its
earlier rungs are trained, and so is what it tries beyond, such as ``fedavg(weighting="uniform")``.

Two regrets are printed, in points of mean accuracy over clients, of one seed. ``regret`` is that against the best
method on test data. The best of so many is best by luck too, so that this is more than another choice would have
gained. ``fair`` halves each client's test samples: the method that is best on one half is compared with the advised one
on the other, and both ways are averaged. This is free of the luck, but half of the samples may choose less well.
``by candidates`` is the part of the fair regret that no search among the advised candidates could avoid: the best of
all minus the best of these.

The lists of methods in ``diagnosis/advice.py`` were improved with the first, third, ... federation in view. The others
judge: means are printed for each half, and for advice that names one and the same method everywhere.

Results are kept in OUT (default runs/methods) and not computed again: after Ctrl-C the same command goes on. With
``trained``, federations that are not trained yet are left out.

Run ``OMP_NUM_THREADS=1 python benchmarks/advise.py [ROUNDS [OUT [trained]]]``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from federations import MAKERS, make_federations
from methods import RATES, SEEDS, SETTINGS, read_folder
from methods import measure as train_all

from fedshift.analysis.statistics import paired_difference
from fedshift.data.federation import ClientData, Federation
from fedshift.diagnosis.search import BASELINE, Candidate, Search, begin_search
from fedshift.engines.engine import Diverged
from fedshift.evaluation.metrics import evaluate_clients
from fedshift.experiments.experiment import Experiment
from fedshift.experiments.python_settings import make_python_experiment
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.run_directory import trial_folder
from fedshift.results.trial_records import CHECKPOINT

BUDGET = 1e4
"""Minutes: so many that the rounds alone say how long the search takes."""

LEARNED = tuple(MAKERS)[::2]
"""Federations that were in view when the lists of methods were improved."""

Accuracies = dict[str, float]
"""Accuracy of each client's model."""


def halve(client: ClientData) -> ClientData:
    """Return the client with every other test sample as its test data, and the rest in place of validation data."""
    places = torch.arange(len(client.test))
    return client.with_splits({"test": client.test.take(places[::2]), "validation": client.test.take(places[1::2])})


def measure_splits(trial: Trial, data: Federation, *splits: str) -> list[Accuracies]:
    """Return the accuracies of clients' models on each of ``splits`` of ``data``."""
    rows = evaluate_clients(trial.plan, trial.server, data, splits, trial.personal_state)
    own = [row for row in rows if row["model"] == "personal"]
    return [
        {row["client"]: sum(row["hits"]) / row["samples"] for row in own if row["split"] == split} for split in splits
    ]


def measure_early(trial: Trial) -> Accuracies:
    """Return validation accuracies as a search measures them before the last round, without lagging statistics."""
    lag = trial.measure_lag()
    rows = [] if lag is None else lag["rows"]
    found = {
        row["client"]: sum(row["hits"]) / row["samples"]
        for row in rows
        if (row["split"], row["model"]) == ("validation", "personal")
    }
    return found or measure_splits(trial, trial.measured, "validation")[0]


class Trials:
    """Trials of a federation: finished ones from the runs in ``folder``, others trained when they are asked for.

    Measurements are kept in ``folder``/trials.jsonl.
    """

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self.experiment, self.folder = experiment, folder
        self._file = folder / "trials.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._known: dict[str, Any] = dict(json.loads(line) for line in lines)

    def _keep(self, name: str, value: Any) -> Any:
        self._known[name] = value
        with self._file.open("a") as file:
            file.write(json.dumps((name, value)) + "\n")
        return value

    def _begin(self, candidate: Candidate) -> Trial:
        (method,) = METHODS.parse_all(candidate.name)
        return Trial(method, self.experiment.model, self.experiment.data, self.experiment.settings, 0)

    def finish(self, candidate: Candidate) -> dict[str, Any]:
        """Return accuracies of the trained models on ``validation`` data and both ``halves`` of test data.

        Nothing, where training diverged.
        """
        if candidate.name in self._known:
            return self._known[candidate.name]
        with closing(self._begin(candidate)) as trial:
            for run in self.folder.glob("*/rates"):
                kept = trial_folder(run, trial.plan.method.label, 0)
                if (kept / CHECKPOINT).exists():
                    trial.restore(*load_checkpoint(kept / CHECKPOINT), kept)
            try:
                while trial.server.round < self.experiment.settings.rounds:
                    trial.advance()
            except Diverged:
                return self._keep(candidate.name, {})
            (validation,) = measure_splits(trial, trial.measured, "validation")
            data = replace(trial.measured, clients=tuple(halve(client) for client in trial.measured.clients))
            halves = measure_splits(trial, data, "test", "validation")
        return self._keep(candidate.name, {"validation": validation, "halves": halves})

    def validate(self, candidate: Candidate, rounds: Sequence[int]) -> list[Accuracies]:
        """Return validation accuracies after each of ``rounds``; nothing, where training diverged before."""
        name = f"{candidate.name} {' '.join(map(str, rounds))}, statistics estimated anew"
        if name in self._known:
            return self._known[name]
        found: list[Accuracies] = []
        with closing(self._begin(candidate)) as trial:
            try:
                while trial.server.round < max(rounds, default=0):
                    trial.advance()
                    if trial.server.round in rounds:
                        found.append(measure_early(trial))
            except Diverged:
                found += [{}] * (len(rounds) - len(found))
        return self._keep(name, found)


def replay(search: Search, trials: Trials) -> Search:
    """Return ``search`` with the results of its rungs."""
    early = [rung.rounds for rung in search.rungs[:-1]]
    clients = trials.experiment.data.names
    while not search.ended:
        number = len(search.results)
        values: dict[str, dict[str, float | None]] = {}
        for each in search.members(number):
            found = (
                trials.validate(each, early)[number] if number < len(early) else trials.finish(each).get("validation")
            )
            values[each.name] = {client: (found or {}).get(client) for client in clients}
        search = replace(search, results=(*search.results, values))
    return search


def choose_tried(search: Search, trials: Trials) -> dict[str, Candidate]:
    """Return each method that ``search`` tries at its best rate, of all rounds."""
    known = {each: found for each in search.candidates if (found := trials.finish(each))}
    order = sorted(known, key=lambda each: -np.mean(list(known[each]["validation"].values())))
    return {each.method: each for each in reversed(order)}


def compare(search: Search, every: Mapping[str, Candidate], trials: Trials) -> tuple[dict[str, Any], pd.Series]:
    """Return a row of the table for ``search``, and the fair regret of each method, of which ``every`` has all."""
    tried = choose_tried(search, trials)
    chosen = {**tried, **every, "": search.best}
    halves = pd.DataFrame(
        {
            m: [100 * np.mean(list(half.values())) for half in trials.finish(each)["halves"]]
            for m, each in chosen.items()
        }
    )
    tested, methods = halves.mean(), [m for m in chosen if m]
    best = tested[methods].idxmax()

    def lose(method: str, among: Sequence[str]) -> float:
        pairs = ((halves.loc[half], halves.loc[1 - half]) for half in (0, 1))
        return float(np.mean([judge[chooser[among].idxmax()] - judge[method] for chooser, judge in pairs]))

    row = {
        "advised": search.best.name, "accuracy": tested[""], "best": chosen[best].name, "its accuracy": tested[best],
        "fedavg": tested[BASELINE], "expected gain": 100 * search.expected.mean,
        "regret": max(0.0, tested[best] - tested[""]), "fair": lose("", methods),
        "by candidates": lose("", methods) - lose("", list(tried)),
    }  # fmt: skip
    return row, pd.Series({m: lose(m, methods) for m in methods})


def measure(data: Federation, rounds: int, folder: Path) -> tuple[dict[str, Any], pd.Series]:
    """Return :func:`compare` for a federation; train what is missing."""
    train_all(data, rounds, folder, RATES, SEEDS)
    table = read_folder(folder).dropna()
    experiment = make_python_experiment(
        {"data": data, "methods": BASELINE, "rounds": rounds, "evaluate_every": rounds, **SETTINGS}
    )
    trials = Trials(experiment, folder)
    every = {
        str(method): Candidate(name=f"tuned(lr={rate:g})+{method}", method=str(method), rate=rate)
        for method, rate in table["rate"].items()
    }
    return compare(replay(begin_search(experiment, None, RATES, BUDGET), trials), every, trials)


def print_means(name: str, rows: pd.DataFrame, lost: pd.DataFrame) -> None:
    """Print the mean regrets over federations, and those of the same method everywhere."""
    fair = paired_difference(rows["fair"].tolist(), [0.0] * len(rows))
    same = lost.dropna(axis=1).mean().sort_values()
    print(
        f"{name} ({len(rows)}): regret {rows['regret'].mean():.2f} points, fair {fair.mean:.2f} ({fair.low:.2f} to "
        f"{fair.high:.2f}), by candidates {rows['by candidates'].mean():.2f}; fair regret of one method "
        f"everywhere: {', '.join(f'{m} {same[m]:.2f}' for m in dict.fromkeys((*same.index[:3], BASELINE)))}"
    )


def main(rounds: int = 20, out: str = "runs/methods", only: str = "") -> None:
    torch.set_num_threads(1)
    rows, lost = dict[str, dict[str, Any]](), dict[str, pd.Series]()
    for name, data in make_federations():
        if only == "trained" and read_folder(Path(out) / name).empty:
            continue
        rows[name], lost[name] = measure(data, rounds, Path(out) / name)
        if len(rows) == 1:
            print(f"| federation | {' | '.join(rows[name])} |\n|---|{'---|' * len(rows[name])}")
        cells = (f"{value:.2f}" if isinstance(value, float) else value for value in rows[name].values())
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    table, others = pd.DataFrame(rows).T, pd.DataFrame(lost).T
    learned = [name in LEARNED for name in table.index]
    print()
    parts = {"All federations": slice(None), "Advice learned from": learned, "Judges": [not each for each in learned]}
    for name, part in parts.items():
        if len(table[part]):
            print_means(name, table[part], others[part])


if __name__ == "__main__":
    main(*[int(word) for word in sys.argv[1:2]], *sys.argv[2:4])
