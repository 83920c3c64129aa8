"""The guard in front of a SuperLink, which has a single port and accepts requests of any size.

Nodes use paths below ``/v1/fleet/``; other paths submit runs, register nodes, stop runs and read logs. Flower's
open-source build has no login for these other paths; here, such requests must come from the coordinator's machine. A
node may send the bytes that its answer needs plus a margin; anything beyond is refused before it is stored in memory.
Flower keeps every key that was ever registered; the guard refuses nodes whose keys are not there any more.
"""

from __future__ import annotations

import binascii
import importlib
import json
import os
from base64 import b64decode
from collections.abc import Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ...utils.errors import FedshiftError
from ...utils.files import write_atomically
from .pki import PublicKeys

GUARDED, LIMIT = "guarded", "limit"
"""Files in a SuperLink's home: the first exists once its guard is active, the second says how much nodes may send."""
KEYS = "FEDSHIFT_KEYS"
"""Environment variable with the directory of the coordinator's keys; without it, nodes are not known by keys."""
UNKNOWN = "the coordinator does not know this key"
"""What a node with such a key is answered."""
FLEET, PUBLIC_KEY = "/v1/fleet/", b"flwr-public-key"
MARGIN, LARGEST = 2**25, 2**24
"""Bytes allowed for everything except entries, and for one request; Flower sends entries in parts of 5 MiB."""


class Firewall:
    """ASGI middleware that restricts what other machines can reach of a SuperLink's ``app``, and how much nodes send.

    ``limits``: how much a node may send in answer to the current questions. ``keys``: returns the nodes' public keys by
    name; None: nodes are not known by keys.
    """

    def __init__(self, app: Any, limits: UploadLimits, keys: Callable[[], Mapping[str, bytes]] | None = None) -> None:
        self.app, self.limits, self.keys = app, limits, keys

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Forward a request, or answer it with 403, 404 from a node without a key, or 413 if it is too large."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["path"].startswith(FLEET):
            await self._admit(scope, receive, send)
        elif _is_local(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await _answer(send, 403)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _admit(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Forward a node's request as long as it stays within the node's limit."""
        headers = dict(scope.get("headers", ()))
        node, declared = headers.get(PUBLIC_KEY), headers.get(b"content-length", b"0")
        if self.keys is not None and _decode(node) not in self.keys().values():
            await _answer(send, 404, UNKNOWN)
            return
        left = self.limits.left(node)
        if not declared.isdigit() or int(declared) > left:
            await _answer(send, 413)
            return
        taken, begun = 0, False

        async def count() -> Any:
            nonlocal taken
            part = await receive()
            taken += len(part.get("body", b""))
            return part if taken <= left else {"type": "http.disconnect"}

        async def note(part: Mapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            if (
                200 <= part.get("status", 0) < 300
            ):  # a refused request, perhaps with another node's key, counts against nobody
                self.limits.spend(node, taken)
            await send(part)

        try:
            await self.app(scope, count, note)
        except Exception:
            if taken <= left:
                raise
        if taken > left and not begun:
            await _answer(send, 413)


class UploadLimits:
    """The number of bytes that each node, by its public key, may still send in answer to the current questions.

    The coordinator's app writes the limit to a file before each question (:func:`allow_uploads`).
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._written, self._allowed, self._spent = 0, MARGIN, dict[bytes, int]()

    def left(self, node: bytes | None) -> int:
        """Return the maximum number of bytes for the next request of ``node`` (None: a node without a key)."""
        with suppress(OSError, ValueError):
            if (written := self.file.stat().st_mtime_ns) != self._written:
                self._allowed = int(self.file.read_text(encoding="ascii"))
                self._written, self._spent = written, {}
        return min(LARGEST, self._allowed - self._spent.get(node, 0)) if node else LARGEST

    def spend(self, node: bytes | None, count: int) -> None:
        """Record that ``node`` has sent ``count`` bytes."""
        if node:
            self._spent[node] = self._spent.get(node, 0) + count


def allow_uploads(home: Path, count: int) -> None:
    """Allow each node to send 1.25 ``count`` + :data:`MARGIN` bytes to the SuperLink with folder ``home``."""
    write_atomically(home / LIMIT, str(count + count // 4 + MARGIN).encode())


async def _answer(send: Any, status: int, said: str = "") -> None:
    """Answer with ``status``, and with ``said`` as a SuperNode repeats it."""
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
    and before a port opens.
    """
    config = importlib.import_module("uvicorn").Config
    load = config.load

    def load_guarded(self: Any) -> None:
        self.proxy_headers = False
        load(self)
        keys = PublicKeys(Path(os.environ[KEYS]), print) if KEYS in os.environ else None
        self.loaded_app = Firewall(self.loaded_app, UploadLimits(home / LIMIT), keys)
        _require_refusal(self.loaded_app)
        (home / GUARDED).touch()

    config.load = load_guarded


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
