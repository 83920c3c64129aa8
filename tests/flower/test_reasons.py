"""A site that is turned away is told why, in words that say what to do."""

import threading
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedshift.flower.site import join as joining
from fedshift.flower.site.join import CoordinatorLink
from fedshift.flower.site.reasons import describe_offset, explain_end, measure_offset
from fedshift.flower.transport.certificates import EndNotice
from fedshift.flower.transport.firewall import UNKNOWN

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)


@pytest.fixture
def coordinator():
    """The address of a server whose clock is the given number of seconds behind."""
    opened = []

    def start(behind):
        class Answer(BaseHTTPRequestHandler):
            def date_time_string(self, timestamp=None):
                return format_datetime(datetime.now(UTC) - timedelta(seconds=behind), usegmt=True)

            def do_GET(self):
                self.send_error(403)

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened.append(server)
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in opened:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("ahead", [-400, -305, -304.9, -10, 0, 4.9, 5, 12])
def test_a_clock_is_wrong_where_flower_says_so(ahead, monkeypatch):
    """Flower's own check of a request that a site with this clock signed."""
    from flwr.superlink.routers.fleet import node_auth

    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    signed = (NOW + timedelta(seconds=ahead)).isoformat()
    monkeypatch.setattr(node_auth, "now", lambda: NOW)
    asked = SimpleNamespace(node_id=3)
    monkeypatch.setattr(node_auth, "get_linkstate", lambda _: SimpleNamespace(get_node_id_by_public_key=lambda key: 3))
    signature = key.sign(signed.encode(), ec.ECDSA(hashes.SHA256()))
    headers = {
        node_auth.FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),
        node_auth.FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
        node_auth.TIMESTAMP_HEADER: signed,
    }
    request = SimpleNamespace(headers=headers, state=SimpleNamespace(protobuf_request=asked))
    try:
        node_auth.authenticate_node(request)
        refused = False
    except node_auth.HTTPException:
        refused = True
    assert refused == bool(describe_offset(ahead)) == (not -305 < ahead < 5)


def test_a_site_is_told_how_far_its_clock_is_off(coordinator, monkeypatch, tmp_path):
    """The whole way of the message: a SuperNode that ends, and what the site says in place of its last words."""
    ends, stop, heard = iter([1, None]), threading.Event(), []

    def program(name, *_, **__):
        code = next(ends) if name == "flower-supernode" else None
        if name == "flower-supernode" and code is None:
            stop.set()
        return SimpleNamespace(code=code, wait=lambda _: code, stop=lambda: None, last_message=lambda: "it is finished",
                               log=tmp_path / "log")  # fmt: skip

    monkeypatch.setattr(joining, "Program", program)
    door = SimpleNamespace(
        path=tmp_path, broken=threading.Event(), over="", site=SimpleNamespace(say=lambda text: heard.append(text))
    )
    monkeypatch.setattr(stop, "wait", lambda _: False)
    link = CoordinatorLink(address=coordinator(12), tls=None, key=None, poll=None)
    assert joining._watch(link, door, tmp_path, tmp_path / "log", stop, EndNotice(None, str)) == 130
    (told,) = heard
    assert told.startswith(("this machine's clock is 12 seconds ahead of", "this machine's clock is 11 seconds ahead"))
    assert "which accepts less than 5 ahead and less than 305 behind: set both by the network" in told
    behind = describe_offset(-400.2, NOW)
    assert behind.startswith("this machine's clock is 400 seconds behind the coordinator's (2026-11-26 12:00:00 here, ")
    assert "2026-11-26 12:06:40 there, UTC)" in behind


def test_a_clock_that_is_right_or_unknown_is_no_reason(coordinator):
    assert abs(measure_offset(coordinator(0), secured=False)) < 2
    assert explain_end("Connection refused", coordinator(0), secured=False) == ""
    assert measure_offset("127.0.0.1:1", secured=False) is None


def test_a_site_whose_key_was_revoked_is_told_so():
    first = f"Failed to initialize the connection to the SuperLink. [code: 404] {UNKNOWN}"
    later = "Client error '404 Not Found' for url 'https://127.0.0.1:1/v1/fleet/pull-messages'"
    for said in (first, later):
        assert explain_end(said, "127.0.0.1:1", secured=True).startswith(
            "the coordinator does not know this site's key"
        )


def test_the_second_site_with_a_key_is_told_that_it_is_in_use():
    """Flower's own words for it, which its catalog of errors gives."""
    from flwr.supercore.error import ApiErrorCode

    said = f"It failed. [code: {int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)}] Failed to activate SuperNode."
    assert explain_end(said, "127.0.0.1:1", secured=True).startswith(
        "this site's key is in use: another `fedshift join`"
    )
