"""Why a coordinator turned a site away, in words that say what to do: a clock, a key in use or unknown.

Nodes sign the time of each request. Flower 1.41 and 1.42 (``flwr.superlink.routers.fleet.node_auth``) refuse one from
5 seconds or more in the future, or 305 seconds or more in the past, with 401 and no reason.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import httpx
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from ..transport.firewall import UNKNOWN

AHEAD, BEHIND = SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
"""Seconds that a site's clock may be ahead of the coordinator's, and behind it (both exclusive)."""
SECONDS = 5.0
"""Seconds to wait for the coordinator's time."""
NOT_FOUND = "404 Not Found"
"""The answer to an unknown key in the last words of a SuperNode that was connected before."""
IN_USE = "[code: 2004]"
"""Flower's number for a node that is connected already, in the last words of a SuperNode."""


def explain_end(said: str, address: str, *, secured: bool) -> str:
    """Explain why the SuperNode with the last words ``said`` was refused; empty if there is no better explanation."""
    if UNKNOWN in said or NOT_FOUND in said:
        return (
            "the coordinator does not know this site's key, or it was replaced or revoked: have this site's .pub put "
            "into pki/nodes there, or bring the key that belongs to it here"
        )
    if IN_USE in said:
        return (
            "this site's key is in use: another `fedshift join` with it is connected, or one that was killed is not "
            "missed yet, or the coordinator has just started and registers keys. One key is for one site: stop the "
            "other, or ask for a key of your own (fedshift pki add)"
        )
    offset = measure_offset(address, secured=secured)
    return "" if offset is None else describe_offset(offset)


def describe_offset(seconds: float, now: datetime | None = None) -> str:
    """Return what is wrong with a clock that is ``seconds`` ahead of the coordinator's; empty if Flower accepts it."""
    if -BEHIND < seconds < AHEAD:
        return ""
    here = now or datetime.now(UTC)
    there, off = here - timedelta(seconds=seconds), "ahead of" if seconds > 0 else "behind"
    return (
        f"this machine's clock is {abs(seconds):.0f} seconds {off} the coordinator's ({here:%Y-%m-%d %H:%M:%S} here, "
        f"{there:%Y-%m-%d %H:%M:%S} there, UTC), which accepts less than {AHEAD} ahead and less than {BEHIND} behind: "
        "set both by the network (timedatectl set-ntp true)"
    )


def measure_offset(address: str, *, secured: bool) -> float | None:
    """Return by how many seconds this clock is ahead of the coordinator's, to a second; None if it does not answer.

    Certificates are not checked, since that needs a correct clock, and only a time is read.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        answer = httpx.get(f"{'https' if secured else 'http'}://{address}/", verify=context, timeout=SECONDS)
        there = parsedate_to_datetime(answer.headers["date"])
        return (datetime.now(UTC) - there).total_seconds() - 0.5  # a date has no fractions
    except (httpx.HTTPError, OSError, KeyError, ValueError, TypeError):
        return None
