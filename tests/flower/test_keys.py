"""Keys and certificates: OpenSSL, ssh-keygen and Flower's loaders take them, and nothing is overwritten."""

import shutil
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from fedshift.flower import keys
from fedshift.flower.keys import (
    LOOPBACK,
    EndNotice,
    PublicKeys,
    check_server,
    load_private_key,
    load_public_keys,
    make_certificate,
    read_end,
)
from fedshift.utils.errors import UsageError

HOST, ADDRESS = "coordinator.example.org", "10.0.0.5"
NOW = datetime.now(UTC).replace(microsecond=0)
PEM, PLAIN = serialization.Encoding.PEM, serialization.NoEncryption()


@pytest.fixture
def place(tmp_path):
    """A directory of keys for one name and one address."""
    make_certificate(tmp_path / "pki", [HOST, ADDRESS])
    return tmp_path / "pki"


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


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


def write_key(path, key, form=serialization.PrivateFormat.OpenSSH, locked=PLAIN):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(key.private_bytes(PEM, form, locked))
    path.chmod(0o600)


def write_public(place, name, key):
    ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    (place / "nodes" / f"{name}.pub").write_bytes(key.public_key().public_bytes(*ssh))


def pem_of(key):
    return key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def new_key(curve=ec.SECP384R1):
    return ec.generate_private_key(curve())


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_public_key_as_windows_saves_it_is_that_key(tmp_path, encoding):
    (tmp_path / "nodes").mkdir()
    key = new_key()
    write_public(tmp_path, "north", key)
    file = tmp_path / "nodes" / "north.pub"
    file.write_bytes(f"{file.read_text()}\r\n".encode(encoding))
    assert load_public_keys(tmp_path) == {"north": pem_of(key)}


@pytest.mark.parametrize("host", [HOST, ADDRESS, *LOOPBACK])
def test_the_coordinator_is_believed_under_its_names(place, host):
    seen = handshake(place, host)
    (authority,) = ssl.create_default_context(cafile=place / "ca.crt").get_ca_certs()
    assert seen["issuer"] == authority["subject"] != seen["subject"]
    assert int(seen["serialNumber"], 16) != int(authority["serialNumber"], 16)


@pytest.mark.parametrize("host", ["example.org", "other.example.org", "10.0.0.6"])
def test_the_coordinator_is_believed_under_no_other_name_and_no_other_authority(place, host, tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(place, host)
    make_certificate(tmp_path / "other", [HOST])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(place, HOST, authority=tmp_path / "other")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="OpenSSL's program verifies the certificate")
def test_openssl_verifies_the_certificate_strictly(place):
    for purpose in ("sslserver", "sslclient"):
        words = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", place / "ca.crt"]
        done = subprocess.run([*words, place / "server.crt"], capture_output=True, text=True)
        assert (done.returncode == 0) == (purpose == "sslserver"), done.stderr


def test_files_are_their_owners_alone(place):
    modes = {path.name: path.stat().st_mode & 0o777 for path in [place, *place.rglob("*")]}
    assert {name: mode for name, mode in modes.items() if name.endswith((".crt", ".key"))} == dict.fromkeys(
        ("ca.crt", "ca.key", "server.crt", "server.key"), 0o600
    )
    assert (modes["pki"], modes["nodes"]) == (0o700, 0o700)


def test_a_certificate_is_valid_for_the_days_asked_but_no_longer_than_its_authority(tmp_path, monkeypatch):
    end = make_certificate(tmp_path / "pki", [HOST], 90)
    assert end - datetime.now(UTC) <= timedelta(days=90) < end - datetime.now(UTC) + timedelta(minutes=5)
    seen = handshake(tmp_path / "pki", HOST)
    assert ssl.cert_time_to_seconds(seen["notAfter"]) == end.timestamp() == read_end(tmp_path / "pki").timestamp()
    (authority,) = x509.load_pem_x509_certificates((tmp_path / "pki" / "ca.crt").read_bytes())
    later = SimpleNamespace(now=lambda zone: datetime.now(zone) + timedelta(days=3640))
    monkeypatch.setattr(keys, "datetime", later)
    assert make_certificate(tmp_path / "pki", []) == authority.not_valid_after_utc
    later.now = lambda zone: datetime.now(zone) + timedelta(days=3651)
    with pytest.raises(UsageError, match=r"the authority in .* has ended: make one in a new directory"):
        make_certificate(tmp_path / "pki", [])


def test_a_renewed_certificate_keeps_hosts_and_is_believed_by_sites_that_keep_their_files(place):
    before, first = contents(place), handshake(place, HOST)
    make_certificate(place, [], 60)
    assert {name for name, content in contents(place).items() if content != before[name]} == {"server.crt"}
    assert {*handshake(place, HOST)["subjectAltName"]} == {*first["subjectAltName"]}
    make_certificate(place, ["10.0.0.6", "LocalHost", "FE80::0:1"])
    handshake(place, "10.0.0.6")
    handshake(place, "fe80::1")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(place, HOST)
    for name in ("ca.crt", "ca.key", "server.key"):
        assert contents(place)[name] == before[name]


BAD_HOSTS = [
    "", "https://a", "a:8000", "[::1]", "ü.de", "a b", "*.a", "a..b", "a.", "-a", "1.0.0.300", "5", "a" * 64, "a\n",
]  # fmt: skip


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_a_host_that_cannot_be_is_refused(tmp_path, host):
    with pytest.raises(UsageError, match="without scheme and port"):
        make_certificate(tmp_path / "pki", [host])
    assert not (tmp_path / "pki").exists()


@pytest.mark.parametrize(("hosts", "days", "said"), [
    ([HOST], 0, "days=0: .* 1 to 3650"), ([HOST], 3651, "days=3651"), ([], 90, r"name the coordinator's host .*--host"),
])  # fmt: skip
def test_days_and_missing_hosts_are_refused_before_anything_is_made(tmp_path, hosts, days, said):
    with pytest.raises(UsageError, match=said):
        make_certificate(tmp_path / "pki", hosts, days)
    assert not (tmp_path / "pki").exists()


@pytest.mark.parametrize("missing", [["ca.key"], ["ca.key", "ca.crt"], ["ca.key", "server.crt", "server.key"]])
def test_what_another_authority_made_is_not_touched(place, missing):
    for name in missing:
        (place / name).unlink()
    before = contents(place)
    with pytest.raises(UsageError, match=r"has no ca\.key: request a certificate from the authority"):
        make_certificate(place, [HOST])
    assert contents(place) == before


def test_the_key_of_another_authority_renews_nothing(place, tmp_path):
    make_certificate(tmp_path / "other", [HOST])
    shutil.copy(tmp_path / "other" / "ca.key", place)
    before = contents(place)
    with pytest.raises(UsageError, match=r"ca\.key is not the key of ca\.crt"):
        make_certificate(place, [HOST])
    assert contents(place) == before


def test_a_command_that_was_killed_is_repeated(place):
    """Files are made in this order: whichever is there stays."""
    for left in (["ca.key"], ["ca.key", "ca.crt"], ["ca.key", "ca.crt", "server.key"]):
        for name in {"ca.key", "ca.crt", "server.key", "server.crt"} - {*left}:
            (place / name).unlink()
        before = contents(place)
        make_certificate(place, [HOST])
        assert {name: contents(place)[name] for name in before} == before
        check_server(place)


def issue(subject, key, issuer, issuer_key, *, authority, names=(), end=NOW + timedelta(days=400)):
    """A certificate as an organization's software makes it, with an RFC's extensions and no more."""
    name, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (subject, issuer))
    begin = NOW - timedelta(days=2)
    made = x509.CertificateBuilder(by, name, key.public_key(), x509.random_serial_number(), begin, end)
    made = made.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    of_subject = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    made = made.add_extension(of_issuer, critical=False).add_extension(of_subject, critical=False)
    if authority:
        uses = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
        signs = x509.KeyUsage(**uses, digital_signature=False, key_cert_sign=True, crl_sign=True, encipher_only=False,
                              decipher_only=False)  # fmt: skip
        made = made.add_extension(signs, critical=True)
    if names:
        made = made.add_extension(x509.SubjectAlternativeName([*map(x509.DNSName, names)]), critical=False)
    return made.sign(issuer_key, hashes.SHA256())


def hospital(folder, *, complete=True, names=(HOST,), key=None, **options):
    """The files of a server whose certificate a hospital's intermediate authority signed, with it if ``complete``."""
    root_key, between_key, key = new_key(ec.SECP256R1), new_key(ec.SECP256R1), key or new_key()
    root = issue("Root", root_key, "Root", root_key, authority=True)
    between = issue("Issuing", between_key, "Root", root_key, authority=True)
    leaf = issue("coordinator", key, "Issuing", between_key, authority=False, names=names, **options)
    folder.mkdir()
    (folder / "ca.crt").write_bytes(root.public_bytes(PEM))
    (folder / "server.crt").write_bytes(b"".join(each.public_bytes(PEM) for each in [leaf, between][: 1 + complete]))
    write_key(folder / "server.key", key, serialization.PrivateFormat.PKCS8)
    return folder


@pytest.mark.parametrize("options", [{}, {"key": rsa.generate_private_key(65537, 2048)}, {"names": ["*.example.org"]}])
def test_an_organizations_authority_takes_the_place_of_ours(options, tmp_path):
    own = hospital(tmp_path / "own", **options)
    check_server(own)
    handshake(own, HOST)
    before = contents(own)
    with pytest.raises(UsageError, match=r"has no ca\.key"):
        make_certificate(own, [HOST])
    assert contents(own) == before


def test_what_an_authority_lacks_is_named_before_the_start(tmp_path):
    cases = {
        r"ca\.crt does not vouch for .*append intermediate ones": {"complete": False},
        r"server\.crt names no host \(subjectAltName\)": {"names": ()},
        r"does not vouch for .*expired.*renew one that has ended": {"end": NOW - timedelta(days=1)},
    }
    for number, (said, options) in enumerate(cases.items()):
        with pytest.raises(UsageError, match=said):
            check_server(hospital(tmp_path / str(number), **options))


def test_a_key_that_does_not_fit_the_certificate_is_named_before_the_start(place, tmp_path):
    own, other = hospital(tmp_path / "own"), hospital(tmp_path / "other")
    shutil.copy(other / "server.key", own)
    with pytest.raises(UsageError, match=r"server\.key is not the key of .*server\.crt"):
        check_server(own)
    form, locked = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    write_key(own / "server.key", new_key(), form, locked)
    with pytest.raises(UsageError, match=r"server\.key is not the key of .*without a passphrase"):
        check_server(own)
    (own / "ca.crt").write_text("no")
    for check in (check_server, read_end):
        with pytest.raises(UsageError, match=r"ca\.crt is not a certificate .*`fedshift pki`"):
            check(own)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_private_key_that_others_can_read_is_refused_by_name(place, tmp_path, mode):
    site = tmp_path / "site" / "north.key"
    write_key(site, new_key())
    for path, use in (
        (site, lambda: load_private_key(site)), (place / "server.key", lambda: check_server(place)),
        (place / "ca.key", lambda: check_server(place)), (place / "ca.key", lambda: make_certificate(place, [])),
    ):  # fmt: skip
        use()
        path.chmod(mode)
        with pytest.raises(UsageError, match=rf"{path.name} can be read by others \(mode 0{mode:o}\): chmod 600"):
            use()
        path.chmod(0o600)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="sites make their keys by ssh-keygen")
@pytest.mark.parametrize("bits", [256, 384, 521])
def test_keys_of_ssh_keygen_are_flowers(place, tmp_path, bits):
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, sign_message, verify_signature

    file = tmp_path / "north.key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", str(bits), "-N", "", "-f", file], check=True)
    shutil.copy(f"{file}.pub", place / "nodes" / "north.pub")
    known = load_public_keys(place)["north"]
    assert verify_signature(bytes_to_public_key(known), b"x", sign_message(load_private_key(file), b"x"))


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="sites make their keys by ssh-keygen")
def test_a_key_of_another_kind_is_refused_with_the_command(place, tmp_path):
    file, said = tmp_path / "north.key", r"ssh-keygen -t ecdsa -b 384 -N '' -f"
    locked = ["ssh-keygen", "-q", "-t", "ecdsa", "-N", "secret", "-f", file]
    for key in (ed25519.Ed25519PrivateKey.generate(), rsa.generate_private_key(65537, 2048)):
        write_key(file, key)
        write_public(place, "north", key)
        with pytest.raises(UsageError, match=rf"north\.key is not an ECDSA key: .*{said} .*north\.key"):
            load_private_key(file)
        with pytest.raises(UsageError, match=rf"north\.pub is not an ECDSA key: .*{said}"):
            load_public_keys(place)
    for write in (
        file.unlink, lambda: subprocess.run(locked, check=True), lambda: file.write_text("garbage"),
        lambda: write_key(file, new_key(), serialization.PrivateFormat.PKCS8),
    ):  # fmt: skip
        write()
        with pytest.raises(UsageError, match=rf"north\.key is not a private key .*{said}"):
            load_private_key(file)
    (place / "nodes" / "north.pub").write_text("ecdsa-sha2-nist")
    with pytest.raises(UsageError, match=rf"north\.pub is not a public key .*{said}"):
        load_public_keys(place)


@pytest.mark.parametrize("name", [" ", "a ", "", ".a", "a\\b", "a,b", "a\nb", "a\x1bb"])
def test_a_site_whose_name_cannot_be_shown_is_refused(place, name):
    write_public(place, name, new_key())
    with pytest.raises(UsageError, match="name the file as the site, in printable signs"):
        load_public_keys(place)


def test_keys_come_change_and_go_while_a_file_that_is_being_written_changes_nothing_else(place):
    north, south, said = new_key(), new_key(), []
    write_public(place, "north", north)
    public = PublicKeys(place, said.append)
    write_public(place, "south", south)
    assert public() == {"north": pem_of(north), "south": pem_of(south)}
    (place / "nodes" / "south.pub").write_text("ecdsa-sha2-nis")  # half of it
    write_public(place, "west", west := new_key())
    write_public(place, "north", north := new_key())
    assert public() == {"north": pem_of(north), "south": pem_of(south), "west": pem_of(west)}
    assert public() == public()
    assert len(said) == 1
    assert "south.pub is not a public key" in said[0]
    for name in ("south", "north", "west"):
        (place / "nodes" / f"{name}.pub").unlink()
    assert public() == {}


def test_two_sites_with_one_key_are_refused_and_neither_takes_the_others_place(place):
    north, said = new_key(), []
    write_public(place, "north", north)
    public = PublicKeys(place, said.append)
    write_public(place, "a", north)
    assert public() == {"north": pem_of(north)}
    assert all("a, north share a key" in text for text in said)
    with pytest.raises(UsageError, match="a, north share a key: each site makes one"):
        load_public_keys(place)


def test_the_end_of_a_certificate_is_announced_once_a_day_with_the_remedy(tmp_path, monkeypatch):
    said, clock = [], SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(keys, "time", clock)
    make_certificate(tmp_path / "soon", [HOST], 20)
    notice = EndNotice(tmp_path / "soon", said.append)
    for hours in (0.1, 1, 23, 24.2, 30):
        clock.monotonic = lambda hours=hours: hours * 3600
        notice.check()
    assert len(said) == 2
    when = f"{tmp_path / 'soon'}: the certificate in server.crt ends in 19 days, on {NOW + timedelta(days=20):%Y-%m-%d}"
    assert said[0].startswith(when)
    assert "run `fedshift pki DIR` where ca.key is, then continue (`fedshift serve --resume`)" in said[0]
    make_certificate(tmp_path / "late", [HOST], 31)
    for quiet in (tmp_path / "late", None):
        EndNotice(quiet, said.append).check()
    assert len(said) == 2


def test_the_end_of_both_certificates_is_announced_also_after_it(tmp_path, monkeypatch):
    said = []
    make_certificate(tmp_path / "pki", [HOST], 10)
    monkeypatch.setattr(keys, "datetime", SimpleNamespace(now=lambda zone: datetime.now(zone) + timedelta(days=3660)))
    EndNotice(tmp_path / "pki", said.append).check()
    assert ["server.crt has ended" in said[1], "ca.crt has ended" in said[0]] == [True, True]
    assert "make a new authority, and bring its ca.crt to all" in said[0]
