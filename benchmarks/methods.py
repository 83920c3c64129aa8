"""Every method on small federations, each with the best of eight settings of its own on validation data.

A *cell* is a federation, a question, a budget and a method. There are two questions: how well models serve the clients
that trained, and, with ``--leave-out``, how well they serve a site that never trained, each site in turn. There are two
budgets, 20 and 80 rounds of five local steps.

Each cell has the same search (:func:`search`). Four settings have the arguments of the method's authors and the
learning rates and momenta of :data:`STARTS`; four more change one choice of the best setting so far, its rate, its
momentum or an argument (:data:`SPACES`). A third of each client's training samples judges them, with one seed; of a
site that is left out, nothing does. At a longer budget the best three settings of the shorter one are trained anew
(Jamieson and Talwalkar 2016, arXiv:1502.07943), and judged again. The best setting trains with further seeds, and only
its models are measured on test data: as they are, and with statistics of BatchNorm estimated anew, or, at a site that
was left out, under each policy that needs no labels.

The file of each cell is kept in OUT, and is not computed again: after Ctrl-C, the same command goes on. Cells of
``--records FILE``, such as ``docs/benchmark.parquet``, are not computed again either, so that a part can be added to
it. Several commands with different federations can share OUT. The federation with a pretrained network needs
``--weights``. With ``--pack FILE``, nothing is trained, and all cells are added to one Parquet file, from which
``benchmarks/ranking.py`` makes the tables and figures of ``docs/benchmark.md``. ``--quick`` takes a minute or two: two
federations, three methods, two budgets of one and two rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from federations import MAKERS, make_federations

from fedshift.config.expressions import list_catalog
from fedshift.data.federation import Federation
from fedshift.engines.engine import Diverged
from fedshift.evaluation.policy import POLICIES, list_policies
from fedshift.experiments.experiment import Experiment
from fedshift.experiments.python_settings import make_python_experiment
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.new_clients.policies import UNCHANGED, evaluate_model, make_models
from fedshift.results.run_directory import to_file_name
from fedshift.results.schema import Row, compute_metric, rows_to_frame
from fedshift.utils.errors import UsageError
from fedshift.utils.files import write_atomically

RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
MOMENTA = (0.0, 0.9)
STARTS = ((0.3, 0.0), (0.03, 0.0), (0.1, 0.9), (0.01, 0.9))
"""Learning rates and momenta with which a method's own defaults are tried first."""
TRIED, FINALISTS, SEEDS, BUDGETS = 8, 3, 3, (20, 80)
"""Settings of each search, settings that a longer budget tries again, seeds, and rounds of each budget."""
QUICK = "digits-40", "digits-two"
"""Federations of ``--quick``."""
LEFT_OUT = (
    "centralized", "tuned", "dp", "dp_sgd", "fedsmb",
    "geometric_median", "krum", "median", "multi_krum", "trimmed_mean",
)  # fmt: skip
"""Methods of another purpose: there are no attackers, and in FedSMB a round is a single step."""
FOR_NEW_SITES = (
    "fedavg", "fedbn", "silobn", "fedwon", "gn", "hbn", "fixbn", "fpl",
    "fedsr", "feddg_ga", "harmofl", "feddg_elcfs", "fedgma",
)  # fmt: skip
"""Methods of ``--leave-out``: those for sites that never train, and those with which their papers compare."""
SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "agc": {"clip": (0.64, 0.16, 2.56)},
    "apfl": {"alpha": (0.5, 0.25, 0.75), "learned": (True, False)},
    "ditto": {"lam": (1.0, 0.1, 0.01)},
    "fedadagrad": {"lr": (0.01, 0.03, 0.1), "tau": (0.001, 0.01)},
    "fedadam": {"lr": (0.01, 0.03, 0.1), "tau": (0.001, 0.01)},
    "fedala": {"layers": (1, 2), "rate": (10.0, 1.0)},
    "fedap": {"self_weight": (0.5, 0.3, 0.7)},
    "fedavg": {"weighting": ("auto", "uniform")},
    "fedavgm": {"beta": (0.9, 0.5), "lr": (1.0, 0.3)},
    "fedbabu": {"rounds": (5, 1, 10)},
    "fedcac": {"tau": (0.5, 0.25, 0.75), "beta": (100, 20)},
    "feddecorr": {"beta": (0.1, 0.01)},
    "feddg_elcfs": {"frequencies": (0, 1), "beta": (0.001, 0.01)},
    "feddg_ga": {"step_size": (0.2, 0.05, 0.5)},
    "feddyn": {"alpha": (0.01, 0.1, 0.001)},
    "fedgma": {"threshold": (0.4, 0.2, 0.6), "soft": (True, False)},
    "fedheal": {"threshold": (0.3, 0.1, 0.5), "beta": (0.4, 0.8)},
    "fedlc": {"tau": (1.0, 0.1)},
    "fedntd": {"beta": (1.0, 0.3)},
    "fedper": {"layers": (1, 2)},
    "fedproto": {"lam": (1.0, 0.1, 10.0)},
    "fedprox": {"mu": (0.01, 0.1, 1.0)},
    "fedsr": {"l2": (0.01, 0.001), "cmi": (0.0005, 0.005)},
    "fedwon": {"agc": (0.64, 0.16, 2.56)},
    "fedyogi": {"lr": (0.01, 0.03, 0.1), "tau": (0.001, 0.01)},
    "fixbn": {"switch": (0.5, 0.25, 0.75)},
    "fedplvm": {"lam": (100.0, 1.0, 0.1), "alpha": (0.25, 0.5)},
    "fpl": {"tau": (0.02, 0.1, 0.5), "lam": (1.0, 0.1)},
    "gn": {"groups": (None, 2, 4)},
    "greg": {"lam": (1.0, 0.1, 10.0)},
    "harmofl": {"frequencies": (0, 1, 2), "alpha": (0.05, 0.01)},
    "hbn": {"momentum": (0.002, 0.1, 0.3)},
    "moon": {"mu": (1.0, 0.1, 5.0), "tau": (0.5, 0.1)},
    "partialfed_adaptive": {"tau": (1.0, 0.3)},
    "partialfed_fix": {"layers": (1, 2)},
    "scaffold": {"server_lr": (1.0, 0.5)},
}
"""Values of methods' arguments that a search may try; the first is the default, which is the authors'."""
SETTINGS: dict[str, Any] = {
    "methods": "fedavg", "batch_size": 16, "steps": 5, "allow_single_class": True, "validation": 1 / 3,
    "engine": "stacked",
}  # fmt: skip
WITHOUT_LABELS = tuple(name for name in list_policies() if POLICIES.parse(name).data != "labels")
COLUMNS = (
    "federation", "left_out", "rounds", "method", "rate", "momentum", "own", "seed", "measured", "client", "value",
)  # fmt: skip
"""Columns of records. ``left_out``: the site, or empty. ``own``: arguments of the method, as JSON. ``value``: percent;
none if training diverged. ``measured``: a test-time policy, or one of the following."""
SEARCHED, PLAIN, ANEW, UNADAPTED, EXCUSED = "search", "as trained", "reestimated", "average", "does not apply"
"""Validation data of a setting; models as they are; with statistics estimated anew; a new site's without adaptation; a
method that does not fit the network."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A method's learning rate, momentum, and arguments ``own``, as JSON."""

    method: str
    rate: float
    momentum: float
    own: str

    def write(self, rounds: int) -> str:
        """Return the setting as an expression; ``rounds``: of the trial, which FedDG-GA has to know."""
        own = json.loads(self.own) | ({"rounds": rounds} if self.method == "feddg_ga" else {})
        arguments = ", ".join(f"{name}={value!r}" for name, value in own.items())
        momentum = f", momentum={self.momentum:g}" if self.momentum else ""
        return f"tuned(lr={self.rate:g}{momentum})+{self.method}" + (f"({arguments})" if arguments else "")


def list_starts(method: str) -> list[Setting]:
    """Return the settings that a search tries first, with the method's own defaults."""
    own = json.dumps({name: values[0] for name, values in SPACES.get(method, {}).items()})
    return [Setting(method=method, rate=rate, momentum=momentum, own=own) for rate, momentum in STARTS]


def list_neighbors(setting: Setting) -> Iterator[Setting]:
    """Yield the settings that differ from ``setting`` in one choice, by turns of the optimizer and of the method."""
    place, known = RATES.index(setting.rate), json.loads(setting.own)
    optimizer = [replace(setting, rate=RATES[at]) for at in (place + 1, place - 1) if 0 <= at < len(RATES)]
    optimizer += [replace(setting, momentum=each) for each in MOMENTA if each != setting.momentum]
    own = [
        replace(setting, own=json.dumps(known | {name: value}))
        for name, values in SPACES.get(setting.method, {}).items()
        for value in values
        if value != known[name]
    ]
    yield from filter(None, chain.from_iterable(zip_longest(optimizer, own)))


def search(method: str, judge: Callable[[Setting], float | None]) -> dict[Setting, float]:
    """Return :data:`TRIED` settings of ``method`` with their validation metrics.

    After :func:`list_starts`, each setting is the first neighbor of the best one so far that is not tried yet. Those
    for which ``judge`` returns None are refused by the method, and do not count.
    """
    found, refused = dict[Setting, float](), set[Setting]()
    while len(found) < TRIED:
        ahead = sorted(found, key=lambda each: -found[each])
        near = chain(list_starts(method), chain.from_iterable(map(list_neighbors, ahead)))
        chosen = next((each for each in near if each not in found and each not in refused), None)
        if chosen is None:
            break
        if (value := judge(chosen)) is None:
            refused.add(chosen)
        else:
            found[chosen] = value
    return found


def read_values(trial: Trial, rows: Sequence[Row], split: str) -> dict[str, float]:
    """Return the metric of each client's model on ``split`` in percent."""
    table = rows_to_frame([row for row in rows if row["split"] == split and row["model"] == "personal"])
    values = 100 * compute_metric(table, trial.settings.metric)
    return dict(zip(table["client"], values, strict=True))


def measure_trained(trial: Trial) -> dict[str, dict[str, float]]:
    """Return test metrics of the clients' models, and with statistics estimated anew where running ones may lag."""
    plain, renewed = trial.evaluate(), trial.reestimate()
    measured = {PLAIN: plain} | ({ANEW: trial.measure_lag(plain, renewed)["rows"]} if renewed else {})
    return {name: read_values(trial, rows, "test") for name, rows in measured.items()}


def measure_unseen(trial: Trial, site: str) -> dict[str, dict[str, float]]:
    """Return test metrics of ``site``, which never trained, by policy; policies see its training inputs."""
    client = trial.measured.client(site)
    models = make_models(trial, {site: client.train}, WITHOUT_LABELS, notices=[])
    rows = {each.policy: evaluate_model(trial, each, client) for each in models}
    values = 100 * compute_metric(rows_to_frame(rows.values()), trial.settings.metric)
    names = (UNADAPTED if policy == UNCHANGED else policy for policy in rows)
    return {name: {site: value} for name, value in zip(names, values, strict=True)}


def train(expression: str, experiment: Experiment, seed: int) -> Trial | None:
    """Return the trial of a method after all rounds; None if it diverged."""
    (method,) = METHODS.parse_all(expression)
    trial = Trial(method, experiment.model, experiment.data, experiment.settings, seed)
    try:
        while trial.server.round < experiment.settings.rounds:
            trial.advance()
    except Diverged:
        trial.close()
        return None
    return trial


def measure(
    data: Federation, site: str, rounds: int, method: str, finalists: Sequence[Setting], **settings: Any
) -> pd.DataFrame:
    """Return the records of a cell; ``site`` never trains (empty: all do).

    ``finalists``: settings to try in place of a search, the best of a shorter budget. ``settings``: of the federation.
    """
    given = {"data": data, "rounds": rounds, "evaluate_every": rounds, "newcomers": site or None}
    given |= SETTINGS | settings
    experiment = make_python_experiment(given)
    trained = [client.name for client in experiment.data.clients if client.name != site]
    rows: list[dict[str, Any]] = []
    trials: dict[Setting, Trial] = {}

    def record(setting: Setting, seed: int, measured: str, values: Mapping[str, float]) -> None:
        known = {"rate": setting.rate, "momentum": setting.momentum, "own": setting.own}
        known |= {"seed": seed, "measured": measured}
        rows.extend({**known, "client": client, "value": value} for client, value in values.items())

    with ExitStack() as stack:

        def judge(setting: Setting) -> float | None:
            try:
                trial = train(setting.write(rounds), experiment, 0)
            except UsageError:
                return None
            if trial is None:
                record(setting, 0, SEARCHED, dict.fromkeys(trained, math.nan))
                return -math.inf
            trials[setting] = stack.enter_context(closing(trial))
            values = read_values(trial, trial.evaluate(), "validation")
            record(setting, 0, SEARCHED, values)
            return sum(values.values()) / len(values)

        found = {each: judge(each) for each in finalists} if finalists else search(method, judge)
        best = max(trials, key=lambda each: found[each], default=None)
        for seed in range(SEEDS) if best else ():
            trial = train(best.write(rounds), experiment, seed) if seed else trials[best]
            if trial:
                tested = measure_unseen(trial, site) if site else measure_trained(trial)
            else:
                tested = {UNADAPTED: {site: math.nan}} if site else {PLAIN: dict.fromkeys(trained, math.nan)}
            for measured, values in tested.items():
                record(best, seed, measured, values)
            if trial and seed:
                trial.close()
    if not found:
        rows = [{"measured": EXCUSED}]
    return pd.DataFrame(rows).assign(left_out=site, rounds=rounds, method=method)


def choose_finalists(records: pd.DataFrame) -> list[Setting]:
    """Return the settings of a cell that are best on validation data, the best first."""
    tried = records[records["measured"] == SEARCHED]
    if tried.empty:
        return []
    means = tried.groupby(["rate", "momentum", "own"], sort=False)["value"].mean()
    ahead = means.dropna().sort_values(ascending=False, kind="stable").index[:FINALISTS]
    method = records["method"].iloc[0]
    return [Setting(method=method, rate=rate, momentum=momentum, own=own) for rate, momentum, own in ahead]


def list_methods() -> list[str]:
    """Return the methods of the benchmark."""
    return [name for name in list_catalog("methods") if name not in LEFT_OUT]


def read_records(file: Path) -> pd.DataFrame:
    """Return the records in ``file``, with text in place of categories."""
    table = pd.read_parquet(file)
    return table.astype({name: object for name in table.columns if table[name].dtype == "category"})


def pack(out: Path, file: Path) -> None:
    """Write the records of all cells in ``out`` to ``file``, which keeps its records of other cells."""
    cells = [pd.read_parquet(each) for each in sorted(out.glob("*/*/*.parquet"))]
    table = pd.concat(cells, ignore_index=True)[[*COLUMNS]]
    if file.exists():
        before, cell = read_records(file), [*COLUMNS[:4]]
        new = pd.MultiIndex.from_frame(table[cell])
        table = pd.concat([before[~pd.MultiIndex.from_frame(before[cell]).isin(new)], table], ignore_index=True)
    table["value"] = table["value"].round(3).astype("float32")
    names = ["federation", "left_out", "method", "own", "measured", "client"]
    table = table.astype(dict.fromkeys(names, "category") | {"rounds": "int16", "seed": "Int8"})
    write_parquet(table.sort_values([*COLUMNS[:4]], kind="stable", ignore_index=True), file)


def write_parquet(table: pd.DataFrame, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    buffer = BytesIO()
    table.to_parquet(buffer, compression="zstd", index=False)
    write_atomically(file, buffer.getvalue())


def split(text: str) -> list[str]:
    """Return the names in an argument with commas."""
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument("--federations", type=split, default=[*MAKERS], help="names with commas; default: all")
    parser.add_argument("--methods", type=split, help="names with commas; default: all of the question")
    parser.add_argument("--budgets", type=lambda text: [*map(int, text.split(","))], default=[*BUDGETS])
    parser.add_argument("--leave-out", action="store_true", help="leave out each site in turn")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="mobilenet_v2-b0353104.pth of torchvision")
    parser.add_argument("--records", type=Path, metavar="FILE", help="take the cells in this file as computed")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="add the records of OUT to this file")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.pack:
        pack(given.out, given.pack)
        return
    if given.quick:
        given.federations, given.budgets, given.out = QUICK, [1, 2], given.out / "quick"
        given.methods = given.methods or ["fedavg", "fedbn", "fedprox"]
    methods = given.methods or (list(FOR_NEW_SITES) if given.leave_out else list_methods())
    for kind, names, known in (("federation", given.federations, MAKERS), ("method", methods, list_methods())):
        if unknown := set(names) - set(known):
            parser.error(f"no {kind} {min(unknown)!r}; there are: {', '.join(known)}")
    torch.set_num_threads(1)
    recorded = dict(iter(read_records(given.records).groupby([*COLUMNS[:4]]))) if given.records else {}
    began, trained = time.monotonic(), 0
    for place, (name, data, settings) in enumerate(make_federations(given.federations, given.weights)):
        cells = [(site, method) for site in (data.names if given.leave_out else [""]) for method in methods]
        for number, (site, method) in enumerate(cells, 1):
            finalists: list[Setting] = []
            for rounds in given.budgets:
                file = given.out / name / (to_file_name(site) or "all") / f"{method}-{rounds}.parquet"
                cell = recorded.get((name, site, rounds, method))
                if cell is None and not file.exists():
                    made = measure(data, site, rounds, method, finalists, **settings)
                    write_parquet(made.assign(federation=name), file)
                    trained += 1
                finalists = choose_finalists(pd.read_parquet(file) if cell is None else cell)
            here = f"{name}, {f'without {site}, ' * bool(site)}{method} ({number} of {len(cells)})"
            left = len(cells) - number + len(cells) * (len(given.federations) - place - 1)
            each = (time.monotonic() - began) * len(given.budgets) / max(trained, 1) / 60
            print(f"{here}; about {each * left:.0f} minutes left", flush=True)


if __name__ == "__main__":
    main()
