"""Bounds on a SuperLink's connections, which apply as soon as one is accepted, before TLS.

A connection costs memory before anything is known about who is at its other end: asyncio's TLS alone has a buffer of
256 KiB for each. Here each listening socket counts its connections, by address, and refuses those beyond the bounds;
and a connection on which no request is in progress must complete the next one's headers within :data:`SECONDS` and
:data:`BYTES`. A share is reserved for addresses of nodes that proved a known key (``homes``), so that strangers cannot
crowd out known sites.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from importlib import import_module
from ipaddress import ip_address
from typing import Any

from typing_extensions import override

MOST, OF_ADDRESS = 512, 32
"""Most connections in total, half of them for strangers, and most connections of one unknown address."""
SECONDS, BYTES = 15.0, 2**20
"""Time and bytes that a connection has for the handshake and the headers of its next request."""


class Connections:
    """The open connections of a SuperLink.

    ``homes``: the last address of each node that proved a known key.
    """

    def __init__(self) -> None:
        resource = import_module("resource")  # which Windows lacks
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = MOST if files == resource.RLIM_INFINITY else min(MOST, files // 2)
        self.homes = dict[bytes, str]()
        self._counts = Counter[str]()
        self._open = dict[tuple[str, int], Connection]()

    def admits(self, host: str, own: str) -> bool:
        """Return whether another connection from ``host`` to this machine's address ``own`` is within the bounds."""
        known, total = {"", *self.homes.values()}, self._counts.total()
        if (place := find_place(host, own)) in known:
            return total < self.most
        strangers = total - sum(self._counts[each] for each in known)
        return total < self.most and strangers < self.most // 2 and self._counts[place] < OF_ADDRESS

    def add(self, connection: Connection) -> None:
        """Count a connection."""
        self._counts[connection.place] += 1
        self._open[connection.peer] = connection

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._counts -= Counter([connection.place])
        if self._open.get(connection.peer) is connection:
            del self._open[connection.peer]

    def know(self, node: bytes, scope: Any) -> None:
        """Note that ``node``, which proved a known key, sent a request with this ASGI scope."""
        if connection := self.find(scope):
            self.homes[node] = connection.place

    def find(self, scope: Any) -> Connection | None:
        """Return the connection of a request with this ASGI scope; None if it came through another socket."""
        return self._open.get(tuple(scope.get("client") or ()))


def find_place(host: str, own: str = "") -> str:
    """Return what counts as one address: of IPv6 its first 64 bits; "" for this machine, whose address is ``own``."""
    address = ip_address(host.partition("%")[0])
    if address.is_loopback or host == own:
        return ""
    return str(address) if address.version == 4 else address.exploded[:19]


class Connection(socket.socket):
    """An accepted connection: it is cut if the headers of a request take too long or too much.

    ``peer``: host and port at the other end; ``place``: the address that counts.
    """

    peer, place = ("", 0), ""
    _counted: Connections | None = None
    _deadline: asyncio.TimerHandle | None = None
    _left = BYTES

    def begin(self, counted: Connections, peer: tuple[str, int], place: str) -> None:
        """Count this connection among ``counted``, and wait for its first request."""
        self.peer, self.place, self._counted = peer, place, counted
        counted.add(self)
        self.expect()

    def expect(self) -> None:
        """Wait for the next request, within :data:`SECONDS` and :data:`BYTES`."""
        self.serve()
        if self._counted:
            self._left, self._deadline = BYTES, asyncio.get_running_loop().call_later(SECONDS, self.cut)

    def serve(self) -> None:
        """Note that a request has begun, which is bounded separately."""
        if self._deadline:
            self._deadline.cancel()
        self._deadline = None

    def cut(self) -> None:
        """End the connection, as if the other end had."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def _read(self, count: int) -> None:
        if self._deadline:
            self._left -= count
            if self._left < 0:
                self.cut()

    @override
    def recv(self, *arguments: Any) -> bytes:
        found = super().recv(*arguments)
        self._read(len(found))
        return found

    @override
    def recv_into(self, *arguments: Any) -> int:
        count = super().recv_into(*arguments)
        self._read(count)
        return count

    @override
    def close(self) -> None:
        self.serve()
        counted, self._counted = self._counted, None
        if counted:
            counted.remove(self)
        super().close()


class Listener(socket.socket):
    """A listening socket that accepts what ``connections`` admits."""

    connections: Connections

    @override
    def accept(self) -> tuple[Connection, Any]:
        handle, address = self._accept()  # type: ignore[attr-defined]  # the standard library's own accept does this
        connection = Connection(self.family, self.type, self.proto, fileno=handle)
        try:
            own = str(connection.getsockname()[0])
            if self.connections.admits(address[0], own):
                connection.begin(self.connections, address[:2], find_place(address[0], own))
                return connection, address
        except OSError:  # it is gone already
            pass
        connection.close()
        raise ConnectionAbortedError("beyond the bounds of connections")


def listen(host: str, port: int, connections: Connections) -> list[socket.socket]:
    """Return sockets bound to each address of ``host``, whose connections are bounded."""
    made = list[socket.socket]()
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in dict.fromkeys(found):
        listener = Listener(family, kind, protocol)
        listener.connections = connections
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        made.append(listener)
    return made
