"""A site that cannot connect, or is turned away, is told why at once, in words that say what to do."""

import re
import socket
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from importlib.metadata import version
from types import SimpleNamespace

import fedshift.flower  # noqa: F401  isort: skip  (before anything of flwr: it keeps Flower quiet)

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.flower import test_link
from tests.flower.test_link import identity, opened, serve_nodes, sign  # noqa: F401  (a fixture)

with warnings.catch_warnings():  # what Flower imports (typer, click) is no matter of ours
    warnings.simplefilter("ignore", DeprecationWarning)
    from flwr.superlink.routers.fleet import node_auth

from fedshift import __version__
from fedshift.flower import keys
from fedshift.flower.keys import PublicKeys, load_private_key, make_certificate
from fedshift.flower.site.node import check_connection
from fedshift.flower.site.reasons import describe_clock, explain
from tests.flower.processes import free_port, make_key, make_keys

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for number in ("_run_id", "_node_id", "_task_id"):
            patch.setattr(test_link.internals.TaskIdentity, number, 1)
        with opened(tmp_path_factory.mktemp("port")) as made:
            yield made


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """An environment without proxies."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def why(address, root, key):
    """What a site is told that cannot connect."""
    with pytest.raises((httpx.HTTPError, OSError)) as caught:
        check_connection(address, root and str(root), key)
    return explain(caught.value)


def test_a_site_that_is_fit_hears_what_was_checked(port):
    lines = check_connection(f"localhost:{port.port}", str(port.folder / "tls" / "ca.crt"), port.key("north"))
    assert lines[0].startswith(f"connected to localhost:{port.port} in ")
    assert lines[0].endswith("with TLS, and the coordinator knows this key")
    assert lines[1:] == [
        "the clocks agree",
        f"fedshift {__version__} here, {__version__} at the coordinator; flwr {version('flwr')} here",
    ]
    check_connection(f"localhost:{port.port}", str(port.folder / "tls" / "ca.crt"), port.key("north"))  # it has left


def test_what_is_wrong_with_a_certificate_is_named_with_the_remedy(port, tmp_path, monkeypatch):
    root, north = port.folder / "tls" / "ca.crt", port.key("north")
    make_certificate(tmp_path / "other", ["localhost"])
    other = why(f"localhost:{port.port}", tmp_path / "other" / "ca.crt", north)
    assert other.startswith(f"ca.crt here does not vouch for the certificate of localhost:{port.port} (")
    assert other.endswith("bring the coordinator's ca.crt")
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **named: look_up("127.0.0.1", *rest, **named))
    assert why(f"wrong.example.org:{port.port}", root, north) == (
        "the coordinator's certificate is not for wrong.example.org, but for localhost, ::1, 127.0.0.1: join by one of "
        "these, or renew it there (`fedshift pki DIR --host wrong.example.org`, with all hosts)"
    )
    assert "is not for 10.9.8.7, but for" in why(f"10.9.8.7:{port.port}", root, north)


def test_a_certificate_that_has_ended_is_said(tmp_path, monkeypatch):
    before = SimpleNamespace(now=lambda zone: datetime.now(zone) - timedelta(days=10))
    monkeypatch.setattr(keys, "datetime", before)
    make_certificate(tmp_path / "tls", ["localhost"], 2)
    monkeypatch.setattr(test_link, "make_keys", lambda folder, names, hosts: _make_site_keys(folder, names))
    with opened(tmp_path) as ended:
        said = why(f"localhost:{ended.port}", tmp_path / "tls" / "ca.crt", ended.key("north"))
    assert said.startswith("the coordinator's certificate has ended: renew it there (`fedshift pki DIR`")


def _make_site_keys(folder, names):
    (folder / "keys").mkdir()
    for name in names:
        make_key(folder, name)


def test_plain_text_and_tls_are_told_apart(port, tmp_path):
    assert why(f"localhost:{port.port}", None, port.key("north")) == (
        f"localhost:{port.port} speaks TLS: join with --tls DIR and --key FILE in place of --insecure"
    )
    with opened(tmp_path, host="127.0.0.1", tls=False) as plain:
        said = why(f"localhost:{plain.port}", port.folder / "tls" / "ca.crt", port.key("north"))
    assert said.startswith(f"localhost:{plain.port} speaks no TLS: the coordinator was started with --insecure")


def test_an_address_where_nothing_is_and_a_proxy_are_named(port, monkeypatch):
    root, nobody, key = port.folder / "tls" / "ca.crt", free_port(), port.key("north")
    said = why(f"localhost:{nobody}", root, key)
    assert said.startswith(
        f"nothing answers at localhost:{nobody} ([Errno 111] Connection refused): is `fedshift serve`"
    )
    assert "the name in no-such-host.invalid is unknown here" in why("no-such-host.invalid:9", root, key)
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:secret@127.0.0.1:{nobody}")
    said = why(f"localhost:{port.port}", root, key)
    assert f"at localhost:{port.port} through the proxy 127.0.0.1:{nobody}, which the environment names" in said
    assert "secret" not in said


def test_a_key_that_is_unknown_or_in_use_is_told_so(port):
    address, root = f"localhost:{port.port}", port.folder / "tls" / "ca.crt"
    unknown = why(address, root, ec.generate_private_key(ec.SECP384R1()))
    assert unknown.startswith(
        "the coordinator does not know this key, or it was replaced or revoked: have this site's .pub"
    )
    with port.connect("south"):
        assert why(address, root, port.key("south")).startswith(
            "this site's key is in use: another `fedshift join` with it is connected, or one that was killed or cut off"
        )
    with port.connect("south"):
        pass


def test_the_first_start_of_sites_before_the_coordinator_does_not_take_their_keys_for_used(tmp_path):
    """Both wait for the coordinator, and connect as soon as it listens, by their first request."""
    make_keys(tmp_path, ["north", "south"])
    said = {}

    def wait(name, address):
        said[name] = []
        key, root = load_private_key(tmp_path / "keys" / f"{name}.key"), str(tmp_path / "tls" / "ca.crt")
        while not said[name] or not said[name][-1].startswith("connected"):
            try:
                said[name] += check_connection(address, root, key)[:1]
            except (httpx.HTTPError, OSError) as error:
                said[name].append(explain(error))

    number, known = free_port(), PublicKeys(tmp_path / "tls", print)
    sites = [threading.Thread(target=wait, args=(name, f"localhost:{number}")) for name in ("north", "south")]
    for site in sites:
        site.start()
    test_link.wait_until(lambda: len(said) == 2 and all(said.values()))
    with serve_nodes("localhost", number, tmp_path / "tls", known, tmp_path / "log"):
        for site in sites:
            site.join()
    assert not [text for texts in said.values() for text in texts if "in use" in text]


@pytest.fixture
def server():
    """The port of a server that answers ``status`` with ``content``, whose clock is ``behind`` seconds behind."""
    opened_servers = []

    def start(status, content=b"", behind=0.0):
        class Answer(BaseHTTPRequestHandler):
            def date_time_string(self, timestamp=None):
                return format_datetime(datetime.now(UTC) - timedelta(seconds=behind), usegmt=True)

            def do_POST(self):
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        made = HTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        opened_servers.append(made)
        return f"127.0.0.1:{made.server_port}"

    yield start
    for made in opened_servers:
        made.shutdown()
        made.server_close()


def test_a_clock_that_is_off_is_named_with_its_seconds(server, port):
    key = port.key("north")
    for behind, direction in ((60, "ahead of"), (-400, "behind")):
        said = why(server(401, behind=behind), None, key)
        assert "which accepts less than 5 ahead and less than 305 behind: set both by the network" in said
        seconds = re.match(rf"this machine's clock is (\d+) seconds {direction} the coordinator's", said)[1]
        assert abs(int(seconds) - abs(behind)) < 10
    assert why(server(401), None, key) == "the coordinator refused this site's signature"


def test_an_answer_that_no_coordinator_gives_is_shown(server, port):
    key = port.key("north")
    assert why(server(404, b"<html>\x1b[31mno"), None, key) == "the coordinator answered 404 (<html>no)"
    assert "no coordinator of fedshift" in why(server(200, b"<html>sign in here"), None, key)


@pytest.mark.parametrize("ahead", [-400, -305, -304.9, -10, 0, 4.9, 5, 12])
def test_a_clock_is_wrong_where_flower_says_so(ahead, monkeypatch):
    """Flower's own check of a request that a site with this clock signed, and ours."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = test_link.internals.public_key_to_bytes(key.public_key())
    monkeypatch.setattr(node_auth, "now", lambda: NOW)
    monkeypatch.setattr(node_auth, "get_linkstate", lambda _: SimpleNamespace(get_node_id_by_public_key=lambda key: 3))
    clock = SimpleNamespace(now=lambda zone: NOW, fromisoformat=datetime.fromisoformat)
    monkeypatch.setattr(test_link, "datetime", SimpleNamespace(now=lambda zone: NOW))
    headers = sign(key, ahead=ahead)
    request = SimpleNamespace(headers=headers, state=SimpleNamespace(protobuf_request=SimpleNamespace(node_id=3)))
    try:
        node_auth.authenticate_node(request)
        refused = False
    except node_auth.HTTPException:
        refused = True
    monkeypatch.setattr(test_link.link, "datetime", clock)
    ours = test_link.link.is_signed(public, {name.encode(): value.encode() for name, value in headers.items()})
    assert refused == (not ours) == (not -305 < ahead < 5)
    monkeypatch.setattr("fedshift.flower.site.reasons.datetime", clock)
    date = format_datetime(NOW - timedelta(seconds=ahead), usegmt=True)
    if float(ahead).is_integer():  # a date has no fractions
        assert (describe_clock(date) == "the clocks agree") == (not refused)


def test_a_site_imports_nothing_of_the_server():
    code = "import sys, fedshift.flower.site.node; print([n for n in sys.modules if n.startswith('flwr.superlink')])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Tunnel(BaseHTTPRequestHandler):
    """An HTTP proxy that opens tunnels (RFC 9110, 9.3.6)."""

    opened = ()

    def do_CONNECT(self):
        type(self).opened = (*self.opened, self.path)
        host, _, number = self.path.rpartition(":")
        with socket.create_connection((host, int(number))) as far:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=pump, args=(far, self.connection))
            back.start()
            pump(self.connection, far)
            back.join()

    def log_message(self, *_):
        pass


def pump(reader, writer):
    with suppress(OSError):
        while part := reader.recv(2**16):
            writer.sendall(part)
        writer.shutdown(socket.SHUT_WR)


def test_a_site_behind_an_http_proxy_connects_through_it(port, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Tunnel) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.server_port}")
        lines = check_connection(f"localhost:{port.port}", str(port.folder / "tls" / "ca.crt"), port.key("north"))
        proxy.shutdown()
    assert lines[0].startswith("connected")
    assert Tunnel.opened[0] == f"localhost:{port.port}"
