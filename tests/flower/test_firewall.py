"""What other machines reach of a SuperLink."""

import asyncio

import fedshift.flower  # noqa: F401  isort: skip  (before anything of flwr: it keeps Flower quiet)

import pytest
import uvicorn

from fedshift.flower.transport import programs
from fedshift.utils.errors import FedshiftError


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


async def plain_app(scope, receive, send):
    """Answers everyone, with the address that it takes for the client's."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["client"][0].encode()})


def ask(app, client, claimed):
    """The answer to a request from ``client`` that claims in proxies' headers to come from elsewhere."""
    sent = []

    async def send(message):
        sent.append(message.get("status", message.get("body")))

    headers = [(name, claimed) for name in (b"x-forwarded-for", b"x-real-ip", b"forwarded")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/control/stop-run", "headers": headers, "client": (client, 5000),
        "server": ("0.0.0.0", 9091), "http_version": "1.1", "query_string": b"", "scheme": "https",
    }  # fmt: skip
    asyncio.run(app(scope, None, send))
    return sent


@pytest.fixture
def guarded(monkeypatch, tmp_path):
    """A function that makes what uvicorn serves, as in a SuperLink's process."""
    monkeypatch.setattr(uvicorn.Config, "load", uvicorn.Config.load)  # put back afterwards
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    programs.install_firewall(tmp_path / "proof")

    def make():
        config = uvicorn.Config(plain_app, log_config=None, ws="none")
        config.load()
        return config.loaded_app

    return make


def test_a_remote_client_cannot_say_that_it_is_this_machine(guarded, monkeypatch):
    assert ask(guarded(), "10.0.0.7", b"127.0.0.1") == [403, b""]
    assert ask(guarded(), "127.0.0.1", b"10.0.0.7") == [200, b"127.0.0.1"]


def test_without_the_guard_the_header_would_be_believed(monkeypatch):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    config = uvicorn.Config(plain_app, log_config=None, ws="none")
    config.load()
    assert ask(config.loaded_app, "10.0.0.7", b"127.0.0.1") == [200, b"127.0.0.1"]


def test_the_guard_proves_that_it_refuses_before_a_port_opens(guarded, tmp_path, monkeypatch):
    assert not (tmp_path / "proof").exists()
    guarded()
    assert (tmp_path / "proof").exists()
    (tmp_path / "proof").unlink()
    monkeypatch.setattr(programs, "_is_local", lambda scope: True)
    with pytest.raises(FedshiftError, match="let a remote client in"):
        guarded()
    assert not (tmp_path / "proof").exists()


def test_no_program_inherits_whom_proxies_may_speak_for(monkeypatch, tmp_path):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    assert "FORWARDED_ALLOW_IPS" not in programs.make_environment(tmp_path, {})
