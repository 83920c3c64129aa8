"""A certificate is for the coordinator's host, whoever else has one of the same authority, and its end is announced."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from fedshift.flower.server.prometheus import Prometheus
from fedshift.flower.server.serve import ListenOptions
from fedshift.flower.site.ledger import read_ledger
from fedshift.flower.transport import certificates
from fedshift.flower.transport.arrays import RefusedMessage
from fedshift.flower.transport.certificates import EndNotice, check_server, describe_end, is_for, read_end
from fedshift.flower.transport.exchange import Exchange
from fedshift.flower.transport.pki import (
    _general_name,
    _key_usage,
    _make_root,
    _make_server,
    add_nodes,
    renew_certificate,
    rotate_key,
)
from fedshift.flower.transport.signatures import Signer, Verifier
from fedshift.utils.errors import UsageError
from tests.flower.kills import write_data
from tests.flower.processes import machines
from tests.flower.sites import spec_for

RUN, HOST = 7, "coordinator.example.org"
NOW = datetime.now(UTC).replace(microsecond=0)
END = NOW + timedelta(days=400)


@pytest.fixture(scope="module")
def authority():
    return ec.generate_private_key(ec.SECP384R1())


def server(folder, authority, hosts, end=END):
    """The files of a server for ``hosts``, whose certificate the authority signed."""
    key, start = ec.generate_private_key(ec.SECP384R1()), NOW - timedelta(days=1)
    ca = _make_root(authority, start, NOW + timedelta(days=900))
    own = _make_server(ca, authority, key, hosts, start, end)
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


def hospital(folder, *, intermediate=True, complete=True, names=(HOST,), rsa_key=False):
    """The files of a server whose certificate a hospital's own authority signed, by an intermediate one.

    ``complete``: server.crt has the intermediate certificate too.
    """
    root_key, between_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    key = rsa.generate_private_key(65537, 2048) if rsa_key else key
    root = issue("Hospital Root", root_key, "Hospital Root", root_key, authority=True)
    between = issue("Hospital Issuing", between_key, "Hospital Root", root_key, authority=True)
    signer = ("Hospital Issuing", between_key) if intermediate else ("Hospital Root", root_key)
    own = issue("coordinator", key, *signer, authority=False, names=names)
    folder.mkdir()
    chain = [own, *([between] if intermediate and complete else [])]
    (folder / "ca.crt").write_bytes(root.public_bytes(Encoding.PEM))
    (folder / "server.crt").write_bytes(b"".join(each.public_bytes(Encoding.PEM) for each in chain))
    (folder / "server.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return folder


def issue(subject, key, issuer, issuer_key, *, authority, names=()):
    """A certificate as an organization's software makes it, with an RFC's extensions and no more."""
    name, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, issuer))
    made = x509.CertificateBuilder().subject_name(name).issuer_name(by).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(NOW).not_valid_after(END)
    made = made.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    made = made.add_extension(of_issuer, critical=False).add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    if authority:
        made = made.add_extension(_key_usage("key_cert_sign", "crl_sign"), critical=True)
    else:
        made = made.add_extension(x509.SubjectAlternativeName(list(map(_general_name, names))), critical=False)
    return made.sign(issuer_key, hashes.SHA256())


@pytest.mark.parametrize("intermediate", [True, False])
def test_an_organizations_own_authority_takes_the_place_of_ours(intermediate, tmp_path):
    question = Exchange(kind="end", facts={"say": "over"}, run=RUN)
    own, other = (hospital(tmp_path / name, intermediate=intermediate) for name in ("own", "other"))
    check_server(own)
    verifier = Verifier(own / "ca.crt", HOST)
    signed = Signer(own, RUN)(question)
    assert replace(verifier(signed, RUN), signer="") == question
    with pytest.raises(RefusedMessage, match=r"for which ca\.crt does not vouch"):
        verifier(Signer(other, RUN)(question), RUN)
    with pytest.raises(RefusedMessage, match=f"a certificate for {HOST}, where the coordinator is www"):
        Verifier(own / "ca.crt", "www.example.org")(signed, RUN)
    assert add_nodes(own, ["north"]) == ("north",)
    with pytest.raises(UsageError, match=r"holds no ca\.key"):
        renew_certificate(own)


def test_a_site_is_no_authority(tmp_path):
    """Whoever has a certificate for a host of the hospital's cannot issue one for the coordinator's."""
    own, question = hospital(tmp_path / "own", names=["www.example.org"]), Exchange(kind="end", facts={}, run=RUN)
    www = load_pem_private_key((own / "server.key").read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    forged = issue("coordinator", key, "coordinator", www, authority=False, names=[HOST])
    (own / "server.crt").write_bytes(forged.public_bytes(Encoding.PEM) + (own / "server.crt").read_bytes())
    (own / "server.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(RefusedMessage, match=r"for which ca\.crt does not vouch"):
        Verifier(own / "ca.crt", HOST)(Signer(own, RUN)(question), RUN)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            {"complete": False},
            r"ca\.crt does not vouch for .*append the certificates of intermediate authorities",
        ),
        ({"names": ()}, r"server\.crt names no host \(subjectAltName\)"),
        ({"rsa_key": True}, r"server\.key is not an ECDSA key"),
    ],
)
def test_what_an_authority_lacks_is_named_before_the_start(made, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        check_server(hospital(tmp_path / "own", **made))


def test_a_key_of_another_certificate_or_with_a_passphrase_is_named_before_the_start(tmp_path):
    own, other = hospital(tmp_path / "own"), hospital(tmp_path / "other")
    (own / "server.key").write_bytes((other / "server.key").read_bytes())
    with pytest.raises(UsageError, match=r"server\.crt is not for the key in server\.key"):
        check_server(own)
    locked = ec.generate_private_key(ec.SECP384R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    (own / "server.key").write_bytes(locked)
    with pytest.raises(UsageError, match=r"server\.key is not a private key without a passphrase"):
        check_server(own)


@pytest.mark.parametrize(
    ("names", "address"),
    [
        ((HOST,), f"{HOST}:9"), (("10.0.0.5",), "10.0.0.5:9"), (("*.example.org",), "coordinator.example.org:9"),
        ((HOST, "127.0.0.1"), "127.0.0.1:9"), (("fd00::5",), "[fd00::5]:9"),
    ],
)  # fmt: skip
def test_programs_of_this_machine_use_a_name_that_the_certificate_is_for(names, address, tmp_path):
    given = ListenOptions(host="0.0.0.0", port=9, tls=hospital(tmp_path / "own", names=names), clients=1)
    assert (given.local_address, given.here) == (address, "127.0.0.1")


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
        f"{tmp_path / 'soon'}: the certificate in server.crt ends in 19 days, on {NOW + timedelta(days=20):%Y-%m-%d}"
    )
    quiet = EndNotice(server(tmp_path / "late", authority, [HOST]), heard.append)
    quiet.check()
    EndNotice(None, heard.append).check()
    assert len(heard) == 2


def test_an_end_is_near_thirty_days_before():
    assert not describe_end("server.crt", NOW + timedelta(days=30, seconds=1), NOW)
    assert "ends in 30 days" in (told := describe_end("server.crt", NOW + timedelta(days=30), NOW))
    assert "fedshift pki renew" in told
    assert "has ended" in (told := describe_end("ca.crt", NOW - timedelta(seconds=1), NOW))
    assert "make a new authority" in told


def test_the_end_is_a_metric_and_what_is_no_certificate_is_named(authority, tmp_path):
    folder = server(tmp_path / "own", authority, [HOST])
    assert read_end(folder) == END
    found = Prometheus(read_end(folder)).registry.get_sample_value("fedshift_certificate_end_timestamp_seconds")
    assert found == END.timestamp()
    (folder / "ca.crt").write_text("no")
    with pytest.raises(UsageError, match=r"ca.crt is not a certificate .*: take the file"):
        read_end(folder)


@pytest.mark.slow
def test_keys_are_replaced_and_revoked_while_it_runs_with_a_certificate_of_a_hospitals_own_authority(tmp_path):
    files = {"data": write_data(tmp_path), "samples": None, "image_size": None, "model": "tests.flower.gated:network"}
    with machines(tmp_path, spec_for(rounds=4, evaluate_every=4, **files)) as three:
        keys = tmp_path / "tls"
        for file in hospital(tmp_path / "own", names=["127.0.0.2"]).iterdir():
            file.replace(keys / file.name)
        (keys / "ca.key").unlink()
        three.host = "127.0.0.2"
        for name, batch in (("pen", 1), ("photo", 1), ("print", 2)):
            three.hold(name, batch)
        coordinator = three.serve("--min-clients", 1, seconds=1800)
        sites = {"pen": three.join("pen")}
        three.held("pen", sites["pen"])
        sites |= {name: three.join(name) for name in ("photo", "print")}
        coordinator.says("(3 connected)")
        three.release("pen")
        three.held("photo", sites["photo"])
        rotate_key(keys, "photo")
        coordinator.says("the key of photo was revoked or replaced: refused")
        three.release("photo")
        three.held("print", sites["print"])
        coordinator.says("photo is connected", times=2)
        (keys / "nodes" / "pen.pub").unlink()
        coordinator.says("the key of pen was revoked or replaced: refused (2 connected)")
        sites["pen"].says("the coordinator does not know this site's key")
        three.release("print")
        assert coordinator.ends() == 0, coordinator.said
        assert [sites[name].ends() for name in ("photo", "print")] == [0, 0]
        assert three.rounds == [["pen"], ["pen", "print"], ["pen", "print"], ["photo", "print"]]
    assert len({entry.signed for entry in read_ledger(tmp_path / "photo")}) == 2
