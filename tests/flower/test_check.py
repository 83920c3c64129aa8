"""What a site's IT learns before anything else runs."""

import socket
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta

import fedshift.flower  # noqa: F401  isort: skip  (before anything of flwr: it keeps Flower quiet)

import httpx
import pytest
import uvicorn

from fedshift.flower.site import check, reasons
from fedshift.flower.site.check import Checks
from fedshift.flower.site.join import CoordinatorLink
from fedshift.flower.transport import firewall
from fedshift.flower.transport.firewall import CHECK, write_sizes
from fedshift.flower.transport.pki import add_nodes, make_authority
from fedshift.flower.transport.programs import free_port


async def absent(scope, receive, send):
    """Answers as Flower answers for a path that it does not have."""
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    """A guarded server with TLS, its folder, and its port."""
    folder = tmp_path_factory.mktemp("coordinator")
    make_authority(folder / "pki", [], ["north"])
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (uvicorn.Config, "load"),
            (uvicorn.Config, "get_loop_factory"),
            (uvicorn.Server, "startup"),
        ):
            patch.setattr(owner, name, getattr(owner, name))  # put back afterwards
        patch.setenv(firewall.KEYS, str(folder / "pki"))
        firewall.install_firewall(folder)
        port = free_port()
        files = {"ssl_keyfile": folder / "pki" / "server.key", "ssl_certfile": folder / "pki" / "server.crt"}
        server = uvicorn.Server(uvicorn.Config(absent, port=port, log_config=None, ws="none", lifespan="off", **files))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield folder, port
        server.should_exit = True
        thread.join()


@pytest.fixture
def checks(coordinator, monkeypatch, tmp_path):
    """A function that makes the checks of a site, with changes; probes are small."""
    folder, port = coordinator
    monkeypatch.setattr(check, "PROBE", check.LEAST_PROBE)

    def make(host="localhost", port=port, tls=folder / "pki", key=folder / "pki" / "nodes" / "north.key", size=None):
        return Checks(CoordinatorLink(address=f"{host}:{port}", tls=tls, key=key, poll=None), tmp_path / "sites", size)

    return make


def failed(made):
    """What fails, by name, with its fix."""
    return {found.what: found.fix for found in made.run() if found.fix}


def test_a_site_that_is_fit_hears_all_of_it(checks, coordinator):
    found = {each.what: each for each in checks().run()}
    assert "".join(each.fix for each in found.values()) == ""
    assert list(found) == [
        "name", "port", "certificate", "clock", "key", "versions", "throughput", "round", "disk", "memory",
    ]  # fmt: skip
    assert "not known yet" in found["round"].text
    write_sizes(coordinator[0], down=3_000_000, up=2_000_000, seconds=3600.0)
    found = {each.what: each for each in checks().run()}
    assert "3.00 MB down twice and 2.00 MB up" in found["round"].text
    assert "235 MB needed" in found["disk"].text  # 64 MiB and 56 times 3 MB
    assert "to and from a site" not in str(found)


def test_what_is_wrong_is_named_with_its_fix(checks, coordinator, tmp_path):
    _, port = coordinator
    make_authority(tmp_path / "other", [], ["north"])
    assert "DNS" in failed(checks(host="no-such-host.invalid"))["name"]
    assert "open outbound TCP port" in failed(checks(port=free_port()))["port"]
    assert "another authority" in failed(checks(tls=tmp_path / "other"))["certificate"]
    elsewhere = checks(host="coordinator.example.org")
    elsewhere._connect = lambda: socket.create_connection(("127.0.0.1", port))
    assert "localhost" in elsewhere.certificate().fix


def test_a_key_that_is_not_known_learns_nothing(checks, coordinator, tmp_path):
    folder, port = coordinator
    make_authority(tmp_path / "other", [], ["north"])
    stranger = checks(key=tmp_path / "other" / "nodes" / "north.key")
    found = list(stranger.run())
    assert [each.what for each in found if each.fix] == ["key"]
    assert "throughput" in found[-3].text
    context = ssl.create_default_context(cafile=str(folder / "pki" / "ca.crt"))
    nobody = httpx.post(f"https://localhost:{port}{CHECK}", verify=context)
    wrong = stranger._ask(wanted=5)
    known = {"server", "date", "content-length", "connection", "content-type"}
    assert (nobody.status_code, nobody.content) == (wrong.status_code, wrong.content) == (404, nobody.content)
    assert set(nobody.headers) | set(wrong.headers) <= known
    add_nodes(folder / "pki", ["south"])  # while the coordinator runs
    assert "key" not in failed(checks(key=folder / "pki" / "nodes" / "south.key"))


def test_probes_are_bounded(checks, coordinator, monkeypatch):
    most, whole = check.LEAST_PROBE, 4 * check.LEAST_PROBE
    monkeypatch.setattr(firewall, "PROBE", most)
    monkeypatch.setattr(firewall, "PROBES", whole)
    folder, _ = coordinator
    add_nodes(folder / "pki", ["west", "east"])
    west, east = (checks(key=folder / "pki" / "nodes" / f"{name}.key") for name in ("west", "east"))
    assert west._ask(wanted=most + 1).status_code == 413
    assert [west._ask(wanted=most).status_code for _ in range(5)] == [200] * 4 + [429]
    assert west._ask(sent=bytes(most + 1)).status_code in (413, 429)
    assert "ten minutes" in failed(west)["throughput"]
    assert "throughput" not in failed(east)


def test_a_clock_that_is_off_and_other_versions_are_named(checks, monkeypatch):
    monkeypatch.setattr(check, "is_own_series", lambda _: False)
    assert "pip install fedshift==" in failed(checks())["versions"]
    monkeypatch.setattr(check, "measure_offset", lambda *_, **__: 77.0)
    assert "timedatectl" in failed(checks())["clock"]
    assert reasons.describe_offset(77.0).startswith("this machine's clock is 77 seconds ahead")


def test_too_large_a_model_is_named(checks, monkeypatch):
    monkeypatch.setattr(check, "available_memory", lambda: 4e9)
    assert failed(checks(size=10**15)).keys() == {"disk", "memory"}


def test_a_certificate_says_what_is_wrong_with_it(checks, monkeypatch):
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(UTC) + timedelta(days=5000)

    monkeypatch.setattr(check, "datetime", Later)
    assert "renew" in checks()._explain_certificate()
