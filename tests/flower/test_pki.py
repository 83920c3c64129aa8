"""Keys and certificates: OpenSSL (Python's ``ssl``) and Flower's own loaders take them, and nothing is overwritten."""

import os
import ssl
import stat
import sys
from argparse import Namespace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from fedshift.flower.transport import pki
from fedshift.flower.transport.certificates import check_server, read_certificates
from fedshift.flower.transport.chain import load_key
from fedshift.flower.transport.exchange import Exchange
from fedshift.flower.transport.pki import (
    PublicKeys,
    add_nodes,
    load_public_keys,
    make_authority,
    renew_certificate,
    revoke_key,
    rotate_key,
)
from fedshift.flower.transport.signatures import Signer, Verifier, fingerprint, load_private_key
from fedshift.utils.errors import FedshiftError, UsageError

HOST, ADDRESS = "coordinator.example.org", "10.0.0.5"


@pytest.fixture
def place(tmp_path):
    """An authority with two nodes, whose certificate is for one name and one address."""
    make_authority(tmp_path / "pki", [HOST, ADDRESS], ["hospital-a", "hospital-a 2"], 30)
    return tmp_path / "pki"


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def handshake(place, host, authority=None):
    """What a client that trusts the authority and asks for ``host`` reads in the certificate of a server."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(place / "server.crt", place / "server.key")
    client = ssl.create_default_context(cafile=(authority or place) / "ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(down, up, server_hostname=host)
    ends = [asking, server.wrap_bio(up, down, server_side=True)]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass
    return asking.getpeercert()


def test_openssl_reads_names_and_serial_numbers(place):
    seen = handshake(place, HOST)
    assert seen["subjectAltName"] == (
        ("DNS", HOST), ("IP Address", ADDRESS), ("DNS", "localhost"), ("IP Address", "127.0.0.1"),
        ("IP Address", "0:0:0:0:0:0:0:1"),
    )  # fmt: skip
    (authority,) = ssl.create_default_context(cafile=place / "ca.crt").get_ca_certs()
    assert seen["issuer"] == authority["subject"] != seen["subject"]
    assert int(seen["serialNumber"], 16) != int(authority["serialNumber"], 16)


def test_openssl_takes_the_servers_key_with_its_certificate_alone(place):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "server.crt", place / "server.key")
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        context.load_cert_chain(place / "ca.crt", place / "server.key")


def test_the_page_states_the_clocks_that_flower_allows():
    page = " ".join((Path(__file__).parents[2] / "docs/deployment.md").read_text().split())
    behind = TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
    said = f"{SYSTEM_TIME_TOLERANCE} seconds or more ahead of the coordinator's, or {behind} seconds or more behind"
    assert said in page


def test_certificates_say_what_they_may_be_used_for(place):
    ca, server = (x509.load_pem_x509_certificate((place / f"{name}.crt").read_bytes()) for name in ("ca", "server"))
    for certificate, expected in ((ca, (True, 0)), (server, (False, None))):
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        assert (constraints.critical, constraints.value.ca, constraints.value.path_length) == (True, *expected)
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
        assert usage.critical
        assert (usage.value.key_cert_sign, usage.value.crl_sign) == (expected[0], expected[0])
        assert usage.value.digital_signature is not expected[0]
        issuer = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
        assert issuer == ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
        assert certificate.public_key().curve.name == "secp384r1"
    purposes = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.SERVER_AUTH]


@pytest.mark.parametrize("host", [HOST, ADDRESS, "localhost", "127.0.0.1", "::1"])
def test_the_coordinator_is_believed_under_its_names(place, host):
    handshake(place, host)


@pytest.mark.parametrize("host", ["example.org", "other.example.org", "10.0.0.6"])
def test_the_coordinator_is_not_believed_under_another_name(place, host):
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(place, host)


def test_another_authority_is_not_believed(place, tmp_path):
    make_authority(tmp_path / "other", [HOST], [])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(place, HOST, authority=tmp_path / "other")


def test_certificates_are_valid_for_the_days_asked_the_authoritys_for_longer_and_from_before_now(tmp_path):
    until = make_authority(tmp_path / "pki", [HOST], [], 90).until
    (authority,) = ssl.create_default_context(cafile=tmp_path / "pki" / "ca.crt").get_ca_certs()
    for seen, days in ((authority, 3650), (handshake(tmp_path / "pki", HOST), 90)):
        start, end = (ssl.cert_time_to_seconds(seen[when]) for when in ("notBefore", "notAfter"))
        assert end - start == days * 86400 + 3600
    assert end == until.timestamp()


def test_a_renewed_certificate_is_believed_by_sites_that_keep_their_files(place):
    before, first = contents(place), handshake(place, HOST)
    until = renew_certificate(place, days=60).until
    assert {path.name for path, content in contents(place).items() if content != before[path]} == {"server.crt"}
    seen = handshake(place, HOST)
    assert ssl.cert_time_to_seconds(seen["notAfter"]) == until.timestamp() > ssl.cert_time_to_seconds(first["notAfter"])
    assert {*seen["subjectAltName"]} == {*first["subjectAltName"]}
    check_server(place)
    question = Exchange(kind="end", facts={"say": "over"}, run=7)
    signed = Signer(place, 7)(question)
    assert Verifier(place / "ca.crt", HOST)(signed, 7).signer == fingerprint(load_key(place / "server.crt"))
    renew_certificate(place, ["10.0.0.6"], new_key=True)
    changed = {path.name for path, content in contents(place).items() if content != before[path]}
    assert changed == {"server.crt", "server.key"}
    assert stat.S_IMODE((place / "server.key").stat().st_mode) == 0o600
    handshake(place, "10.0.0.6")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(place, HOST)


def test_a_certificate_ends_no_later_than_its_authority(place, monkeypatch):
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=3640)

    monkeypatch.setattr(pki, "datetime", Later)
    (authority,) = read_certificates(place / "ca.crt")
    assert renew_certificate(place).until == authority.not_valid_after_utc
    monkeypatch.setattr(pki, "datetime", SimpleNamespace(now=lambda _: datetime.now(UTC) + timedelta(days=3651)))
    with pytest.raises(UsageError, match=r"the authority in .* ended on"):
        renew_certificate(place)


def test_without_the_authoritys_key_nothing_is_renewed_and_nothing_changes(place, tmp_path):
    make_authority(tmp_path / "other", [HOST], [])
    (place / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    before = contents(place)
    with pytest.raises(UsageError, match=r"ca\.key is not the key of ca\.crt"):
        renew_certificate(place)
    assert contents(place) == before
    (place / "ca.key").unlink()
    with pytest.raises(UsageError, match=r"holds no ca\.key"):
        renew_certificate(place)
    (place / "ca.crt").unlink()
    with pytest.raises(UsageError, match=r"holds no ca\.crt: make one"):
        renew_certificate(place)


def test_a_key_is_rotated_under_its_name_and_revoked_and_what_it_signed_stays_verifiable(place):
    first = (place / "nodes" / "hospital-a.pub").read_bytes()
    rotate_key(place, "hospital-a")
    second = (place / "nodes" / "hospital-a.pub").read_bytes()
    assert second not in (first, b"")
    belongs = fingerprint(load_private_key(place / "nodes" / "hospital-a.key").public_key())
    assert belongs == fingerprint(load_key(place / "nodes" / "hospital-a.pub"))
    assert stat.S_IMODE((place / "nodes" / "hospital-a.key").stat().st_mode) == 0o600
    revoke_key(place, "hospital-a")
    assert list(load_public_keys(place)) == ["hospital-a 2"]
    assert not (place / "nodes" / "hospital-a.key").exists()
    assert [(place / "retired" / f"hospital-a-{n}.pub").read_bytes() for n in (1, 2)] == [first, second]
    for change in (rotate_key, revoke_key):
        with pytest.raises(UsageError, match=r"'hospital-a' has no key in .*, which has keys of hospital-a 2"):
            change(place, "hospital-a")
    add_nodes(place, ["hospital-a"])  # which may come back


def test_keys_are_read_while_files_come_change_and_go(place):
    heard = []
    keys = PublicKeys(place, heard.append)
    before = dict(keys())
    add_nodes(place, ["c"])
    rotate_key(place, "hospital-a")
    assert keys().keys() == {"c", *before}
    assert keys()["hospital-a"] != before["hospital-a"]
    (place / "nodes" / "c.pub").write_text("ecdsa-sha2-nis")  # half of it
    kept = keys()["c"]
    revoke_key(place, "hospital-a")
    assert keys().keys() == {"c", "hospital-a 2"}
    assert keys()["c"] == kept
    assert len(heard) == 2
    assert all("c.pub is not a public key" in told for told in heard)
    revoke_key(place, "c")
    revoke_key(place, "hospital-a 2")
    assert keys() == {}


@pytest.mark.filterwarnings("ignore:'click[.]utils:DeprecationWarning")
def test_flower_reads_the_nodes_keys_which_belong_together(place):
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, sign_message, verify_signature
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication as private_key

    known = load_public_keys(place)
    assert list(known) == ["hospital-a", "hospital-a 2"]
    for name, public in known.items():
        assert try_load_public_key(place / "nodes" / f"{name}.pub") == public
        given = Namespace(
            auth_supernode_private_key=str(place / "nodes" / f"{name}.key"), auth_supernode_public_key=None
        )
        key, _ = private_key(given)
        belongs = {
            other: verify_signature(bytes_to_public_key(pem), b"x", sign_message(key, b"x"))
            for other, pem in known.items()
        }
        assert belongs == {other: other == name for other in known}


def test_private_files_are_their_owners_alone_from_the_start(tmp_path, monkeypatch):
    made, real = {}, os.open

    def watched(path, flags, mode=0o777, **options):
        made[os.path.basename(path)] = (flags & os.O_EXCL, mode)  # noqa: PTH119 - a path or a name
        return real(path, flags, mode, **options)

    before = os.umask(0)
    try:
        monkeypatch.setattr(os, "open", watched)
        (tmp_path / "pki").mkdir()
        make_authority(tmp_path / "pki", [], ["a"])
        add_nodes(tmp_path / "pki", ["b"])
    finally:
        os.umask(before)
    keys = {"ca.key", "server.key", "a.key", "b.key"}
    assert {name: made[name] for name in keys} == dict.fromkeys(keys, (os.O_EXCL, 0o600))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "pki").rglob("*")}
    public = {"ca.crt", "server.crt", "a.pub", "b.pub"}
    assert modes == dict.fromkeys(keys, 0o600) | dict.fromkeys(public, 0o644) | {"nodes": 0o700}
    assert stat.S_IMODE((tmp_path / "pki").stat().st_mode) == 0o700


def test_more_nodes_join_without_the_authoritys_key(place):
    (place / "ca.key").unlink()
    before = contents(place)
    assert add_nodes(place, ["clinic.c"]) == ("clinic.c",)
    assert list(load_public_keys(place)) == ["clinic.c", "hospital-a", "hospital-a 2"]
    assert before.items() <= contents(place).items()


@pytest.mark.parametrize("left", ["key", "pub"])
def test_a_name_that_is_taken_is_refused_and_no_other_is_made(place, left):
    (place / "nodes" / f"hospital-a.{'pub' if left == 'key' else 'key'}").unlink()
    before = contents(place)
    with pytest.raises(UsageError, match=f"'hospital-a' has a key, .*hospital-a.{left}"):
        add_nodes(place, ["new", "hospital-a"])
    with pytest.raises(UsageError, match="'new' has a key"):
        add_nodes(place, ["new", "new"])
    assert contents(place) == before


@pytest.mark.parametrize("name", ["", " ", "a ", ".", "..", ".a", "a/b", "../a", "a\\b", "a,b", "a\nb", "a\x00b"])
def test_a_name_that_cannot_be_a_files_is_refused(place, name):
    before = contents(place)
    with pytest.raises(UsageError, match="node name"):
        add_nodes(place, [name])
    assert contents(place) == before


@pytest.mark.parametrize(
    "host",
    [
        "", "https://a", "a:8000", "[::1]", "ü.de", "a b", "*.a", "a..b", "a.", "-a", "1.0.0.300", "5", "a" * 64, "a\n",
    ],
)  # fmt: skip
def test_a_host_that_cannot_be_is_refused(tmp_path, host):
    with pytest.raises(UsageError, match="without scheme and port"):
        make_authority(tmp_path / "pki", [host], [])
    assert not (tmp_path / "pki").exists()


@pytest.mark.parametrize("days", [0, -1, 3651])
def test_days_that_cannot_be_are_refused(tmp_path, days):
    with pytest.raises(UsageError, match=f"days {days}: .* 1 to 3650"):
        make_authority(tmp_path / "pki", [HOST], [], days)
    assert not (tmp_path / "pki").exists()


def test_hosts_are_named_once_in_lower_case(tmp_path):
    made = make_authority(tmp_path / "pki", ["LocalHost", "my_host", "FE80::0:1"], [])
    assert made.hosts == ("localhost", "my_host", "fe80::1", "127.0.0.1", "::1")


def test_a_directory_that_holds_something_is_refused(place, tmp_path):
    before = contents(place)
    with pytest.raises(UsageError, match=r"ca\.crt exists, .*`fedshift pki add"):
        make_authority(place, [HOST], ["x"])
    (place / "ca.crt").unlink()
    with pytest.raises(UsageError, match=r"is not empty"):
        make_authority(place, [HOST], ["x"])
    assert contents(place).items() == before.items() - {(place / "ca.crt", before[place / "ca.crt"])}
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    with pytest.raises(UsageError, match="notes is not empty"):
        make_authority(tmp_path / "notes", [HOST], ["x"])


def test_what_could_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    real, count = os.fsync, iter(range(5))

    def full(descriptor):
        if next(count) == 4:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FedshiftError, match=r"cannot write .*a\.key: No space left"):
        make_authority(tmp_path / "pki", [HOST], ["a"])
    assert not (tmp_path / "pki").exists()


def test_public_keys_that_cannot_be_told_apart_or_read_are_refused(place):
    nodes = place / "nodes"
    (nodes / "twin.pub").write_bytes((nodes / "hospital-a.pub").read_bytes())
    with pytest.raises(UsageError, match=r"twin\.pub is the key of node 'hospital-a' too"):
        load_public_keys(place)
    (nodes / "twin.pub").write_text("no key")
    with pytest.raises(UsageError, match=r"twin\.pub is not a public key"):
        load_public_keys(place)
    other = Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (nodes / "twin.pub").write_bytes(other)
    with pytest.raises(UsageError, match=r"twin\.pub: Flower takes ECDSA"):
        load_public_keys(place)


def test_the_command_makes_all_and_says_what_goes_where(cli, tmp_path):
    done = cli("pki", "init", "pki", "--host", HOST, "--host", ADDRESS, "--nodes", "hospital-a, hospital-b")
    assert (done.code, done.err) == (0, "")
    assert f"for {HOST}, {ADDRESS}, localhost, 127.0.0.1, ::1, until " in done.out
    assert "To the coordinator: ca.crt server.crt server.key nodes/*.pub" in done.out
    assert "To hospital-b: ca.crt nodes/hospital-b.key\n" in done.out
    assert "ca.key stays here" in done.out
    more = cli("pki", "add", "pki", "c", "d")
    assert "To the coordinator: nodes/c.pub nodes/d.pub" in more.out
    assert "To d: ca.crt nodes/d.key\n" in more.out
    assert list(load_public_keys(tmp_path / "pki")) == ["c", "d", "hospital-a", "hospital-b"]
    renewed = cli("pki", "renew", "pki", "--days", 9)
    assert f"for {HOST}, localhost, {ADDRESS}, 127.0.0.1, ::1, until " in renewed.out
    assert "To the coordinator: server.crt, of pki, between two runs" in renewed.out
    assert "server.crt server.key" in cli("pki", "renew", "pki", "--new-key").out
    assert "To c: nodes/c.key" in cli("pki", "rotate", "pki", "c").out
    assert "The key of c is no longer in pki" in cli("pki", "revoke", "pki", "c").out
    assert list(load_public_keys(tmp_path / "pki")) == ["d", "hospital-a", "hospital-b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["init", "pki"], "--host"),
        (["init", "pki", "--host", "a b"], "without scheme and port"),
        (["add", "pki", "c"], "fedshift pki init pki"),
    ],
)
def test_a_command_that_cannot_be_carried_out_names_the_fix(cli, words, said):
    done = cli("pki", *words)
    assert (done.code, said in done.err) == (2, True)


def test_adding_nobody_is_refused(place, cli):
    done = cli("pki", "add", place)
    assert (done.code, "no node is named" in done.err) == (2, True)


def test_without_the_package_it_is_named(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "fedshift.flower.transport.pki")
    done = cli("pki", "init", "pki", "--host", HOST)
    assert (done.code, "pip install 'fedshift[flower]'" in done.err) == (2, True)
