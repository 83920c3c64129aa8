"""Regret of ``fedshift advise``: how much better other methods of the benchmark are on test data than the one it names.

For each federation whose records ``docs/benchmark.parquet`` has, advice is asked for with the settings of the benchmark
and the rounds of its first budget, and the method that it names trains with the benchmark's seeds.

Two regrets are printed, in points of mean accuracy over clients. ``regret`` is that against the best method of the
records on test data. The best of so many is best by luck too, so that this is more than another choice would have
gained. ``fair`` is that against the method whose chosen setting is best on validation data: the choice of a search
among all methods, eight settings each, which does not see test data either. It may be negative.

The lists of methods in ``diagnosis/shift_report.py`` were improved with the first, third, ... federation in view
(:data:`LEARNED`). Means are printed for these and the others, with and without the federations that the benchmark
held apart, and for advice that names one and the same method everywhere. As in the benchmark, federations of one
source of data count as one, their mean.

Results are kept in OUT and not computed again: after Ctrl-C, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from federations import HELD_APART, MAKERS, make_federations
from methods import BUDGETS, PLAIN, SEARCHED, SEEDS, SETTINGS, read_values, split, train
from ranking import BASE, RECORDS, average_sources, format_table, make_ranking, read_records

import fedshift
from fedshift.analysis.statistics import paired_difference
from fedshift.data.federation import Federation
from fedshift.experiments.python_settings import make_python_experiment

BUDGET = 1e4
"""Minutes: so many that the rounds alone say how long the search takes."""

LEARNED = tuple(MAKERS)[:22:2]
"""Federations that were in view when the lists of methods were improved."""


def advise(data: Federation, rounds: int, folder: Path, own: dict[str, Any]) -> tuple[str, float]:
    """Return the advised method and its mean accuracy over clients and seeds in percent; kept in ``folder``.

    ``own``: settings of the federation.
    """
    kept, search = folder / "advised.json", folder / "search"
    if not kept.exists():
        shared = SETTINGS | own
        settings = {name: value for name, value in shared.items() if name != "methods"}
        begun = (search / "search.json").exists()
        advice = fedshift.advise(data, rounds=rounds, budget=BUDGET, out=search, resume=begun, jobs=1, **settings)
        experiment = make_python_experiment({"data": data, "rounds": rounds, "evaluate_every": rounds, **shared})
        found: list[float] = []
        for seed in range(SEEDS):
            trial = train(advice.method, experiment, seed)
            if trial is None:
                raise SystemExit(f"{advice.method} diverged with seed {seed}")
            with closing(trial):
                values = read_values(trial, trial.evaluate(), "test")
            found.append(sum(values.values()) / len(values))
        kept.write_text(json.dumps([advice.method, sum(found) / len(found)]))
    method, accuracy = json.loads(kept.read_text())
    return method, accuracy


def find_validated(records: pd.DataFrame, name: str, rounds: int) -> pd.Series:
    """Return the validation metric of each method's chosen setting on a federation."""
    own = records[(records["federation"] == name) & (records["rounds"] == rounds) & (records["left_out"] == "")]
    setting = ["method", "rate", "momentum", "own"]
    chosen = own[own["measured"] == PLAIN][setting].drop_duplicates()
    return own[own["measured"] == SEARCHED].merge(chosen, on=setting).groupby("method")["value"].mean()


def compare(advised: tuple[str, float], tested: pd.Series, validated: pd.Series) -> tuple[dict[str, Any], pd.Series]:
    """Return a row of the table, and the fair regret of each method; ``tested``, ``validated``: percent by method."""
    tested = tested.dropna()
    method, accuracy = advised
    best, chosen = tested.idxmax(), validated[tested.index].idxmax()
    row = {
        "advised": method, "accuracy": accuracy, "best on validation": chosen, "its accuracy": tested[chosen],
        "best on test data": best, "accuracy of that": tested[best], BASE: tested[BASE],
        "fair": tested[chosen] - accuracy, "regret": max(0.0, tested[best] - accuracy),
    }  # fmt: skip
    return row, tested[chosen] - tested


def print_means(name: str, rows: pd.DataFrame, lost: pd.DataFrame) -> None:
    """Print the mean regrets over sources of data, and those of the same method everywhere."""
    lost, regrets = average_sources(lost.dropna(axis=1)), average_sources(rows[["fair", "regret"]].astype(float))
    fair = paired_difference(regrets["fair"].tolist(), [0.0] * len(regrets))
    same = lost.mean().sort_values()
    print(
        f"{name} ({len(rows)} of {len(regrets)} sources): regret {regrets['regret'].mean():.1f} points, "
        f"fair {fair.mean:.1f} ({fair.low:.1f} to {fair.high:.1f}); fair regret of one method everywhere: "
        f"{', '.join(f'{m} {same[m]:.1f}' for m in dict.fromkeys((*same.index[:3], BASE)))}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--out", type=Path, default=Path("runs/advise"))
    parser.add_argument("--weights", type=Path, metavar="FILE", help="mobilenet_v2-b0353104.pth of torchvision")
    parser.add_argument("--federations", type=split, help="names with commas; default: all of the records")
    given = parser.parse_args()
    torch.set_num_threads(1)
    records, rounds = read_records(given.records), BUDGETS[0]
    tested = make_ranking(records, rounds).federations
    if unknown := set(given.federations or ()) - set(tested.index):
        parser.error(f"no records of {', '.join(sorted(unknown))}: {given.records} has {', '.join(tested.index)}")
    found, lost = dict[str, dict[str, Any]](), dict[str, pd.Series]()
    for name, data, own in make_federations(tuple(given.federations or tested.index), given.weights):
        advised = advise(data, rounds, given.out / name, own)
        found[name], lost[name] = compare(advised, tested.loc[name], find_validated(records, name, rounds))
        print(f"{name}: {advised[0]}", flush=True)
    table, others = pd.DataFrame(found).T, pd.DataFrame(lost).T
    cells = (
        [name, *(value if isinstance(value, str) else f"{value:.1f}" for value in row)]
        for name, row in zip(table.index, table.to_numpy(), strict=True)
    )
    print("\n" + format_table(["federation", *table], cells))
    apart = table.index.isin(HELD_APART)
    learned = table.index.isin(LEARNED)
    parts = {"All federations": slice(None), "Without those held apart": ~apart, "Held apart": apart}
    for name, part in (parts | {"Advice learned from": learned, "Others": ~learned}).items():
        if len(table[part]):
            print_means(name, table[part], others[part])


if __name__ == "__main__":
    main()
