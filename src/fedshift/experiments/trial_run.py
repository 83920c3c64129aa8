"""A trial of a run, where it is trained: a call to begin it, one for each round, and one to end it.

Calls write the files of the trial and return what the caller is to report. Between two calls the trial lives on its
lane (:mod:`fedshift.utils.execution.executor`).

A round is written with its checkpoint: its records first, so that files hold complete rounds at any moment. Rounds that
wait for the next checkpoint (``checkpoint_every``) are lost if the process is killed, and are written if an error ends
the trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..engines.auto import EngineChoice
from ..evaluation.metrics import measured_splits, picture_worst, record_clients
from ..results.cases import (
    FILES,
    PICTURES,
    REESTIMATED,
    RUNNING,
    has_pictures,
    measured_round,
    write_cases,
    write_pictures,
)
from ..results.checkpoint import load_checkpoint
from ..results.run_directory import append_rows, cut_rows
from ..results.schema import RESTART, Row, compute_metric, is_lower_better, name_metric, rows_to_frame
from ..results.trial_records import (
    BEST,
    CHECKPOINT,
    LAG,
    METRICS,
    ROUNDS,
    STOPPED,
    is_lag_measured,
    load_facts,
    read_rounds,
    read_stop,
    require_recorded,
    stream_measurements,
)
from ..utils.checked_json import write_checked
from ..utils.errors import FedshiftError
from ..utils.execution.executor import Executor
from ..utils.profiling import timed_section
from .client_store import check_segments
from .session import format_now
from .settings import Settings
from .trial import Models, RoundResult, Trial
from .trial_notices import list_notices_after, list_notices_before

if TYPE_CHECKING:
    from .experiment import Experiment

Score = tuple[int, float]
"""Score of a round; see :func:`score_round`."""
NO_SCORE: Score = (0, 0.0)
"""Score of a round without validation data."""
Record = tuple[Row, list[Row]]
"""Line of a round in ``rounds.jsonl``, and its lines in ``metrics.jsonl``."""
SAVING = 0.05
"""Largest part of the time that saving takes with ``checkpoint_every="auto"``, beside evaluated rounds."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A trial that has begun, or continues after ``done`` rounds.

    ``ended``: whether it has had its last round. ``evaluated``: measurements of its last evaluated round. ``notices``:
    for the user. ``choice``: its engine, where one was chosen.
    """

    done: int
    ended: bool
    evaluated: Sequence[Row]
    notices: Sequence[str]
    choice: EngineChoice | None


@dataclass(kw_only=True, eq=False)
class TrialRun:
    """One trial of a run; its ``number`` among all trials, and the ``folder`` for its files.

    ``choice``: its engine, if another trial with the method has one already. ``made``: the trial, if it was made
    already. ``progress``: called as each client finishes, where that can be seen from here. ``device``: the device that
    it was given among several.
    """

    number: int
    method: str
    seed: int
    folder: Path
    choice: EngineChoice | None = None
    made: Trial | None = None
    progress: Callable[[str, float], None] | None = None
    device: str = ""
    _trained: RoundResult | None = None
    _waiting: list[Record] = field(default_factory=list)  # rounds that are not in files yet
    _saved: list[Record] = field(default_factory=list)  # rounds that are, which the caller does not know yet
    _due: float = 0.0  # when saving is worth its time

    def begin(self, experiment: Experiment, executor: Executor, threads: int) -> Begun:
        """Begin or continue the trial on this many threads; a pool trains on ``executor``."""
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if self.device:
            experiment = replace(experiment, settings=replace(experiment.settings, device=self.device))
            if torch.device(self.device).type == "cuda":
                torch.cuda.set_device(self.device)  # this process is a worker
        self.experiment, folder = experiment, self.folder
        trial = self.trial = self.made or experiment.make_trial(self.method, self.seed, executor)
        trial.choice = self.choice or trial.choice
        folder.mkdir(parents=True, exist_ok=True)
        begun = (folder / CHECKPOINT).exists()
        if begun:
            trial.restore(*load_checkpoint(folder / CHECKPOINT), folder)
        done = trial.server.round
        self.scores = read_scores(folder, done, trial.settings)
        best = find_best(folder, done, trial.settings)
        for file in (METRICS, ROUNDS):
            cut_rows(folder / file, done)
        # A trial has a checkpoint from the beginning, so that a removed one is noticed. This also completes an earlier
        # call that was killed before it kept this round as the best or removed unneeded files.
        trial.save(folder, *(() if begun else (CHECKPOINT,)), *((BEST,) if best == done > 0 else ()))
        ended = not count_rounds_left(folder, trial.settings.rounds)
        chosen = trial.settings.engine == "auto" and not ended
        choice = trial.engine_choice if chosen else None
        notices = list_notices_before(experiment, trial)
        self._before = time.perf_counter()
        evaluated = _read_last_evaluation(folder)
        return Begun(done=done, ended=ended, evaluated=evaluated, notices=tuple(notices), choice=choice)

    def train(self) -> None:
        """Train the next round; :meth:`round` then saves it."""
        self._trained = self._advance()

    def round(self) -> tuple[RoundResult, list[Record]]:
        """Run the next round and save it if that is due; return its outcome, and the rounds that were saved."""
        trial = self.trial
        outcome, self._trained = self._trained or self._advance(), None
        self._before, elapsed = time.perf_counter(), time.perf_counter() - self._before
        cost = {key: getattr(outcome, key) for key in ("round", "participants", "down", "up", "seconds")}
        cost |= {"elapsed": elapsed, "ended": format_now(), "engine": trial.engine_choice.engine}
        self._waiting.append(({**cost, "rows": len(outcome.rows)}, outcome.rows))
        now, before = score_round(outcome.rows, trial.settings), max([NO_SCORE, *self.scores.values()])
        if is_evaluated(outcome.rows):
            self.scores[outcome.round] = now
        better = trial.settings.select == "best" and now > before
        outcome = replace(outcome, stopped=self._find_reason(outcome.round))
        last = outcome.round == trial.settings.rounds or outcome.stopped
        if not (last or better or self._is_due(outcome)):
            return outcome, []
        if outcome.stopped:
            self._record_stop(outcome.round, outcome.stopped)
        if self.experiment.make_engine and (better if trial.settings.select == "best" else last):
            self._record_lag(trial.measure_lag(outcome.rows))
        return outcome, self.save(*((BEST,) if better else ()))

    def _is_due(self, outcome: RoundResult) -> bool:
        """Return whether a round that is neither the last nor the best so far is to be saved."""
        every = self.trial.settings.checkpoint_every
        if self.trial.clients.is_full or self.experiment.make_engine:  # sites continue from the round that is saved
            return True
        if every != "auto":
            return len(self._waiting) >= every
        return is_evaluated(outcome.rows) or time.perf_counter() >= self._due

    def save(self, *names: str) -> list[Record]:
        """Save the rounds that are not in files yet, the last also as ``names``; return those not returned before."""
        self._save(*names)
        saved, self._saved = self._saved, []
        return saved

    def _save(self, *names: str) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting or waiting[-1][0]["round"] != self.trial.server.round:  # a round that failed has no records
            return
        began = time.perf_counter()
        with timed_section("checkpoint"):
            append_rows(self.folder / METRICS, (row for _, rows in waiting for row in rows))
            append_rows(self.folder / ROUNDS, (line for line, _ in waiting))
            self.trial.save(self.folder, CHECKPOINT, *names)
        self._saved += waiting
        self._due = time.perf_counter() + (time.perf_counter() - began) * (1 / SAVING - 1)

    def _find_reason(self, round: int) -> str:
        """Return why the trial ends with ``round``, before the last planned one; empty if it does not."""
        settings = self.trial.settings
        patience = settings.patience
        if patience is None or round == settings.rounds or round not in self.scores:
            return ""
        if count_stale(self.scores.values(), settings.min_delta) < patience:
            return ""
        return f"no better {name_metric(settings.metric)} on validation data in {patience} evaluations (patience)"

    def _record_stop(self, round: int, reason: str) -> None:
        write_checked(self.folder / STOPPED, {"round": round, "reason": reason})

    def stop(self, reason: str) -> list[Record]:
        """End the trial with the last round, which was evaluated, for this reason; return what :meth:`save` does."""
        saved = self.save()
        if self.experiment.make_engine and self.trial.settings.select == "last":
            self._record_lag(self.trial.measure_lag(_read_last_evaluation(self.folder)))
        self._record_stop(self.trial.server.round, reason)
        return saved

    def _advance(self) -> RoundResult:
        """Train the next round.

        If an error ends the round, those before it are saved. One that is evaluated may end after training.
        """
        if self.trial.settings.is_evaluated(self.trial.server.round + 1):
            self._save()
        try:
            return self.trial.advance(self.progress)
        except Exception:
            self._save()
            raise

    def end(self) -> tuple[str, tuple[str, ...]]:
        """Record what is left to record of a trial that has had its last round.

        Returns why it was stopped, empty if it was not, and its notices.
        """
        if not self.experiment.make_engine:  # sites keep the results of single samples
            self._record_reported()
        stopped = read_stop(self.folder, self.trial.server.round)
        return stopped, tuple(list_notices_after(self.experiment, self.trial, stopped))

    def close(self) -> None:
        """Release the resources of a trial that is trained here."""
        if trial := getattr(self, "trial", self.made):
            trial.close()

    def _record_lag(self, lag: Mapping[str, Any]) -> None:
        write_checked(self.folder / LAG, lag)

    def _record_reported(self) -> None:
        """Record the reported round with re-estimated BatchNorm statistics, and its results of single samples."""
        trial, folder = self.trial, self.folder
        done, settings = trial.server.round, trial.settings
        reported = done if settings.select == "last" else find_best(folder, done, settings)
        if not settings.pictures:
            (folder / PICTURES).unlink(missing_ok=True)  # of an earlier session
        splits = self._list_unrecorded(reported)
        if not reported or (not splits and is_lag_measured(folder, reported)):
            return
        if reported < done:
            trial = self.experiment.make_trial(self.method, self.seed)
            trial.restore(*load_checkpoint(folder / BEST), folder)
        with timed_section("evaluation"):
            rows = stream_measurements(folder, read_rounds(folder))
            evaluated = [row for row in rows if row["round"] == reported and row["split"] != "train"]
            models: dict[str, Models] = {RUNNING: (trial.server, trial.personal_state)}
            if renewed := trial.reestimate():
                models[REESTIMATED] = renewed
            self._record_lag(trial.measure_lag(evaluated, renewed))
            self._record_cases(trial, models, splits)

    @property
    def _draws_pictures(self) -> bool:
        """Return whether the trial, of the first seed, records pictures of its worst test images."""
        return self.trial.settings.pictures and self.seed == self.experiment.seeds[0]

    def _list_unrecorded(self, reported: int) -> list[str]:
        """Return the splits of which results of single samples in round ``reported`` are still to be recorded."""
        folder, held = self.folder, measured_splits(self.trial.measured)
        splits = [split for split in FILES if split in held and measured_round(folder, split) != reported]
        if self._draws_pictures and "test" not in splits and not has_pictures(folder, reported):
            splits.append("test")
        return splits if "test" in self.trial.settings.splits else []

    def _record_cases(self, trial: Trial, models: Mapping[str, Models], splits: Iterable[str]) -> None:
        """Record the results of single samples of ``splits`` under the ``models`` of ``trial``, by statistics."""
        folder, plan, data, number = self.folder, trial.plan, trial.measured, trial.server.round
        for split in splits:
            made = {name: record_clients(plan, server, data, own, split) for name, (server, own) in models.items()}
            if all(each for several in made.values() for each in several.values()):
                write_cases(folder, number, made, split)
            if self._draws_pictures and split == "test":
                worst = {
                    name: picture_worst(plan, server, data, own, made[name]) for name, (server, own) in models.items()
                }
                write_pictures(folder, number, worst)


def score_round(rows: Sequence[Row], settings: Settings) -> Score:
    """Return a round's score: number of clients with validation rows (more is better), then the macro metric.

    The metric is over the clients that define it; their number may depend on predictions, and does not count.
    """
    if not settings.watches_validation:
        return NO_SCORE
    chosen = rows_to_frame(
        row for row in rows if (row["split"], row["model"], row["moment"]) == ("validation", "personal", "loaded")
    )
    found = compute_metric(chosen, settings.metric)
    sign = -1 if is_lower_better(settings.metric) else 1
    return (len(found), sign * float(found.mean())) if found.count() else NO_SCORE


def is_evaluated(rows: Sequence[Row]) -> bool:
    """Return whether the ``rows`` of a round hold an evaluation."""
    return any(row["split"] != "train" for row in rows)


def count_stale(scores: Iterable[Score], min_delta: float) -> int:
    """Return the number of evaluations after the last whose score was better by more than ``min_delta``."""
    best, stale = NO_SCORE, 0
    for clients, value in scores:
        if clients > best[0] or (clients == best[0] and value > best[1] + min_delta):
            best, stale = (clients, value), 0
        else:
            stale += 1
    return stale


def count_rounds_left(folder: Path, rounds: int) -> int:
    """Return how many of ``rounds`` are left to the trial in ``folder``: none if it was stopped."""
    file = folder / CHECKPOINT
    done = load_facts(file)["round"] if file.exists() else 0
    return 0 if read_stop(folder, done) else max(0, rounds - done)


def read_scores(folder: Path, done: int, settings: Settings) -> dict[int, Score]:
    """Return the score of each evaluated round among the ``done`` rounds of the trial in ``folder``.

    Raises :class:`FedshiftError` if the records are damaged or missing.
    """
    rounds = read_rounds(folder)
    require_recorded(folder, rounds, done)
    measured = groupby(stream_measurements(folder, rounds[:done]), key=lambda row: row["round"])
    each = ((number, list(of_round)) for number, of_round in measured)
    return {number: score_round(rows, settings) for number, rows in each if is_evaluated(rows)}


def find_best(folder: Path, done: int, settings: Settings) -> int:
    """Return the first best of the ``done`` rounds of the trial in ``folder``, 0 for none.

    Raises :class:`FedshiftError` if the records or the state of the best round are damaged or missing.
    """
    reached = {0: NO_SCORE, **read_scores(folder, done, settings)}
    best = max(reached, key=lambda number: reached[number]) if settings.select == "best" else 0
    if 0 < best < done:
        _, facts = load_checkpoint(folder / BEST)
        check_segments(folder, facts["segments"])
        if facts["round"] != best:
            raise FedshiftError(f"{folder / BEST} is of round {facts['round']}, not of {best}, the best: {RESTART}")
    return best


def _read_last_evaluation(folder: Path) -> list[Row]:
    """Return the measurements of a trial's last evaluated round."""
    rows: list[Row] = []
    for row in stream_measurements(folder, read_rounds(folder)):
        if row["split"] != "train":
            if rows and rows[-1]["round"] < row["round"]:
                rows.clear()
            rows.append(row)
    return rows
