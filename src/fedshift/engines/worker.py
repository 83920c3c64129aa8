"""A worker of the pool engine: a process with one thread that does clients' work until whoever started it is gone.

It talks over one socket and watches another, its lifeline: the operating system closes that with the process at the
other end, however that ends, and the worker ends with it, in the middle of a step if need be.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
from multiprocessing.connection import Connection

import cloudpickle
import torch

from ..base.allocator import freed_memory_kept
from ..base.profiling import recording
from ..core.kernel import Server
from .sequential import Sequential
from .shelf import Shelf, copied
from .spread import attempted


class Worker:
    """What a worker knows: by number, the trials that it works for."""

    def __init__(self, talk: socket.socket) -> None:
        self.talk, self.own = Connection(os.dup(talk.fileno())), receive_shelf(talk)
        self.socket = talk
        self.engines: dict[int, Sequential] = {}
        self.shelves: dict[int, tuple[Shelf, Shelf]] = {}
        self.servers: dict[int, Server] = {}

    def serve(self) -> None:
        """Answer what is asked until nobody is there to ask."""
        while True:
            try:
                task, *given = pickle.loads(self.talk.recv_bytes())
            except (EOFError, OSError):
                return
            if task == "work":
                self.talk.send_bytes(self._work(*given))
            else:
                getattr(self, f"_{task}")(*given)

    def _trial(self, number: int, laid: bytes) -> None:
        self.shelves[number] = receive_shelf(self.socket), receive_shelf(self.socket)
        self.engines[number] = Sequential(*self.shelves[number][0].take(laid))

    def _server(self, number: int, laid: bytes) -> None:
        self.servers[number] = self.shelves[number][1].take(laid)

    def _forget(self, number: int) -> None:
        self.engines.pop(number)
        self.servers.pop(number, None)
        for shelf in self.shelves.pop(number):
            shelf.close()

    def _work(self, number: int, name: str, laid: bytes) -> bytes:
        """The outcome for one client, or the error that there was instead; and the seconds that the parts took."""

        def trained() -> bytes:
            client = copied(self.own.take(laid))  # the outcome will lie where the client lies now
            return self.own.lay(self.engines[number].work(self.servers[number], name, client))

        with recording() as seconds:
            done = attempted(trained)
        return cloudpickle.dumps((done, seconds))  # type: ignore[no-any-return]


def send_shelf(talk: socket.socket, shelf: Shelf) -> None:
    """Hand ``shelf`` to the process at the other end."""
    socket.send_fds(talk, [b"."], [shelf.fd])


def receive_shelf(talk: socket.socket) -> Shelf:
    """The shelf that :func:`send_shelf` hands over."""
    _, fds, _, _ = socket.recv_fds(talk, 1, 1)
    return Shelf(fds[0])


def _end_with(lifeline: socket.socket) -> None:
    lifeline.recv(1)
    os._exit(0)


def main(talk: int, lifeline: int) -> None:
    """What a worker process runs, given its two sockets."""
    threading.Thread(target=_end_with, args=(socket.socket(fileno=lifeline),), daemon=True).start()
    torch.set_num_threads(1)
    with freed_memory_kept():
        Worker(socket.socket(fileno=talk)).serve()
