"""Contents of a certificate: its hosts, its end, and whether the authority signed it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from ...utils.errors import UsageError

NOTICE = timedelta(days=30)
"""Time between the first notice of a certificate's end and the end."""
DAY = 86400.0


def list_hosts(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the names and addresses that the certificate is for (RFC 5280, 4.2.1.6)."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = map(str, found.get_values_for_type(x509.IPAddress))
    return *found.get_values_for_type(x509.DNSName), *addresses


def is_for(certificate: x509.Certificate, host: str) -> bool:
    """Return whether the certificate is for ``host``; a star matches the first part of a name (RFC 6125, 6.4.3)."""
    try:
        return str(ip_address(host)) in list_hosts(certificate)
    except ValueError:
        first, _, rest = host.lower().rstrip(".").partition(".")
        return not {f"{first}.{rest}".rstrip("."), f"*.{rest}"}.isdisjoint(map(str.lower, list_hosts(certificate)))


def check_chain(chain: Sequence[x509.Certificate], roots: Sequence[x509.Certificate]) -> None:
    """Raise ``ValueError`` unless the first certificate of ``chain`` is now valid for its server (RFC 5280, 6).

    For which hosts is another question: :func:`is_for`.

    Args:
        chain: the server's certificate, then the certificates of intermediate authorities.
        roots: the trusted authorities.

    """
    policy = PolicyBuilder().store(Store(list(roots))).time(datetime.now(UTC))
    for name in list_hosts(chain[0]):
        try:
            verifier = policy.build_server_verifier(_name_subject(example_host(name)))
        except ValueError:  # a name with an underscore, which is invalid on the Internet
            continue
        try:
            verifier.verify(chain[0], list(chain[1:]))
        except VerificationError as error:
            raise ValueError(str(error)) from error
        return
    raise ValueError("it is for no host")


def _name_subject(host: str) -> x509.DNSName | x509.IPAddress:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def check_server(directory: Path) -> None:
    """Raise :class:`UsageError` unless ``server.key`` belongs to ``server.crt``, for which ``ca.crt`` vouches.

    A certificate that has ended is left to :class:`EndNotice`, since a run without sites may be at its end.
    """
    file = directory / "server.crt"
    chain, roots = read_certificates(file), read_certificates(directory / "ca.crt")
    try:
        key = serialization.load_pem_private_key((directory / "server.key").read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{directory / 'server.key'} is not a private key without a passphrase ({error}): take the file that "
            "`fedshift pki init` made, or the key of your request to an authority"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(
            f"{directory / 'server.key'} is not an ECDSA key, which the coordinator needs to sign its questions: "
            "request a certificate for a key on the curve P-384"
        )
    if key.public_key() != chain[0].public_key():
        raise UsageError(f"{file} is not for the key in server.key: bring both from the same place")
    if not list_hosts(chain[0]):
        raise UsageError(f"{file} names no host (subjectAltName): request one with the coordinator's name")
    try:
        check_chain(chain, roots)
    except ValueError as error:
        if read_end(directory) > datetime.now(UTC):
            raise UsageError(
                f"{directory / 'ca.crt'} does not vouch for {file} ({error}): give the authority's certificate as "
                "ca.crt, and append the certificates of intermediate authorities to server.crt"
            ) from error


def example_host(name: str) -> str:
    """Return ``name``, which a certificate is for, as a host's name: with a word in place of a star."""
    return f"coordinator{name[1:]}" if name.startswith("*.") else name


def read_certificates(path: Path) -> list[x509.Certificate]:
    """Return the certificates in ``path``, at least one; raise :class:`UsageError` if there are none."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is not a certificate ({error}): take the file that `fedshift pki init` made"
        ) from error


def read_ends(directory: Path) -> dict[str, datetime]:
    """Return when the certificates in each file of ``directory`` end: the first of a chain, the last of authorities."""
    ends = {}
    for name, choose in (("ca.crt", max), ("server.crt", min)):
        if (directory / name).exists():
            ends[name] = choose(each.not_valid_after_utc for each in read_certificates(directory / name))
    return ends


def read_end(directory: Path) -> datetime:
    """Return when the first of the certificates in ``directory`` ends."""
    return min(read_ends(directory).values())


class EndNotice:
    """Daily notice that a certificate in ``directory`` (None: there are none) ends soon, or has ended."""

    def __init__(self, directory: Path | None, say: Callable[[str], None]) -> None:
        self._ends = read_ends(directory) if directory else {}
        self._directory, self._say, self._next = directory, say, 0.0

    def check(self) -> None:
        """Say it if it is due."""
        if not self._ends or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + DAY
        name = min(self._ends, key=self._ends.__getitem__)
        if text := describe_end(name, self._ends[name], datetime.now(UTC)):
            self._say(f"{self._directory}: {text}")


def describe_end(name: str, end: datetime, now: datetime) -> str:
    """Return a warning if the certificate in file ``name`` ends within :data:`NOTICE`; empty if it does not."""
    if end - now > NOTICE:
        return ""
    days = (end - now).days
    when = f"ends in {days} days" if end > now else "has ended"
    remedy = (
        "renew it where the authority's key is (`fedshift pki renew`), and bring server.crt to the coordinator"
        if name == "server.crt"
        else "make a new authority (`fedshift pki init`), and bring its files to all machines"
    )
    return (
        f"the certificate in {name} {when}, on {end:%Y-%m-%d %H:%M} (UTC), and no site connects after that: {remedy} "
        "between two runs of `serve --resume`"
    )
