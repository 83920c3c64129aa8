"""Search for a method on validation data: successive halving over methods and learning rates, within a budget.

All candidates train for a few rounds, the best third of them for three times as many, and so on; a candidate that
advances continues from its checkpoint (Jamieson and Talwalkar 2016, arXiv:1502.07943, who halve; Li et al. 2018,
arXiv:1603.06560, keep a third). There are three changes. After the first rung every method advances at its best
learning rate, since it is too early to rank methods. At most :data:`PER_METHOD` rates of a method advance, since the
search is to choose a method. The baseline stays to the end, since gains are measured against it. Test data are not
used.

A search is a function of data, settings and its plan. Only the plan depends on the clock: how many candidates and
rounds fit into the budget follows from steps timed on this machine, which are cached.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pandas as pd
import torch
from pydantic import TypeAdapter

from ..analysis.statistics import PairedDifference, paired_difference
from ..config.expressions import trust_only
from ..config.spec import AUTO
from ..core.method import Method
from ..core.optimizer import AdamW, Optimizer, TorchOptimizer
from ..data.source import Progress
from ..engines.engine import Diverged
from ..experiments.callbacks import Callback
from ..experiments.duration import Cost
from ..experiments.experiment import Experiment
from ..experiments.jobs import Jobs
from ..methods import METHODS
from ..methods.tuned import tuned
from ..results.run_directory import trial_folder
from ..results.schema import (
    REESTIMATED,
    compute_metric,
    find_baseline,
    is_lower_better,
    is_plain,
    is_share,
    rows_to_frame,
)
from ..results.summary import read_chosen_statistics
from ..results.trial_records import read_lag, read_rounds, stream_measurements
from ..utils.checked_json import read_checked, write_checked
from ..utils.errors import FedshiftError, Ref, Sentence, UsageError
from ..utils.execution.workers import Workers
from ..utils.words import format_time
from .budget import PER_METHOD, Rung, fit_budget, measure_cost, plan_rungs, predict_seconds
from .shift_report import choose_methods, interpret
from .shifts import Diagnosis, diagnose

MOST_METHODS = 12
"""Maximum number of candidate methods from a diagnosis: FedAvg, eight recommended ones and three that always run."""
SMALL_BATCH = 4
"""Largest batch size at which methods without BatchNorm are tried first."""
BASELINE, LOCAL = "fedavg", "single"
"""Methods that stay to the end for comparison with the advised one: the baseline, and local training."""
CONFIRMING = 5
"""Number of seeds in the comparison that confirms the advice."""
LARGE_PART = 0.05
"""Share of the budget from which a round is too long to be timed, and is predicted from a step."""
FILE, RUN = "search.json", "search"
"""In the directory of a search: the file with its plan and results, and the run directory of its trials."""
RATES, ADAMW_RATES = (0.003, 0.01, 0.03, 0.1, 0.3), (0.0001, 0.0003, 0.001, 0.003, 0.01)
"""Learning rates to try with SGD and with AdamW."""
TIMES_DEFAULT = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Multiples of the default learning rate to try with another optimizer of torch."""
VALIDATION = 0.2
"""Fraction of the training samples that is held out if there are no validation data."""
GENERAL = {
    "single": "each client trains by itself: shows whether federating pays",
    "fedbn": "the smallest change against a feature shift, in case the diagnosis missed it",
    "gn": "one model without statistics of batches, in case the diagnosis missed a shift",
}
"""Methods that are always tried, with the reasons."""
FEW = "BatchNorm's statistics are noisy in batches of {} samples (FedWon, tables 2 and 20)"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A method at a learning rate (None: the one that it sets); ``name`` stands for both in tables."""

    name: str
    method: str
    rate: float | None

    def is_of(self, method: str) -> bool:
        """Return whether this is ``method``, in any spelling."""
        return self.method == method or is_plain(self.method, method)


Values = dict[str, dict[str, float | None]]
"""Validation metric by candidate and client, mean over seeds; None where it is undefined or training diverged."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Plan of a search, and the results of the rungs that were run.

    Attributes:
        reasons: Reason for trying each method.
        refused: Methods that do not suit the data or the model, with the reason.
        findings: Sentences from the diagnosis.
        seconds: Predicted total time, including diagnosis and timing.
        asked: Requested number of rounds; the budget may allow fewer.
        budget: Minutes for everything.
        results: Values of each rung that was run.
        dropped: Methods and learning rates that the budget does not allow.
        costs: Seconds that a method takes for a round and its evaluation.
        spent: Seconds used so far.
        overtime: Whether the budget was used up before all rungs were run.

    """

    federation: str
    metric: str
    seeds: int
    baseline: str
    reasons: Mapping[str, str]
    refused: Mapping[str, str]
    findings: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    rungs: tuple[Rung, ...]
    seconds: float = field(compare=False)
    asked: int
    budget: float
    results: tuple[Values, ...] = ()
    dropped: tuple[str, ...] = ()
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
        """1 if a higher value of the metric is better, else -1."""
        return -1 if is_lower_better(self.metric) else 1

    def table(self, rung: int) -> pd.DataFrame:
        """Return the values of a rung that was run, clients x candidates.

        Candidates without any value are omitted, then clients without a value for some candidate.
        """
        values = pd.DataFrame(self.results[rung], dtype=float).dropna(axis=1, how="all")
        table = values.dropna()
        if not len(table):
            raise FedshiftError(
                f"no client has a validation {self.metric} for every candidate after {self.rungs[rung].rounds} "
                "rounds: give smaller {}, more {}, or {}",
                Ref("rates"),
                Ref("rounds"),
                Ref(metric="accuracy"),
            )
        return table

    def rank(self, rung: int) -> list[Candidate]:
        """Return the candidates of a rung that did not diverge, the best first; equal ones keep their order."""
        macro = self.table(rung).mean()
        known = [each for each in self.candidates if each.name in macro]
        return sorted(known, key=lambda each: -self.sign * macro[each.name])

    def members(self, rung: int) -> tuple[Candidate, ...]:
        """Return the candidates of a rung, in the order of all candidates.

        Raises :class:`FedshiftError` if the baseline diverged at every learning rate.
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
        """Return the baseline and local training at their best learning rates in a rung."""
        local = self.find(LOCAL, rung)
        return [self.find_baseline(rung), *([local] if local else [])]

    def find(self, method: str, rung: int = -1) -> Candidate | None:
        """Return ``method`` at its best learning rate in a rung; None if the rung has no such candidate."""
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
        """The advised candidate: the best on validation data in the last rung, unless a simpler one does as well.

        If the expected gain over the baseline is negative, the baseline is advised, or local training if the baseline
        loses to it. If the best candidate's expected gain over local training is not positive, local training is
        advised.
        """
        local = self.find(LOCAL)
        if self.expected.mean < 0:
            base = self.find_baseline(-1)
            return local if local and self.gain(base, -1, local).mean < 0 else base
        gained = self.expected_over(LOCAL)
        return local if local and gained and not gained.mean > 0 else self.rank(-1)[0]

    def gain(self, candidate: Candidate, rung: int, over: Candidate | None = None) -> PairedDifference:
        """Return how much better ``candidate`` is in a rung than ``over``, paired over clients.

        ``over``: a candidate; None: the baseline at its best learning rate.
        """
        table = self.table(rung)
        ours, theirs = (self.sign * table[each.name] for each in (candidate, over or self.find_baseline(rung)))
        return self._compare(ours.tolist(), theirs.tolist())

    def _compare(self, ours: list[float], theirs: list[float]) -> PairedDifference:
        return paired_difference(ours, theirs, widest=1.0 if is_share(self.metric) else math.inf)

    @cached_property
    def expected(self) -> PairedDifference:
        """The expected gain over the baseline: at each client, the gain of the candidate that is best at the others.

        The best of several values is too high by chance; here no client's data both choose and measure.
        """
        return self.expected_over(self.baseline) or paired_difference([], [])

    def expected_over(self, method: str) -> PairedDifference | None:
        """Return the gain over ``method`` as in :attr:`expected`; None if the last rung did not measure ``method``."""
        table = self.sign * self.table(-1)
        base = [each.name for each in self.candidates if each.is_of(method) and each.name in table]
        if not base:
            return None
        ours, theirs = list[float](), list[float]()
        for client in table.index if len(table) > 1 else ():
            others = table.drop(index=client).mean()
            ours.append(float(table.loc[client, others.idxmax()]))
            theirs.append(float(table.loc[client, others[base].idxmax()]))
        return self._compare(ours, theirs)


def parse_rates(rates: str | Sequence[float], optimizer: Optimizer) -> tuple[float, ...]:
    """Parse learning rates from numbers or a comma-separated text; ``auto``: the usual ones for ``optimizer``."""
    if rates == AUTO:
        return _choose_rates(optimizer)
    try:
        parsed = tuple(float(rate) for rate in (rates.split(",") if isinstance(rates, str) else rates))
    except (TypeError, ValueError) as error:
        raise UsageError(f"rates={rates!r}: give numbers separated by commas, such as 0.01,0.03,0.1") from error
    if not parsed or len(set(parsed)) < len(parsed) or not all(0 < rate < math.inf for rate in parsed):
        raise UsageError(f"rates={rates!r}: give different numbers greater than 0, such as 0.01,0.03,0.1")
    return parsed


def _choose_rates(optimizer: Optimizer) -> tuple[float, ...]:
    """Return the learning rates to try with ``optimizer``; with one of torch's, multiples of its default."""
    if isinstance(optimizer, TorchOptimizer) and not issubclass(optimizer.function, torch.optim.SGD):
        usual = inspect.signature(optimizer.function).parameters.get("lr")
        if usual and isinstance(usual.default, float):
            return tuple(float(f"{factor * usual.default:.3g}") for factor in TIMES_DEFAULT)
    return ADAMW_RATES if isinstance(optimizer, AdamW) else RATES


def hold_out(make: Callable[[dict[str, Any]], Experiment]) -> Experiment:
    """Return an experiment that measures only validation data, held out from the training data where there are none.

    Test data are not measured, so they cannot influence the search. ``make`` creates the experiment with additional
    settings.
    """

    def prepare(settings: dict[str, Any]) -> Experiment:
        made = make(settings)
        return replace(made, settings=replace(made.settings, splits=("validation",)))

    experiment = prepare({})
    trained = [client for client in experiment.data.clients if client.name not in experiment.settings.newcomers]
    return experiment if all(client.validation for client in trained) else prepare({"validation": VALIDATION})


def begin_search(
    experiment: Experiment,
    methods: Sequence[Method] | None,
    rates: Sequence[float],
    budget: float,
    progress: Progress | None = None,
) -> Search:
    """Diagnose the training clients of ``experiment``, choose candidates, and plan rungs for ``budget`` minutes.

    Args:
        experiment: Data, model, settings and seeds; its methods are ignored.
        methods: Methods to try; the baseline is FedAvg if it is among them, else the first. None: those that the
            diagnosis recommends.
        rates: Learning rates to try for methods that do not set their own.
        budget: Minutes for diagnosis, timing, training and evaluation together.
        progress: Callback for progress.

    Raises:
        UsageError: There is only one client, fewer than two methods suit the data and the model, or the budget is too
            small.

    """
    began, data, settings = time.monotonic(), experiment.data, experiment.settings
    if settings.patience is not None:
        raise UsageError("{} ends trials early, which a search does by its own rule: omit it", Ref("patience"))
    members = data.select_clients(name for name in data.names if name not in settings.newcomers)
    found = diagnose(members, progress=progress)
    if methods is None:
        reasons = list_candidates(found, settings.work.batch_size)
        methods, named = METHODS.parse_all(",".join(reasons)), False
    else:
        methods = list({each.name: each for each in methods}.values())
        reasons, named = {method.label: "as requested" for method in methods}, True
    known = {each.label: each for each in methods}
    costs, refused = dict[str, Cost](), dict[str, str]()
    always = [] if named else [BASELINE, *GENERAL]
    order = [*(name for name in always if name in known), *(name for name in known if name not in always)]
    for number, name in enumerate(order):
        if progress is not None:
            progress("timing a round of each method", number, len(order))
        try:
            costs[name] = measure_cost(experiment, known[name], LARGE_PART * 60 * budget)
        except UsageError as error:
            if named:
                raise
            refused[name] = str(error)
        if len(costs) == MOST_METHODS and not named:
            break
    baseline = find_baseline(costs)
    if len(costs) < 2:
        raise UsageError(
            f"a search needs two methods that fit the data and the model, but only {', '.join(costs) or 'none'} does: "
            f"name more ({{}}). {'; '.join(refused.values())}",
            Ref("methods"),
        )
    costs = {baseline: costs.pop(baseline), **costs}  # the baseline is dropped last
    keep = 2 if named else max(2, sum(name in costs for name in always))
    several = len(experiment.seeds)
    scaled = {name: Cost(round=several * c.round, evaluation=several * c.evaluation) for name, c in costs.items()}
    held, spent = 1 + any(is_plain(name, LOCAL) for name in costs), time.monotonic() - began
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
        candidates=tuple(candidates),
        rungs=rungs,
        seconds=spent + predict_seconds(rungs, [scaled[name] for name in chosen], len(left), held),
        asked=settings.rounds,
        budget=budget,
        dropped=tuple(dropped),
        costs={name: costs[name].round + costs[name].evaluation for name in chosen},
        spent=time.monotonic() - began,
    )


def list_candidates(found: Diagnosis, batch_size: int | None) -> dict[str, str]:
    """Return the methods to try after a diagnosis with their reasons, the best supported first.

    ``batch_size``: of training; small batches favor methods without BatchNorm.
    """
    (baseline, why), *advised = choose_methods(found).items()
    few = batch_size is not None and batch_size <= SMALL_BATCH
    reasons = {baseline: why} | (dict.fromkeys(("gn", "fedwon"), FEW.format(batch_size)) if few else {})
    for method, reason in (*advised, *GENERAL.items()):
        reasons.setdefault(method, reason)
    return reasons


def tune(method: Method, rates: Sequence[float]) -> Iterator[Candidate]:
    """Yield ``method`` at each learning rate, or once if it sets its own."""
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
    """Run the remaining rungs of ``search`` in ``directory`` until ``stop`` is set, and return it with their results.

    ``methods``: the argument of :func:`begin_search`. Results are written after each rung. When the budget is used up,
    the search ends after the rounds in progress; a search that is resumed has the full budget again.
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

            def run(part: Experiment, path: Path, rung: str) -> bool:
                left = search.seconds - before - time.monotonic() + began
                if callback is not None and left > 0:
                    callback.on_notice(f"{rung}; about {format_time(left)} left in all")
                resume = (path / "config.toml").exists()
                return part.run(path, resume=resume, callback=callback, stop=stop, jobs=jobs, workers=workers, runs=0)

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
    """Run the remaining rungs; ``run`` takes an experiment, a directory and what the rung is."""
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
            rung = f"rung {number + 1} of {len(search.rungs)}: {len(members)} candidates, {rounds} rounds"
            finished = run(part, path, rung)
        except Diverged:
            finished = True  # the other trials have ended; the diverged one has no measurement
        if not finished:
            break
        search = replace(search, results=(*search.results, read_values(part, path, rounds, search.asked)))
        save_search(search, directory)
    return search


def _make_method(candidate: Candidate, known: Mapping[str, Method]) -> Method:
    if candidate.method in known:
        method = known[candidate.method]
    else:
        with trust_only((), FILE):  # only methods of the catalog: a file may come from someone else
            method = METHODS.parse(candidate.method)
    return method if candidate.rate is None else tuned(method, lr=candidate.rate)


def read_values(experiment: Experiment, path: Path, rounds: int, asked: int) -> Values:
    """Return the validation metric of each client after ``rounds`` rounds of the run in ``path``, mean over seeds.

    After fewer rounds than ``asked``, models are compared with re-estimated BatchNorm statistics where the running ones
    lag (:mod:`fedshift.evaluation.statistics_lag`), since they would have caught up after more rounds. After as many,
    they have the statistics that the run reports.
    """
    renewed = rounds < asked or read_chosen_statistics(path) == REESTIMATED
    metrics: Values = {}
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
            lag = read_lag(folder) if renewed else None
            again = [row for row in lag["rows"] if row["round"] == rounds] if lag else []
            fresh = rows_to_frame(r for r in again if (r["split"], r["model"]) == ("validation", "personal"))
            kept = fresh if len(fresh) else kept
            if len(kept):
                measured = compute_metric(kept, experiment.settings.metric)
                values[seed] = pd.Series(measured.to_numpy(dtype=float), index=kept["client"]).reindex(trained)
        mean = values.mean(axis=1, skipna=False)
        metrics[method.label] = {str(name): None if math.isnan(value) else float(value) for name, value in mean.items()}
    return metrics


def save_search(search: Search, directory: Path) -> None:
    """Write ``search`` into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    write_checked(directory / FILE, asdict(search))


def read_search(directory: Path) -> Search:
    """Read the search in ``directory``; raise :class:`FedshiftError` if there is none, or its file is damaged."""
    hint = Sentence("start a new search in another directory ({})", Ref("out"))
    return TypeAdapter(Search).validate_python(read_checked(directory / FILE, hint))
