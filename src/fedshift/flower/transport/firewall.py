"""The guard in front of a SuperLink, which has a single port and accepts requests of any size.

Nodes use paths below ``/v1/fleet/``; other paths submit runs, register nodes, stop runs and read logs. Flower's
open-source build has no login for these other paths; here, such requests must come from the coordinator's machine.

Flower reads the whole body of a request before it verifies who sent it. The guard verifies first: a node whose key the
coordinator has may send the bytes that its answer needs plus a margin, over all its requests; strangers may send small
requests only. What is beyond a bound is refused before it is stored in memory. Connections have bounds, too
(:mod:`.connections`). Flower keeps every key that was ever registered; the guard refuses nodes whose keys are not there
any more.
"""

from __future__ import annotations

import asyncio
import binascii
import importlib
import json
import os
import platform
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from ...utils.errors import FedshiftError
from ...utils.files import write_atomically
from ...utils.version import __version__
from .connections import Connections, listen
from .pki import PublicKeys

GUARDED, LIMIT, SIZES = "guarded", "limit", "sizes"
"""Files in a SuperLink's home: the first exists once its guard is active, the second holds how much nodes may send, the
third what a round transfers (:func:`write_sizes`)."""
KEYS = "FEDSHIFT_KEYS"
"""Environment variable with the directory of the coordinator's keys; without it, nodes are not known by keys."""
UNKNOWN = "the coordinator does not know this key"
"""What a node with such a key is answered."""
FLEET, CHECK, PUBLIC_KEY = "/v1/fleet/", "/v1/fleet/check", b"flwr-public-key"
"""Paths for nodes, path for ``fedshift check``, and the header with a node's key."""
MARGIN, LARGEST = 2**25, 2**24
"""Bytes allowed for everything except entries, and for one request; Flower sends entries in parts of 5 MiB."""
SMALL, STRANGERS = 2**16, 2**22
"""Bytes of a stranger's request, and of all strangers' requests at a time, where nodes are known by keys."""
WITHOUT_KEYS = 2**26
"""Bytes of all requests at a time where nodes are not known by keys."""
PROBE, PROBES, SPAN = 2**23, 2**26, 600.0
"""Most bytes of one probe of a node's throughput, and of all of its probes within a span of seconds."""
SECONDS, STALLED = 20.0, 600.0
"""Seconds in which a stranger's request, and a node's, must have arrived. A node thus needs 9 kB a second."""

Send: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[None]]


class Firewall:
    """ASGI middleware that restricts what other machines can reach of a SuperLink's ``app``, and how much nodes send.

    ``limits``: how much a node may send in answer to the current questions. ``keys``: returns the nodes' public keys by
    name; None: nodes are not known by keys. ``connections``: the open connections.
    """

    def __init__(
        self,
        app: Any,
        limits: UploadLimits,
        keys: Callable[[], Mapping[str, bytes]] | None = None,
        connections: Connections | None = None,
    ) -> None:
        self.app, self.limits, self.keys, self.connections = app, limits, keys, connections
        self.probes, self._strange = Probes(limits.file.with_name(SIZES)), 0

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Send) -> None:
        """Forward a request, or answer it: 403; 404 without a known key; 413, too large; 503, too slow or too many."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        connection = self.connections.find(scope) if self.connections else None
        if connection:
            connection.serve()
        try:
            if scope["path"].startswith(FLEET):
                await self._admit(scope, receive, send)
            elif _is_local(scope):
                await self.app(scope, receive, send)
            elif scope["type"] == "http":
                await _answer(send, 403)
            else:
                await send({"type": "websocket.close", "code": 1008})
        finally:
            if connection:
                connection.expect()

    async def _admit(self, scope: Mapping[str, Any], receive: Any, send: Send) -> None:
        """Forward a node's request as long as it stays within its bounds."""
        headers = dict(scope.get("headers", ()))
        node, declared = headers.get(PUBLIC_KEY), headers.get(b"content-length", b"0")
        if self.keys is not None and _decode(node) not in self.keys().values():
            await _answer(send, 404, UNKNOWN)
            return
        known = self.keys is not None and _is_signed(headers)
        if known and node and self.connections:
            self.connections.know(node, scope)
        if known and node and scope["path"] == CHECK:
            await self.probes.answer(node, scope, receive, send)
            return
        most = self.limits.left(node) if known or self.keys is None else SMALL
        if not declared.isdigit() or int(declared) > most:
            await _answer(send, 413)
            return
        request = _Request(self, node, known=known, most=most)
        if not request.hold(int(declared)):
            await _answer(send, 503)
            return
        try:
            await self.app(scope, request.bound(receive), request.count(send))
        except Exception:
            if not request.refused:
                raise
        finally:
            request.release()
        if request.refused and not request.begun:
            await _answer(send, request.refused)

    def hold(self, node: bytes | None, count: int, *, known: bool) -> bool:
        """Hold (or, if negative, release) bytes of requests in progress; return whether they are within the bounds."""
        if known:
            self.limits.hold(node, count)
            return True
        if self._strange + count > (WITHOUT_KEYS if self.keys is None else STRANGERS):
            return False
        self._strange += count
        return True


class _Request:
    """A request in progress. ``refused``: the status of the answer if it broke a bound; ``begun``: it is answered."""

    def __init__(self, firewall: Firewall, node: bytes | None, *, known: bool, most: int) -> None:
        self._firewall, self._node, self._known, self._most = firewall, node, known, most
        self._held, self._taken = 0, 0
        self.refused, self.begun = 0, False

    def hold(self, count: int) -> bool:
        """Hold room for ``count`` bytes in all; return whether there is any."""
        more = max(0, count - self._held)
        if not self._firewall.hold(self._node, more, known=self._known):
            return False
        self._held += more
        return True

    def release(self) -> None:
        """Release what is held."""
        self._firewall.hold(self._node, -self._held, known=self._known)
        self._held = 0

    def bound(self, receive: Any) -> Callable[[], Awaitable[Any]]:
        """Return ``receive``, which ends with a disconnection at the bounds of time and size."""
        until = asyncio.get_running_loop().time() + (STALLED if self._known else SECONDS)

        async def take() -> Any:
            try:
                async with asyncio.timeout_at(until):
                    part = await receive()
            except TimeoutError:
                self.refused = 503
                return {"type": "http.disconnect"}
            self._taken += len(part.get("body", b""))
            if self._taken > self._most:
                self.refused = 413
            elif not self.hold(self._taken):
                self.refused = 503
            return {"type": "http.disconnect"} if self.refused else part

        return take

    def count(self, send: Send) -> Send:
        """Return ``send``, which counts what arrived against its node once the request is accepted.

        A refused request, perhaps with another node's key, counts against nobody.
        """

        async def note(part: Mapping[str, Any]) -> None:
            self.begun = True
            if 200 <= part.get("status", 0) < 300:
                self.release()
                self._firewall.limits.spend(self._node, self._taken)
            await send(part)

        return note


class Probes:
    """Answers ``fedshift check`` of nodes with a known key: versions, what is in file ``sizes``, and random bytes."""

    def __init__(self, sizes: Path) -> None:
        self._sizes = sizes
        self._spent = dict[bytes, tuple[float, int]]()

    async def answer(self, node: bytes, scope: Mapping[str, Any], receive: Any, send: Send) -> None:
        """Take the body of a request and answer with as many bytes as its query asks for, or else with what is known.

        The status is 413 beyond :data:`PROBE` bytes in a direction, 429 beyond :data:`PROBES` in :data:`SPAN` seconds,
        and 503 beyond :data:`STALLED` seconds.
        """
        query = bytes(scope.get("query_string", b""))
        wanted = int(query) if query.isdigit() and len(query) < 10 else 0
        if wanted > PROBE or not self._spend(node, wanted):
            await _answer(send, 413 if wanted > PROBE else 429)
            return
        taken, more = 0, True
        try:
            async with asyncio.timeout(STALLED):
                while more:
                    part = await receive()
                    count, more = len(part.get("body", b"")), bool(part.get("more_body"))
                    taken += count
                    if taken > PROBE or not self._spend(node, count):
                        await _answer(send, 413 if taken > PROBE else 429)
                        return
        except TimeoutError:
            await _answer(send, 503)
            return
        said = os.urandom(wanted) if wanted else json.dumps(self._describe()).encode()
        headers = [(b"content-length", str(len(said)).encode()), (b"content-type", b"application/octet-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    def _spend(self, node: bytes, count: int) -> bool:
        """Return whether ``node`` may send or receive ``count`` bytes more, and count them."""
        if not count:
            return True
        now = asyncio.get_running_loop().time()
        began, spent = self._spent.get(node, (now, 0))
        began, spent = (now, 0) if now - began > SPAN else (began, spent)
        self._spent[node] = began, spent + count
        return spent + count <= PROBES

    def _describe(self) -> dict[str, Any]:
        try:
            sizes = json.loads(self._sizes.read_text(encoding="ascii"))
        except OSError:  # no round was prepared yet
            sizes = None
        return {"versions": list_versions(), "sizes": sizes}


def list_versions() -> dict[str, str]:
    """Return the versions here of what both sides of an experiment run."""
    return {"fedshift": __version__, "python": platform.python_version()} | {
        name: version(name) for name in ("flwr", "torch")
    }


def write_sizes(home: Path, *, down: int, up: int, seconds: float) -> None:
    """Write, for ``fedshift check``, the bytes to and from a site per round, and the round's limit in seconds."""
    write_atomically(home / SIZES, json.dumps({"down": down, "up": up, "seconds": seconds}).encode())


class UploadLimits:
    """The number of bytes that each node, by its public key, may still send in answer to the current questions.

    The coordinator's app writes the limit to a file before each question (:func:`allow_uploads`).
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._written, self._allowed, self._spent, self._held = 0, MARGIN, Counter[bytes](), Counter[bytes]()

    def left(self, node: bytes | None) -> int:
        """Return the maximum number of bytes for the next request of ``node`` (None: a node without a key)."""
        with suppress(OSError, ValueError):
            if (written := self.file.stat().st_mtime_ns) != self._written:
                self._allowed = int(self.file.read_text(encoding="ascii"))
                self._written, self._spent = written, Counter()
        return min(LARGEST, self._allowed - self._spent[node] - self._held[node]) if node else LARGEST

    def hold(self, node: bytes | None, count: int) -> None:
        """Note that requests of ``node`` with ``count`` bytes more (or, if negative, less) are in progress."""
        if node:
            self._held += Counter({node: count})

    def spend(self, node: bytes | None, count: int) -> None:
        """Record that ``node`` has sent ``count`` bytes."""
        if node:
            self._spent[node] += count


def allow_uploads(home: Path, count: int) -> None:
    """Allow each node to send 1.25 ``count`` + :data:`MARGIN` bytes to the SuperLink with folder ``home``."""
    write_atomically(home / LIMIT, str(count + count // 4 + MARGIN).encode())


async def _answer(send: Send, status: int, said: str = "") -> None:
    """Answer with ``status``, and with ``said`` in a form that a SuperNode prints."""
    body = json.dumps({"code": status, "detail": said}).encode() if said else b""
    headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _decode(key: bytes | None) -> bytes:
    """Return the key in a request's header; empty if there is none."""
    try:
        return b64decode(key or b"", validate=True)
    except binascii.Error:
        return b""


def _is_signed(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request was signed just now with the key in its headers, as Flower's nodes sign."""
    try:
        signature = b64decode(headers[b"flwr-signature"], validate=True)
        when = headers[b"flwr-timestamp"]
        age = (datetime.now(UTC) - datetime.fromisoformat(when.decode())).total_seconds()
        key = load_pem_public_key(_decode(headers[PUBLIC_KEY]))
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, when, ec.ECDSA(hashes.SHA256()))
    except (KeyError, ValueError, TypeError, InvalidSignature):
        return False
    return -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


def _is_local(scope: Mapping[str, Any]) -> bool:
    """Return whether a request comes from this machine."""
    if not scope.get("client"):
        return False
    address = ip_address(scope["client"][0].partition("%")[0])
    own = (scope.get("server") or ("",))[0]
    return address.is_loopback or str(address) == own


def install_firewall(home: Path) -> None:
    """Put a :class:`Firewall` around every app that uvicorn serves from now on in this process, whose home is ``home``.

    It comes before anything else that uvicorn adds. Proxy headers are ignored, because a remote client can write any
    address into them. The file :data:`GUARDED` is written after the firewall has refused a test request from outside,
    and before a port opens. The port's sockets come from :mod:`.connections`, on asyncio's event loop: uvloop accepts
    connections without Python.
    """
    uvicorn = importlib.import_module("uvicorn")
    load, start, connections = uvicorn.Config.load, uvicorn.Server.startup, Connections()
    keys = PublicKeys(Path(os.environ[KEYS]), print) if KEYS in os.environ else None

    def load_guarded(self: Any) -> None:
        self.proxy_headers = False
        load(self)
        self.loaded_app = Firewall(self.loaded_app, UploadLimits(home / LIMIT), keys, connections)
        _require_refusal(self.loaded_app)
        (home / GUARDED).touch()

    async def start_guarded(self: Any, sockets: Any = None) -> None:
        await start(self, sockets or listen(self.config.host, self.config.port, connections))

    uvicorn.Config.load, uvicorn.Server.startup = load_guarded, start_guarded
    uvicorn.Config.get_loop_factory = lambda _: asyncio.SelectorEventLoop


def _require_refusal(guard: Firewall) -> None:
    """Raise :class:`FedshiftError` unless ``guard`` refuses a remote client regardless of its headers."""
    answers: list[Any] = []

    async def send(message: Mapping[str, Any]) -> None:
        answers.append(message.get("status"))

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request"}

    claimed = [(name, b"127.0.0.1") for name in (b"x-forwarded-for", b"x-real-ip", b"forwarded")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/control/stop-run", "headers": claimed, "server": ("0.0.0.0", 0),
        "client": ("192.0.2.1", 0),  # an address that RFC 5737 reserves for documentation
    }  # fmt: skip
    with suppress(StopIteration):
        guard(scope, receive, send).__await__().send(None)
        raise FedshiftError("the guard in front of Flower's SuperLink waits where it should refuse")
    if answers[:1] != [403]:
        raise FedshiftError(f"the guard in front of Flower's SuperLink let a remote client in ({answers})")
