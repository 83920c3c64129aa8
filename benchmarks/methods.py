"""Every method on twenty-two small federations (``federations``), each at its best learning rate on validation data.

For each federation, every method that fits its network trains at every learning rate of :data:`RATES`, with a fifth of
each client's training samples held out. Its rate is the one that is best on these, so that all methods have the same
budget. At that rate it trains with further seeds, five in all; its result is the mean over seeds of the macro accuracy
of the clients' models on test data. Left out are pooled training, privacy by noise and aggregations against attackers,
of whom there are none here (:data:`LEFT_OUT`).

Three tables are printed. The first has what methods gain over FedAvg, with a 95 % interval over federations (Student),
once for clients that differ in their looks and once for those that differ in their classes; a star where it is not
chance (paired over federations, corrected for all methods by Holm); the gain of the client that is worst off; bytes of
a round to clients and from them, and seconds, over FedAvg's; and in how many federations the highest rate was the best:
a higher one may be better there. It ranks only the methods that have all federations. The second has the others,
against FedAvg and FedBN on the federations that they have. The third has the best two methods of each federation.

Results are kept in OUT and not computed again: after Ctrl-C the same command goes on, and methods that were added to
the catalog are trained alone. With ``--trained``, nothing is trained. ``--quick`` takes minutes: two federations, one
round, one rate, two seeds, kept in OUT/quick. Other rounds or seeds need another OUT.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from zlib import crc32

import pandas as pd
from federations import ALIKE, MAKERS, SKEWED, make_federations

import fedshift
from fedshift.analysis.statistics import PairedDifference, correct_family, paired_difference
from fedshift.config.expressions import list_catalog
from fedshift.data.federation import Federation
from fedshift.diagnosis.search import Candidate, tune
from fedshift.engines.engine import Diverged
from fedshift.experiments.python_settings import make_python_experiment
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.utils.errors import UsageError

RATES = (0.03, 0.1, 0.3, 1.0)
SEEDS = 5
QUICK = "digits-40", "digits-two"
"""Federations of ``--quick``."""
MEASURED = "validation", "test", "worst", "down", "up", "seconds"
LEFT_OUT = (
    "centralized", "tuned", "dp", "dp_sgd", "fedsmb",
    "geometric_median", "krum", "median", "multi_krum", "trimmed_mean",
)  # fmt: skip
"""Methods of another purpose; of FedSMB, a round is a single step."""
SETTINGS: dict[str, Any] = {"batch_size": 16, "allow_single_class": True, "validation": 0.2}


def list_candidates(data: Federation, rounds: int, rates: Sequence[float]) -> list[Candidate]:
    """Return every method that fits the network of ``data``, at every learning rate."""
    experiment = make_python_experiment({"methods": "fedavg", "data": data, "rounds": rounds, **SETTINGS})
    found: list[Candidate] = []
    for name in list_catalog("methods").keys() - {*LEFT_OUT}:
        (method,) = METHODS.parse_all(name)
        try:
            with closing(Trial(method, experiment.model, experiment.data, experiment.settings, 0)):
                found += tune(method, rates)
        except UsageError:
            continue
    return sorted(found, key=lambda each: each.name)


def train(candidates: Sequence[Candidate], data: Federation, rounds: int, out: Path, seeds: Sequence[int]) -> Any:
    """Train ``candidates`` with each of ``seeds``; return the run and its candidates by name.

    Goes on where ``out`` was stopped.
    """
    try:
        run = fedshift.compare(
            [each.name for each in candidates], data=data, rounds=rounds, evaluate_every=rounds, seeds=seeds, out=out,
            resume=(out / "config.toml").exists(), **SETTINGS,
        )  # fmt: skip
    except Diverged:  # of some candidate, and the others have ended
        run = fedshift.read_run(out)
    return run, dict(zip(run.summary.methods, candidates, strict=True))  # gn+tuned is tuned+gn


def read_results(run: Any, candidates: dict[str, Candidate]) -> pd.DataFrame:
    """Return a row for each candidate and seed that ended: method, rate, seed, accuracies in percent, costs of a round.

    Accuracies are ``validation`` and ``test`` (macro) and ``worst`` (the client that is worst off in tests); costs are
    ``down`` and ``up`` in bytes, and ``seconds``.
    """
    rows = run.records
    last = rows[(rows["round"] == rows["round"].max()) & (rows["model"] == "personal") & (rows["moment"] == "loaded")]
    last = last.assign(accuracy=100 * last["hits"].map(sum) / last["samples"])
    each = last.groupby(["method", "seed", "split"])["accuracy"]
    found = each.mean().unstack()[["validation", "test"]]
    found["worst"] = each.min().unstack()["test"]
    costs = run.summary.traffic.groupby(["method", "seed"])[["down", "up", "seconds"]].mean()
    found = found.join(costs).reset_index()
    found["rate"] = [candidates[name].rate for name in found["method"]]
    found["name"] = [candidates[name].name for name in found["method"]]
    found["method"] = [candidates[name].method for name in found["method"]]
    return found


def measure(data: Federation, rounds: int, folder: Path, rates: Sequence[float], seeds: int) -> None:
    """Add to :func:`read_folder` the methods that are not there yet, each at the rate that is best on validation data.

    Methods that diverged at every rate have neither a rate nor results.
    """
    known = set(read_folder(folder).index)
    candidates = [each for each in list_candidates(data, rounds, rates) if each.method not in known]
    if not candidates:
        return
    out = folder / f"{crc32(' '.join(each.name for each in candidates).encode()):08x}"
    first = read_results(*train(candidates, data, rounds, out / "rates", [0]))
    best = first.sort_values("validation", kind="stable", ascending=False).drop_duplicates("method")
    chosen = [each for each in candidates if each.name in set(best["name"])]
    more = read_results(*train(chosen, data, rounds, out / "seeds", range(1, seeds))) if seeds > 1 else first[:0]
    failed = pd.DataFrame({"method": sorted({each.method for each in candidates} - set(best["method"]))})
    pd.concat([best, more, failed]).drop(columns="name").to_csv(out / "results.csv", index=False)


def read_folder(folder: Path) -> pd.DataFrame:
    """Return the results kept in ``folder``, by method; accuracies and costs are means over seeds."""
    kept = [pd.read_csv(file) for file in sorted(folder.glob("*/results.csv"))]
    found = pd.concat(kept) if kept else pd.DataFrame(columns=["method", "rate", *MEASURED])
    return found.groupby("method").agg({"rate": "first", **dict.fromkeys(MEASURED, "mean")})


def describe_gain(found: PairedDifference) -> str:
    """Return the mean of a gain and its interval."""
    return f"{found.mean:+.1f}" + ("" if math.isnan(found.low) else f" ({found.low:+.1f} to {found.high:+.1f})")


def compare_with(base: pd.Series, other: pd.Series) -> PairedDifference:
    """Return what ``other`` gains over ``base``, both by federation."""
    return paired_difference(other.tolist(), base[other.index].tolist())


def print_tables(results: dict[str, pd.DataFrame]) -> None:
    """Print the tables of the results of methods, by federation."""
    test, worst, down, up, seconds, rates = (
        pd.DataFrame({name: each[column] for name, each in results.items()}).T
        for column in ("test", "worst", "down", "up", "seconds", "rate")
    )
    edge = (rates == max(RATES)).sum()
    partial = test.columns[test.isna().any()]
    ranked = test.drop(columns=partial)
    groups = {
        "sites or looks differ": [name for name in ranked.index if name not in (*SKEWED, *ALIKE)],
        "classes differ": [name for name in ranked.index if name in SKEWED],
    }
    groups = {name: rows for name, rows in groups.items() if rows} or {"clients alike": list(ranked.index)}
    gains, sure = dict[str, dict[str, PairedDifference]](), dict[str, set[str]]()
    others = ranked.columns.drop("fedavg")
    for name, rows in groups.items():
        gains[name] = {method: compare_with(ranked.loc[rows, "fedavg"], ranked.loc[rows, method]) for method in ranked}
        corrected = correct_family([gains[name][method] for method in others])
        sure[name] = {method for method, each in zip(others, corrected, strict=True) if each.is_significant}
    ranks = ranked.rank(axis=1, ascending=False).mean()
    least = worst.sub(worst["fedavg"], axis=0).mean()
    costs = [table.div(table["fedavg"], axis=0).mean() for table in (down, up, seconds)]
    heads = " | ".join(f"gain, {name} ({len(rows)})" for name, rows in groups.items())
    print(f"\n| method | {heads} | worst client | mean rank | down | up | seconds | at {max(RATES):g} |")
    print(f"|---|{'---:|' * (len(groups) + 6)}")
    first = next(iter(gains.values()))
    for method in sorted(first, key=lambda name: -first[name].mean):
        cells = [describe_gain(own[method]) + " *" * (method in sure[name]) for name, own in gains.items()]
        cells += [f"{least[method]:+.1f}", f"{ranks[method]:.1f}", *(f"{each[method]:.2f}" for each in costs)]
        print(f"| {method} | {' | '.join(cells)} | {edge[method]} |")
    print(f"\n| method | federations | gain over FedAvg | gain over FedBN | at {max(RATES):g} |")
    print("|---|---:|---:|---:|---:|")
    for method in partial:
        own = test[method].dropna()
        cells = [describe_gain(compare_with(test[base], own)) for base in ("fedavg", "fedbn")]
        print(f"| {method} | {len(own)} | {' | '.join(cells)} | {edge[method]} |")
    print("\n| federation | fedavg | best | accuracy | second | accuracy |\n|---|---:|---|---:|---|---:|")
    for name, row in test.iterrows():
        ahead = row.sort_values(ascending=False, kind="stable")[:2]
        cells = [f"{method} | {value:.1f}" for method, value in ahead.items()]
        print(f"| {name} | {row['fedavg']:.1f} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument(
        "--federations", type=lambda text: text.split(","), help="names, separated by commas; default: all"
    )
    parser.add_argument("--trained", action="store_true")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    rounds, seeds, rates, names, out = given.rounds, given.seeds, RATES, given.federations, given.out
    if given.quick:
        rounds, seeds, rates, names, out = 1, 2, RATES[:1], QUICK, out / "quick"
    if names and (unknown := set(names) - MAKERS.keys()):
        parser.error(f"no federation {min(unknown)!r}; there are: {', '.join(MAKERS)}")
    names = names or list(MAKERS)
    began = time.monotonic()
    for number, (name, data) in enumerate(() if given.trained else make_federations(names), 1):
        measure(data, rounds, out / name, rates, seeds)
        each = (time.monotonic() - began) / number / 60
        print(f"{name}: trained; about {each * (len(names) - number):.0f} minutes left", flush=True)
    results = {name: read_folder(out / name).dropna() for name in names}
    results = {name: found for name, found in results.items() if len(found)}
    if not results:
        parser.error(f"nothing is trained in {out} yet: leave out --trained")
    print_tables(results)


if __name__ == "__main__":
    main()
