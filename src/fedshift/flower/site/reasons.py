"""Why a coordinator cannot be reached or turns a site away, in words that say what to do."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.request import getproxies, proxy_bypass

import httpx
from cryptography.x509 import load_pem_x509_certificate

from ...utils.printable import to_printable
from .. import internals
from ..keys import UNKNOWN, list_hosts

EXPIRED, OTHER_HOST, OTHER_ADDRESS = 10, 62, 64
"""OpenSSL's numbers of what is wrong with a certificate (X509_V_ERR_...)."""


def explain(error: Exception) -> str:
    """Return what went wrong, and the remedy where there is one."""
    if isinstance(error, httpx.HTTPStatusError):
        return _explain_answer(error.response)
    if isinstance(error, httpx.TransportError):
        return _explain_transport(error)
    return to_printable(str(error) or type(error).__name__)


def _explain_answer(answer: httpx.Response) -> str:
    if UNKNOWN in answer.text:
        return (
            f"{UNKNOWN}, or it was replaced or revoked: have this site's .pub put into pki/nodes there, or bring the "
            "key that belongs to it here"
        )
    if f'"code":{internals.ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:d}' in answer.text.replace(" ", ""):
        return (
            "this site's key is in use: another `fedshift join` with it is connected, or one that was killed or cut "
            "off is not missed yet (20 seconds): stop the other, or make a key for this site"
        )
    if answer.status_code == 401:
        return describe_clock(answer.headers.get("date"), refused=True)
    return to_printable(f"the coordinator answered {answer.status_code} ({answer.text[:200]})")


def describe_clock(date: str | None, *, refused: bool = False) -> str:
    """Compare this machine's clock with a coordinator's that said ``date``, the header of an answer."""
    ahead, behind = internals.SYSTEM_TIME_TOLERANCE, internals.TIMESTAMP_TOLERANCE + internals.SYSTEM_TIME_TOLERANCE
    seconds = (datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds() if date else 0.0
    if -behind < seconds < ahead:
        return "the coordinator refused this site's signature" if refused else "the clocks agree"
    return (
        f"this machine's clock is {abs(seconds):.0f} seconds {'ahead of' if seconds > 0 else 'behind'} the "
        f"coordinator's, which accepts less than {ahead} ahead and less than {behind} behind: set both by the "
        "network (timedatectl set-ntp true)"
    )


def _explain_transport(error: httpx.TransportError) -> str:
    url, causes = error.request.url, list(_list_causes(error))
    proxy = _find_proxy(url)
    where = url.netloc.decode() + (f" through the proxy {proxy}, which the environment names" if proxy else "")
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _explain_certificate(cause, url)
        if isinstance(cause, socket.gaierror):
            return f"the name in {proxy or url.host} is unknown here: check the address, and this machine's DNS"
    said = "".join(f" ({cause})" for cause in causes[-1:])
    if any("WRONG_VERSION_NUMBER" in str(cause) or "RECORD_LAYER" in str(cause) for cause in causes):
        return f"{where} speaks no TLS: the coordinator was started with --insecure, or this is another program's port"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        reason = f"nothing answers at {where}{said}: is `fedshift serve` running, and may this machine reach that port?"
        return to_printable(reason)
    if url.scheme == "http" and _read_hosts(url):
        return f"{where} speaks TLS: join with --tls DIR and --key FILE in place of --insecure"
    return to_printable(f"the connection to {where} was lost ({type(error).__name__}: {error})")


def _explain_certificate(error: ssl.SSLCertVerificationError, url: httpx.URL) -> str:
    if error.verify_code in (OTHER_HOST, OTHER_ADDRESS):
        hosts = ", ".join(_read_hosts(url)) or "others"
        return (
            f"the coordinator's certificate is not for {url.host}, but for {hosts}: join by one of these, or renew it "
            f"there (`fedshift pki DIR --host {url.host}`, with all hosts)"
        )
    if error.verify_code == EXPIRED:
        return "the coordinator's certificate has ended: renew it there (`fedshift pki DIR`, then `serve --resume`)"
    return (
        f"ca.crt here does not vouch for the certificate of {url.netloc.decode()} ({error.verify_message}): bring the "
        "coordinator's ca.crt"
    )


def _list_causes(error: BaseException) -> Iterator[BaseException]:
    while cause := error.__cause__ or error.__context__:
        yield cause
        error = cause


def _read_hosts(url: httpx.URL) -> list[str]:
    """Return the hosts that the server's certificate is for; none if it shows none."""
    with suppress(OSError, ValueError):
        pem = ssl.get_server_certificate((url.host, url.port or 443), timeout=5)
        return list_hosts(load_pem_x509_certificate(pem.encode()))
    return []


def _find_proxy(url: httpx.URL) -> str:
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return "" if not proxy or proxy_bypass(url.host) else proxy.rpartition("@")[2]
