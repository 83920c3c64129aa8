"""Keys and certificates of one federation: its certificate authority, the coordinator's certificate, a key per node.

Flower's SuperLink presents ``server.crt``, which SuperNodes verify against ``ca.crt`` (RFC 5280). SuperNodes sign
requests with ECDSA keys on a NIST curve, which Flower 1.41 and 1.42 read in OpenSSH format (``flower-supernode
--auth-supernode-private-key``, ``flwr supernode register``). All keys use P-384, as Flower's own key generator does.

``ca.crt ca.key server.crt server.key nodes/NAME.key nodes/NAME.pub retired/NAME-NUMBER.pub``

The authority's private key signs the coordinator's certificate, and later ones under the same authority; nothing else
needs it. An organization's own authority may take its place: its certificates and a key made elsewhere are then
``ca.crt``, ``server.crt`` and ``server.key``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from itertools import count
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

from .certificates import list_hosts, read_certificates

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Hosts for which every server certificate is valid."""
DAYS, MOST_DAYS = 825, 3650
"""Default validity in days of the coordinator's certificate (the longest that strict clients accept from a server), and
the maximum, which is the authority's validity."""
_SKEW = timedelta(hours=1)
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z)({_LABEL}\.)*(?!\d+\Z){_LABEL}")


@dataclass(frozen=True, kw_only=True)
class Authority:
    """The coordinator's hosts, the nodes for which keys were made, and the end of the coordinator's certificate."""

    hosts: tuple[str, ...]
    names: tuple[str, ...]
    until: datetime


def make_authority(directory: Path, hosts: Iterable[str], names: Iterable[str], days: int = DAYS) -> Authority:
    """Make an authority, a server certificate for ``hosts`` and :data:`LOOPBACK`, and keys for the nodes ``names``.

    Either all files are made or none. Private keys are created with mode 0600, readable only by their owner. The
    authority is valid for :data:`MOST_DAYS`.

    Args:
        directory: a new or empty directory, which is made accessible only to its owner (0700).
        hosts: the coordinator's names or IP addresses.
        names: the nodes' names.
        days: validity of the server certificate, in days.

    Raises:
        UsageError: for a directory that is not empty, or an invalid host, name or number of days.
        FedshiftError: if files cannot be written.

    """
    if (directory / "ca.crt").exists():
        raise UsageError(
            f"{directory / 'ca.crt'} exists, and nothing is overwritten: give a new directory, more nodes with "
            f"`fedshift pki add {directory} NAME`, or renew the coordinator's certificate with `fedshift pki renew "
            f"{directory}`"
        )
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty: give a new directory, which will hold only keys")
    _check_days(days)
    certified = _list_certified(hosts)
    names = tuple(names)
    nodes = _node_key_files(directory, names)
    ca_key, server_key = _new_key(), _new_key()
    now = datetime.now(UTC).replace(microsecond=0)
    until = now + timedelta(days=days)
    ca = _make_root(ca_key, now - _SKEW, now + timedelta(days=MOST_DAYS))
    server = _make_server(ca, ca_key, server_key, certified, now - _SKEW, until)
    files = {
        directory / "ca.key": _encode_private(ca_key),
        directory / "ca.crt": ca.public_bytes(serialization.Encoding.PEM),
        directory / "server.key": _encode_private(server_key),
        directory / "server.crt": server.public_bytes(serialization.Encoding.PEM),
    }
    _write(directory, files | nodes)
    return Authority(hosts=certified, names=names, until=until)


def renew_certificate(
    directory: Path, hosts: Iterable[str] = (), days: int = DAYS, *, new_key: bool = False
) -> Authority:
    """Replace ``server.crt`` in ``directory`` by a new certificate of the same authority.

    Args:
        directory: where :func:`make_authority` made the authority, with its private key.
        hosts: the coordinator's names or IP addresses; by default the names in the previous certificate.
        days: validity in days, at most the authority's.
        new_key: replace ``server.key`` too; sites whose policies name the coordinator's key must then name the new one.

    Raises:
        UsageError: without the authority's key, or for an invalid host or number of days.
        FedshiftError: if files cannot be written.

    """
    _require_authority(directory)
    _check_days(days)
    ca, server = (read_certificates(directory / f"{name}.crt")[0] for name in ("ca", "server"))
    certified = _list_certified(hosts or list_hosts(server))
    if not (directory / "ca.key").is_file():
        raise UsageError(
            f"{directory} holds no ca.key, with which `fedshift pki init` signs: renew where that was run. If the key "
            "is nowhere, make a new authority and bring its files to all machines"
        )
    ca_key, server_key = (_load_key(directory / f"{name}.key") for name in ("ca", "server"))
    if ca_key.public_key() != ca.public_key():
        raise UsageError(f"{directory / 'ca.key'} is not the key of ca.crt: bring both from one authority")
    now = datetime.now(UTC).replace(microsecond=0)
    until = min(now + timedelta(days=days), ca.not_valid_after_utc)
    if until <= now:
        raise UsageError(
            f"the authority in {directory} ended on {until:%Y-%m-%d}: make a new one (`fedshift pki init`) and bring "
            "its files to all machines"
        )
    files = {}
    if new_key:
        server_key = _new_key()
        files[directory / "server.key"] = _encode_private(server_key)
    made = _make_server(ca, ca_key, server_key, certified, now - _SKEW, until)
    files[directory / "server.crt"] = made.public_bytes(serialization.Encoding.PEM)
    _replace(directory, files)
    return Authority(hosts=certified, names=(), until=until)


def add_nodes(directory: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Make keys for more nodes of the authority in ``directory``, all or none, and return their names.

    Raises :class:`UsageError` if there is no authority, if names are missing, taken or invalid, and
    :class:`FedshiftError` if files cannot be written.
    """
    _require_authority(directory)
    names = tuple(names)
    if not names:
        raise UsageError(f"no node is named: write `fedshift pki add {directory} NAME`")
    _write(directory, _node_key_files(directory, names))
    return names


def rotate_key(directory: Path, name: str) -> None:
    """Make a new key for node ``name``; the public key before stays in ``retired``, for what it signed.

    Raises :class:`UsageError` if ``name`` has no key, and :class:`FedshiftError` if files cannot be written.
    """
    _require_node(directory, name)
    files = _make_node_key(directory, name)
    _retire(directory, name)
    _replace(directory, files)


def revoke_key(directory: Path, name: str) -> None:
    """Remove the keys of node ``name``; its public key stays in ``retired``, for what it signed.

    Raises :class:`UsageError` if ``name`` has no key, and :class:`FedshiftError` if files cannot be moved.
    """
    _require_node(directory, name)
    _retire(directory, name)
    for kind in ("pub", "key"):
        (directory / "nodes" / f"{name}.{kind}").unlink(missing_ok=True)


def load_public_keys(directory: Path) -> dict[str, bytes]:
    """Return public keys by node name, sorted, in the format of Flower's ``NodeInfo.public_key`` (PEM).

    Raises :class:`UsageError` if a file is not such a key, or two nodes share a key.
    """
    owners: dict[bytes, str] = {}
    for path in sorted((directory / "nodes").glob("*.pub"), key=lambda path: path.stem):
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
        except FileNotFoundError:  # removed since
            continue
        except (ValueError, UnsupportedAlgorithm) as error:
            raise UsageError(f"{path} is not a public key ({error}): take the file that `fedshift pki` made") from error
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise UsageError(f"{path}: Flower takes ECDSA keys on a NIST curve: take the file that `fedshift pki` made")
        pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        known = owners.setdefault(pem, path.stem)
        if known != path.stem:
            raise UsageError(f"{path} is the key of node {known!r} too: each node needs a different one")
    return {name: key for key, name in owners.items()}


class PublicKeys:
    """The public keys of nodes in ``directory``, whose files may be added, replaced and removed at any time.

    While a file cannot be read, perhaps because it is being written, existing files keep their previous keys, and
    ``say`` is called.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self.directory, self._say = directory, say
        self._files = self._list()
        self._keys = load_public_keys(directory)

    def __call__(self) -> Mapping[str, bytes]:
        """Return the keys by node name, in the format of :func:`load_public_keys`."""
        if (files := self._list()) != self._files:
            self._files = files
            try:
                self._keys = load_public_keys(self.directory)
            except UsageError as error:
                self._keys = {name: key for name, key in self._keys.items() if name in files}
                self._say(f"{error}. Until then no key is added or replaced")
        return self._keys

    def _list(self) -> dict[str, tuple[int, int]]:
        """Return the files by node name, each with what changes when it is written."""
        found = {}
        for path in (self.directory / "nodes").glob("*.pub"):
            with suppress(FileNotFoundError):  # removed since
                status = path.stat()
                found[path.stem] = status.st_mtime_ns, status.st_size
        return found


def _check_days(days: int) -> None:
    if not 1 <= days <= MOST_DAYS:
        raise UsageError(f"days {days}: certificates are valid for 1 to {MOST_DAYS} days")


def _list_certified(hosts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*map(_normalize_host, hosts), *LOOPBACK]))


def _require_authority(directory: Path) -> None:
    if not (directory / "ca.crt").is_file():
        raise UsageError(f"{directory} holds no ca.crt: make one with `fedshift pki init {directory} --host HOST`")


def _require_node(directory: Path, name: str) -> None:
    known = sorted(path.stem for path in (directory / "nodes").glob("*.pub"))
    if name not in known:
        raise UsageError(
            f"node {name!r} has no key in {directory / 'nodes'}, which has keys of {', '.join(known) or 'none'}"
        )


def _node_key_files(directory: Path, names: Iterable[str]) -> dict[Path, bytes]:
    """Return files with new keys for the nodes ``names``; raise :class:`UsageError` for a taken or invalid name."""
    files: dict[Path, bytes] = {}
    for name in names:
        if not name.isprintable() or name != name.strip() or name[:1] in ("", ".") or set(name) & set("/\\,"):
            raise UsageError(
                f"node name {name!r}: write signs that can be shown, none of / \\ and comma, no dot or space in front"
            )
        made = _make_node_key(directory, name)
        for path in made:
            if path in files or path.exists():
                raise UsageError(
                    f"node {name!r} has a key, {path}, and nothing is overwritten: choose another name, or replace the "
                    f"key with `fedshift pki rotate {directory} {name}`"
                )
        files |= made
    return files


def _make_node_key(directory: Path, name: str) -> dict[Path, bytes]:
    """Return the files of a new key for node ``name``."""
    private, public = (directory / "nodes" / f"{name}.{kind}" for kind in ("key", "pub"))
    key, openssh = _new_key(), serialization.PublicFormat.OpenSSH
    return {
        private: _encode_private(key, serialization.PrivateFormat.OpenSSH),
        public: key.public_key().public_bytes(serialization.Encoding.OpenSSH, openssh) + b"\n",
    }


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


def _make_root(key: ec.EllipticCurvePrivateKey, start: datetime, end: datetime) -> x509.Certificate:
    """Return the certificate of an authority with this key (RFC 5280, 4.2.1)."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedshift authority")])
    return _sign(
        key, name, key, name, start, end,
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_key_usage("key_cert_sign", "crl_sign"), True),
    )  # fmt: skip


def _make_server(
    ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, key: ec.EllipticCurvePrivateKey, hosts: Iterable[str],
    start: datetime, end: datetime,
) -> x509.Certificate:  # fmt: skip
    """Return the coordinator's certificate for ``hosts`` by the authority ``ca`` (RFC 5280, 4.2.1)."""
    return _sign(
        ca_key, ca.subject, key, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedshift coordinator")]), start,
        end,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(list(map(_general_name, hosts))), False),
    )  # fmt: skip


def _sign(
    ca_key: ec.EllipticCurvePrivateKey, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, subject: x509.Name,
    start: datetime, end: datetime, *extensions: tuple[x509.ExtensionType, bool],
) -> x509.Certificate:  # fmt: skip
    draft = x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(key.public_key())
    draft = draft.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)
    for extension, critical in (
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        *extensions,
    ):
        draft = draft.add_extension(extension, critical=critical)
    return draft.sign(ca_key, hashes.SHA384())


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


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in ``path``, as :func:`_encode_private` wrote it."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{path} is not a private key ({error}): take the file that `fedshift pki init` made"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path} is not an ECDSA key: take the file that `fedshift pki init` made")
    return key


def _retire(directory: Path, name: str) -> None:
    """Copy the public key of node ``name`` to ``retired``."""
    place = directory / "retired"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        free = next(path for number in count(1) if not (path := place / f"{name}-{number}.pub").exists())
        shutil.copy(directory / "nodes" / f"{name}.pub", free)
    except OSError as error:
        raise FedshiftError(f"cannot write {place}: {error.strerror}. Give a place that can be written") from error


def _replace(directory: Path, files: Mapping[Path, bytes]) -> None:
    """Write or replace ``files``, each atomically; private keys with mode 0600 from creation."""
    beside = directory / ".new"
    shutil.rmtree(beside, ignore_errors=True)
    _write(beside, {beside / path.relative_to(directory): content for path, content in files.items()})
    for path in files:
        (beside / path.relative_to(directory)).replace(path)
    shutil.rmtree(beside)


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
