"""What other machines reach of a SuperLink."""

import asyncio
import inspect

import fedshift.flower  # noqa: F401  isort: skip  (before anything of flwr: it keeps Flower quiet)

import pytest
import uvicorn
from flwr.superlink.cli import flower_superlink

from fedshift.flower.transport import programs


def requested(path, client, server="0.0.0.0", kind="http"):
    """What a request gets from a guarded app: what the app says, or what the guard does."""
    sent = []

    async def app(scope, receive, send):
        sent.append("let in")

    async def send(message):
        sent.append(message.get("status", message["type"]))

    scope = {"type": kind, "path": path, "client": client and (client, 5000), "server": (server, 9091)}
    asyncio.run(programs.Firewall(app)(scope, None, send))
    return sent


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleet", "/"])
def test_other_machines_get_only_what_nodes_need(path):
    assert requested(path, "10.0.0.7") == [403, "http.response.body"]
    assert requested(path, None) == [403, "http.response.body"]
    assert requested(path, "10.0.0.7", kind="websocket") == ["websocket.close"]
    assert requested("/v1/fleet/pull-messages", "10.0.0.7") == ["let in"]
    for here in ("127.0.0.1", "::1"):
        assert requested(path, here) == ["let in"]
    assert requested(path, "10.0.0.5", server="10.0.0.5") == ["let in"]


def test_a_superlink_starts_guarded(monkeypatch):
    started = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **named: started.append((app, named)))
    programs.install_firewall()
    uvicorn.run(app="the app", port=1)
    ((guarded, named),) = started
    assert isinstance(guarded, programs.Firewall)
    assert (guarded.app, named) == ("the app", {"port": 1})


def test_the_superlink_is_started_by_what_is_guarded():
    assert "uvicorn.run(" in inspect.getsource(inspect.getmodule(flower_superlink))
