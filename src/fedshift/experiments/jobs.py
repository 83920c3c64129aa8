"""Trials of an experiment side by side, each in a worker process, with the same bits as one after another.

A trial that computes on one thread leaves other processors idle, and a trial of the pool engine gives the same bits as
the sequential engine on one thread. Such trials run side by side, with their usual engine and number of threads. A
worker writes the files of its trial; shared files, the display and the loggers stay with the parent, to which a worker
reports every event. Workers are reused by later experiments of the process and end with it, however it ends.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Event
from typing import Any, Literal

import cloudpickle
import torch
from typing_extensions import override

from ..core.kernel import ClientState, ServerState
from ..engines.auto import EngineChoice, estimate_seconds
from ..engines.cost_model import limit_threads
from ..engines.engine import ClientResult, Diverged
from ..engines.process_pool import WorkerProcess, capture_error, exit_with_parent, receive_buffer
from ..engines.sequential import Sequential
from ..engines.shared_memory import SharedMemoryBuffer
from ..results.run_directory import trial_folder
from ..results.schema import Row
from ..results.trial_records import CHECKPOINT, load_facts
from ..utils.errors import FedshiftError, Ref, UsageError
from ..utils.processors import available_memory, available_processors
from ..utils.profiling import Seconds, add_seconds, is_recording, record_seconds
from ..utils.state import nbytes
from .loggers import RecordLog
from .observer import Observer
from .session import Session
from .trial import BEGUN, RoundResult, Trial

Jobs = int | Literal["auto"]
"""Maximum number of trials that run at a time; ``auto``: as many as leave no processor idle."""
WORTH = 10.0
"""Estimated seconds of all trials below which starting workers costs more time than it saves."""
WORKER = 5e8
"""Bytes of memory that a worker uses before its trial begins."""
COPIES = 10
"""Maximum copies of the network in a trial: initial, shared, trained, gradients, float64 sums, checkpoint."""


ANSWERED = ("describe", "log", "round")
"""Worker messages that wait for an answer, which says whether to stop after the round."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A trial to run in a worker: its ``number`` among all trials, method name, seed and engine."""

    number: int
    method: str
    seed: int
    choice: EngineChoice


def choose_jobs(path: Path, trials: Mapping[str, Trial], seeds: Sequence[int], jobs: Jobs) -> tuple[list[Job], int]:
    """Return the unfinished trials to run side by side, and how many at a time; none if it would not help.

    Args:
        path: run directory.
        trials: one trial per method, by name, from which engine and cost are taken.
        seeds: seeds of the trials.
        jobs: maximum number of trials at a time, as the user wrote it.

    """
    most = available_processors() if jobs == "auto" else jobs
    settings, threads = next(iter(trials.values())).settings, torch.get_num_threads()
    if most < 2 or os.name != "posix" or settings.engine == "ray" or (jobs == "auto" and settings.device != "cpu"):
        return [], 1
    pending, seconds = list[tuple[int, str, int, EngineChoice | None]](), 0.0
    for number, (seed, method) in enumerate(product(seeds, trials)):
        checkpoint = trial_folder(path, method, seed) / CHECKPOINT
        facts: dict[str, Any] = load_facts(checkpoint) if checkpoint.exists() else {"round": 0, "engine": None}
        if (left := settings.rounds - facts["round"]) > 0:
            engine = facts["engine"] if settings.engine == "auto" else None
            kept = EngineChoice(engine=engine[0], threads=engine[1], reason=BEGUN) if engine else None
            pending.append((number, method, seed, kept))
            trial = trials[method]
            seconds += estimate_seconds(trial.plan, trial.train, clients=_count_participants(trial), rounds=left)
    if len(pending) < 2 or (jobs == "auto" and seconds < WORTH):
        return [], 1
    found = [
        Job(number=number, method=method, seed=seed, choice=kept or trials[method].engine_choice)
        for number, method, seed, kept in pending
    ]
    if jobs == "auto":
        most = int(min(most, *(_count_fitting(trials[job.method]) for job in found)))
        pooled = [job for job in found if job.choice.engine == "pool" and settings.engine == "auto"]
        alone = [job for job in found if job.choice.engine != "pool" and (job.choice.threads or threads) == 1]
        clients = max(map(_count_participants, trials.values()))
        found = alone + (pooled if len(alone) + len(pooled) >= min(available_processors(), clients) else [])
    most = min(most, len(found))
    return (sorted(found, key=lambda job: job.number), most) if most > 1 else ([], 1)


def _count_participants(trial: Trial) -> int:
    return len(trial.settings.draw_participants(trial.seed, 1, trial.clients.names))


def _count_fitting(trial: Trial) -> float:
    """Return how many trials like this one fit in half of the free memory."""
    return available_memory() / 2 / (WORKER + COPIES * nbytes(trial.plan.initial))


class JobRunner:
    """Runs ``jobs`` of ``rounds`` rounds side by side, ``processes`` at a time; it can be used once.

    ``work``: runs a job in a worker; it contains the experiment. Raises :class:`UsageError` if it cannot be sent to
    another process.
    """

    def __init__(
        self, work: Callable[[Job, JobSession], bool], jobs: Sequence[Job], processes: int, rounds: int
    ) -> None:
        self.jobs, self.processes, self.rounds = jobs, processes, rounds
        self._buffer = SharedMemoryBuffer()
        try:
            self._layout = self._buffer.write(work)
        except Exception as error:
            self._buffer.close()
            raise UsageError(
                f"jobs={processes}: a method, the model or another part of the experiment cannot be sent to another "
                f"process ({error}): use jobs=1"
            ) from error

    def run(self, session: Session, log: RecordLog) -> tuple[bool, dict[int, Diverged]]:
        """Run the jobs in a run's ``session``; return whether all finished, and the divergences by job number.

        If a worker dies or a trial fails otherwise, the other trials finish their rounds before the error is raised.
        """
        waiting, busy = list(self.jobs), dict[Connection, _Running]()
        workers = list[WorkerProcess]()
        free = list[WorkerProcess]()
        finished, failed = True, list[BaseException]()
        diverged: dict[int, Diverged] = {}
        try:
            while busy or (waiting and not failed and not session.stop.is_set()):
                while waiting and len(busy) < self.processes and not failed and not session.stop.is_set():
                    if not free:
                        free.append(self._take_worker(workers))
                    running = _Running(waiting.pop(0), self.rounds, free.pop(), session, log)
                    running.begin()
                    busy[running.worker.connection] = running
                for connection in wait(list(busy)):
                    assert isinstance(connection, Connection)
                    running = busy[connection]
                    if not running.answer(stop=bool(failed)):
                        continue
                    del busy[connection]
                    if isinstance(running.result, Diverged):
                        diverged[running.job.number] = running.result
                    elif isinstance(running.result, BaseException):
                        failed.append(running.result)
                    else:
                        finished = finished and running.result
                    if running.alive:
                        free.append(running.worker)
                    else:
                        workers.remove(running.worker)
                        _WORKERS.remove(running.worker)
        finally:
            for running in busy.values():
                running.close(None)
            for worker in workers:
                if worker in free:
                    worker.send()
                else:  # it is still busy
                    _WORKERS.remove(worker)
                    worker.end()
            self._buffer.close()
        if failed:
            raise failed[0]
        return finished and not waiting, diverged

    def _take_worker(self, taken: list[WorkerProcess]) -> WorkerProcess:
        """Return a worker not in ``taken``, add it to ``taken``, and send it the experiment."""
        for dead in [worker for worker in _WORKERS if worker not in taken and worker.process.poll() is not None]:
            _WORKERS.remove(dead)
            dead.end()
        worker = next((worker for worker in _WORKERS if worker not in taken), None)
        if worker is None:
            worker = WorkerProcess(__name__)
            _WORKERS.append(worker)
        taken.append(worker)
        worker.send(self._layout, torch.get_num_threads(), is_recording())
        worker.share_buffer(self._buffer)
        return worker


_WORKERS: list[WorkerProcess] = []
"""The worker processes of this process that run trials."""


@atexit.register
def dismiss() -> None:
    """End the workers; later experiments start new ones."""
    while _WORKERS:
        _WORKERS.pop().end()


class _Running:
    """A job in a worker, seen from the parent; ``result``: whether it reached its last round, or its error."""

    def __init__(self, job: Job, rounds: int, worker: WorkerProcess, session: Session, log: RecordLog) -> None:
        self.job, self.rounds, self.worker, self.session, self.log = job, rounds, worker, session, log
        self.result: bool | BaseException = False
        self.alive = True
        self._logged = ExitStack()
        self._log_round: Callable[[Row, list[Row]], None] = lambda *_: None

    def begin(self) -> None:
        """Tell the worker to run the job."""
        self.worker.send(self.job, self.session.path)

    def answer(self, *, stop: bool) -> bool:
        """Receive and answer the worker's next message; return whether the job has ended.

        ``stop``: whether the job should end after its round.
        """
        message = self.worker.receive()
        self.session.number = self.job.number
        if message is None:
            self.alive = False
            self.close(
                FedshiftError(
                    f"the worker process that ran {self.job.method}, seed {self.job.seed}, {self.worker.reap()}. What "
                    "was saved before is intact: continue with {}, or with fewer {}",
                    Ref(resume=True),
                    Ref("jobs"),
                )
            )
            return True
        kind, *given = message
        if kind == "ended":
            result, seconds = given
            add_seconds(seconds)
            self.close(result)
            if isinstance(result, Diverged):
                self.session.say_diverged(self.job.method, self.job.seed, result)
            return True
        if kind == "describe":
            self.session.describe(trains=True)
        elif kind == "log":
            (folder,) = given
            logged = self.log.trial(self.job.method, self.job.seed, folder, self.rounds)
            self._log_round = self._logged.enter_context(logged)
        elif kind == "log_round":
            self._log_round(*given)
        elif kind == "say":
            self.session.say(*given)
        else:
            if kind != "trial":
                self.session.observer.turn(self.job.method, self.job.seed)
            getattr(self.session.observer, kind)(*given)
        if kind in ANSWERED:
            self.worker.send(stop or self.session.stop.is_set())
        return False

    def close(self, result: bool | BaseException | None) -> None:
        """End the trial's log with ``result``; None: it was interrupted."""
        self.result = False if result is None else result
        if isinstance(result, BaseException):
            with suppress(type(result)):
                self._logged.__exit__(type(result), result, None)
        else:
            self._logged.close()


class JobSession(Observer):
    """Worker-side session, observer and log of a run: every event goes to the parent."""

    def __init__(self, connection: Connection, path: Path) -> None:
        self.connection, self.path, self.stop = connection, path, Event()
        self.observer, self._described = self, False

    def send(self, *message: Any) -> None:
        """Send a message."""
        self.connection.send_bytes(cloudpickle.dumps(message))

    def ask(self, *message: Any) -> None:
        """Send a message and wait for the answer, which says whether to stop."""
        self.send(*message)
        if pickle.loads(self.connection.recv_bytes())[0]:
            self.stop.set()

    def say(self, text: str) -> None:
        """Give a notice."""
        self.send("say", text)

    def describe(self, *, trains: bool) -> None:
        """Have the parent write the run's description, on the first call."""
        if trains and not self._described:
            self.ask("describe")
            self._described = True

    @contextmanager
    def log(self, method: str, seed: int, folder: Path, rounds: int) -> Iterator[Callable[[Row, list[Row]], None]]:
        """Have the parent log the trial."""
        self.ask("log", folder)
        yield lambda cost, rows: self.send("log_round", cost, rows)

    @override
    def trial(self, method: str, seed: int, done: int) -> None:
        self.send("trial", method, seed, done)

    @override
    def recorded(self, rows: Sequence[Row]) -> None:
        self.send("recorded", rows)

    @override
    def engine(self, method: str, choice: EngineChoice) -> None:
        self.send("engine", method, choice)

    @override
    def client(self, client: str, loss: float) -> None:
        self.send("client", client, loss)

    @override
    def round(self, done: RoundResult) -> None:
        self.ask("round", done)


class SequentialForPool(Sequential):
    """The sequential engine on one thread; a job runs it in place of the pool engine, with the same bits."""

    @override
    def train_client(self, server: ServerState, name: str, client: ClientState) -> ClientResult:
        with limit_threads(1):
            return super().train_client(server, name, client)


def main(parent: int) -> None:
    """Run a worker process, given the file descriptor of its socket: experiment after experiment, job after job."""
    exit_with_parent()
    given = socket.socket(fileno=parent)
    connection = Connection(os.dup(given.fileno()))
    while True:
        layout, threads, records = pickle.loads(connection.recv_bytes())
        buffer = receive_buffer(given)
        torch.set_num_threads(threads)
        _serve(buffer.read(layout), connection, records=records)
        buffer.close()


def _serve(work: Callable[[Job, JobSession], bool], connection: Connection, *, records: bool) -> None:
    """Run jobs with ``work`` until the parent has no more; ``records``: whether to record seconds."""
    while message := pickle.loads(connection.recv_bytes()):
        job, path = message
        timed: AbstractContextManager[Seconds] = record_seconds() if records else nullcontext({})
        with timed as seconds:
            result = capture_error(partial(work, job, JobSession(connection, path)))
        connection.send_bytes(cloudpickle.dumps(("ended", result, seconds)))
