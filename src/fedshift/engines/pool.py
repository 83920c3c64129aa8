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

from ..base.errors import FedshiftError
from ..base.processors import processors
from ..base.profiling import add, part
from ..core.kernel import Client, Server
from ..core.plan import Plan
from .engine import Data, Trained
from .shelf import Shelf, copied
from .spread import GO_ON, Spread
from .worker import send_shelf

START = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # Ctrl-C is for whoever started it
    "sys.path[:] = json.loads(sys.argv.pop()); from fedshift.engines.worker import main; "
)


class Pool(Spread):
    """Runs what can be sent to another process, on the CPU."""

    _numbers = count()

    def __init__(self, plan: Plan, data: Data, seed: int, workers: int | None = None) -> None:
        super().__init__(plan, data, seed, workers)
        self._number = next(self._numbers)
        self._shelves: tuple[Shelf, Shelf] | None = None
        self._told: list[_Hand] = []
        self._hands: list[_Hand] = []
        self._free: list[_Hand] = []
        self._trial = b""

    @override
    @classmethod
    def refusal(cls, plan: Plan, data: Data) -> str | None:
        if os.name != "posix":
            return "shares memory in a way that this operating system does not have"
        return super().refusal(plan, data)

    @override
    def close(self) -> None:
        for hand in self._told:
            hand.send("forget", self._number)
        for shelf in self._shelves or ():
            shelf.close()
        self._told, self._shelves = [], None

    @override
    def _ready(self, server: Server, clients: int) -> int:
        hands = _hired(min(self.workers or processors(), clients))
        try:
            with part("hand over"):
                self._tell(hands, server)
        except BaseException:  # what they have heard of it cannot be told
            for hand in hands:
                hand.end()
            raise
        self._hands, self._free = hands, list(hands)
        return len(hands)

    @override
    def _start(self, name: str, client: Client) -> _Hand:
        hand = self._free.pop(0)
        hand.send("work", self._number, name, hand.shelf.lay(client))
        return hand

    @override
    def _ended(self, tasks: list[_Hand]) -> list[_Hand]:
        heard = wait([hand.talk for hand in tasks])
        return [hand for hand in tasks if hand.talk in heard]

    @override
    def _outcome(self, task: _Hand, client: str, round: int) -> Trained | BaseException:
        found = task.receive(client, round)
        self._free.append(task)
        if isinstance(found, BaseException):
            return found
        trained: Trained = task.shelf.take(found)
        state, update = copied(trained.client), copied(trained.update)
        return Trained(client=state, update=update, loss_sum=trained.loss_sum)

    @override
    def _abandon(self, tasks: list[_Hand]) -> None:
        for hand in self._hands:
            if hand not in self._free:  # one may have been told to begin and not be among ``tasks`` yet
                hand.end()

    def _tell(self, hands: list[_Hand], server: Server) -> None:
        """Let ``hands`` know the trial, if they do not, and what the server broadcasts."""
        if self._shelves is None:
            shelves = Shelf(), Shelf()
            self._trial = shelves[0].lay((self.plan, self.data, self.seed))
            self._shelves = shelves
        laid = self._shelves[1].lay(server)
        self._told = [hand for hand in self._told if hand.process.poll() is None]
        for hand in hands:
            if hand not in self._told:
                hand.send("trial", self._number, self._trial)
                for shelf in self._shelves:
                    hand.lend(shelf)
                self._told.append(hand)
            hand.send("server", self._number, laid)


class _Hand:
    """A worker process as its parent sees it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self._lifeline, end = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - the process's own, as long as it lives
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{START}main({theirs.fileno()}, {end.fileno()})", json.dumps(sys.path)],
            pass_fds=(theirs.fileno(), end.fileno()), env=environment, stdin=subprocess.DEVNULL, stderr=self._said,
        )  # fmt: skip
        theirs.close()
        end.close()
        self.talk, self.shelf = Connection(os.dup(self.socket.fileno())), Shelf()
        self.lend(self.shelf)

    def send(self, *message: Any) -> None:
        """Tell the worker something; where it is dead, that is found when its answer is awaited."""
        with suppress(OSError):
            self.talk.send_bytes(pickle.dumps(message))

    def lend(self, shelf: Shelf) -> None:
        """Share ``shelf`` with the worker; where it is dead, as in :meth:`send`."""
        with suppress(OSError):
            send_shelf(self.socket, shelf)

    def receive(self, client: str, round: int) -> bytes | BaseException:
        """Its answer: where the outcome lies, or the error that there was instead."""
        try:
            found, seconds = pickle.loads(self.talk.recv_bytes())
        except (EOFError, OSError):
            self.process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip().splitlines()
            self.end()
            return FedshiftError(
                f"the worker process that trained client {client!r} in round {round} {_cause(self.process.returncode)}"
                f"{f': {said[-1]}' if said else ''}. {GO_ON}"
            )
        add(seconds)
        return found  # type: ignore[no-any-return]

    def end(self) -> None:
        """Stop the process, at once, and close everything that was shared with it."""
        if self in _HANDS:
            _HANDS.remove(self)
            self.process.kill()
            self.process.wait()
            for each in (self.talk, self.socket, self._lifeline, self._said, self.shelf):
                each.close()


def _cause(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ", most often because memory ran out" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"


_HANDS: list[_Hand] = []
"""The worker processes of this process."""


def _hired(number: int) -> list[_Hand]:
    """``number`` workers, started where there are fewer."""
    for hand in [hand for hand in _HANDS if hand.process.poll() is not None]:
        hand.end()
    while len(_HANDS) < number:
        _HANDS.append(_Hand())
    return _HANDS[:number]


@atexit.register
def dismiss() -> None:
    """End the worker processes of this process; later rounds start others."""
    while _HANDS:
        _HANDS[-1].end()
