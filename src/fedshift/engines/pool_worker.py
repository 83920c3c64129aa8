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

from ..core.kernel import ServerState
from ..utils.allocator import keep_freed_memory
from ..utils.profiling import record_seconds
from .multiprocess import capture_error
from .sequential import Sequential
from .shared_memory import SharedMemoryBuffer, copy_out


class Worker:
    """What a worker knows: by number, the trials that it works for."""

    def __init__(self, talk: socket.socket) -> None:
        self.connection, self.buffer = Connection(os.dup(talk.fileno())), receive_buffer(talk)
        self.socket = talk
        self.engines: dict[int, Sequential] = {}
        self.buffers: dict[int, tuple[SharedMemoryBuffer, SharedMemoryBuffer]] = {}
        self.servers: dict[int, ServerState] = {}

    def serve(self) -> None:
        """Answer what is asked until nobody is there to ask."""
        while True:
            try:
                task, *given = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                return
            if task == "work":
                self.connection.send_bytes(self._work(*given))
            else:
                getattr(self, f"_{task}")(*given)

    def _trial(self, number: int, laid: bytes) -> None:
        self.buffers[number] = receive_buffer(self.socket), receive_buffer(self.socket)
        self.engines[number] = Sequential(*self.buffers[number][0].read(laid))

    def _server(self, number: int, laid: bytes) -> None:
        self.servers[number] = self.buffers[number][1].read(laid)

    def _forget(self, number: int) -> None:
        self.engines.pop(number)
        self.servers.pop(number, None)
        for shelf in self.buffers.pop(number):
            shelf.close()

    def _work(self, number: int, name: str, laid: bytes) -> bytes:
        """The outcome for one client, or the error that there was instead; and the seconds that the parts took."""

        def trained() -> bytes:
            client = copy_out(self.buffer.read(laid))  # the outcome will lie where the client lies now
            return self.buffer.write(self.engines[number].train_client(self.servers[number], name, client))

        with record_seconds() as seconds:
            done = capture_error(trained)
        return cloudpickle.dumps((done, seconds))  # type: ignore[no-any-return]


def send_buffer(talk: socket.socket, shelf: SharedMemoryBuffer) -> None:
    """Hand ``shelf`` to the process at the other end."""
    socket.send_fds(talk, [b"."], [shelf.fd])


def receive_buffer(talk: socket.socket) -> SharedMemoryBuffer:
    """The shelf that :func:`send_buffer` hands over."""
    _, fds, _, _ = socket.recv_fds(talk, 1, 1)
    return SharedMemoryBuffer(fds[0])


def _exit_with(lifeline: socket.socket) -> None:
    lifeline.recv(1)
    os._exit(0)


def main(talk: int, lifeline: int) -> None:
    """What a worker process runs, given its two sockets."""
    threading.Thread(target=_exit_with, args=(socket.socket(fileno=lifeline),), daemon=True).start()
    torch.set_num_threads(1)
    with keep_freed_memory():
        Worker(socket.socket(fileno=talk)).serve()
