"""Experiments: several methods and seeds on one federation, saved to disk as they run.

Trials run seed by seed, all methods of a seed before the next, so that the results of an interrupted experiment can be
compared. Methods with the same seed start from the same weights and see the same order of samples, so that differences
are paired.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from ..analysis.privacy import describe_delta, describe_guarantee, describe_sample_guarantee, find_mechanism
from ..core.method import Method
from ..core.plan import Plan
from ..data.federation import Federation, find_majority_classes
from ..data.pictures import to_pictures
from ..engines.engine import Data, Diverged, Engine, EngineFactory
from ..evaluation.communication import summarize_method
from ..evaluation.metrics import record_clients
from ..evaluation.policy import list_policies
from ..models import ModelFactory
from ..results.cases import measured_round, write_cases
from ..results.checkpoint import load_checkpoint
from ..results.run_directory import RunDirectory, append_rows, cut_rows, to_file_name, trial_folder
from ..results.schema import LOWER_IS_BETTER, PICTURED, RESTART, MethodSummary, Row, compute_metric, rows_to_frame
from ..results.summary import (
    write_summary,
)
from ..results.trial_records import (
    BEST,
    CHECKPOINT,
    LAG,
    METRICS,
    ROUNDS,
    load_facts,
    read_rounds,
    require_checkpoint,
    require_recorded,
    stream_measurements,
)
from ..utils.allocator import keep_freed_memory
from ..utils.checked_json import write_checked
from ..utils.errors import FedshiftError, Ref, UsageError, join_choices
from ..utils.profiling import timed_section
from ..utils.state import pick
from .client_store import check_segments
from .description import describe_training
from .jobs import Job, JobRunner, Jobs, JobSession, SequentialForPool, choose_jobs
from .loggers import RecordLog, TrialLog, require_packages
from .observer import Observer
from .private_training import list_uncovered
from .session import Session, format_now
from .settings import Settings, check_counts
from .trial import Trial

SAMPLES = 8
"""Images of each client that a run keeps for its report."""
VOLUMES = 1
"""Volumes of each client from which a run keeps a slice."""
MAX_NAMED = 5
"""Maximum number of clients that a notice lists."""
NO_SCORE = (0, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """Methods and seeds to run on a federation, with a model and settings.

    ``model(sample_shape, classes)`` makes a network. ``config`` contains the settings as the user wrote them, for the
    record, and ``files`` additional files for the run directory, by name. ``measured_later``: clients that the caller
    measures after the experiment, which need no notice. ``notices``: notices at the start about errors in the data, in
    place of the federation's ``faults``. ``make_engine``: makes each trial's engine if the samples are elsewhere, in
    place of the one in the settings. ``log``: names of loggers.
    """

    methods: tuple[Method, ...]
    data: Federation
    model: ModelFactory
    settings: Settings
    seeds: tuple[int, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    measured_later: tuple[str, ...] = ()
    notices: tuple[str, ...] | None = None
    make_engine: EngineFactory | None = None
    log: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [method.name for method in self.methods]
        if not names:
            raise UsageError("no method is given: name at least one, for example fedavg")
        clash = [name for name in names if [to_file_name(other) for other in names].count(to_file_name(name)) > 1]
        if clash:
            raise UsageError(f"method {clash[0]!r} is given twice: give one of them another name (Method.name)")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise UsageError(f"seeds {list(self.seeds)}: give at least one, each once")
        object.__setattr__(self, "settings", self.settings.for_task(self.data.task))
        if self.make_engine is None:
            check_counts(self.data)
        private = [each.name for each in self.methods if find_mechanism((each.aggregate, *each.rules))]
        if private and self.settings.loss and self.settings.loss.uses_counts:
            raise UsageError(
                f"method {private[0]!r}: {self.settings.loss.weights} weights come from all clients' label counts, "
                "which noise does not hide: give the weights of the classes as numbers"
            )
        train = [client for client in self.data.clients if len(client.train)]
        if self.settings.select == "best" and any(client.validation is None for client in train):
            raise UsageError(
                "{} needs validation data, which the clients lack: hold some out ({})",
                Ref(select="best"),
                Ref(validation=0.1),
            )
        if (self.settings.select, self.settings.metric) == ("best", "auc"):
            parts = [client.validation for client in train if client.validation is not None]
            counts = [(self.data.task.count_classes(part.y, self.data.classes), len(part)) for part in parts]
            if not any(bool(((count > 0) & (count < size)).any()) for count, size in counts):
                raise UsageError(
                    "select='best' by auc needs a client whose validation data hold two classes, or a label that some "
                    "samples have and others lack: hold out more, use another metric, or select='last'"
                )

    def run(
        self,
        path: Path,
        *,
        resume: bool = False,
        observer: Observer | None = None,
        stop: Event | None = None,
        jobs: Jobs = 1,
    ) -> bool:
        """Run all trials in directory ``path``, with a checkpoint after each round.

        Args:
            path: run directory.
            resume: whether to continue the run in ``path``.
            observer: callbacks for events.
            stop: event that ends the run after the rounds in progress once it is set.
            jobs: maximum number of trials that run side by side, in worker processes; it does not affect results.
                ``auto``: as many as leave no processor idle, if that saves time.

        Returns:
            Whether the run reached its end.

        Raises:
            UsageError: a method, the model and the data are incompatible, or cannot be sent to another process for
                several jobs; raised before anything starts.
            Diverged: a trial diverged; raised after the other trials.
            FedshiftError: the disk, the directory or a logger fails.

        """
        observer, stop = observer or Observer(), stop or Event()
        require_packages(self.log)
        trials = self._make_first_trials()
        facts = {name: summarize_method(trial.plan) for name, trial in trials.items()}
        with closing(RunDirectory(path, resume=resume)) as directory:
            if resume:
                self._check_kept(path, trials)
            names, settings = [method.name for method in self.methods], self.settings
            plans = {name: trial.plan for name, trial in trials.items()}
            resolved = describe_training(plans, self.data, self.model, self.settings, remote=bool(self.make_engine))

            def describe(sessions: Sequence[Mapping[str, str]] | None) -> None:
                self._describe(directory, facts, resolved, sessions)

            session = Session(directory, observer, stop, describe, resume=resume)
            log = RecordLog(self.log, path, self.config, settings.metric, observer.notice, session.say)
            observer.begin(names, self.seeds, settings.rounds, self.data.names, settings.metric)
            for notice in (*self.data.notices, *(self.data.faults if self.notices is None else self.notices)):
                session.say(notice)
            side_by_side, processes = choose_jobs(path, trials, self.seeds, 1 if self.make_engine else jobs)
            finished, diverged = True, dict[int, Diverged]()
            if side_by_side:
                try:
                    runner = JobRunner(self.run_job, side_by_side, processes, settings.rounds)
                except UsageError:
                    if jobs != "auto":
                        raise
                    side_by_side = []
                else:
                    observer.notice(f"{processes} trials run side by side, each in a process, with the same results")
                    finished, diverged = runner.run(session, log)
            elsewhere = {job.number for job in side_by_side}
            for number, (seed, method) in enumerate(product(self.seeds, self.methods)):
                if not finished:
                    break
                if number in elsewhere:
                    continue
                session.number = number
                try:
                    known = method.name in trials
                    trial = trials.pop(method.name) if known else self._make_trial(method, seed)
                    finished = self.run_trial(trial, session, log.trial)
                except Diverged as error:
                    session.say_diverged(method.name, seed, error)
                    diverged[number] = error
            session.end(finished=finished and not diverged)
            if finished and diverged:
                raise diverged[min(diverged)]
            return finished

    def run_job(self, job: Job, session: JobSession) -> bool:
        """Run or continue the trial of ``job`` in a worker process; return whether it reached its end."""

        def make_engine(plan: Plan, data: Data, seed: int) -> Engine:
            return SequentialForPool(plan, data, seed, augment=self.settings.augment)

        (method,) = (method for method in self.methods if method.name == job.method)
        trial = self._make_trial(method, job.seed, make_engine if job.choice.engine == "pool" else None)
        trial.choice = job.choice
        log: TrialLog = session.log if self.log else lambda *_: nullcontext(lambda *_: None)
        return self.run_trial(trial, session, log)

    def _make_trial(self, method: Method, seed: int, make_engine: EngineFactory | None = None) -> Trial:
        make_engine = make_engine or self.make_engine
        return Trial(method, self.model, self.data, self.settings, seed, make_engine=make_engine)

    def check_compatible(self, path: Path) -> None:
        """Raise :class:`UsageError` if a method does not fit model and data, or ``path`` contains another run's trials.

        Nothing is trained, and nothing in ``path`` is changed.
        """
        self._check_kept(path, self._make_first_trials())

    def _make_first_trials(self) -> dict[str, Trial]:
        """Make each method's trial of the first seed, which shows whether method, model and data fit."""
        return {method.name: self._make_trial(method, self.seeds[0]) for method in self.methods}

    def _check_kept(self, path: Path, trials: Mapping[str, Trial]) -> None:
        """Raise an error if a trial in ``path`` belongs to another run, or its files are damaged or missing."""
        for name, trial in trials.items():
            for seed in self.seeds:
                folder = trial_folder(path, name, seed)
                require_checkpoint(folder)
                if (folder / CHECKPOINT).exists():
                    trial.check_compatible(load_facts(folder / CHECKPOINT), seed)
                    _, facts = load_checkpoint(folder / CHECKPOINT)
                    check_segments(folder, facts["segments"])
                    self._find_best(folder, facts["round"])

    def run_trial(self, trial: Trial, session: Session | JobSession, log: TrialLog) -> bool:
        """Run or continue ``trial`` in the directory of ``session``; return whether it reached its end.

        ``log``: logs the trial, like :meth:`~fedshift.experiments.loggers.RecordLog.trial`.
        """
        name = trial.plan.method.name
        folder = trial_folder(session.path, name, trial.seed)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = folder / CHECKPOINT
        begun = checkpoint.exists()
        if begun:
            trial.restore(*load_checkpoint(checkpoint), folder)
        done = trial.server.round
        best, reached = self._find_best(folder, done)
        for file in (METRICS, ROUNDS):
            cut_rows(folder / file, done)
        # A trial has a checkpoint from the beginning, so that a removed one is noticed. This also completes an earlier
        # call that was killed before it kept this round as the best or removed unneeded files.
        trial.save(folder, *(() if begun else (CHECKPOINT,)), *((BEST,) if best == done > 0 else ()))
        session.observer.trial(name, trial.seed, done)
        if evaluated := _last_evaluation(folder):
            session.observer.recorded(evaluated)
        for text in self._notices_before(trial):
            session.say(text)
        rounds = self.settings.rounds
        with closing(trial), keep_freed_memory(), log(name, trial.seed, folder, rounds) as log_round:
            if self.settings.engine == "auto" and trial.server.round < self.settings.rounds:
                session.observer.engine(name, trial.engine_choice)
            began = time.perf_counter()
            while trial.server.round < self.settings.rounds:
                if session.stop.is_set():
                    return False
                outcome = trial.advance(session.observer.client)
                session.describe(trains=True)
                began, elapsed = time.perf_counter(), time.perf_counter() - began
                cost = {key: getattr(outcome, key) for key in ("round", "participants", "down", "up", "seconds")}
                cost |= {"elapsed": elapsed, "ended": format_now(), "engine": trial.engine_choice.engine}
                with timed_section("checkpoint"):
                    append_rows(folder / METRICS, outcome.rows)
                    append_rows(folder / ROUNDS, [{**cost, "rows": len(outcome.rows)}])
                    now = self._score(outcome.rows)
                    better = now > reached
                    reached = max(now, reached)
                    if better if self.settings.select == "best" else trial.server.round == rounds:
                        self._record_lag(trial, folder)
                    trial.save(folder, CHECKPOINT, *((BEST,) if better else ()))
                log_round(cost, outcome.rows)
                session.observer.round(outcome)
            if not self.make_engine:  # sites keep the results of single samples
                self._record_cases(trial, folder)
        for text in self._notices_after(trial):
            session.say(text)
        return True

    def _record_lag(self, trial: Trial, folder: Path) -> None:
        """Write measurements of the reported round with BatchNorm statistics estimated anew, if these may lag."""
        (folder / LAG).unlink(missing_ok=True)  # of an earlier round
        with timed_section("evaluation"):
            if (lag := trial.measure_lag()) is not None:
                write_checked(folder / LAG, lag)

    def _record_cases(self, trial: Trial, folder: Path) -> None:
        """Record the results of single test samples at the reported round of a trial that has ended."""
        done = trial.server.round
        reported = done if self.settings.select == "last" else self._find_best(folder, done)[0]
        if "test" not in self.settings.splits or not reported or measured_round(folder) == reported:
            return
        if reported < done:
            (method,) = (each for each in self.methods if each.name == trial.plan.method.name)
            trial = self._make_trial(method, trial.seed)
            trial.restore(*load_checkpoint(folder / BEST), folder)
        with timed_section("evaluation"):
            records = record_clients(trial.plan, trial.server, trial.measured, trial.personal_state)
        if all(records.values()):
            write_cases(folder, reported, records)

    def _notices_before(self, trial: Trial) -> Iterator[str]:
        """Yield the notices about a trial that starts."""
        plan = trial.plan
        for rule in plan.method.rules:
            yield from rule.notices(plan.method.name, plan.work.batch_size, pick(plan.initial, plan.trained))
        if mechanism := find_mechanism(trial.plan.method.rules):
            sizes = {name: len(split) for name, split in trial.train.items()}
            yield from (f"{trial.plan.method.name}: {text}" for text in describe_delta(mechanism, sizes))
        if trial.plan.work.is_one_step(map(len, trial.train.values()), trial.plan.smallest_batch):
            for needs in (*(rule.requires for rule in plan.method.rules), plan.method.aggregate.requires):
                if needs.several_steps:
                    yield f"{plan.method.name}: {needs.several_steps}; a round is one step here"
        merged = trial.find_merged_batches()
        for who in [f"client {name!r}" for name in merged] if len(merged) <= MAX_NAMED else [f"{len(merged)} clients"]:
            yield (
                f"{who}: the last batch would hold one sample, over which batch normalization has no variance; it "
                "joins the batch before it"
            )
        asked = trial.plan.work.batches or 0
        short = {name: count for name, count in trial.count_batches().items() if count < asked}
        if short:
            yield (
                f"{trial.plan.method.name}: a pass has fewer than batches={asked} at {_list_batches(short)}, where a "
                "round ends with the pass and takes fewer steps. --steps takes the same number at each client, over as "
                "many passes as that needs"
            )
        if trial.plan.personalizes and self.settings.unseen == "skip" and self._has_unmeasured:
            yield (
                f"{trial.plan.method.name} keeps models on its clients, and not all take part in every round: one that "
                f"never did has none and is not measured. --unseen {join_choices(list_policies())} gives it one"
            )

    def _notices_after(self, trial: Trial) -> Iterator[str]:
        """Yield the notices about a trial that has ended."""
        method = trial.plan.method
        untrained = [name for name in self._without_later(self.data.names) if not trial.clients.has_trained(name)]
        if untrained and trial.plan.personalizes:
            more = f" and {len(untrained) - MAX_NAMED} more" if len(untrained) > MAX_NAMED else ""
            which = f"{', '.join(untrained[:MAX_NAMED])}{more}"
            fate = (
                f"are not counted (--unseen {join_choices(list_policies())} gives them a model)"
                if self.settings.unseen == "skip"
                else f"are measured by the policy unseen={self.settings.unseen}"
                + (" where their sites can follow it" if self.make_engine else "")
            )
            yield f"{method.name}, seed {trial.seed}: clients that never took part {fate}: {which}"
        uncovered = list_uncovered(trial.plan, self.settings, trial.data, len(self.methods) * len(self.seeds))
        if mechanism := find_mechanism((method.aggregate,)):
            share = len(self.settings.draw_participants(trial.seed, 1, trial.clients.names)) / len(trial.clients)
            yield f"{method.name}: {describe_guarantee(mechanism, share, trial.server.round, uncovered)}"
        if mechanism := find_mechanism(method.rules):
            yield f"{method.name}: {describe_sample_guarantee(mechanism, trial.count_uses(), uncovered)}"

    def _without_later(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in self.measured_later)

    @property
    def _has_unmeasured(self) -> bool:
        """Return whether a client that would need a notice may have no model."""
        settings = replace(self.settings, newcomers=self._without_later(self.settings.newcomers))
        return settings.skips_clients(self._without_later(self.data.names))

    def _score(self, rows: list[Row]) -> tuple[int, float]:
        """Return a round's score: number of clients with validation rows (more is better), then the macro metric.

        The metric is over the clients that define it; their number may depend on predictions, and does not count.
        """
        if self.settings.select != "best":
            return NO_SCORE
        chosen = rows_to_frame(
            row for row in rows if (row["split"], row["model"], row["moment"]) == ("validation", "personal", "loaded")
        )
        found = compute_metric(chosen, self.settings.metric)
        sign = -1 if self.settings.metric in LOWER_IS_BETTER else 1
        return (len(found), sign * float(found.mean())) if found.count() else NO_SCORE

    def _find_best(self, folder: Path, done: int) -> tuple[int, tuple[int, float]]:
        """Return the first best of the ``done`` rounds of the trial in ``folder``, 0 for none, and its score.

        Raises :class:`FedshiftError` if the records or the state of the best round are damaged or missing.
        """
        rounds = read_rounds(folder)
        require_recorded(folder, rounds, done)
        reached = {0: NO_SCORE}
        for number, of_round in groupby(stream_measurements(folder, rounds[:done]), key=lambda row: row["round"]):
            reached[number] = self._score(list(of_round))
        best = max(reached, key=lambda number: reached[number])
        if 0 < best < done:
            _, facts = load_checkpoint(folder / BEST)
            check_segments(folder, facts["segments"])
            if facts["round"] != best:
                raise FedshiftError(f"{folder / BEST} is of round {facts['round']}, not of {best}, the best: {RESTART}")
        return best, reached[best]

    def _sample_images(self) -> dict[str, np.ndarray]:
        """Return some test images of each client in the report's figure, uint8 ``[n, H, W, C]``."""
        pictured = [client for client in self.data.clients[:PICTURED] if len(client.test.shape) in (3, 4)]
        shown = {client.name: SAMPLES if len(client.test.shape) == 3 else VOLUMES for client in pictured}
        return {
            client.name: to_pictures(client.test, slice(0, shown[client.name]), self.data.classes)
            for client in pictured
        }

    def _describe(
        self,
        directory: RunDirectory,
        methods: Mapping[str, MethodSummary],
        resolved: Mapping[str, str],
        sessions: Sequence[Mapping[str, str]] | None,
    ) -> None:
        directory.write_settings(self.config)
        for name, content in self.files.items():
            directory.write(name, content)
        first: dict[int, str] = {}
        owners = {client.name: first.setdefault(id(client.test), client.name) for client in self.data.clients}
        facts = {
            "name": self.data.name,
            "note": self.data.note,
            "classes": self.data.classes,
            "seeds": self.seeds,
            "rounds": self.settings.rounds,
            "select": self.settings.select,
            "metric": self.settings.metric,
            "target_metric": self.settings.target_metric,
            "clients": {c.name: {split: len(part) for split, part in c.splits.items()} for c in self.data.clients},
            "fingerprint": self.data.fingerprint,
            "same_test": {name: owner for name, owner in owners.items() if name != owner},
            "majority": {} if self.make_engine else find_majority_classes(self.data),
            "task": self.data.task.name,
            "metrics": self.data.task.metrics,
            "resolved": resolved,
            "config": dict(self.config),
            "methods": {name: asdict(fact) for name, fact in methods.items()},
        }
        write_summary(directory, facts, {} if self.make_engine else self._sample_images(), sessions)


def _list_batches(batches: Mapping[str, int]) -> str:
    """Return the clients in ``batches`` with their numbers of batches, all clients only if there are few."""
    named = [f"{name!r} ({count})" for name, count in list(batches.items())[:MAX_NAMED]]
    return ", ".join(named) + (f" and {len(batches) - MAX_NAMED} more clients" if len(batches) > MAX_NAMED else "")


def _last_evaluation(folder: Path) -> list[Row]:
    """Return the measurements of a trial's last evaluated round."""
    rows: list[Row] = []
    for row in stream_measurements(folder, read_rounds(folder)):
        if row["split"] != "train":
            if rows and rows[-1]["round"] < row["round"]:
                rows.clear()
            rows.append(row)
    return rows
