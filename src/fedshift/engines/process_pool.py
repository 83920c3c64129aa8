"""The pool engine: clients distributed over worker processes of one thread each, as workers become free.

Networks too large to gain from running side by side make the best use of several processors when each trains another
client: no step waits for another thread. Data, broadcast and uploads pass through shared memory. Results are those
of the sequential engine on one thread, bit for bit, whatever the number of workers. Workers are started at the first
round, serve all trials of this process, and end with it, however it ends.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch
from typing_extensions import override

from ..core.kernel import ClientState, ServerState
from ..core.plan import Plan
from ..data.augmentation import Augmentation
from ..data.samples import count_bytes
from ..utils.allocator import keep_freed_memory
from ..utils.errors import FedshiftError, Ref, Sentence
from ..utils.processors import available_memory, available_processors
from ..utils.profiling import add_seconds, record_seconds, timed_section
from ..utils.user_code import locate_error
from .engine import ClientResult, Data, Engine
from .sequential import Sequential
from .shared_memory import SharedMemoryBuffer, copy_out, pickle_without_tensors

HOW_TO_CONTINUE = Sentence(
    "What was saved before is intact: continue with {}, with fewer {}, or with {}",
    Ref(resume=True),
    Ref("workers"),
    Ref(engine="sequential"),
)
"""Advice for when a worker is lost."""
START = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # Ctrl-C is meant for the parent
    "sys.path[:] = json.loads(sys.argv.pop()); from {module} import main; main({fd})"
)
"""Program of a worker process, whose parent is at the other end of socket ``fd``."""


class ProcessEngine(Engine):
    """Base of engines that send clients to other processes: several at once, those with most samples first."""

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        device = next(iter(data.values())).y.device.type
        if device != "cpu":
            return f"uses processors, but the device is {device}"
        try:
            pickle_without_tensors((plan, augment))
        except Exception as error:
            return f"cannot send {plan.method.name} or the model to another process ({error})"
        for name, split in data.items():
            try:
                pickle_without_tensors(split if split.lazy else None)
            except Exception as error:
                return f"cannot send the dataset of client {name!r} to another process ({error})"
        return None

    @override
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        at_once = self._broadcast(server, len(clients))
        steps = {name: self.steps_of_round(name, client)[1] for name, client in clients.items()}
        waiting = sorted(clients, key=lambda name: len(steps[name]) * len(self.data[name]), reverse=True)
        busy, failed = dict[Any, str](), None
        try:
            while busy or (waiting and not failed):
                while waiting and len(busy) < at_once and not failed:
                    name = waiting.pop(0)
                    busy[self._submit(name, clients[name])] = name
                for task in self._wait(list(busy)):
                    name = busy[task]
                    found = self._collect(task, name, server.round + 1)
                    del busy[task]
                    if isinstance(found, BaseException):
                        failed = failed or found
                    else:
                        yield name, found
        finally:
            self._cancel(list(busy))  # not empty if the caller stopped half way
        if failed:
            raise failed

    @abstractmethod
    def _broadcast(self, server: ServerState, clients: int) -> int:
        """Make ``server`` known to workers for this many clients; return how many clients can be trained at once."""

    @abstractmethod
    def _submit(self, name: str, client: ClientState) -> Any:
        """Begin the client's work; return its task."""

    @abstractmethod
    def _wait(self, tasks: list[Any]) -> Iterable[Any]:
        """Wait until at least one of ``tasks`` has ended; return those that have."""

    @abstractmethod
    def _collect(self, task: Any, client: str, round: int) -> ClientResult | BaseException:
        """Return the result of a task that has ended, or its error."""

    @abstractmethod
    def _cancel(self, tasks: list[Any]) -> None:
        """Stop ``tasks`` and all other work in progress."""


def capture_error(work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` in a worker, or its error in a form that can be sent."""
    try:
        return work()
    except FedshiftError as error:
        return error
    except BaseException as error:  # its type may be unknown to the parent, or impossible to unpickle
        where = locate_error(error)
        told = RuntimeError(f"{type(error).__name__}: {error}{f'; in {where}' if where else ''}")
        told.add_note(f"In the worker process:\n{traceback.format_exc()}")
        return told


class Pool(ProcessEngine):
    """Runs what can be sent to another process, on the CPU."""

    _numbers = count()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number = next(self._numbers)
        self._buffers: tuple[SharedMemoryBuffer, SharedMemoryBuffer] | None = None  # trial, broadcast
        self._workers: list[_WorkerHandle] = []
        self._free: list[_WorkerHandle] = []
        self._trial = b""

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        if os.name != "posix":
            return "shares memory in a way that this operating system does not have"
        size, free = count_bytes(data.values()), available_memory()
        if size > free:
            return (
                f"copies the training samples, {size / 1e9:.1f} GB, into memory, of which {free / 1e9:.1f} GB are free"
            )
        return super().refusal(plan, data, augment)

    @override
    def close(self) -> None:
        for worker in _WORKERS:
            if self._number in worker.trials:
                worker.trials.remove(self._number)
                worker.send("forget", self._number)
        for buffer in self._buffers or ():
            buffer.close()
        self._buffers = None

    @override
    def _broadcast(self, server: ServerState, clients: int) -> int:
        workers = _ensure_workers(min(self.workers or available_processors(), clients))
        try:
            with timed_section("hand over"):
                self._inform(workers, server)
        except BaseException:  # it is unknown how much of it has reached them
            for worker in workers:
                worker.end()
            raise
        self._workers, self._free = workers, list(workers)
        return len(workers)

    def _inform(self, workers: list[_WorkerHandle], server: ServerState) -> None:
        """Send ``workers`` the broadcast, and the trial to those that do not have it."""
        if self._buffers is None:
            buffers = SharedMemoryBuffer(), SharedMemoryBuffer()
            self._trial = buffers[0].write((self.plan, self.data, self.seed, 1, self.augment))
            self._buffers = buffers
        layout = self._buffers[1].write(server)
        for worker in workers:
            if self._number not in worker.trials:
                worker.send("trial", self._number, self._trial)
                for buffer in self._buffers:
                    worker.share_buffer(buffer)
                worker.trials.add(self._number)
            worker.send("server", self._number, layout)

    @override
    def _submit(self, name: str, client: ClientState) -> _WorkerHandle:
        worker = self._free.pop(0)
        worker.send("work", self._number, name, worker.buffer.write(client))
        return worker

    @override
    def _wait(self, tasks: list[_WorkerHandle]) -> list[_WorkerHandle]:
        ready = wait([worker.connection for worker in tasks])
        return [worker for worker in tasks if worker.connection in ready]

    @override
    def _collect(self, task: _WorkerHandle, client: str, round: int) -> ClientResult | BaseException:
        found = task.receive_result(client, round)
        self._free.append(task)
        if isinstance(found, BaseException):
            return found
        result: ClientResult = task.buffer.read(found)
        return ClientResult(client=copy_out(result.client), update=copy_out(result.update), loss_sum=result.loss_sum)

    @override
    def _cancel(self, tasks: list[_WorkerHandle]) -> None:
        for worker in self._workers:
            if worker not in self._free:  # one may have been told to begin without being among ``tasks`` yet
                worker.end()


class WorkerProcess:
    """A process that runs ``main(fd)`` of ``module``, seen from its parent, which it does not outlive.

    ``socket``: the parent's end, which sends buffers; ``connection``: the same for messages.
    """

    def __init__(self, module: str) -> None:
        self.socket, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process lives
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START.format(module=module, fd=theirs.fileno()), json.dumps(sys.path)],
            pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.PIPE, stderr=self._stderr,
        )  # fmt: skip
        theirs.close()
        self.connection = Connection(os.dup(self.socket.fileno()))

    def send(self, *message: Any) -> None:
        """Send a message; if the worker is dead, that is noticed when its answer is awaited."""
        with suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message))

    def share_buffer(self, buffer: SharedMemoryBuffer) -> None:
        """Share ``buffer`` with the worker; a dead one is noticed as in :meth:`send`."""
        with suppress(OSError):
            send_buffer(self.socket, buffer)

    def receive(self) -> Any:
        """Return the worker's next message; None: it is dead."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None

    def reap(self) -> str:
        """End a dead worker; return how it died, as the end of a sentence."""
        self.process.wait()
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        self.end()
        return f"{_describe_exit(self.process.returncode)}{f': {last[0]}' if last else ''}"

    def end(self) -> None:
        """Kill the process and close everything that was shared with it."""
        self.process.kill()
        self.process.communicate()  # waits, and closes its standard input
        for each in (self.connection, self.socket, self._stderr):
            each.close()


class _WorkerHandle(WorkerProcess):
    """A worker that trains clients; ``trials``: the numbers of those that it knows."""

    def __init__(self) -> None:
        super().__init__("fedshift.engines.process_pool")
        self.trials: set[int] = set()
        self.buffer = SharedMemoryBuffer()
        self.share_buffer(self.buffer)

    def receive_result(self, client: str, round: int) -> bytes | BaseException:
        """Return the worker's answer: the layout of the result in :attr:`buffer`, or an error."""
        answer = self.receive()
        if answer is None:
            return FedshiftError(
                f"the worker process that trained client {client!r} in round {round} {self.reap()}. {{}}",
                HOW_TO_CONTINUE,
            )
        found, seconds = answer
        add_seconds(seconds)
        return found  # type: ignore[no-any-return]

    @override
    def end(self) -> None:
        if self in _WORKERS:
            _WORKERS.remove(self)
            super().end()
            self.buffer.close()


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ", most often because memory ran out" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"


_WORKERS: list[_WorkerHandle] = []
"""The worker processes of this process."""


def _ensure_workers(number: int) -> list[_WorkerHandle]:
    """Return ``number`` workers; replace dead ones and start those that are lacking."""
    for worker in [worker for worker in _WORKERS if worker.process.poll() is not None]:
        worker.end()
    while len(_WORKERS) < number:
        _WORKERS.append(_WorkerHandle())
    return _WORKERS[:number]


@atexit.register
def dismiss() -> None:
    """End the worker processes of this process; later rounds start new ones."""
    while _WORKERS:
        _WORKERS[-1].end()


class Worker:
    """A worker process, seen from inside: it answers messages for the trials that it knows by number."""

    def __init__(self, parent: socket.socket) -> None:
        self.connection, self.buffer = Connection(os.dup(parent.fileno())), receive_buffer(parent)
        self.socket = parent
        self.engines: dict[int, Sequential] = {}
        self.buffers: dict[int, tuple[SharedMemoryBuffer, SharedMemoryBuffer]] = {}
        self.servers: dict[int, ServerState] = {}

    def serve(self) -> None:
        """Answer messages until the parent is gone."""
        while True:
            try:
                task, *given = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                return
            if task == "work":
                self.connection.send_bytes(self._work(*given))
            else:
                getattr(self, f"_{task}")(*given)

    def _trial(self, number: int, layout: bytes) -> None:
        self.buffers[number] = receive_buffer(self.socket), receive_buffer(self.socket)
        self.engines[number] = Sequential(*self.buffers[number][0].read(layout))

    def _server(self, number: int, layout: bytes) -> None:
        self.servers[number] = self.buffers[number][1].read(layout)

    def _forget(self, number: int) -> None:
        self.engines.pop(number)
        self.servers.pop(number, None)
        for buffer in self.buffers.pop(number):
            buffer.close()

    def _work(self, number: int, name: str, layout: bytes) -> bytes:
        """Return a client's result or error, and the seconds that its sections took, pickled."""

        def train() -> bytes:
            client = copy_out(self.buffer.read(layout))  # the result will take its place in the buffer
            return self.buffer.write(self.engines[number].train_client(self.servers[number], name, client))

        with record_seconds() as seconds:
            done = capture_error(train)
        return cloudpickle.dumps((done, seconds))  # type: ignore[no-any-return]


def send_buffer(to: socket.socket, buffer: SharedMemoryBuffer) -> None:
    """Share ``buffer`` with the process at the other end."""
    socket.send_fds(to, [b"."], [buffer.fd])


def receive_buffer(sender: socket.socket) -> SharedMemoryBuffer:
    """Return the buffer that :func:`send_buffer` shares."""
    _, fds, _, _ = socket.recv_fds(sender, 1, 1)
    return SharedMemoryBuffer(fds[0])


def exit_with_parent() -> None:
    """End this worker process when its parent ends, in the middle of a step if need be.

    The operating system closes the worker's standard input when the parent ends, however it ends.
    """

    def wait_for_end() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(0)

    threading.Thread(target=wait_for_end, daemon=True).start()


def main(parent: int) -> None:
    """Run a worker process, given the file descriptor of its socket."""
    exit_with_parent()
    torch.set_num_threads(1)
    with keep_freed_memory():
        Worker(socket.socket(fileno=parent)).serve()
