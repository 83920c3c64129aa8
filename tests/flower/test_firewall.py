"""What other machines reach of a SuperLink."""

import asyncio
from base64 import b64encode
from pathlib import Path

import fedshift.flower  # noqa: F401  isort: skip  (before anything of flwr: it keeps Flower quiet)

import pytest
import uvicorn
from flwr.supercore.error import FlowerError

from fedshift.flower.transport import firewall
from fedshift.flower.transport.firewall import GUARDED, UNKNOWN, Firewall, UploadLimits, allow_uploads
from fedshift.flower.transport.pki import PublicKeys, make_authority, revoke_key, rotate_key
from fedshift.flower.transport.programs import make_environment
from fedshift.utils.errors import FedshiftError


def requested(path, client, server="0.0.0.0", kind="http"):
    """What a request gets from a guarded app: what the app says, or what the guard does."""
    sent = []

    async def app(scope, receive, send):
        sent.append("let in")

    async def send(message):
        sent.append(message.get("status", message["type"]))

    scope = {"type": kind, "path": path, "client": client and (client, 5000), "server": (server, 9091)}
    asyncio.run(Firewall(app, UploadLimits(Path("nowhere")))(scope, None, send))
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


def test_a_node_whose_key_is_not_there_any_more_gets_nothing_and_is_told_why(tmp_path):
    make_authority(tmp_path / "pki", [], ["ann", "bob"])
    keys, sent = PublicKeys(tmp_path / "pki", print), []

    async def app(scope, receive, send):
        await send({"status": 200})

    async def send(message):
        sent.append(message.get("status", message.get("body")))

    def ask(key):
        sent.clear()
        headers = [(b"flwr-public-key", b64encode(key))] if key else []
        scope = {"type": "http", "path": "/v1/fleet/pull-messages", "headers": headers, "client": ("10.0.0.7", 5000)}
        asyncio.run(Firewall(app, UploadLimits(Path("nowhere")), keys)(scope, None, send))
        return sent

    before = dict(keys())
    assert ask(before["ann"]) == ask(before["bob"]) == [200]
    revoke_key(tmp_path / "pki", "ann")
    rotate_key(tmp_path / "pki", "bob")
    for key in (before["ann"], before["bob"], b"no key", None):
        status, body = ask(key)
        assert status == 404
        assert FlowerError.from_json(body.decode()).message == UNKNOWN
    assert ask(keys()["bob"]) == [200]


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
    firewall.install_firewall(tmp_path)

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
    assert not (tmp_path / GUARDED).exists()
    guarded()
    assert (tmp_path / GUARDED).exists()
    (tmp_path / GUARDED).unlink()
    monkeypatch.setattr(firewall, "_is_local", lambda scope: True)
    with pytest.raises(FedshiftError, match="let a remote client in"):
        guarded()
    assert not (tmp_path / GUARDED).exists()


def test_no_program_inherits_whom_proxies_may_speak_for(monkeypatch, tmp_path):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    assert "FORWARDED_ALLOW_IPS" not in make_environment(tmp_path, {})


class Node:
    """A node with ``key`` that sends to a guarded app, which reads all and answers with ``status``."""

    def __init__(self, limits, key=b"north"):
        self.limits, self.key, self.status, self.held = limits, key, 200, 0

    def push(self, *parts, declared=True):
        """Send a request of ``parts`` bytes; return the answer's status."""
        self.held, sent, coming = 0, [], list(parts)

        async def app(scope, receive, send):
            while True:
                part = await receive()
                if part["type"] == "http.disconnect":
                    raise RuntimeError("the client is gone")
                self.held += len(part["body"])
                if not part["more_body"]:
                    break
            await send({"type": "http.response.start", "status": self.status})
            await send({"type": "http.response.body", "body": b""})

        async def receive():
            return {"type": "http.request", "body": bytes(coming.pop(0)), "more_body": bool(coming)}

        async def send(message):
            sent.append(message.get("status"))

        headers = [(b"flwr-public-key", self.key)] * bool(self.key)
        headers += [(b"content-length", str(sum(parts)).encode())] * declared
        scope = {
            "type": "http", "path": "/v1/fleet/push-object", "client": ("127.0.0.1", 9), "server": ("127.0.0.1", 1),
            "headers": headers,
        }  # fmt: skip
        asyncio.run(Firewall(app, self.limits)(scope, receive, send))
        return sent[0]


@pytest.mark.parametrize("declared", [True, False])
def test_a_request_that_is_too_large_is_refused_before_it_is_held(tmp_path, declared):
    for key in (b"north", b""):
        node = Node(UploadLimits(tmp_path / "limit"), key)
        assert node.push(*[2**20] * 16, declared=declared) == 200
        assert node.push(*[2**20] * 17, declared=declared) == 413
        assert node.held <= (0 if declared else 2**24)


def test_a_node_may_send_what_its_answer_needs_and_no_more_until_the_next_question(tmp_path, monkeypatch):
    monkeypatch.setattr(firewall, "MARGIN", 1000)
    allow_uploads(tmp_path, 8000)
    limits = UploadLimits(tmp_path / "limit")
    north, south = Node(limits), Node(limits, b"south")
    assert [north.push(5000), north.push(5000), north.push(2000)] == [200, 200, 413]
    assert south.push(10_000) == 200
    allow_uploads(tmp_path, 0)
    assert [south.push(1000), south.push(1), north.push(1000)] == [200, 413, 200]


def test_a_request_that_flower_refuses_uses_up_nobody_s_share(tmp_path, monkeypatch):
    monkeypatch.setattr(firewall, "MARGIN", 1000)
    allow_uploads(tmp_path, 0)
    node = Node(UploadLimits(tmp_path / "limit"))
    node.status = 401
    assert [node.push(1000), node.push(1000)] == [401, 401]
    node.status = 200
    assert [node.push(1000), node.push(1)] == [200, 413]
