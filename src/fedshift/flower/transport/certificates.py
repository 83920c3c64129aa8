"""What a certificate says: the hosts that it is for, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509

from ...utils.errors import UsageError

NOTICE = timedelta(days=30)
"""Time before the end of a certificate from which on it is announced."""
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
    """Return whether the certificate is for ``host``; a star stands for the first part of a name (RFC 6125, 6.4.3)."""
    try:
        return str(ip_address(host)) in list_hosts(certificate)
    except ValueError:
        first, _, rest = host.lower().rstrip(".").partition(".")
        return not {f"{first}.{rest}".rstrip("."), f"*.{rest}"}.isdisjoint(map(str.lower, list_hosts(certificate)))


def read_end(directory: Path) -> datetime:
    """Return when the first of the certificates in ``directory`` ends."""
    ends = []
    for path in (directory / name for name in ("ca.crt", "server.crt")):
        if path.exists():
            try:
                ends.append(x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc)
            except ValueError as error:
                raise UsageError(f"{path} is no certificate: take the file that `fedshift pki init` made") from error
    return min(ends)


class EndNotice:
    """Says once a day that a certificate in ``directory`` (None: there are none) ends soon, or has ended."""

    def __init__(self, directory: Path | None, say: Callable[[str], None]) -> None:
        self.end = read_end(directory) if directory else None
        self._directory, self._say, self._next = directory, say, 0.0

    def check(self) -> None:
        """Say it if it is due."""
        if self.end is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + DAY
        if text := describe_end(self.end, datetime.now(UTC)):
            self._say(f"{self._directory}: {text}")


def describe_end(end: datetime, now: datetime) -> str:
    """Return a warning if a certificate ends within :data:`NOTICE`; empty if it does not."""
    if end - now > NOTICE:
        return ""
    days = (end - now).days
    when = f"ends in {days} days" if end > now else "has ended"
    return (
        f"the certificate {when}, on {end:%Y-%m-%d %H:%M} (UTC), and no site connects after that: make a new authority "
        "(fedshift pki init), and bring its files to all machines between two runs of `serve --resume`"
    )
