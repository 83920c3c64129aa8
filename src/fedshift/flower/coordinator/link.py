"""Flower's SuperLink in this process: nodes reach its paths below ``/v1/fleet/``, and there are no others.

``flower-superlink`` serves three interfaces on one port. Two of them, which submit, stop and read runs and hand out
tasks, have no login in Flower's open-source build. Here they do not exist: the coordinator is the only app, and calls
the same functions without a network, as Flower's own simulation does.

Strangers cost little: connections are counted before TLS, must soon carry a request that a known key signed, and no
body is read before. A share of the connections is kept for addresses where known keys connected.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import logging
import resource
import socket
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI
from flwr.serverapp import Grid
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...utils.errors import FedshiftError, UsageError
from ...utils.version import __version__
from .. import internals
from ..keys import UNKNOWN

CONNECTIONS, OF_ADDRESS = 512, 32
"""Most connections, half of them for strangers, and most of one stranger's address (IPv6: of its /64 network)."""
HEAD_SECONDS, BODY_SECONDS = 15.0, 600.0
"""Time for the TLS handshake and until a signed request begins; time for the body of such a request."""
LARGEST, OF_KEY = 2**24, 2**26
"""Bytes of one request (Flower sends entries in parts of 5 MiB), and of one key's requests in progress."""
SOON = 2.0
"""Seconds to wait for an upload that is on its way, before Flower waits a second or more."""
VERSION = b"fedshift-version"
"""Header that tells a node with a known key our version."""
CALLS = {
    "GetNodes": "get_nodes", "PushMessages": "push_messages", "PushObject": "push_object",
    "PullMessages": "pull_messages", "PullObject": "pull_object", "ConfirmMessageReceived": "confirm_message_received",
}  # fmt: skip
"""What a grid asks of a SuperLink, and the function that answers."""


class KnownNodes:
    """ASGI middleware that passes on signed requests of nodes with known keys, of at most :data:`LARGEST` bytes.

    ``keys``: returns the nodes' public keys by name; None: all nodes may come, and register. Keys are registered and
    refused as their files come and go. ``homes``: receives each verified node's address.
    """

    def __init__(
        self, app: Any, state: Any, keys: Callable[[], Mapping[str, bytes]] | None, homes: dict[bytes, str]
    ) -> None:
        self.app, self.state, self.keys, self.homes = app, state, keys, homes
        self._held = Counter[bytes]()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Pass on a request, or answer it: 404 without a known key, 401 without a signature, 413 and 503 by size."""
        headers = dict(reversed(scope["headers"]))  # the first of each name, as Flower reads them
        key, length = b"" if self.keys is None else _decode(headers, b"flwr-public-key"), headers.get(b"content-length")
        refused = self._refuse(key, headers)
        size = int(length) if length and length.isdigit() else LARGEST + 1
        if not refused and size > LARGEST:
            refused = 413, f"a request has a declared length of at most {LARGEST} bytes"
        if not refused and self._held[key] + size > OF_KEY:
            refused = 503, "too many requests at a time"
        if refused:
            await _answer(send, *refused)
            return
        if scope["client"] and key:
            self.homes[key] = find_place(scope["client"][0])
        self._held[key] += size
        try:
            await self.app(scope, _bound(receive), _introduce(send))
        finally:
            self._held[key] -= size

    def _refuse(self, key: bytes, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        if self.keys is None:
            return None
        name = next((name for name, known in self.keys().items() if known == key), None)
        if name is None:
            return 404, UNKNOWN
        if not is_signed(key, headers):
            return 401, "the signature is not of this key, or not of this time"
        if self.state.get_node_id_by_public_key(key) is None:
            owner = internals.NOOP_FLWR_AID, internals.NOOP_ACCOUNT_NAME
            self.state.create_node(*owner, key, 0, name=name)
        return None


def is_signed(key: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request was signed just now with ``key`` (PEM), as Flower's nodes sign."""
    stamp, signature = headers.get(b"flwr-timestamp", b""), _decode(headers, b"flwr-signature")
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(stamp.decode())).total_seconds()
    except (ValueError, TypeError):  # no time, or one without a zone
        return False
    ahead, behind = internals.SYSTEM_TIME_TOLERANCE, internals.TIMESTAMP_TOLERANCE + internals.SYSTEM_TIME_TOLERANCE
    public = internals.bytes_to_public_key(key)
    return -ahead < age < behind and bool(internals.verify_signature(public, stamp, signature))


def _decode(headers: Mapping[bytes, bytes], name: bytes) -> bytes:
    with suppress(binascii.Error):
        return b64decode(headers.get(name, b""), validate=True)
    return b""


def _bound(receive: Any) -> Any:
    """Return ``receive`` with an end to a slow body, as if the node had gone."""
    until = asyncio.get_running_loop().time() + BODY_SECONDS

    async def take() -> Any:
        try:
            async with asyncio.timeout_at(until):
                return await receive()
        except TimeoutError:
            return {"type": "http.disconnect"}

    return take


def _introduce(send: Any) -> Any:
    async def tell(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (VERSION, __version__.encode())]
        await send(message)

    return tell


async def _answer(send: Any, status: int, detail: str) -> None:
    body = json.dumps({"code": status, "detail": detail}).encode()
    headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Connections:
    """Counts of open connections by address. ``homes``: the addresses of nodes with known keys."""

    def __init__(self) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = CONNECTIONS if files == resource.RLIM_INFINITY else min(CONNECTIONS, files // 2)
        self.homes, self.counts = dict[bytes, str](), Counter[str]()

    def admits(self, place: str) -> bool:
        """Return whether another connection from ``place`` is within the bounds."""
        known, total = {"", *self.homes.values()}, self.counts.total()
        if total >= self.most or place in known:
            return total < self.most
        strangers = total - sum(self.counts[each] for each in known)
        return strangers < self.most // 2 and self.counts[place] < OF_ADDRESS


def find_place(host: str) -> str:
    """Return what counts as one address: of IPv6 its first 64 bits; "" for this machine."""
    address = ip_address(host.partition("%")[0])
    if address.is_loopback:
        return ""
    return str(address) if address.version == 4 else address.exploded[:19]


class _Accepted(socket.socket):
    """A connection that is counted until it is closed."""

    release: Callable[[], None] = staticmethod(lambda: None)

    @override
    def close(self) -> None:
        self.release()
        self.release = lambda: None
        super().close()


class _Listener(socket.socket):
    """A listening socket that closes connections beyond the bounds at once."""

    connections: Connections

    @override
    def accept(self) -> tuple[socket.socket, Any]:
        plain, address = super().accept()
        accepted, place = _Accepted(fileno=plain.detach()), find_place(address[0])
        if not self.connections.admits(place):
            accepted.close()
            raise ConnectionAbortedError("beyond the bounds of connections")
        self.connections.counts[place] += 1
        accepted.release = lambda: self.connections.counts.subtract([place])
        return accepted, address


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose TLS handshakes are soon over."""

    @override
    async def create_server(self, *arguments: Any, **options: Any) -> Any:
        soon = {"ssl_handshake_timeout": HEAD_SECONDS, "ssl_shutdown_timeout": 5.0} if options.get("ssl") else {}
        return await super().create_server(*arguments, **options, **soon)  # type: ignore[call-overload]


class _Protocol(H11Protocol):
    """HTTP/1.1 that cuts a connection on which no request begins in time."""

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect()

    @override
    def on_response_complete(self) -> None:
        self._expect()
        super().on_response_complete()

    def _expect(self) -> None:
        self.loop.call_later(HEAD_SECONDS, self._check, self.scope)

    def _check(self, before: Any) -> None:
        if self.scope is before:  # no request has begun since; one without a signature was answered and closed
            self.transport.abort()


@contextmanager
def serve_nodes(
    host: str, port: int, tls: Path | None, keys: Callable[[], Mapping[str, bytes]] | None, log: Path
) -> Iterator[Grid]:
    """Listen for nodes until the block ends, and yield the grid of those that are connected.

    ``tls``: folder with ``server.crt`` and ``server.key``; None: plain text. ``keys``: see :class:`KnownNodes`.
    ``log``: file for Flower's log.

    Raises :class:`UsageError` if the address cannot be bound. If the port fails later, the grid's calls raise
    :class:`FedshiftError`.
    """
    _, factory = internals.get_objectstore_linkstate_factories(
        internals.FLWR_IN_MEMORY_DB_NAME, internals.NoOpFederationManager()
    )
    state, connections = factory.state(), Connections()
    app = FastAPI(
        openapi_url=None,
        middleware=[
            Middleware(KnownNodes, state=state, keys=keys, homes=connections.homes),
            Middleware(BaseHTTPMiddleware, dispatch=internals.http_error_translator),
            Middleware(internals.ProtobufTranslationMiddleware), Middleware(internals.NodeAuthMiddleware),
        ],
    )  # fmt: skip
    app.state.linkstate_factory, app.state.enable_supernode_auth = factory, keys is not None
    app.include_router(internals.router)
    certificate, key = (tls / "server.crt", tls / "server.key") if tls else (None, None)
    with _log_to(log):
        config = uvicorn.Config(
            app, http=_Protocol, ws="none", lifespan="off", proxy_headers=False, server_header=False, log_config=None,
            timeout_keep_alive=int(HEAD_SECONDS), access_log=False, ssl_certfile=certificate, ssl_keyfile=key,
        )  # fmt: skip
        config.load()
        server = _Server(uvicorn.Server(config), _listen(host, port, connections))
        try:
            with _begin_run(state) as (run, task):
                yield _make_grid(server, state, run, task)
        finally:
            server.stop()


class _Server(threading.Thread):
    """The thread that serves nodes; returns from its start once it listens."""

    def __init__(self, server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        super().__init__(daemon=True)
        self.server, self.sockets, self.failure = server, sockets, "it has ended"
        self.start()
        while self.is_alive() and not server.started:
            time.sleep(0.01)

    @override
    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_Loop) as runner:
                runner.run(self.server.serve(sockets=self.sockets))
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def check(self) -> None:
        """Raise :class:`FedshiftError` if it serves no longer."""
        if not self.is_alive():
            raise FedshiftError(f"the coordinator's port is closed ({self.failure}): continue with --resume")

    def stop(self) -> None:
        """Stop, after answers that are on their way."""
        self.server.should_exit = True
        self.join(2)
        self.server.force_exit = True
        self.join(5)
        for listener in self.sockets:  # still open where it failed
            listener.close()


def _listen(host: str, port: int, connections: Connections) -> list[socket.socket]:
    """Return sockets bound to the addresses of ``host``."""
    made = list[socket.socket]()
    options = [(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            made.append(listener := _Listener(family, kind, protocol))
            listener.connections = connections
            only_ipv6 = [(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)] if family == socket.AF_INET6 else []
            for option in [*options, *only_ipv6]:
                listener.setsockopt(*option)
            listener.bind(address)
            listener.listen()
    except OSError as error:
        for opened in made:
            opened.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port or address (--port, --host)"
        ) from error
    return made


@contextmanager
def _begin_run(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a run of Flower's and its task, which is alive until the block ends."""
    run_id = state.create_run(
        None, None, None, {}, internals.NOOP_FEDERATION_ID, None, internals.NOOP_FLWR_AID, internals.TaskType.SERVER_APP
    )
    (run,) = state.get_run_info(run_ids=[run_id])
    task = SimpleNamespace(task_id=run.primary_task_id, run_id=run_id)
    state.claim_task(task.task_id)
    state.activate_task(task.task_id)
    identity = internals.TaskIdentity
    identity.task_id, identity.run_id, identity.node_id = task.task_id, run_id, 1
    alive = internals.HeartbeatSender(lambda: state.acknowledge_task_heartbeat(task.task_id))
    alive.start()
    try:
        yield run, task
    finally:
        alive.stop()


def _make_grid(server: _Server, state: Any, run: Any, task: Any) -> Grid:
    """Return Flower's grid with a client that calls the SuperLink's functions in place of its address."""

    def make_call(name: str) -> Callable[[Any], Any]:
        def call(request: Any) -> Any:
            until = time.monotonic() + SOON
            while True:
                server.check()
                answer = getattr(internals, name)(request, state=state, task=task)
                if name != "pull_object" or answer.object_available or time.monotonic() > until:
                    return answer
                time.sleep(0.05)

        return call

    grid: Grid = internals.HttpGrid(token="none")
    calls = {name: make_call(function) for name, function in CALLS.items()}
    grid._client = SimpleNamespace(**calls, close=lambda: None)  # type: ignore[attr-defined]
    grid.set_run(run)
    return grid


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("flwr", "uvicorn")]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
