"""Worker processes as lanes, with values, arguments and results in shared memory.

Workers start when they are first needed. One that dies fails its own call alone, with the signal that killed it, and is
replaced. None outlives its parent, however that ends. Standard pools do not fit: that of ``concurrent.futures`` imports
the main script again, and loky's fails every pending call when one worker dies, and lets calls outlive the parent.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch
from typing_extensions import override

from ..allocator import keep_freed_memory
from ..processors import available_processors
from ..profiling import Seconds, add_seconds, is_recording, record_seconds
from .executor import Executor, Handle, LaneLost, Task, capture_error
from .shared_memory import SharedMemoryBuffer

START = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # Ctrl-C is meant for the parent
    "sys.path[:] = json.loads(sys.argv.pop()); from fedshift.utils.execution.workers import main; main({fd})"
)
"""Program of a worker process, whose parent is at the other end of socket ``fd``."""


class Workers(Executor):
    """A process for each lane; ``environments``: environment variables, one mapping for each lane.

    Without them there are as many lanes as are asked for at once. They start with one thread for torch.
    """

    lane_name = "worker process"

    def __init__(self, environments: Sequence[Mapping[str, str]] = ()) -> None:
        self.environments = environments
        self.lanes = len(environments) or available_processors()
        self._workers: dict[int, WorkerProcess] = {}
        self._values: dict[int, tuple[SharedMemoryBuffer, bytes]] = {}
        self._numbers = count()
        self._end = weakref.finalize(self, _end_all, self._workers, self._values)  # at the latest at exit

    @override
    def put(self, value: Any) -> Handle:
        buffer = SharedMemoryBuffer()
        try:
            layout = buffer.write(value)
        except BaseException:
            buffer.close()
            raise
        number = next(self._numbers)
        self._values[number] = buffer, layout
        return Handle(number)

    @override
    def drop(self, handle: Handle) -> None:
        if known := self._values.pop(handle.held, None):
            known[0].close()
        for worker in self._workers.values():
            if worker.task is None:
                self._make_forget(worker)

    @override
    def submit(self, function: Callable[..., Any], *args: Any, lane: int | None = None) -> Task:
        lane = self._find_lane() if lane is None else lane
        worker, task = self._workers[lane], Task(lane)
        worker.task = task  # from here to its answer it is busy, and is ended if the parent is interrupted
        self._make_forget(worker)
        for number in (each.held for each in args if isinstance(each, Handle)):
            if number not in worker.known:
                buffer, layout = self._values[number]
                worker.send("learn", number, layout)
                worker.share_buffer(buffer)
                worker.known.add(number)
        try:
            layout = worker.buffer.write((function, args))
        except Exception:
            worker.task = None
            raise
        worker.send("run", layout, is_recording())
        return task

    @override
    def wait(self, tasks: list[Task]) -> list[Task]:
        ready = wait([self._workers[task.lane].connection for task in tasks])
        ended = [task for task in tasks if self._workers[task.lane].connection in ready]
        for task in ended:
            task.result = self._receive(task.lane)
        return ended

    @override
    def cancel(self) -> None:
        for lane in [lane for lane, worker in self._workers.items() if worker.task is not None]:
            self._workers.pop(lane).end()

    @override
    def close(self) -> None:
        self._end()

    def _find_lane(self) -> int:
        """Return a free lane, whose worker is started or replaced if need be."""
        free = (n for n in count() if n not in self._workers or self._workers[n].task is None)
        lane = next(free)
        if lane in self._workers and self._workers[lane].process.poll() is not None:
            self._workers.pop(lane).end()
        if lane not in self._workers:
            given = self.environments[lane] if self.environments else {}
            self._workers[lane] = WorkerProcess(given)
        return lane

    def _make_forget(self, worker: WorkerProcess) -> None:
        """Tell ``worker`` which of the values that it knows were dropped."""
        for number in worker.known - self._values.keys():
            worker.send("forget", number)
            worker.known.remove(number)

    def _receive(self, lane: int) -> Any:
        """Return the result of the call that has ended on ``lane``, or its error."""
        worker = self._workers[lane]
        answer = worker.receive()
        if answer is None:
            return LaneLost(self._workers.pop(lane).reap())
        worker.task = None
        found, seconds = answer
        add_seconds(seconds)
        return worker.buffer.take(found) if isinstance(found, bytes) else found


def _end_all(workers: dict[int, WorkerProcess], values: dict[int, tuple[SharedMemoryBuffer, bytes]]) -> None:
    while workers:
        workers.popitem()[1].end()
    while values:
        values.popitem()[1][0].close()


class WorkerProcess:
    """A worker seen from its parent, which it does not outlive; ``environment``: its environment variables.

    ``task``: the call that it runs; ``known``: the values that it knows; ``buffer``: its call's arguments, then result.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.socket, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process lives
        self.process = subprocess.Popen(
            [sys.executable, "-c", START.format(fd=theirs.fileno()), json.dumps(sys.path)],
            pass_fds=(theirs.fileno(),), stdin=subprocess.PIPE, stderr=self._stderr,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        theirs.close()
        self.connection = Connection(os.dup(self.socket.fileno()))
        self.task: Task | None = None
        self.known: set[int] = set()
        self.buffer = SharedMemoryBuffer()
        self.share_buffer(self.buffer)

    def send(self, *message: Any) -> None:
        """Send a message; if the worker is dead, that is noticed when its answer is awaited."""
        with suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message))

    def share_buffer(self, buffer: SharedMemoryBuffer) -> None:
        """Share ``buffer`` with the worker; a dead one is noticed as in :meth:`send`."""
        with suppress(OSError):
            socket.send_fds(self.socket, [b"."], [buffer.fd])

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
        return f"{describe_exit(self.process.returncode)}{f': {last[0]}' if last else ''}"

    def end(self) -> None:
        """Kill the process and close everything that was shared with it."""
        self.process.kill()
        self.process.communicate()  # waits, and closes its standard input
        for each in (self.connection, self.socket, self._stderr, self.buffer):
            each.close()


def describe_exit(code: int) -> str:
    """Return how a process ended, as the end of a sentence."""
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ", most often because memory ran out" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"


class Worker:
    """A worker seen from inside: it runs calls for the parent at the other end of a socket."""

    def __init__(self, parent: socket.socket) -> None:
        self.socket, self.connection = parent, Connection(os.dup(parent.fileno()))
        self.buffer = self._receive_buffer()
        self.layouts: dict[int, tuple[SharedMemoryBuffer, bytes]] = {}
        self.values: dict[int, Any] = {}

    def serve(self) -> None:
        """Run calls until the parent ends."""
        while True:
            try:
                kind, *given = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                return
            if kind == "run":
                self.connection.send_bytes(self._run(*given))
            else:
                getattr(self, f"_{kind}")(*given)

    def _learn(self, number: int, layout: bytes) -> None:
        self.layouts[number] = self._receive_buffer(), layout

    def _forget(self, number: int) -> None:
        self.values.pop(number, None)
        self.layouts.pop(number)[0].close()

    def _find(self, number: int) -> Any:
        if number not in self.values:
            buffer, layout = self.layouts[number]
            self.values[number] = buffer.read(layout)
        return self.values[number]

    def _run(self, layout: bytes, records: bool) -> bytes:
        """Return a call's result or error, and the seconds that its sections took, pickled."""

        def work() -> bytes:
            function, args = self.buffer.take(layout)  # the result will take their place
            found = function(*(self._find(each.held) if isinstance(each, Handle) else each for each in args))
            return self.buffer.write(found)

        timed: AbstractContextManager[Seconds] = record_seconds() if records else nullcontext({})
        with timed as seconds:
            done = capture_error(work)
        return cloudpickle.dumps((done, seconds))  # type: ignore[no-any-return]

    def _receive_buffer(self) -> SharedMemoryBuffer:
        _, fds, _, _ = socket.recv_fds(self.socket, 1, 1)
        return SharedMemoryBuffer(fds[0])


def exit_with_parent() -> None:
    """End this worker process when its parent ends, in the middle of a call if need be.

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
