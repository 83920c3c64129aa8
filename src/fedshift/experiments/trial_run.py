"""A trial of a run, where it is trained: a call to begin it, one for each round, and one to end it.

Calls write the files of the trial, with a checkpoint after each round, and return what the caller is to report. Between
two calls the trial lives on its lane (:mod:`fedshift.utils.execution.executor`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..engines.auto import EngineChoice
from ..evaluation.metrics import record_clients
from ..results.cases import measured_round, write_cases
from ..results.checkpoint import load_checkpoint
from ..results.run_directory import append_rows, cut_rows
from ..results.schema import LOWER_IS_BETTER, RESTART, Row, compute_metric, rows_to_frame
from ..results.trial_records import (
    BEST,
    CHECKPOINT,
    LAG,
    METRICS,
    ROUNDS,
    read_rounds,
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
from .trial import RoundResult, Trial
from .trial_notices import list_notices_after, list_notices_before

if TYPE_CHECKING:
    from .experiment import Experiment

NO_SCORE = (0, 0.0)
"""Score of a round without validation data."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A trial that has begun, or continues after ``done`` rounds.

    ``evaluated``: measurements of its last evaluated round. ``notices``: for the user. ``choice``: its engine, where
    one was chosen.
    """

    done: int
    evaluated: Sequence[Row]
    notices: Sequence[str]
    choice: EngineChoice | None


@dataclass(kw_only=True, eq=False)
class TrialRun:
    """One trial of a run; its ``number`` among all trials, and the ``folder`` for its files.

    ``choice``: its engine, if another trial with the method has one already. ``made``: the trial, if it was made
    already. ``progress``: called as each client finishes, where that can be seen from here.
    """

    number: int
    method: str
    seed: int
    folder: Path
    choice: EngineChoice | None = None
    made: Trial | None = None
    progress: Callable[[str, float], None] | None = None
    _trained: RoundResult | None = None

    def begin(self, experiment: Experiment, executor: Executor, threads: int) -> Begun:
        """Begin or continue the trial on this many threads; a pool trains on ``executor``."""
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        self.experiment, folder = experiment, self.folder
        trial = self.trial = self.made or experiment.make_trial(self.method, self.seed, executor)
        trial.choice = self.choice or trial.choice
        folder.mkdir(parents=True, exist_ok=True)
        begun = (folder / CHECKPOINT).exists()
        if begun:
            trial.restore(*load_checkpoint(folder / CHECKPOINT), folder)
        done = trial.server.round
        best, self.reached = find_best(folder, done, trial.settings)
        for file in (METRICS, ROUNDS):
            cut_rows(folder / file, done)
        # A trial has a checkpoint from the beginning, so that a removed one is noticed. This also completes an earlier
        # call that was killed before it kept this round as the best or removed unneeded files.
        trial.save(folder, *(() if begun else (CHECKPOINT,)), *((BEST,) if best == done > 0 else ()))
        chosen = trial.settings.engine == "auto" and done < trial.settings.rounds
        choice = trial.engine_choice if chosen else None
        notices = list_notices_before(experiment, trial)
        self._before = time.perf_counter()
        return Begun(done=done, evaluated=_read_last_evaluation(folder), notices=tuple(notices), choice=choice)

    def train(self) -> None:
        """Train the next round; :meth:`round` then saves it."""
        self._trained = self._advance()

    def round(self) -> tuple[Row, RoundResult]:
        """Run the next round and save it; return its line in ``rounds.jsonl``, and its outcome."""
        trial, folder = self.trial, self.folder
        outcome, self._trained = self._trained or self._advance(), None
        self._before, elapsed = time.perf_counter(), time.perf_counter() - self._before
        cost = {key: getattr(outcome, key) for key in ("round", "participants", "down", "up", "seconds")}
        cost |= {"elapsed": elapsed, "ended": format_now(), "engine": trial.engine_choice.engine}
        with timed_section("checkpoint"):
            append_rows(folder / METRICS, outcome.rows)
            append_rows(folder / ROUNDS, [{**cost, "rows": len(outcome.rows)}])
            now = score_round(outcome.rows, trial.settings)
            better = now > self.reached
            self.reached = max(now, self.reached)
            if better if trial.settings.select == "best" else outcome.round == trial.settings.rounds:
                self._record_lag()
            trial.save(folder, CHECKPOINT, *((BEST,) if better else ()))
        return cost, outcome

    def _advance(self) -> RoundResult:
        """Train the next round; the exchange before round 1 is saved by itself, so that it is not held twice."""
        if self.trial.introduce():
            self.trial.save(self.folder, CHECKPOINT)
        return self.trial.advance(self.progress)

    def end(self) -> tuple[str, ...]:
        """Record what is left to record of a trial that has had its last round; return its notices."""
        if not self.experiment.make_engine:  # sites keep the results of single samples
            self._record_cases()
        return tuple(list_notices_after(self.experiment, self.trial))

    def close(self) -> None:
        """Release the resources of a trial that is trained here."""
        if trial := getattr(self, "trial", self.made):
            trial.close()

    def _record_lag(self) -> None:
        """Write measurements of the reported round with BatchNorm statistics estimated anew, if these may lag."""
        (self.folder / LAG).unlink(missing_ok=True)  # of an earlier round
        with timed_section("evaluation"):
            if (lag := self.trial.measure_lag()) is not None:
                write_checked(self.folder / LAG, lag)

    def _record_cases(self) -> None:
        """Record the results of single test samples at the reported round."""
        trial, folder = self.trial, self.folder
        done, settings = trial.server.round, trial.settings
        reported = done if settings.select == "last" else find_best(folder, done, settings)[0]
        if "test" not in settings.splits or not reported or measured_round(folder) == reported:
            return
        if reported < done:
            trial = self.experiment.make_trial(self.method, self.seed)
            trial.restore(*load_checkpoint(folder / BEST), folder)
        with timed_section("evaluation"):
            records = record_clients(trial.plan, trial.server, trial.measured, trial.personal_state)
        if all(records.values()):
            write_cases(folder, reported, records)


def score_round(rows: Sequence[Row], settings: Settings) -> tuple[int, float]:
    """Return a round's score: number of clients with validation rows (more is better), then the macro metric.

    The metric is over the clients that define it; their number may depend on predictions, and does not count.
    """
    if settings.select != "best":
        return NO_SCORE
    chosen = rows_to_frame(
        row for row in rows if (row["split"], row["model"], row["moment"]) == ("validation", "personal", "loaded")
    )
    found = compute_metric(chosen, settings.metric)
    sign = -1 if settings.metric in LOWER_IS_BETTER else 1
    return (len(found), sign * float(found.mean())) if found.count() else NO_SCORE


def find_best(folder: Path, done: int, settings: Settings) -> tuple[int, tuple[int, float]]:
    """Return the first best of the ``done`` rounds of the trial in ``folder``, 0 for none, and its score.

    Raises :class:`FedshiftError` if the records or the state of the best round are damaged or missing.
    """
    rounds = read_rounds(folder)
    require_recorded(folder, rounds, done)
    reached = {0: NO_SCORE}
    for number, of_round in groupby(stream_measurements(folder, rounds[:done]), key=lambda row: row["round"]):
        reached[number] = score_round(list(of_round), settings)
    best = max(reached, key=lambda number: reached[number])
    if 0 < best < done:
        _, facts = load_checkpoint(folder / BEST)
        check_segments(folder, facts["segments"])
        if facts["round"] != best:
            raise FedshiftError(f"{folder / BEST} is of round {facts['round']}, not of {best}, the best: {RESTART}")
    return best, reached[best]


def _read_last_evaluation(folder: Path) -> list[Row]:
    """Return the measurements of a trial's last evaluated round."""
    rows: list[Row] = []
    for row in stream_measurements(folder, read_rounds(folder)):
        if row["split"] != "train":
            if rows and rows[-1]["round"] < row["round"]:
                rows.clear()
            rows.append(row)
    return rows
