"""Search for a method on validation data: successive halving over methods and learning rates, within a budget.

All candidates train for a few rounds, the best third of them for three times as many, and so on; one that goes on
continues from its checkpoint (Jamieson and Talwalkar 2016, arXiv:1502.07943, who halve; Li et al. 2018,
arXiv:1603.06560, keep a third). Three changes: after the first rung every method goes on at its best learning rate,
since the order of methods is not seen so early; at most :data:`PER_METHOD` rates of a method go on, since methods are
to be chosen; and the baseline stays to the end, since gains are over it. Test data choose nothing.

A search is a function of data, settings and its plan. The plan alone depends on the clock: how many candidates and
rounds fit into the budget follows from steps timed on this machine, which are cached.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pandas as pd
import torch

from ..analysis.statistics import PairedDifference, paired_difference
from ..config.expressions import trust_only
from ..config.spec import AUTO
from ..core.method import Method
from ..core.optimizer import AdamW, Optimizer, TorchOptimizer
from ..data.files.read_options import Progress
from ..engines.engine import Diverged
from ..experiments.callbacks import Callback
from ..experiments.experiment import Experiment
from ..experiments.jobs import Jobs
from ..methods import METHODS
from ..methods.tuned import tuned
from ..results.run_directory import trial_folder
from ..results.schema import LOWER_IS_BETTER, compute_metric, find_baseline, is_plain, rows_to_frame
from ..results.trial_records import read_lag, read_rounds, stream_measurements
from ..utils.checked_json import read_checked, write_checked
from ..utils.errors import FedshiftError, Ref, Sentence, UsageError
from ..utils.execution.workers import Workers
from . import Diagnosis, diagnose
from .budget import PER_METHOD, Cost, Rung, fit_budget, measure_cost, plan_rungs, predict_seconds
from .rendering import interpret

MOST_METHODS = 12
"""Most methods that a diagnosis makes candidates: FedAvg, eight advised ones and three in any case."""
SMALL_BATCH = 4
"""Batch size up to which methods without BatchNorm come first."""
BASELINE, ALONE = "fedavg", "single"
"""Methods that stay to the end, since the advised one is compared with them."""
CONFIRMING = 5
"""Seeds of the comparison that is to confirm the advice."""
LARGE_PART = 0.05
"""A round that is predicted to take this part of the budget is not timed, but predicted from a step."""
FILE, RUN = "search.json", "search"
"""File with the plan and the results of a search in its directory, and the run directory of its trials there."""
RATES, ADAMW_RATES = (0.003, 0.01, 0.03, 0.1, 0.3), (0.0001, 0.0003, 0.001, 0.003, 0.01)
"""Learning rates to try with SGD and with AdamW."""
TIMES_DEFAULT = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Multiples of the default learning rate to try with another optimizer of torch."""
VALIDATION = 0.2
"""Fraction of training samples that is held out where there are no validation data."""
GENERAL = {
    "single": "each client by itself: whether federating pays at all",
    "fedbn": "the smallest change where looks differ, should the diagnosis have missed it",
    "gn": "one model without statistics of batches, should the diagnosis have missed a shift",
}
"""Methods that are tried whatever the diagnosis says."""
FEW = "batches of {} samples, of which BatchNorm's statistics are noisy (FedWon, tables 2 and 20)"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A method at a learning rate (None: its own); ``name`` is what both together are called in tables."""

    name: str
    method: str
    rate: float | None

    def is_of(self, method: str) -> bool:
        """Return whether this is ``method``, in some spelling of it."""
        return self.method == method or is_plain(self.method, method)


Values = dict[str, dict[str, float | None]]
"""Validation metric of each client, mean over seeds, by candidate; None where it is undefined or training diverged."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Plan of a search, and the results of the rungs that were run.

    ``reasons``: for trying each method. ``refused``: methods that do not fit, and why. ``findings`` and ``cautions``:
    of the diagnosis. ``seconds``: predicted for everything, diagnosis and timing included. ``asked``: rounds that were
    asked for, of which the budget may allow fewer. ``dropped``: methods and rates that the budget does not allow.
    ``work``: work of a method beyond FedAvg's, in words; ``costs``: seconds of a round with its evaluation. ``spent``:
    seconds used so far. ``overtime``: the budget was used before all rungs were run.
    """

    federation: str
    metric: str
    seeds: int
    baseline: str
    reasons: Mapping[str, str]
    refused: Mapping[str, str]
    findings: tuple[str, ...]
    cautions: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    rungs: tuple[Rung, ...]
    seconds: float = field(compare=False)
    asked: int
    budget: float
    results: tuple[Values, ...] = ()
    dropped: tuple[str, ...] = ()
    work: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict, compare=False)
    spent: float = field(default=0.0, compare=False)
    overtime: bool = field(default=False, compare=False)

    @property
    def ended(self) -> bool:
        """Return whether all rungs were run."""
        return len(self.results) == len(self.rungs)

    @property
    def last(self) -> Rung:
        """The last rung that was run."""
        return self.rungs[len(self.results) - 1]

    @property
    def sign(self) -> int:
        """1 where a higher value of the metric is better, else -1."""
        return -1 if self.metric in LOWER_IS_BETTER else 1

    def table(self, rung: int) -> pd.DataFrame:
        """Return the values of a rung that was run: clients that all candidates have x candidates that have some."""
        values = pd.DataFrame(self.results[rung], dtype=float).dropna(axis=1, how="all")
        table = values.dropna()
        if not len(table):
            raise FedshiftError(
                f"no client has a validation {self.metric} under every candidate after {self.rungs[rung].rounds} "
                "rounds: give smaller {}, more {}, or {}",
                Ref("rates"),
                Ref("rounds"),
                Ref(metric="accuracy"),
            )
        return table

    def rank(self, rung: int) -> list[Candidate]:
        """Return the candidates of a rung that did not diverge, the best first, of equal ones the earlier."""
        macro = self.table(rung).mean()
        known = [each for each in self.candidates if each.name in macro]
        return sorted(known, key=lambda each: -self.sign * macro[each.name])

    def members(self, rung: int) -> tuple[Candidate, ...]:
        """Return the candidates of a rung, in the order of all candidates.

        Raises :class:`FedshiftError` where the baseline diverged at every learning rate.
        """
        if rung == 0:
            return self.candidates
        ranking, kept = self.rank(rung - 1), list[Candidate]()
        if rung == 1 and len({each.method for each in ranking}) < len(ranking):
            kept = [each for n, each in enumerate(ranking) if each.method not in [r.method for r in ranking[:n]]]
        for each in ranking:
            if (
                each not in kept
                and len(kept) < self.rungs[rung].candidates
                and [k.method for k in kept].count(each.method) < PER_METHOD
            ):
                kept.append(each)
        return tuple(each for each in self.candidates if each in (*kept, *self._list_references(rung - 1)))

    def _list_references(self, rung: int) -> list[Candidate]:
        """Return the baseline and training alone at their best learning rates in a rung."""
        alone = self.find(ALONE, rung)
        return [self.find_baseline(rung), *([alone] if alone else [])]

    def find(self, method: str, rung: int = -1) -> Candidate | None:
        """Return ``method`` at its best learning rate in a rung; None where it is not among its candidates."""
        return next((each for each in self.rank(rung) if each.is_of(method)), None)

    def find_baseline(self, rung: int) -> Candidate:
        """Return the baseline at its best learning rate in a rung."""
        found = self.find(self.baseline, rung)
        if found is None:
            raise FedshiftError(
                f"{self.baseline} diverged at every learning rate: give smaller ones ({{}})", Ref("rates")
            )
        return found

    @cached_property
    def best(self) -> Candidate:
        """The candidate that is best on validation data in the last rung.

        Where that choice, made without a client, loses to the baseline at this client on average, it is the baseline;
        where what is then advised gains nothing over training alone there, it is training alone, which is simpler.
        """
        alone = self.find(ALONE)
        if self.expected.mean < 0:
            base = self.find_baseline(-1)
            return alone if alone and self.gain(base, -1, alone).mean < 0 else base
        gained = self.expected_over(ALONE)
        return alone if alone and gained and not gained.mean > 0 else self.rank(-1)[0]

    def gain(self, candidate: Candidate, rung: int, over: Candidate | None = None) -> PairedDifference:
        """Return how much better ``candidate`` is in a rung than ``over``, paired over clients.

        ``over``: None: the baseline at its best learning rate.
        """
        table = self.table(rung)
        ours, theirs = (self.sign * table[each.name] for each in (candidate, over or self.find_baseline(rung)))
        return paired_difference(ours.tolist(), theirs.tolist())

    @cached_property
    def expected(self) -> PairedDifference:
        """The expected gain over the baseline: at each client that of the candidate that is best at the others.

        The best value of several is too high by chance; here no client's data both choose and measure.
        """
        found = self.expected_over(self.baseline)
        return found if found else paired_difference([], [])

    def expected_over(self, method: str) -> PairedDifference | None:
        """Return the gain like :attr:`expected` over ``method``; None where the last rung has not measured it."""
        table = self.sign * self.table(-1)
        base = [each.name for each in self.candidates if each.is_of(method) and each.name in table]
        if not base:
            return None
        ours, theirs = list[float](), list[float]()
        for client in table.index if len(table) > 1 else ():
            others = table.drop(index=client).mean()
            ours.append(float(table.loc[client, others.idxmax()]))
            theirs.append(float(table.loc[client, others[base].idxmax()]))
        return paired_difference(ours, theirs)


def parse_rates(rates: str | Sequence[float], optimizer: Optimizer) -> tuple[float, ...]:
    """Return learning rates given as numbers or as a text with commas; ``auto``: those for ``optimizer``."""
    if rates == AUTO:
        return _choose_rates(optimizer)
    try:
        found = tuple(float(rate) for rate in (rates.split(",") if isinstance(rates, str) else rates))
    except (TypeError, ValueError) as error:
        raise UsageError(f"rates={rates!r}: give numbers with commas between, such as 0.01,0.03,0.1") from error
    if not found or len(set(found)) < len(found) or not all(0 < rate < math.inf for rate in found):
        raise UsageError(f"rates={rates!r}: give numbers greater than 0, each once, such as 0.01,0.03,0.1")
    return found


def _choose_rates(optimizer: Optimizer) -> tuple[float, ...]:
    """Return the learning rates to try with ``optimizer``; with one of torch's, multiples of its default."""
    if isinstance(optimizer, TorchOptimizer) and not issubclass(optimizer.kind, torch.optim.SGD):
        usual = inspect.signature(optimizer.kind).parameters.get("lr")
        if usual and isinstance(usual.default, float):
            return tuple(float(f"{factor * usual.default:.3g}") for factor in TIMES_DEFAULT)
    return ADAMW_RATES if isinstance(optimizer, AdamW) else RATES


def hold_out(make: Callable[[dict[str, Any]], Experiment]) -> Experiment:
    """Return the experiment that ``make`` makes of further settings, with validation data held out if it has none.

    It measures validation data alone: a search shows no test data, and none can choose.
    """

    def prepare(settings: dict[str, Any]) -> Experiment:
        found = make(settings)
        return replace(found, settings=replace(found.settings, splits=("validation",)))

    made = prepare({})
    trained = [client for client in made.data.clients if client.name not in made.settings.newcomers]
    return made if all(client.validation for client in trained) else prepare({"validation": VALIDATION})


def begin_search(
    experiment: Experiment,
    methods: Sequence[Method] | None,
    rates: Sequence[float],
    budget: float,
    progress: Progress | None = None,
) -> Search:
    """Diagnose the clients of ``experiment`` that train, choose candidates, and plan rungs for ``budget`` minutes.

    Args:
        experiment: data, model, settings and seeds; its methods are ignored.
        methods: methods to try, the first of which is the baseline unless FedAvg is among them; None: by the diagnosis.
        rates: learning rates to try of methods that set none.
        budget: minutes of everything: diagnosis, timing, training and evaluation.
        progress: callback for progress.

    Raises:
        UsageError: there is no second client or no method that fits, or the budget is too small for any.

    """
    began, data, settings = time.monotonic(), experiment.data, experiment.settings
    if settings.patience is not None:
        raise UsageError("{} ends trials, and so does a search, by its own rule: leave it out", Ref("patience"))
    members = data.select_clients(name for name in data.names if name not in settings.newcomers)
    if methods is None:
        found = diagnose(members, progress=progress)
        reasons = list_candidates(found, settings.work.batch_size)
        methods, named = METHODS.parse_all(",".join(reasons)), False
    else:
        methods = list({each.name: each for each in methods}.values())
        reasons, named = {method.label: "as asked for" for method in methods}, True
    known = {each.label: each for each in methods}
    if named:
        found = diagnose(members, progress=progress)
    costs, refused, work = dict[str, Cost](), dict[str, str](), dict[str, str]()
    always = [] if named else [BASELINE, *GENERAL]
    order = [*(name for name in always if name in known), *(name for name in known if name not in always)]
    for number, name in enumerate(order):
        if progress is not None:
            progress("timing a round of each method", number, len(order))
        try:
            costs[name], work[name] = measure_cost(experiment, known[name], LARGE_PART * 60 * budget)
        except UsageError as error:
            if named:
                raise
            refused[name] = str(error)
        if len(costs) == MOST_METHODS and not named:
            break
    baseline = find_baseline(costs)
    if len(costs) < 2:
        raise UsageError(
            f"methods: {', '.join(costs) or 'none'} fits the data and the model, and a search needs two: name more "
            f"({{}}). {'; '.join(refused.values())}",
            Ref("methods"),
        )
    costs = {baseline: costs.pop(baseline), **costs}  # the last to be left out
    keep = 2 if named else max(2, sum(name in costs for name in always))
    several = len(experiment.seeds)
    scaled = {name: Cost(round=several * c.round, evaluation=several * c.evaluation) for name, c in costs.items()}
    held, spent = 1 + any(is_plain(name, ALONE) for name in costs), time.monotonic() - began
    chosen, left, rounds = fit_budget(scaled, rates, settings.rounds, 60 * budget, keep=keep, spent=spent, held=held)
    candidates = [each for name in chosen for each in tune(known[name], left)]
    rungs = plan_rungs(len(candidates), rounds, len(chosen))
    dropped = [*(name for name in costs if name not in chosen), *(f"lr={rate:g}" for rate in rates if rate not in left)]
    return Search(
        federation=data.name,
        metric=settings.metric,
        seeds=len(experiment.seeds),
        baseline=baseline,
        reasons={name: reasons[name] for name in chosen},
        refused=refused,
        findings=tuple(interpret(found)),
        cautions=found.advice.cautions,
        candidates=tuple(candidates),
        rungs=rungs,
        seconds=spent + predict_seconds(rungs, [scaled[name] for name in chosen], len(left), held),
        asked=settings.rounds,
        budget=budget,
        dropped=tuple(dropped),
        work={name: work[name] for name in chosen if work[name]},
        costs={name: costs[name].round + costs[name].evaluation for name in chosen},
        spent=time.monotonic() - began,
    )


def list_candidates(found: Diagnosis, batch_size: int | None) -> dict[str, str]:
    """Return methods to try by a diagnosis and the batch size, the best supported first, each with its reason."""
    baseline, *advised = found.advice.methods
    few = batch_size is not None and batch_size <= SMALL_BATCH
    reasons = {baseline.method: baseline.reason} | (
        dict.fromkeys(("gn", "fedwon"), FEW.format(batch_size)) if few else {}
    )
    for method, reason in (*((each.method, each.reason) for each in advised), *GENERAL.items()):
        reasons.setdefault(method, reason)
    return reasons


def tune(method: Method, rates: Sequence[float]) -> Iterator[Candidate]:
    """Yield ``method`` at each learning rate, or as it is where it sets its own."""
    if "lr" in method.optimizer:
        yield Candidate(name=method.label, method=method.label, rate=None)
        return
    for rate in rates:
        yield Candidate(name=tuned(method, lr=rate).label, method=method.label, rate=rate)


def continue_search(
    experiment: Experiment,
    search: Search,
    directory: Path,
    methods: Sequence[Method] | None = None,
    *,
    callback: Callback | None = None,
    stop: Event | None = None,
    jobs: Jobs = "auto",
) -> Search:
    """Run the rungs of ``search`` that have not been run in ``directory``, until ``stop`` is set; return its results.

    ``methods``: those that :func:`begin_search` was given. Results are written after each rung. What is left of the
    budget ends the search after the rounds in progress; a search that continues has the whole budget again.
    """
    stop, began, before = stop or Event(), time.monotonic(), search.spent
    left = 60 * search.budget - (0.0 if search.overtime or search.results else before)
    search, late = replace(search, overtime=False), Event()

    def end() -> None:
        late.set()
        stop.set()

    timer = Timer(max(0.0, left), end)
    timer.daemon = True
    timer.start()
    try:
        with closing(Workers()) as workers:
            run = partial(Experiment.run, callback=callback, stop=stop, jobs=jobs, workers=workers)
            search = _run_rungs(experiment, search, directory, methods, run)
    finally:
        timer.cancel()
    overtime = late.is_set() and not search.ended
    search = replace(search, overtime=overtime, spent=before + time.monotonic() - began)
    save_search(search, directory)
    return search


def _run_rungs(
    experiment: Experiment, search: Search, directory: Path, methods: Sequence[Method] | None,
    run: Callable[..., bool],
) -> Search:  # fmt: skip
    """Run the rungs that are left, each by ``run``, given its experiment, its directory and whether it continues."""
    known = {each.label: each for each in methods} if methods is not None else {}
    save_search(search, directory)
    while not search.ended:
        number = len(search.results)
        rounds, members = search.rungs[number].rounds, search.members(number)
        chosen = tuple(_make_method(each, known) for each in members)
        part = replace(
            experiment,
            methods=chosen,
            settings=replace(experiment.settings, rounds=rounds, evaluate_every=rounds),
            config={**experiment.config, "methods": ", ".join(m.label for m in chosen), "rounds": rounds},
        )
        path = directory / RUN
        try:
            finished = run(part, path, resume=(path / "config.toml").exists())
        except Diverged:
            finished = True  # the others have ended, and it is not measured
        if not finished:
            break
        search = replace(search, results=(*search.results, read_values(part, path, rounds, search.asked)))
        save_search(search, directory)
    return search


def _make_method(candidate: Candidate, known: Mapping[str, Method]) -> Method:
    if candidate.method in known:
        method = known[candidate.method]
    else:
        with trust_only((), FILE):  # one of the catalog: a file may come from someone else
            method = METHODS.parse(candidate.method)
    return method if candidate.rate is None else tuned(method, lr=candidate.rate)


def read_values(experiment: Experiment, path: Path, rounds: int, asked: int) -> Values:
    """Return the validation metric of each client after ``rounds`` rounds of the run in ``path``, mean over seeds.

    After fewer rounds than ``asked``, models are compared with BatchNorm statistics estimated anew, where the running
    ones lag (:mod:`fedshift.evaluation.statistics_lag`), since they would not after more rounds.
    """
    found: Values = {}
    trained = [c.name for c in experiment.data.clients if c.name not in experiment.settings.newcomers]
    for method in experiment.methods:
        values = pd.DataFrame(index=trained, columns=list(experiment.seeds), dtype=float)
        for seed in experiment.seeds:
            folder = trial_folder(path, method.label, seed)
            kept = rows_to_frame(
                row
                for row in stream_measurements(folder, read_rounds(folder)[:rounds])
                if (row["round"], row["split"], row["model"], row["moment"])
                == (rounds, "validation", "personal", "loaded")
            )
            again = [row for row in read_lag(folder) if row["round"] == rounds and rounds < asked]
            fresh = rows_to_frame(r for r in again if (r["split"], r["model"]) == ("validation", "personal"))
            kept = fresh if len(fresh) else kept
            if len(kept):
                measured = compute_metric(kept, experiment.settings.metric)
                values[seed] = pd.Series(measured.to_numpy(dtype=float), index=kept["client"]).reindex(trained)
        mean = values.mean(axis=1, skipna=False)
        found[method.label] = {str(name): None if math.isnan(value) else float(value) for name, value in mean.items()}
    return found


def save_search(search: Search, directory: Path) -> None:
    """Write ``search`` into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    write_checked(directory / FILE, asdict(search))


def read_search(directory: Path) -> Search:
    """Return the search in ``directory``; raise :class:`FedshiftError` where there is none, or it is damaged."""
    kept = read_checked(directory / FILE, Sentence("search anew in another directory ({})", Ref("out")))
    lists: dict[str, Any] = {name: tuple(value) for name, value in kept.items() if isinstance(value, list)}
    candidates, rungs = (
        tuple(kind(**each) for each in kept[name]) for name, kind in (("candidates", Candidate), ("rungs", Rung))
    )
    return Search(**{**kept, **lists, "candidates": candidates, "rungs": rungs})
