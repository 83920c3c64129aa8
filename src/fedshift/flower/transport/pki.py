"""Keys and certificates of one federation: its certificate authority, the coordinator's certificate, a key per node.

Flower's SuperLink presents ``server.crt``, which SuperNodes verify against ``ca.crt`` (RFC 5280). SuperNodes sign
requests with ECDSA keys on a NIST curve, which Flower 1.41 and 1.42 read in OpenSSH format (``flower-supernode
--auth-supernode-private-key``, ``flwr supernode register``). All keys use P-384, as Flower's own key generator does.

``ca.crt server.crt server.key nodes/NAME.key nodes/NAME.pub``

The authority's private key signs the two certificates and is then forgotten: nothing needs it later, and whoever had it
could pose as the coordinator.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from ...utils.errors import FedshiftError, UsageError

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError as error:
    raise UsageError("keys and certificates need the package cryptography: pip install 'fedshift[flower]'") from error

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Hosts for which every server certificate is valid."""
DAYS, MOST_DAYS = 825, 3650
"""Default validity of certificates in days (the longest that strict clients accept from a server), and the maximum."""
_SKEW = timedelta(hours=1)
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z)({_LABEL}\.)*(?!\d+\Z){_LABEL}")


@dataclass(frozen=True, kw_only=True)
class Authority:
    """A new authority: the coordinator's hosts, the nodes' names and the end of the certificates' validity."""

    hosts: tuple[str, ...]
    names: tuple[str, ...]
    until: datetime


def make_authority(directory: Path, hosts: Iterable[str], names: Iterable[str], days: int = DAYS) -> Authority:
    """Make an authority, a server certificate for ``hosts`` and :data:`LOOPBACK`, and keys for the nodes ``names``.

    Either all files are made or none. Private keys are created with mode 0600, readable only by their owner.

    Args:
        directory: a new or empty directory, which is made accessible only to its owner (0700).
        hosts: the coordinator's names or IP addresses.
        names: the nodes' names.
        days: validity of both certificates, in days.

    Raises:
        UsageError: for a directory that is not empty, or an invalid host, name or number of days.
        FedshiftError: if files cannot be written.

    """
    if (directory / "ca.crt").exists():
        raise UsageError(
            f"{directory / 'ca.crt'} exists, and nothing is overwritten: give a new directory, or more nodes with "
            f"`fedshift pki add {directory} NAME`"
        )
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty: give a new directory, which will hold nothing but keys")
    if not 1 <= days <= MOST_DAYS:
        raise UsageError(f"days {days}: certificates are valid for 1 to {MOST_DAYS} days")
    certified = tuple(dict.fromkeys([*map(_normalize_host, hosts), *LOOPBACK]))
    names = tuple(names)
    nodes = _node_key_files(directory, names)
    ca_key, server_key = _new_key(), _new_key()
    now = datetime.now(UTC).replace(microsecond=0)
    until = now + timedelta(days=days)
    ca, server = _make_certificates(ca_key, server_key, certified, now - _SKEW, until)
    pem = serialization.Encoding.PEM
    files = {
        directory / "ca.crt": ca.public_bytes(pem),
        directory / "server.key": _encode_private(server_key),
        directory / "server.crt": server.public_bytes(pem),
    }
    _write(directory, files | nodes)
    return Authority(hosts=certified, names=names, until=until)


def add_nodes(directory: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Make keys for more nodes of the authority in ``directory``, all or none, and return their names.

    Raises :class:`UsageError` if there is no authority, if no name is given, or if a name is taken or invalid, and
    :class:`FedshiftError` if files cannot be written.
    """
    if not (directory / "ca.crt").is_file():
        raise UsageError(f"{directory} holds no ca.crt: make one with `fedshift pki init {directory} --host HOST`")
    names = tuple(names)
    if not names:
        raise UsageError(f"no node is named: write `fedshift pki add {directory} NAME`")
    _write(directory, _node_key_files(directory, names))
    return names


def load_public_keys(directory: Path) -> dict[str, bytes]:
    """Return public keys by node name, sorted, in the format of Flower's ``NodeInfo.public_key`` (PEM).

    Raises :class:`UsageError` if ``directory`` has no keys, a file is not such a key, or two nodes share a key.
    """
    owners: dict[bytes, str] = {}
    for path in sorted((directory / "nodes").glob("*.pub"), key=lambda path: path.stem):
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
        except (ValueError, UnsupportedAlgorithm) as error:
            raise UsageError(f"{path} is no public key ({error}): take the file that `fedshift pki` made") from error
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise UsageError(f"{path}: Flower takes ECDSA keys on a NIST curve: take the file that `fedshift pki` made")
        pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        known = owners.setdefault(pem, path.stem)
        if known != path.stem:
            raise UsageError(f"{path} is the key of node {known!r} too: each node needs a different one")
    if not owners:
        raise UsageError(f"{directory / 'nodes'} holds no public key: make some with `fedshift pki add`")
    return {name: key for key, name in owners.items()}


def _node_key_files(directory: Path, names: Iterable[str]) -> dict[Path, bytes]:
    """Return files with new keys for the nodes ``names``; raise :class:`UsageError` for a taken or invalid name."""
    files: dict[Path, bytes] = {}
    for name in names:
        if not name.isprintable() or name != name.strip() or name[:1] in ("", ".") or set(name) & set("/\\,"):
            raise UsageError(
                f"node name {name!r}: write signs that can be shown, none of / \\ and comma, no dot or space in front"
            )
        private, public = (directory / "nodes" / f"{name}.{kind}" for kind in ("key", "pub"))
        for path in (private, public):
            if path in files or path.exists():
                raise UsageError(f"node {name!r} has a key, {path}, and nothing is overwritten: choose another name")
        key, openssh = _new_key(), serialization.PublicFormat.OpenSSH
        files[private] = _encode_private(key, serialization.PrivateFormat.OpenSSH)
        files[public] = key.public_key().public_bytes(serialization.Encoding.OpenSSH, openssh) + b"\n"
    return files


def _normalize_host(text: str) -> str:
    """Return ``text`` as a host for a certificate: in lower case, without scheme or port."""
    try:
        return str(ip_address(text))
    except ValueError:
        if not _HOST.fullmatch(text.lower()):
            raise UsageError(
                f"host {text!r}: write a name such as coordinator.example.org or an IP address, without scheme and port"
            ) from None
        return text.lower()


def _make_certificates(
    ca_key: ec.EllipticCurvePrivateKey,
    server_key: ec.EllipticCurvePrivateKey,
    hosts: Iterable[str],
    start: datetime,
    end: datetime,
) -> tuple[x509.Certificate, x509.Certificate]:
    """Return the authority's certificate and the server's (RFC 5280, 4.2.1)."""
    issuer, subject = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedshift {role}")])
        for role in ("authority", "coordinator")
    )
    blank = x509.CertificateBuilder().issuer_name(issuer).not_valid_before(start).not_valid_after(end)
    blank = blank.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)

    def sign(
        key: ec.EllipticCurvePrivateKey, name: x509.Name, *extensions: tuple[x509.ExtensionType, bool]
    ) -> x509.Certificate:
        draft = blank.subject_name(name).public_key(key.public_key()).serial_number(x509.random_serial_number())
        draft = draft.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        for extension, critical in extensions:
            draft = draft.add_extension(extension, critical=critical)
        return draft.sign(ca_key, hashes.SHA384())

    ca = sign(
        ca_key, issuer,
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_key_usage("key_cert_sign", "crl_sign"), True),
    )  # fmt: skip
    server = sign(
        server_key, subject,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(list(map(_general_name, hosts))), False),
    )  # fmt: skip
    return ca, server


def _key_usage(*allowed: str) -> x509.KeyUsage:
    uses = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{use: use in allowed for use in uses})


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _encode_private(
    key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(directory: Path, files: Mapping[Path, bytes]) -> None:
    """Write ``files``, private keys with mode 0600 from creation; on any failure remove all of them."""
    place = directory
    with ExitStack() as undo:
        try:
            for place in (directory, directory / "nodes"):
                if not place.is_dir():
                    place.mkdir(mode=0o700, parents=True)
                    undo.callback(place.rmdir)
                elif not any(place.iterdir()):
                    place.chmod(0o700)
            for place, content in files.items():
                mode = 0o600 if place.suffix == ".key" else 0o644
                with open(place, "xb", opener=partial(os.open, mode=mode)) as file:
                    undo.callback(place.unlink)
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise FedshiftError(f"cannot write {place}: {error.strerror}. Give a place that can be written") from error
        undo.pop_all()
