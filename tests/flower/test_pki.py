"""Keys and certificates: OpenSSL (Python's ``ssl``) and Flower's own loaders take them, and nothing is overwritten."""

import os
import ssl
import stat
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from fedshift.flower.transport.pki import add_nodes, load_public_keys, make_authority
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
    said = (
        f"less than {SYSTEM_TIME_TOLERANCE} seconds ahead of the coordinator's, and less than {behind} seconds behind"
    )
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


def test_certificates_are_valid_for_the_days_asked_and_from_before_now(tmp_path):
    until = make_authority(tmp_path / "pki", [HOST], [], 90).until
    (authority,) = ssl.create_default_context(cafile=tmp_path / "pki" / "ca.crt").get_ca_certs()
    for seen in (authority, handshake(tmp_path / "pki", HOST)):
        start, end = (ssl.cert_time_to_seconds(seen[when]) for when in ("notBefore", "notAfter"))
        assert end == until.timestamp()
        assert end - start == 90 * 86400 + 3600


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
    keys = {"server.key", "a.key", "b.key"}
    assert {name: made[name] for name in keys} == dict.fromkeys(keys, (os.O_EXCL, 0o600))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "pki").rglob("*")}
    public = {"ca.crt", "server.crt", "a.pub", "b.pub"}
    assert modes == dict.fromkeys(keys, 0o600) | dict.fromkeys(public, 0o644) | {"nodes": 0o700}
    assert stat.S_IMODE((tmp_path / "pki").stat().st_mode) == 0o700


def test_more_nodes_join_without_the_authoritys_key_which_is_nowhere(place):
    before = contents(place)
    assert {path.name for path in before if path.suffix == ".key"} == {
        "server.key",
        "hospital-a.key",
        "hospital-a 2.key",
    }
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
    real, count = os.fsync, iter(range(4))

    def full(descriptor):
        if next(count) == 3:
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
    with pytest.raises(UsageError, match=r"twin\.pub is no public key"):
        load_public_keys(place)
    other = Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (nodes / "twin.pub").write_bytes(other)
    with pytest.raises(UsageError, match=r"twin\.pub: Flower takes ECDSA"):
        load_public_keys(place)
    for path in nodes.iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="holds no public key"):
        load_public_keys(place)


def test_the_command_makes_all_and_says_what_goes_where(cli, tmp_path):
    done = cli("pki", "init", "pki", "--host", HOST, "--host", ADDRESS, "--nodes", "hospital-a, hospital-b")
    assert (done.code, done.err) == (0, "")
    assert f"for {HOST}, {ADDRESS}, localhost, 127.0.0.1, ::1, until " in done.out
    assert "To the coordinator: ca.crt server.crt server.key nodes/*.pub" in done.out
    assert "To hospital-b: ca.crt nodes/hospital-b.key\n" in done.out
    assert "The authority's own key was not kept" in " ".join(done.out.split())
    more = cli("pki", "add", "pki", "c", "d")
    assert "To the coordinator: nodes/c.pub nodes/d.pub" in more.out
    assert "To d: ca.crt nodes/d.key\n" in more.out
    assert list(load_public_keys(tmp_path / "pki")) == ["c", "d", "hospital-a", "hospital-b"]


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
