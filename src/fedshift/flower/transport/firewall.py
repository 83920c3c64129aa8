"""The guard in front of a SuperLink, which has one port for all, and no limit on what it is sent.

Nodes use paths below ``/v1/fleet/``; the others are for those who submit runs, register nodes, stop runs and read logs.
Flower's open-source build has no login for the latter; here they must be on the coordinator's machine. A node may send
what its answer needs, and a margin: more is refused before it is held.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ...utils.errors import FedshiftError
from ...utils.files import write_atomically

GUARDED, LIMIT = "guarded", "limit"
"""Files in a SuperLink's home: the first says that its guard stands in the way, the second how much nodes may send."""
FLEET, PUBLIC_KEY = "/v1/fleet/", b"flwr-public-key"
MARGIN, LARGEST = 2**25, 2**24
"""Bytes for all that is not entries, and the most of one request: Flower sends entries in parts of 5 MiB."""


class Firewall:
    """ASGI middleware around a SuperLink's ``app``: what other machines reach, and how much nodes may send.

    ``limits``: says how much a node may send in answer to the questions of the moment.
    """

    def __init__(self, app: Any, limits: UploadLimits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Pass a request on, or answer it with 403, or with 413 where it is too large."""
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
        """Pass a node's request on as long as it stays within what the node may send."""
        headers = dict(scope.get("headers", ()))
        node, declared = headers.get(PUBLIC_KEY), headers.get(b"content-length", b"0")
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
            ):  # a refused request, under another's name perhaps, costs nobody anything
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
    """Numbers of bytes that each node, by its public key, may send in answer to the current questions.

    The coordinator's app writes that number to a file whenever it asks (:func:`allow_uploads`).
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._written, self._allowed, self._spent = 0, MARGIN, dict[bytes, int]()

    def left(self, node: bytes | None) -> int:
        """Return the most bytes that the next request of ``node`` (None: it has no key) may have."""
        with suppress(OSError, ValueError):
            if (written := self.file.stat().st_mtime_ns) != self._written:
                self._allowed = int(self.file.read_text(encoding="ascii"))
                self._written, self._spent = written, {}
        return min(LARGEST, self._allowed - self._spent.get(node, 0)) if node else LARGEST

    def spend(self, node: bytes | None, count: int) -> None:
        """Note that ``node`` has sent ``count`` bytes."""
        if node:
            self._spent[node] = self._spent.get(node, 0) + count


def allow_uploads(home: Path, count: int) -> None:
    """Let each node send ``count`` bytes and :data:`MARGIN` (and a quarter more) to the SuperLink whose home it is."""
    write_atomically(home / LIMIT, str(count + count // 4 + MARGIN).encode())


async def _answer(send: Any, status: int) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _is_local(scope: Mapping[str, Any]) -> bool:
    """Return whether a request comes from this machine."""
    if not scope.get("client"):
        return False
    address = ip_address(scope["client"][0].partition("%")[0])
    own = (scope.get("server") or ("",))[0]
    return address.is_loopback or str(address) == own


def install_firewall(home: Path) -> None:
    """Put a :class:`Firewall` around every app that uvicorn serves from now on in this process, whose home it is.

    It stands before whatever else uvicorn adds, and proxies' headers are never read, since a remote client can write
    any address into them. File :data:`GUARDED` is written once it has refused a request from outside, before a port
    opens.
    """
    config = importlib.import_module("uvicorn").Config
    load = config.load

    def load_guarded(self: Any) -> None:
        self.proxy_headers = False
        load(self)
        self.loaded_app = Firewall(self.loaded_app, UploadLimits(home / LIMIT))
        _require_refusal(self.loaded_app)
        (home / GUARDED).touch()

    config.load = load_guarded


def _require_refusal(guard: Firewall) -> None:
    """Raise :class:`FedshiftError` unless ``guard`` refuses a remote client, whatever its headers say."""
    answers: list[Any] = []

    async def send(message: Mapping[str, Any]) -> None:
        answers.append(message.get("status"))

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request"}

    claimed = [(name, b"127.0.0.1") for name in (b"x-forwarded-for", b"x-real-ip", b"forwarded")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/control/stop-run", "headers": claimed, "server": ("0.0.0.0", 0),
        "client": ("192.0.2.1", 0),  # an address that RFC 5737 keeps for documentation
    }  # fmt: skip
    with suppress(StopIteration):
        guard(scope, receive, send).__await__().send(None)
        raise FedshiftError("the guard in front of Flower's SuperLink waits where it should refuse")
    if answers[:1] != [403]:
        raise FedshiftError(f"the guard in front of Flower's SuperLink let a remote client in ({answers})")
