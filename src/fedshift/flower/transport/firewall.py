"""What stands before the SuperLink that ``fedshift serve`` starts: other machines reach what nodes need, nothing else.

A SuperLink has one port, for nodes and for whoever submits runs, registers nodes, stops runs and reads logs. For the
latter Flower's open-source build knows no login; here it takes being on the coordinator's machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any


class Firewall:
    """An ASGI app: ``app``, of which other machines get only what is below ``/v1/fleet/``."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Pass a request on, or answer 403."""
        if scope["type"] == "lifespan" or scope["path"].startswith("/v1/fleet/") or _is_local(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})


def _is_local(scope: Mapping[str, Any]) -> bool:
    """Whether a request comes from this machine."""
    if not scope.get("client"):
        return False
    address = ip_address(scope["client"][0].partition("%")[0])
    own = (scope.get("server") or ("",))[0]
    return address.is_loopback or str(address) == own


def install_firewall() -> None:
    """Let what `uvicorn.run` serves from now on in this process be guarded."""
    uvicorn = importlib.import_module("uvicorn")
    run = uvicorn.run
    uvicorn.run = lambda app, **named: run(Firewall(app), **named)  # type: ignore[attr-defined]
