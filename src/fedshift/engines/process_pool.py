"""The pool engine: clients spread over worker processes with one thread each, as fast as they become free.

Networks too large to gain from running side by side use several processors best when each does a client of its own: no
step waits for another thread. Data, broadcast and uploads pass through shared memory. Results are those of the
sequential engine on one thread, bit for bit, whatever the number of workers. Workers are started at the first round,
serve all trials of this process, and end with it, however it ends.
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
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

from typing_extensions import override

from ..core.kernel import ClientState, ServerState
from ..core.plan import Plan
from ..data.image_transforms import Augmentation
from ..utils.errors import FedshiftError
from ..utils.processors import available_processors
from ..utils.profiling import add_seconds, timed_section
from .engine import ClientResult, Data
from .multiprocess import HOW_TO_CONTINUE, ProcessEngine
from .pool_worker import send_buffer
from .shared_memory import SharedMemoryBuffer, copy_out

START = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # Ctrl-C is for whoever started it
    "sys.path[:] = json.loads(sys.argv.pop()); from fedshift.engines.pool_worker import main; "
)


class Pool(ProcessEngine):
    """Runs what can be sent to another process, on the CPU."""

    _numbers = count()

    def __init__(
        self, plan: Plan, data: Data, seed: int, workers: int | None = None, augment: Augmentation | None = None
    ) -> None:
        super().__init__(plan, data, seed, workers, augment)
        self._number = next(self._numbers)
        self._buffers: tuple[SharedMemoryBuffer, SharedMemoryBuffer] | None = None
        self._informed: list[_WorkerHandle] = []
        self._handles: list[_WorkerHandle] = []
        self._free: list[_WorkerHandle] = []
        self._trial = b""

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:
        if os.name != "posix":
            return "shares memory in a way that this operating system does not have"
        return super().refusal(plan, data, augment)

    @override
    def close(self) -> None:
        for hand in self._informed:
            hand.send("forget", self._number)
        for shelf in self._buffers or ():
            shelf.close()
        self._informed, self._buffers = [], None

    @override
    def _broadcast(self, server: ServerState, clients: int) -> int:
        hands = _ensure_workers(min(self.workers or available_processors(), clients))
        try:
            with timed_section("hand over"):
                self._inform(hands, server)
        except BaseException:  # what they have heard of it cannot be told
            for hand in hands:
                hand.end()
            raise
        self._handles, self._free = hands, list(hands)
        return len(hands)

    @override
    def _submit(self, name: str, client: ClientState) -> _WorkerHandle:
        hand = self._free.pop(0)
        hand.send("work", self._number, name, hand.buffer.write(client))
        return hand

    @override
    def _wait(self, tasks: list[_WorkerHandle]) -> list[_WorkerHandle]:
        heard = wait([hand.connection for hand in tasks])
        return [hand for hand in tasks if hand.connection in heard]

    @override
    def _collect(self, task: _WorkerHandle, client: str, round: int) -> ClientResult | BaseException:
        found = task.receive(client, round)
        self._free.append(task)
        if isinstance(found, BaseException):
            return found
        trained: ClientResult = task.buffer.read(found)
        state, update = copy_out(trained.client), copy_out(trained.update)
        return ClientResult(client=state, update=update, loss_sum=trained.loss_sum)

    @override
    def _cancel(self, tasks: list[_WorkerHandle]) -> None:
        for hand in self._handles:
            if hand not in self._free:  # one may have been told to begin and not be among ``tasks`` yet
                hand.end()

    def _inform(self, hands: list[_WorkerHandle], server: ServerState) -> None:
        """Let ``hands`` know the trial, if they do not, and what the server broadcasts."""
        if self._buffers is None:
            shelves = SharedMemoryBuffer(), SharedMemoryBuffer()
            self._trial = shelves[0].write((self.plan, self.data, self.seed, 1, self.augment))
            self._buffers = shelves
        laid = self._buffers[1].write(server)
        self._informed = [hand for hand in self._informed if hand.process.poll() is None]
        for hand in hands:
            if hand not in self._informed:
                hand.send("trial", self._number, self._trial)
                for shelf in self._buffers:
                    hand.share_buffer(shelf)
                self._informed.append(hand)
            hand.send("server", self._number, laid)


class _WorkerHandle:
    """A worker process as its parent sees it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self._lifeline, end = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - the process's own, as long as it lives
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{START}main({theirs.fileno()}, {end.fileno()})", json.dumps(sys.path)],
            pass_fds=(theirs.fileno(), end.fileno()), env=environment, stdin=subprocess.DEVNULL, stderr=self._stderr,
        )  # fmt: skip
        theirs.close()
        end.close()
        self.connection, self.buffer = Connection(os.dup(self.socket.fileno())), SharedMemoryBuffer()
        self.share_buffer(self.buffer)

    def send(self, *message: Any) -> None:
        """Tell the worker something; where it is dead, that is found when its answer is awaited."""
        with suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message))

    def share_buffer(self, shelf: SharedMemoryBuffer) -> None:
        """Share ``buffer`` with the worker; where it is dead, as in :meth:`send`."""
        with suppress(OSError):
            send_buffer(self.socket, shelf)

    def receive(self, client: str, round: int) -> bytes | BaseException:
        """Its answer: where the outcome lies, or the error that there was instead."""
        try:
            found, seconds = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.wait()
            self._stderr.seek(0)
            said = self._stderr.read().decode(errors="replace").strip().splitlines()
            self.end()
            return FedshiftError(
                f"the worker process that trained client {client!r} in round {round} {_describe_exit(self.process.returncode)}"
                f"{f': {said[-1]}' if said else ''}. {HOW_TO_CONTINUE}"
            )
        add_seconds(seconds)
        return found  # type: ignore[no-any-return]

    def end(self) -> None:
        """Stop the process, at once, and close everything that was shared with it."""
        if self in _WORKERS:
            _WORKERS.remove(self)
            self.process.kill()
            self.process.wait()
            for each in (self.connection, self.socket, self._lifeline, self._stderr, self.buffer):
                each.close()


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ", most often because memory ran out" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"


_WORKERS: list[_WorkerHandle] = []
"""The worker processes of this process."""


def _ensure_workers(number: int) -> list[_WorkerHandle]:
    """``number`` workers, started where there are fewer."""
    for hand in [hand for hand in _WORKERS if hand.process.poll() is not None]:
        hand.end()
    while len(_WORKERS) < number:
        _WORKERS.append(_WorkerHandle())
    return _WORKERS[:number]


@atexit.register
def dismiss() -> None:
    """End the worker processes of this process; later rounds start others."""
    while _WORKERS:
        _WORKERS[-1].end()
