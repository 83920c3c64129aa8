"""Keys of a federation: an authority and the coordinator's certificate (TLS), and a public key for each site.

``ca.crt ca.key server.crt server.key nodes/NAME.pub``. A site makes its key and keeps it (:data:`MAKE_KEY`); the
coordinator stores ``NAME.pub`` as ``nodes/NAME.pub``, and the site takes part while that file exists. An organization's
authority may replace ours: its certificates and the key of its request are then ``ca.crt``, ``server.crt`` (with
intermediate ones) and ``server.key``.
"""

from __future__ import annotations

import re
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..utils.errors import UsageError
from ..utils.files import owner_only, read_text, write_atomically

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Hosts for which each certificate is valid."""
UNKNOWN = "the coordinator does not know this key"
"""Answer to a node whose key is not among the public keys."""
DAYS, MOST_DAYS = 825, 3650
"""Validity of the coordinator's certificate (the longest that strict clients accept), and of the authority."""
NOTICE_DAYS, DAY_SECONDS = 30, 86400.0
MAKE_KEY = "ssh-keygen -t ecdsa -b 384 -N '' -f NAME"
_SKEW = timedelta(hours=1)
_UNREADABLE = (OSError, ValueError, TypeError, UnsupportedAlgorithm)
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z)({_LABEL}\.)*(?!\d+\Z){_LABEL}")
_PEM = serialization.Encoding.PEM


def make_certificate(directory: Path, hosts: Iterable[str], days: int = DAYS) -> datetime:
    """Make the coordinator's certificate, valid for ``days``, and first the authority if there is none; return its end.

    ``hosts``: names or IP addresses of the coordinator for sites; by default the hosts of the previous certificate.
    Keys that are there are kept, so that sites need no new files. Only the owner can read ``directory``.

    Raises :class:`UsageError` for an invalid host or number of days, and where another authority made the certificate.
    """
    certified = _check_request(directory, hosts, days)
    with owner_only():
        (directory / "nodes").mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        now = datetime.now(UTC).replace(microsecond=0)
        root, ca_key = _open_authority(directory, now - _SKEW)
        end = min(now + timedelta(days=days), root.not_valid_after_utc)
        key = _open_key(directory / "server.key")
        draft = _draft(root.subject, "fedshift coordinator", key, now - _SKEW, end)
        names = x509.SubjectAlternativeName([*map(_general_name, certified)])
        purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        draft = draft.add_extension(names, critical=False).add_extension(purpose, critical=False)
        limits = x509.BasicConstraints(ca=False, path_length=None)
        write_atomically(directory / "server.crt", _sign(draft, key, ca_key, limits, "digital_signature"))
    return end


def _check_request(directory: Path, hosts: Iterable[str], days: int) -> list[str]:
    """Return all hosts of the certificate that is asked for."""
    if not 1 <= days <= MOST_DAYS:
        raise UsageError(f"days={days}: certificates are valid for 1 to {MOST_DAYS} days")
    others = [directory / name for name in ("ca.crt", "server.crt", "server.key")]
    if not (directory / "ca.key").exists() and any(map(Path.exists, others)):
        raise UsageError(
            f"{directory} has no ca.key: request a certificate from the authority of ca.crt, or choose a new directory"
        )
    before = directory / "server.crt"
    certified = [*map(_normalize_host, hosts)] or (list_hosts(_read(before)[0]) if before.exists() else [])
    if not certified:
        raise UsageError(f"{directory} has no certificate yet: name the coordinator's host or IP address (--host)")
    return [*dict.fromkeys([*certified, *LOOPBACK])]


def _open_authority(directory: Path, start: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the authority's certificate, which is made if there is none, and its key."""
    path, key = directory / "ca.crt", _open_key(directory / "ca.key")
    if not path.exists():
        name = "fedshift authority"
        draft = _draft(_name(name), name, key, start, start + timedelta(days=MOST_DAYS))
        limits = x509.BasicConstraints(ca=True, path_length=0)
        write_atomically(path, _sign(draft, key, key, limits, "key_cert_sign", "crl_sign"))
    root = _read(path)[0]
    if root.public_key() != key.public_key():
        raise UsageError(f"{directory / 'ca.key'} is not the key of ca.crt: bring both from one authority")
    if root.not_valid_after_utc < datetime.now(UTC):
        raise UsageError(f"the authority in {directory} has ended: make one in a new directory, for all machines")
    return root, key


def check_server(directory: Path) -> None:
    """Raise :class:`UsageError` unless a site that trusts ``ca.crt`` believes ``server.crt`` with ``server.key``."""
    ca, server, key = (directory / name for name in ("ca.crt", "server.crt", "server.key"))
    _read(ca)
    if not (hosts := list_hosts(_read(server)[0])):
        raise UsageError(f"{server} names no host (subjectAltName): request one with the coordinator's name")
    for path in (key, directory / "ca.key"):
        _require_private(path)
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        here.load_cert_chain(server, key, password="")
    except OSError as error:
        raise UsageError(
            f"{key} is not the key of {server}, without a passphrase ({error}): bring both from one place"
        ) from error
    try:
        _shake_hands(here, ssl.create_default_context(cafile=ca), hosts[0].replace("*", "coordinator"))
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"{ca} does not vouch for {server} ({error.verify_message}): renew one that has ended (`fedshift pki "
            f"{directory}`), or give the authority's as ca.crt and append intermediate ones to server.crt"
        ) from error


def list_hosts(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses that the certificate is for (RFC 5280, 4.2.1.6)."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def read_end(directory: Path) -> datetime:
    """Return when the first of the certificates in ``directory`` ends."""
    return min(_read_ends(directory).values())


class EndNotice:
    """Daily notice that a certificate in ``directory`` (None: there is none) ends soon, or has ended."""

    def __init__(self, directory: Path | None, say: Callable[[str], None]) -> None:
        self._ends, self._directory, self._say = _read_ends(directory) if directory else {}, directory, say
        self._next = 0.0

    def check(self) -> None:
        """Say it if it is due: from :data:`NOTICE_DAYS` before the end on, once a day."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + DAY_SECONDS
        for name, end in self._ends.items():
            if (days := (end - datetime.now(UTC)).days) < NOTICE_DAYS:
                when = f"ends in {days} days" if days >= 0 else "has ended"
                renew, anew = (
                    "run `fedshift pki DIR` where ca.key is",
                    "make a new authority, and bring its ca.crt to all",
                )
                remedy = renew if name == "server.crt" else anew
                self._say(
                    f"{self._directory}: the certificate in {name} {when}, on {end:%Y-%m-%d %H:%M} (UTC), and no site "
                    f"connects after that: {remedy}, then continue (`fedshift serve --resume`)"
                )


def load_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a site's private key; raise :class:`UsageError` if there is none, or others can read it."""
    make = f"make one, without a passphrase, by {MAKE_KEY.replace('NAME', str(path))}"
    _require_private(path)
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except _UNREADABLE as error:
        raise UsageError(f"{path} is not a private key in OpenSSH's format ({error}): {make}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, _CURVES):
        raise UsageError(f"{path} is not an ECDSA key: {make}")
    return key


def load_public_keys(directory: Path) -> dict[str, bytes]:
    """Return the public keys in ``directory/nodes`` by site, as Flower sends them (PEM).

    Raises :class:`UsageError` for a file that is not such a key, a name that cannot be shown, and for a shared key.
    """
    keys, problems = _read_keys(directory)
    for problem in problems.values():
        raise problem
    return keys


class PublicKeys:
    """The sites' public keys, whose files may come, change and go; while one cannot be read, its site's key stays.

    ``say``: called with what is wrong with a file.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self.directory, self._say = directory, say
        self._files, self._keys = self._list(), load_public_keys(directory)

    def __call__(self) -> Mapping[str, bytes]:
        """Return the keys by name."""
        if (files := self._list()) != self._files:
            self._files = files
            keys, problems = _read_keys(self.directory)
            self._keys = keys | {name: key for name, key in self._keys.items() if name in problems}
            for problem in problems.values():
                self._say(f"{problem}. Until then the previous key of this site is valid")
        return self._keys

    def _list(self) -> dict[str, tuple[int, ...]]:
        files = dict[str, tuple[int, ...]]()
        for path in (self.directory / "nodes").glob("*.pub"):
            with suppress(FileNotFoundError):  # removed since
                status = path.stat()
                files[path.stem] = status.st_mtime_ns, status.st_size, status.st_ino
        return files


def _read_keys(directory: Path) -> tuple[dict[str, bytes], dict[str, UsageError]]:
    """Return the keys by site, and what is wrong with the files of others."""
    keys, problems = dict[str, bytes](), dict[str, UsageError]()
    for path in sorted((directory / "nodes").glob("*.pub")):
        with suppress(FileNotFoundError):  # removed since
            try:
                keys[path.stem] = _read_key(path)
            except UsageError as error:
                problems[path.stem] = error
    counts = Counter(keys.values())
    for name in [name for name, key in keys.items() if counts[key] > 1]:
        shared = ", ".join(other for other in keys if keys[other] == keys[name])
        problems[name] = UsageError(f"{directory / 'nodes'}: {shared} share a key: each site makes one ({MAKE_KEY})")
    return {name: key for name, key in keys.items() if name not in problems}, problems


def _read_key(path: Path) -> bytes:
    name = path.stem
    if not name.isprintable() or name != name.strip() or name[:1] in ("", ".") or set(name) & set("\\,"):
        raise UsageError(f"{str(path)!r}: name the file as the site, in printable signs without comma and backslash")
    try:
        key = serialization.load_ssh_public_key(read_text(path).encode())
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        raise UsageError(f"{path} is not a public key ({error}): bring the site's .pub ({MAKE_KEY})") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVES):
        raise UsageError(f"{path} is not an ECDSA key: bring one that the site made by {MAKE_KEY}")
    return key.public_bytes(_PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _require_private(path: Path) -> None:
    """Raise :class:`UsageError` if other accounts can read the file, as ssh does."""
    if path.exists() and (mode := path.stat().st_mode & 0o777) & 0o077:
        raise UsageError(f"{path} can be read by others (mode {mode:04o}): chmod 600 {path}")


def _read(path: Path) -> Sequence[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a certificate ({error}): bring the file that `fedshift pki` made") from error


def _read_ends(directory: Path) -> dict[str, datetime]:
    """Return the end of each certificate file: the first of a chain, the last of authorities."""
    return {
        name: choose(certificate.not_valid_after_utc for certificate in _read(directory / name))
        for name, choose in (("ca.crt", max), ("server.crt", min))
        if (directory / name).exists()
    }


def _shake_hands(here: ssl.SSLContext, there: ssl.SSLContext, host: str) -> None:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [there.wrap_bio(down, up, server_hostname=host), here.wrap_bio(up, down, server_side=True)]
    while ends:
        for end in list(ends):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)


def _open_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in ``path``, which is made if there is none."""
    if not path.exists():
        made, form = ec.generate_private_key(ec.SECP384R1()), serialization.PrivateFormat.PKCS8
        write_atomically(path, made.private_bytes(_PEM, form, serialization.NoEncryption()))
    _require_private(path)
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except _UNREADABLE as error:
        raise UsageError(f"{path} is not a private key without a passphrase ({error}): restore it") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path} is not an ECDSA key: choose a new directory")
    return key


def _draft(
    issuer: x509.Name, subject: str, key: ec.EllipticCurvePrivateKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    number = x509.random_serial_number()
    return x509.CertificateBuilder(issuer, _name(subject), key.public_key(), number, start, end)


def _sign(
    draft: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, ca_key: ec.EllipticCurvePrivateKey,
    limits: x509.BasicConstraints, *uses: str,
) -> bytes:  # fmt: skip
    """Return the certificate with the extensions of RFC 5280, 4.2.1."""
    known = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    usage = x509.KeyUsage(**{use: use in uses for use in known})
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    subject = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    draft = draft.add_extension(limits, critical=True).add_extension(usage, critical=True)
    draft = draft.add_extension(issuer, critical=False).add_extension(subject, critical=False)
    return draft.sign(ca_key, hashes.SHA384()).public_bytes(_PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _normalize_host(text: str) -> str:
    with suppress(ValueError):
        return str(ip_address(text))
    if not _HOST.fullmatch(text.lower()):
        raise UsageError(f"host {text!r}: write a name (a.example.org) or an IP address, without scheme and port")
    return text.lower()


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
