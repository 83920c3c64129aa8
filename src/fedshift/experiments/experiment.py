"""Experiments: several methods and seeds on one federation, saved to disk as they run.

Trials run seed by seed, all methods of a seed before the next, so that the results of an interrupted experiment can be
compared. Methods with the same seed start from the same weights and see the same order of samples, so that differences
are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch

from ..analysis.privacy import find_mechanism
from ..config.spec import TrialSpec
from ..core.method import Method
from ..data.federation import Federation
from ..data.pictures import to_pictures
from ..engines.engine import EngineFactory
from ..evaluation.communication import summarize_method
from ..models import ModelFactory
from ..report.differences import advise_seeds
from ..results.checkpoint import load_checkpoint
from ..results.run_directory import RunDirectory, to_file_name, trial_folder
from ..results.schema import PICTURED, RANKINGS, MethodSummary
from ..results.summary import read_facts, require_series, write_summary
from ..results.trial_records import CHECKPOINT, load_facts, require_checkpoint
from ..tasks import Classification, Multilabel
from ..utils.allocator import keep_freed_memory
from ..utils.errors import FedshiftError, Ref, UsageError
from ..utils.execution.executor import Executor, InProcess
from ..utils.execution.workers import Workers
from .callbacks import Callback
from .client_store import check_segments
from .conductor import Conductor
from .description import describe_training
from .duration import describe_duration
from .jobs import Jobs, choose_jobs, list_devices
from .loggers import RecordLog, require_packages
from .session import Session
from .settings import Settings, check_counts
from .trial import Trial
from .trial_run import TrialRun, count_rounds_left, find_best

SAMPLES = 8
"""Images of each client that a run keeps for its report."""
VOLUMES = 1
"""Number of volumes per client from which a run keeps a slice."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """Methods and seeds to run on a federation, with a model and settings.

    ``model(sample_shape, classes)`` makes a network. ``config`` contains the settings as the user wrote them, for the
    record, and ``files`` additional files for the run directory, by name. ``measured_later``: clients that the caller
    measures after the experiment, which need no notice. ``make_engine``: makes each trial's engine if the samples are
    elsewhere, in place of the one in the settings. ``log``: names of loggers. ``origin``: more facts about the run, for
    the record. ``compare_with``: name of the method with which alone reports compare the others; empty: they compare
    all pairs. ``margin``: loss of a client that reports may exclude; None: none.
    """

    methods: tuple[Method, ...]
    data: Federation
    model: ModelFactory
    settings: Settings
    seeds: tuple[int, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    measured_later: tuple[str, ...] = ()
    make_engine: EngineFactory | None = None
    log: tuple[str, ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)
    compare_with: str = ""
    margin: float | None = None

    def __post_init__(self) -> None:
        if not self.methods:
            raise UsageError("there is no method: name at least one, for example fedavg")
        for one, other in combinations(self.methods, 2):
            if one.name == other.name or to_file_name(one.label) == to_file_name(other.label):
                raise UsageError(_explain_clash(one, other)).about("methods")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise UsageError(f"seeds {list(self.seeds)}: give at least one, each once")
        object.__setattr__(self, "data", self.settings.request_metrics(self.data))
        object.__setattr__(self, "settings", self.settings.for_task(self.data.task))
        if self.make_engine is None:
            check_counts(self.data)
        private = [m.label for m in self.methods if any(find_mechanism(m.rules, clients=of) for of in (True, False))]
        if private and self.settings.loss and self.settings.loss.uses_counts:
            raise UsageError(
                f"method {private[0]!r}: {self.settings.loss.weights} weights come from all clients' label counts, "
                "which noise does not hide: give the weights of the classes as numbers"
            )
        train = [client for client in self.data.clients if len(client.train)]
        point = Ref(operating_point=self.settings.operating_point)
        if self.settings.operating_point != TrialSpec.operating_point:
            if not isinstance(self.data.task, Classification | Multilabel):
                raise UsageError(
                    f"{{}} is for classification, and the data's task is {self.data.task}: leave it out", point
                )
            if any(client.validation is None for client in train):
                raise UsageError(
                    "{} is chosen on validation data, which the clients lack: hold some out ({})",
                    point,
                    Ref(validation=0.2),
                )
        watches = self.settings.watches_validation
        needing = Ref(select="best") if self.settings.select == "best" else Ref(patience=self.settings.patience)
        if watches and any(client.validation is None for client in train):
            raise UsageError(
                "{} needs validation data, which the clients lack: hold some out ({})", needing, Ref(validation=0.1)
            )
        if watches and self.settings.metric in RANKINGS:
            parts = [client.validation for client in train if client.validation is not None]
            counts = [(self.data.task.count_classes(part.y, self.data.classes), len(part)) for part in parts]
            if not any(bool(((count > 0) & (count < size)).any()) for count, size in counts):
                raise UsageError(
                    f"{{}} by {self.settings.metric} needs a client whose validation data hold two classes, or a label "
                    "that some samples have and others lack: hold out more, use another metric, or leave it out",
                    needing,
                )

    @property
    def reference(self) -> str:
        """Label of the method :attr:`compare_with`; empty if there is none."""
        return next((method.label for method in self.methods if method.name == self.compare_with), "")

    def run(
        self,
        path: Path,
        *,
        resume: bool = False,
        callback: Callback | None = None,
        stop: Event | None = None,
        jobs: Jobs = 1,
        workers: Workers | None = None,
        runs: int = 1,
    ) -> bool:
        """Run all trials in directory ``path``, with a checkpoint after each round.

        Args:
            path: run directory.
            resume: whether to continue the run in ``path``.
            callback: callbacks for events.
            stop: event that ends the run after the rounds in progress once it is set.
            jobs: maximum number of trials that run side by side, in worker processes; it does not affect results.
                ``auto``: as many as leave no processor idle, if that saves time.
            workers: worker processes for trials and the pool engine, which stay open; None: the run starts and closes
                workers itself.
            runs: number of similar runs, this one included, whose total duration is predicted; 0: no prediction.

        Returns:
            Whether the run reached its end.

        Raises:
            UsageError: a method, the model and the data are incompatible, or cannot be sent to another process for
                several jobs; raised before anything starts.
            Diverged: a trial diverged; raised after the other trials.
            FedshiftError: the disk, the directory or a logger fails.

        """
        experiment = self.keep_labels(path) if resume else self
        return experiment._run(path, resume, callback or Callback(), stop or Event(), jobs, workers, runs)

    def _run(
        self, path: Path, resume: bool, callback: Callback, stop: Event, jobs: Jobs, workers: Workers | None, runs: int
    ) -> bool:
        require_packages(self.log)
        if resume:
            require_series(path)
        with ExitStack() as opened:
            workers = workers or opened.enter_context(closing(Workers()))
            trials = self._make_first_trials(workers)
            facts = {name: summarize_method(trial.plan) for name, trial in trials.items()}
            directory = opened.enter_context(closing(RunDirectory(path, resume=resume)))
            if resume:
                self._check_kept(path, trials)
            names, settings = [method.label for method in self.methods], self.settings
            plans = {name: trial.plan for name, trial in trials.items()}
            resolved = describe_training(plans, self.data, self.model, self.settings, remote=bool(self.make_engine))
            resolved |= self.origin

            def describe(sessions: Sequence[Mapping[str, str]] | None) -> None:
                self._describe(directory, facts, resolved, sessions)

            session = Session(directory, callback, stop, describe, resume=resume)
            log = RecordLog(self.log, path, self.config, settings.metric, callback.on_notice, session.say)
            callback.on_run_begin(names, self.seeds, settings.rounds, self.data.names, settings.metric)
            for notice in self.data.notices:
                session.say(notice)
            if advice := advise_seeds(names, len(self.seeds), self.reference):
                callback.on_notice(advice)
            conductor = Conductor(session=session, log=log, rounds=settings.rounds)
            opened.enter_context(keep_freed_memory())
            remote = self.make_engine is not None
            self._run_trials(conductor, path, trials, 1 if remote else jobs, workers, 0 if remote else runs)
            session.end(finished=conductor.finished and not conductor.diverged)
            if conductor.finished and conductor.diverged:
                raise conductor.diverged[min(conductor.diverged)]
            return conductor.finished

    def _run_trials(
        self, conductor: Conductor, path: Path, trials: dict[str, Trial], jobs: Jobs, workers: Workers, runs: int
    ) -> None:
        """Run all trials, first those side by side; ``trials``: those that were made already, by method."""
        callback, threads = conductor.session.callback, torch.get_num_threads()
        begun = [
            TrialRun(number=number, method=method.label, seed=seed, folder=trial_folder(path, method.label, seed))
            for number, (seed, method) in enumerate(product(self.seeds, self.methods))
        ]
        choices, processes = choose_jobs(begun, trials, jobs)
        devices = list(list_devices(self.settings.device)) if choices else []
        if runs:
            left = [(run.method, count_rounds_left(run.folder, self.settings.rounds)) for run in begun]
            at_once = processes if len(choices) == len(begun) else 1
            if devices:
                at_once = min(at_once, len(devices))
            for text in describe_duration(trials, left, len(self.seeds), at_once=at_once, runs=runs):
                callback.on_notice(text)
        if choices:
            try:
                shared = workers.put(self)
            except Exception as error:
                if jobs != "auto":
                    raise UsageError(
                        f"jobs={processes}: a method, the model or another part of the experiment cannot be sent to "
                        f"another process ({error}): use jobs=1"
                    ) from error
                choices = {}
            else:
                where = f" on {' and '.join(devices)}" if devices else ""
                callback.on_notice(
                    f"{processes} trials run side by side{where}, each in a process, with the same results"
                )
                side_by_side = [
                    replace(run, choice=choices[run.number], folder=run.folder.absolute())  # for any current directory
                    for run in begun
                    if run.number in choices
                ]
                conductor.run(workers, side_by_side, processes, shared, InProcess(), threads, devices=devices)
                workers.drop(shared)
        alone = (
            replace(
                run, made=trials.get(run.method) if run.seed == self.seeds[0] else None, progress=callback.on_client_end
            )
            for run in begun
            if run.number not in choices
        )
        conductor.run(InProcess(), alone, 1, self, workers, threads)

    def make_trial(self, method: str, seed: int, executor: Executor | None = None) -> Trial:
        """Return the trial of the method with this label; a pool trains on ``executor`` unless it is None."""
        (chosen,) = (each for each in self.methods if each.label == method)
        return Trial(
            chosen, self.model, self.data, self.settings, seed, make_engine=self.make_engine, executor=executor
        )

    def check_compatible(self, path: Path) -> None:
        """Raise :class:`UsageError` if a method does not fit model and data, or ``path`` contains another run's trials.

        Nothing is trained, and nothing in ``path`` is changed.
        """
        experiment = self.keep_labels(path)
        experiment._check_kept(path, experiment._make_first_trials())

    def is_trained(self, path: Path) -> bool:
        """Return whether every trial in directory ``path`` has had its last round."""
        labels = [method.label for method in self.keep_labels(path).methods]
        return all(
            not count_rounds_left(trial_folder(path, label, seed), self.settings.rounds)
            for label in labels
            for seed in self.seeds
        )

    def keep_labels(self, path: Path) -> Experiment:
        """Return the experiment with its methods called as the run in ``path``, if there is one, calls them."""
        try:
            recorded = {facts.get("name"): label for label, facts in read_facts(path)["methods"].items()}
        except FedshiftError:  # none is recorded, or it is rewritten
            return self
        kept = (replace(method, typed=recorded.get(method.name, method.typed)) for method in self.methods)
        return replace(self, methods=tuple(kept))

    def _make_first_trials(self, executor: Executor | None = None) -> dict[str, Trial]:
        """Make each method's trial of the first seed, which shows whether method, model and data fit."""
        return {method.label: self.make_trial(method.label, self.seeds[0], executor) for method in self.methods}

    def _check_kept(self, path: Path, trials: Mapping[str, Trial]) -> None:
        """Raise an error if a trial in ``path`` belongs to another run, or its files are damaged or missing."""
        self._check_family(path)
        for name, trial in trials.items():
            for seed in self.seeds:
                folder = trial_folder(path, name, seed)
                require_checkpoint(folder)
                if (folder / CHECKPOINT).exists():
                    trial.check_compatible(load_facts(folder / CHECKPOINT), seed)
                    _, facts = load_checkpoint(folder / CHECKPOINT)
                    check_segments(folder, facts["segments"])
                    find_best(folder, facts["round"], self.settings)

    def _check_family(self, path: Path) -> None:
        """Raise :class:`UsageError` if the run in ``path`` was begun to compare other pairs of methods."""
        try:
            facts = read_facts(path)
            then, margin = facts.get("compare_with", ""), facts.get("margin")
            statistics = facts.get("statistics", self.settings.statistics)
        except FedshiftError:  # none is recorded
            return
        if then != self.reference:
            pairs = f"pairs with {then}" if then else "all pairs"
            raise UsageError(
                f"{{}}: this run was begun to compare {pairs}, and comparisons must not be chosen once "
                "results are known: leave the setting unchanged, or begin a new run",
                Ref(compare_with=self.reference or "none"),
            )
        if statistics != self.settings.statistics:
            raise UsageError(
                f"{{}}: this run was begun with {statistics!r}, and statistics must not be chosen once results are "
                "known: leave the setting unchanged, or begin a new run",
                Ref(statistics=self.settings.statistics),
            )
        if margin != self.margin:
            raise UsageError(
                f"{{}}: this run was begun with {'no margin' if margin is None else f'the margin {margin:g}'}, and a "
                "margin must not be chosen once results are known: leave the setting unchanged, or begin a new run",
                Ref(margin=self.margin),
            )

    def _sample_images(self) -> dict[str, np.ndarray]:
        """Return some test images of each client in the report's figure, uint8 ``[n, H, W, C]``, if wanted."""
        if self.make_engine or not self.settings.pictures:
            return {}
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
            "operating_point": self.settings.operating_point,
            "statistics": self.settings.statistics,
            "compare_with": self.reference,
            "margin": self.margin,
            "class_names": self.data.class_names,
            "clients": {c.name: {split: len(part) for split, part in c.splits.items()} for c in self.data.clients},
            "digests": self.data.digests,
            "same_test": {name: owner for name, owner in owners.items() if name != owner},
            "majority": {} if self.make_engine else _find_majority_classes(self.data),
            "task": self.data.task.name,
            "metrics": self.data.task.measured,
            "resolved": resolved,
            "config": dict(self.config),
            "methods": {name: asdict(fact) for name, fact in methods.items()},
        }
        write_summary(directory, facts, self._sample_images(), sessions)


def _find_majority_classes(data: Federation) -> dict[str, int]:
    """Return each client's most frequent class in the training data; nothing if samples do not have one class each."""
    counts = {
        client.name: data.task.count_classes(client.train.y, data.classes)
        for client in data.clients
        if data.task.strata(client.train.y) is not None
    }
    return {name: int(count_C.argmax()) for name, count_C in counts.items()}


def _explain_clash(one: Method, other: Method) -> str:
    """Return why two methods of a run cannot both be called what they are."""
    named = f"method {one.label!r} is given twice"
    if one.label != other.label:
        named = f"methods {one.label!r} and {other.label!r} are both {one.name!r}"
        if one.name != other.name:
            named = f"methods {one.label!r} and {other.label!r} would share the folder {to_file_name(one.label)}"
    same = one.text == other.text
    return f"{named}: {'leave one out' if same else 'give one of them another name (Method.name)'}"
