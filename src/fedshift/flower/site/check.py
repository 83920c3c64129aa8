"""``fedshift check``: whether a site's machine and network are fit for an experiment, before anything else runs.

Each step of :class:`Checks` is about one thing and gives a :class:`Finding` with the fix. The guard in front of the
coordinator's SuperLink (:mod:`..transport.firewall`) answers requests that need a key, only for known keys.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment

import httpx
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ...utils.errors import UsageError
from ...utils.printable import to_printable
from ...utils.processors import available_memory
from ...utils.version import is_own_series
from ..transport.certificates import describe_end, list_hosts
from ..transport.firewall import CHECK, PROBE, list_versions
from ..transport.programs import VERSIONS, find_proxy
from ..transport.signatures import fingerprint, load_private_key
from .join import CoordinatorLink
from .reasons import describe_offset, measure_offset

SKIPPED = "not checked"
"""The ``what`` of the finding that lists what was not checked."""
SECONDS = 10.0
"""Time limit for a connection."""
LEAST_PROBE, LONG_ENOUGH = 2**18, 1.0
"""Bytes of the first probe of throughput, and duration in seconds that makes larger probes unnecessary."""
DISK, COPIES_ON_DISK, EARLIER = 2**26, 6, 50
"""Bytes that a site needs on disk in addition to copies of the model: states of three rounds, two models and the
ledger; and states of so many earlier rounds (``join --keep-rounds``), which take no more than :data:`MOST_EARLIER`."""
MOST_EARLIER = 10**9
"""Bytes of ``join --keep-gb``."""
MEMORY, COPIES_IN_MEMORY = 2**30, 8
"""Bytes of memory of a site's programs, and copies of the model: loaded, trained, received, sent, and their forms."""
MEGA = 1e6


@dataclass(frozen=True)
class Finding:
    """Result of checking ``what``; ``fix``: what to do about a problem, empty if there is none."""

    what: str
    text: str
    fix: str = ""


class Checks:
    """The checks of one site.

    Args:
        link: the connection to the coordinator, with a key.
        folder: where the site will keep its state.
        size: bytes of the model; None: as the coordinator reports.

    """

    def __init__(self, link: CoordinatorLink, folder: Path, size: int | None) -> None:
        if link.tls is None or link.key is None:
            raise UsageError("a check needs --tls and --key, as `fedshift join` does")
        self.link, self.folder, self.size = link, folder, size
        self._root, self._key = link.tls / "ca.crt", load_private_key(link.key)
        self._port = int(link.address.rpartition(":")[2])
        self._said: dict[str, Any] = {}

    def run(self) -> Iterator[Finding]:
        """Yield a finding per check; skip checks that depend on a failed one, and report these in the last finding."""
        steps = (self.name, self.port, self.certificate, self.clock, self.key, self.versions)
        for step in steps:
            finding = step()
            yield finding
            if finding.fix and step != self.versions:
                left = ", ".join(each.__name__ for each in steps[steps.index(step) + 1 :])
                yield Finding(SKIPPED, f"{left + ', ' if left else ''}throughput: they need what failed above")
                break
        else:
            yield from self.throughput()
        yield self.disk()
        yield self.memory()

    @cached_property
    def proxy(self) -> str:
        """HOST:PORT of the proxy that leads to the coordinator; empty if there is none."""
        return find_proxy(self.link.host, secured=True)

    def name(self) -> Finding:
        """Resolve the name of the coordinator, or of the proxy in between."""
        host = (self.proxy or self.link.address).rpartition(":")[0].strip("[]")
        try:
            found = sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
        except OSError as error:
            return Finding(
                "name", f"{host} cannot be resolved ({error.strerror or error})",
                "correct the name, or enter it into this machine's DNS or /etc/hosts",
            )  # fmt: skip
        way = f", which leads to {self.link.host} (the environment's proxy; NO_PROXY={self.link.host} goes directly)"
        return Finding("name", f"{host} is {', '.join(found)}{way if self.proxy else ', without a proxy'}")

    def port(self) -> Finding:
        """Connect, through the proxy if there is one."""
        try:
            self._connect().close()
        except (OSError, HTTPException) as error:
            what = f"{self.link.address} cannot be reached ({error})"
            if self.proxy:
                fix = f"let the proxy {self.proxy} pass CONNECT to port {self._port}, or set NO_PROXY={self.link.host}"
            else:
                fix = f"open outbound TCP port {self._port} here, inbound at the coordinator; `fedshift serve` must run"
            return Finding("port", what, fix)
        return Finding("port", f"{self.link.address} answers")

    def certificate(self) -> Finding:
        """Verify the coordinator's certificate: its authority, host and dates."""
        context = ssl.create_default_context(cafile=str(self._root))
        try:
            certificate = self._read_certificate(context)
        except ssl.SSLCertVerificationError as error:
            return Finding("certificate", to_printable(error.verify_message), self._explain_certificate())
        except (OSError, HTTPException) as error:
            return Finding(
                "certificate", f"no TLS is spoken at {self.link.address} ({error})",
                "start `fedshift serve` with --tls; something in between must not end TLS",
            )  # fmt: skip
        end = certificate.not_valid_after_utc
        soon = describe_end("server.crt", end, datetime.now(UTC))
        text = f"of {self._root}, for {self.link.host}, until {end:%Y-%m-%d %H:%M} (UTC)"
        return Finding("certificate", f"{text}; {soon}" if soon else text)

    def clock(self) -> Finding:
        """Compare this machine's clock with the coordinator's."""
        offset = measure_offset(self.link.address, secured=True)
        if offset is None:
            return Finding(
                "clock", "the coordinator did not tell its time", "see that what answers is `fedshift serve`"
            )
        wrong = describe_offset(offset)
        text, _, fix = wrong.rpartition(": ")
        return Finding("clock", text or f"within {abs(offset):.0f} s of the coordinator's", fix)

    def key(self) -> Finding:
        """Ask the coordinator for facts that it discloses to nodes with a known key."""
        mark = fingerprint(self._key.public_key())
        try:
            answer = self._ask()
        except httpx.HTTPError as error:
            return Finding("key", f"the coordinator did not answer ({type(error).__name__})", "try again")
        if answer.status_code != 200:
            return Finding(
                "key", f"{mark} of {self.link.key} is not known at the coordinator",
                "have its .pub (`fedshift pki`) put into pki/nodes there; or the coordinator's fedshift is too old",
            )  # fmt: skip
        self._said = answer.json()
        return Finding("key", f"{mark} is known at the coordinator")

    def versions(self) -> Finding:
        """Compare versions here and there."""
        here, there = list_versions(), {str(k): to_printable(str(v)) for k, v in self._said["versions"].items()}
        told = ", ".join(
            f"{name} {own}" + ("" if there.get(name) == own else f" here and {there.get(name, 'none')} there")
            for name, own in here.items()
        )
        if ".".join(here["flwr"].split(".")[:2]) not in VERSIONS:
            return Finding("versions", told, f"install flwr {' or '.join(VERSIONS)}: pip install 'fedshift[flower]'")
        if not is_own_series(theirs := there.get("fedshift", "")):
            return Finding("versions", told, f"install the coordinator's: pip install fedshift=={theirs}")
        return Finding("versions", told)

    def throughput(self) -> Iterator[Finding]:
        """Measure throughput in both directions, and estimate the duration of a round without training."""
        try:
            rates = {direction: self._measure(direction) for direction in ("down", "up")}
        except httpx.HTTPError as error:
            yield Finding(
                "throughput", f"a probe failed ({type(error).__name__}: {to_printable(str(error))})",
                "see whether something in between limits the size or the time of requests; or try in ten minutes",
            )  # fmt: skip
            return
        yield Finding("throughput", ", ".join(f"{rate / MEGA:.2f} MB/s {name}" for name, rate in rates.items()))
        sizes = self._sizes
        if sizes is None:
            yield Finding("round", "its size is not known yet (give --size): no estimate")
            return
        # the model comes for training and, once more, for measuring
        seconds = 2 * sizes["down"] / rates["down"] + sizes["up"] / rates["up"]
        text = (
            f"{sizes['down'] / MEGA:.2f} MB down twice and {sizes['up'] / MEGA:.2f} MB up take about {seconds:.0f} s, "
            "without training"
        )
        late = "seconds" in sizes and seconds > sizes["seconds"]
        limit = (
            f"a round ends after {sizes['seconds']:g} s: a longer --round-timeout or a smaller model" if late else ""
        )
        yield Finding("round", text, limit)

    def disk(self) -> Finding:
        """Compare free space with what the site's states take."""
        place = self.folder.absolute()
        while not place.exists():
            place = place.parent
        model, free = self._model_bytes, shutil.disk_usage(place).free
        need = DISK + COPIES_ON_DISK * model + min(MOST_EARLIER, EARLIER * model)
        enough = free >= need and os.access(place, os.W_OK)
        fix = "" if enough else "choose another --state, with more space and write permission"
        return Finding("disk", f"{free / MEGA:.0f} MB free in {place}, {need / MEGA:.0f} MB needed", fix)

    def memory(self) -> Finding:
        """Compare available memory with what the site's programs and the model take, without data."""
        need, free = MEMORY + COPIES_IN_MEMORY * self._model_bytes, available_memory()
        fix = "" if free >= need else "close other programs, or add memory"
        return Finding(
            "memory", f"{free / MEGA:.0f} MB available, {need / MEGA:.0f} MB needed in addition to the data", fix
        )

    @property
    def _sizes(self) -> dict[str, float] | None:
        """Bytes of a round: ``down`` and ``up``, and perhaps ``seconds``, its time limit."""
        if self.size is not None:
            return {"down": self.size, "up": self.size}
        given = self._said.get("sizes")
        return None if given is None else {name: float(given[name]) for name in ("down", "up", "seconds")}

    @property
    def _model_bytes(self) -> int:
        return int(max(self._sizes["down"], self._sizes["up"])) if self._sizes else 0

    def _connect(self) -> socket.socket:
        """Return a connection to the coordinator."""
        if not self.proxy:
            return socket.create_connection((self.link.host, self._port), SECONDS)
        known = getproxies_environment()
        proxy = urlsplit(known.get("https") or known.get("all") or "")
        tunnel = HTTPConnection(proxy.hostname or "", proxy.port or 80, timeout=SECONDS)
        secret = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}" if proxy.username else ""
        headers = {"Proxy-Authorization": f"Basic {b64encode(secret.encode()).decode()}"} if secret else {}
        tunnel.set_tunnel(self.link.host, self._port, headers)
        tunnel.connect()
        return tunnel.sock

    def _read_certificate(self, context: ssl.SSLContext) -> x509.Certificate:
        with self._connect() as plain, context.wrap_socket(plain, server_hostname=self.link.host) as talk:
            return x509.load_der_x509_certificate(talk.getpeercert(binary_form=True) or b"")

    def _explain_certificate(self) -> str:
        """Return what to do about a certificate that is not verified."""
        anyone = ssl.create_default_context()
        anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
        certificate = self._read_certificate(anyone)
        own = x509.load_pem_x509_certificate(self._root.read_bytes())
        try:
            certificate.verify_directly_issued_by(own)
        except InvalidSignature:
            return f"it is of another authority than {self._root}, of the same name: bring the coordinator's ca.crt"
        except (ValueError, TypeError):
            issuer = to_printable(certificate.issuer.rfc4514_string())
            return (
                f"it was issued by {issuer}, not by {self._root}: bring the coordinator's ca.crt; if that is a device "
                f"of this network which inspects TLS, exempt {self.link.host} from it"
            )
        if certificate.not_valid_after_utc < datetime.now(UTC):
            return "have it renewed (`fedshift pki renew`)"
        if certificate.not_valid_before_utc > datetime.now(UTC):
            return "set this machine's clock: the certificate is not valid yet"
        return f"it is for {', '.join(list_hosts(certificate))}: use one of these, or make it for {self.link.host} too"

    def _ask(self, *, wanted: int = 0, sent: bytes = b"") -> httpx.Response:
        """Ask the guard, as a node signs its requests."""
        when = datetime.now(UTC).isoformat()
        public = self._key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        signed = self._key.sign(when.encode(), ec.ECDSA(hashes.SHA256()))
        headers = {
            "flwr-public-key": b64encode(public).decode(), "flwr-timestamp": when,
            "flwr-signature": b64encode(signed).decode(),
        }  # fmt: skip
        url = f"https://{self.link.address}{CHECK}" + (f"?{wanted}" if wanted else "")
        context = ssl.create_default_context(cafile=str(self._root))
        with httpx.Client(verify=context, timeout=3 * SECONDS) as client:
            return client.post(url, content=sent, headers=headers)

    def _measure(self, direction: str) -> float:
        """Return bytes a second ``down`` or ``up``, from probes that grow until one takes long enough."""
        size = LEAST_PROBE
        while True:
            began = time.monotonic()
            answer = self._ask(wanted=size) if direction == "down" else self._ask(sent=os.urandom(size))
            answer.raise_for_status()
            seconds = time.monotonic() - began
            if seconds > LONG_ENOUGH or 2 * size > PROBE:
                return size / seconds
            size *= 2
