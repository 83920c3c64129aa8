"""A certificate is for the coordinator's host, whoever else has one of the same authority, and its end is announced."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedshift.flower.server.prometheus import Prometheus
from fedshift.flower.transport import certificates
from fedshift.flower.transport.arrays import RefusedMessage
from fedshift.flower.transport.certificates import EndNotice, describe_end, is_for, read_end
from fedshift.flower.transport.exchange import Exchange
from fedshift.flower.transport.pki import _make_certificates
from fedshift.flower.transport.signatures import Signer, Verifier
from fedshift.utils.errors import UsageError

RUN, HOST = 7, "coordinator.example.org"
NOW = datetime.now(UTC).replace(microsecond=0)
END = NOW + timedelta(days=400)


@pytest.fixture(scope="module")
def authority():
    return ec.generate_private_key(ec.SECP384R1())


def server(folder, authority, hosts, end=END):
    """The files of a server for ``hosts``, whose certificate the authority signed."""
    key = ec.generate_private_key(ec.SECP384R1())
    ca, own = _make_certificates(authority, key, hosts, NOW - timedelta(days=1), end)
    folder.mkdir()
    (folder / "server.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "server.crt").write_bytes(own.public_bytes(Encoding.PEM))
    (folder / "ca.crt").write_bytes(ca.public_bytes(Encoding.PEM))
    return folder


def test_another_server_of_the_same_authority_is_not_the_coordinator(authority, tmp_path):
    question = Exchange(kind="end", facts={"say": "over"}, run=RUN)
    own, web = (
        server(tmp_path / name, authority, [host]) for name, host in (("own", HOST), ("web", "www.example.org"))
    )
    verifier = Verifier(own / "ca.crt", HOST)
    answered = verifier(Signer(own, RUN)(question), RUN)
    assert replace(answered, signer=question.signer) == question
    with pytest.raises(RefusedMessage, match=f"a certificate for www.example.org, where the coordinator is {HOST}"):
        verifier(Signer(web, RUN)(question), RUN)


@pytest.mark.parametrize(
    ("host", "named"),
    [
        (HOST, True), (HOST.upper(), True), (f"{HOST}.", True), ("10.0.0.5", True), ("fd00::5", True),
        ("a.wide.example.org", True), ("b.a.wide.example.org", False), ("wide.example.org", False),
        ("example.org", False), ("10.0.0.6", False), ("localhost", False), (f"{HOST}.evil.example", False),
    ],
)  # fmt: skip
def test_a_certificate_is_for_the_hosts_that_it_names(host, named, authority, tmp_path):
    folder = server(tmp_path / "own", authority, [HOST, "*.wide.example.org", "10.0.0.5", "fd00::5"])
    assert is_for(x509.load_pem_x509_certificate((folder / "server.crt").read_bytes()), host) == named
    root = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    assert not is_for(root, host)  # which names no host


def test_the_end_of_a_certificate_is_announced_once_a_day(authority, monkeypatch, tmp_path):
    heard, clock = [], SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(certificates, "time", clock)
    notice = EndNotice(server(tmp_path / "soon", authority, [HOST], NOW + timedelta(days=20)), heard.append)
    for hours in (0.1, 1, 23, 24.2, 30):
        clock.monotonic = lambda hours=hours: hours * 3600
        notice.check()
    assert len(heard) == 2
    assert heard[0].startswith(
        f"{tmp_path / 'soon'}: the certificate ends in 19 days, on {NOW + timedelta(days=20):%Y-%m-%d}"
    )
    quiet = EndNotice(server(tmp_path / "late", authority, [HOST]), heard.append)
    quiet.check()
    EndNotice(None, heard.append).check()
    assert len(heard) == 2


def test_an_end_is_near_thirty_days_before():
    assert not describe_end(NOW + timedelta(days=30, seconds=1), NOW)
    assert "ends in 30 days" in describe_end(NOW + timedelta(days=30), NOW)
    assert "has ended" in describe_end(NOW - timedelta(seconds=1), NOW)


def test_the_end_is_a_metric_and_what_is_no_certificate_is_named(authority, tmp_path):
    folder = server(tmp_path / "own", authority, [HOST])
    assert read_end(folder) == END
    found = Prometheus(read_end(folder)).registry.get_sample_value("fedshift_certificate_end_timestamp_seconds")
    assert found == END.timestamp()
    (folder / "ca.crt").write_text("no")
    with pytest.raises(UsageError, match=r"ca.crt is no certificate: take the file"):
        read_end(folder)
