"""The conductor of a run: begins its trials on an executor, reports what they return, and decides on each next round.

Trials are trained by :class:`~fedshift.experiments.trial_run.TrialRun`, here or in worker processes; shared files, the
display and the loggers stay here. While trials run side by side, clients' losses arrive at the end of their round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engines.engine import Diverged
from ..utils.errors import FedshiftError, Ref
from ..utils.execution.executor import Chain, Executor, LaneLost, run_all
from .callbacks import RunningTrial
from .loggers import RecordLog
from .session import Session
from .trial_run import TrialRun, is_evaluated


@dataclass(kw_only=True, eq=False)
class Conductor:
    """Runs trials of ``rounds`` rounds for a run's session and log.

    ``finished``: whether all trials so far reached their end; ``diverged``: the errors of those that diverged, by
    number.
    """

    session: Session
    log: RecordLog
    rounds: int
    finished: bool = True
    diverged: dict[int, Diverged] = field(default_factory=dict)

    def run(
        self, executor: Executor, trials: Iterable[TrialRun], at_once: int, *given: Any, devices: Sequence[str] = ()
    ) -> None:
        """Run ``trials`` in this order, at most ``at_once`` at a time, until one is stopped or fails.

        ``given``: what :meth:`TrialRun.begin` takes. ``devices``: those over which trials are spread, each on the one
        with the fewest; none: that of the settings. If a trial fails, the others finish their rounds before its error
        is raised; one that diverges does not fail.
        """
        self._executor, self._given, self._several = executor, given, at_once > 1
        self._failed: list[BaseException] = []
        self._load = Counter(dict.fromkeys(devices, 0))  # running trials by device
        chains = ((trial.number, self._conduct(trial)) for trial in trials if self.finished and not self._failed)
        for number, found in run_all(executor, chains, at_once):
            if isinstance(found, Diverged):
                self.diverged[number] = found
            elif isinstance(found, BaseException):
                self._failed.append(found)
            else:
                self.finished = self.finished and found
        if self._failed:
            raise self._failed[0]

    def _conduct(self, trial: TrialRun) -> Chain:
        """Yield a trial's calls one after another; return whether it reached its end, or the error if it diverged."""
        session, callback, executor = self.session, self.session.callback, self._executor
        trial.device = min(self._load, key=self._load.__getitem__, default="")
        self._load.update([trial.device] if trial.device else [])
        run = executor.put(trial)
        running = RunningTrial(
            method=trial.method, seed=trial.seed, rounds=self.rounds, place=trial.folder, say=session.say
        )
        try:
            begun = yield TrialRun.begin, run, *self._given
            self._turn(trial, running, begins=True)
            callback.on_trial_begin(trial.method, trial.seed, begun.done)
            if begun.evaluated:
                callback.on_recorded(begun.evaluated)
            for text in begun.notices:
                session.say(text)
            with self.log.trial(trial.method, trial.seed, trial.folder, self.rounds) as log_round:
                if begun.choice:
                    callback.on_engine(trial.method, begun.choice)
                for number in range(begun.done + 1, begun.done + 1 if begun.ended else self.rounds + 1):
                    if session.stop.is_set() or self._failed:
                        for record in (yield TrialRun.save, run):
                            log_round(*record)
                        return False
                    callback.trial = running
                    callback.on_round_begin(number)
                    if not session.recorded:
                        yield TrialRun.train, run
                        session.describe(trains=True)  # before the round is saved
                    outcome, saved = yield TrialRun.round, run
                    self._turn(trial, running)
                    for row in outcome.rows if trial.progress is None else ():
                        if row["split"] == "train":
                            callback.on_client_end(row["client"], row["loss_sum"] / row["samples"])
                    for record in saved:
                        log_round(*record)
                    if evaluated := is_evaluated(outcome.rows):
                        callback.on_evaluation(outcome)
                    callback.on_round_end(outcome)
                    if running.asked and evaluated and number < self.rounds and not outcome.stopped:
                        for record in (yield TrialRun.stop, run, running.asked):
                            log_round(*record)
                    if outcome.stopped or (running.asked and evaluated):
                        break
                stopped, notices = yield TrialRun.end, run
            self._turn(trial, running)
            for text in notices:
                session.say(text)
            callback.on_trial_end(stopped)
        except Diverged as error:
            self._turn(trial, running)
            session.say_diverged(trial.method, trial.seed, error)
            callback.on_trial_end(str(error))
            return error
        except LaneLost as error:
            raise FedshiftError(
                f"the {executor.lane_name} that ran {trial.method}, seed {trial.seed}, {error}. What was saved before "
                "is intact: continue with {}, or with fewer {}",
                Ref(resume=True),
                Ref("jobs"),
            ) from error
        except Exception:
            yield TrialRun.save, run
            raise
        finally:
            self._load.subtract([trial.device] if trial.device else [])
            trial.close()
            executor.drop(run)
        return True

    def _turn(self, trial: TrialRun, running: RunningTrial, *, begins: bool = False) -> None:
        """Say that the next events are of ``trial``."""
        self.session.number, self.session.callback.trial = trial.number, running
        if self._several and not begins:
            self.session.callback.on_turn(trial.method, trial.seed)
