"""Alerts of a coordinator about events that need attention, to a command on its machine or an address on its network.

An alert is a JSON object on the command's standard input or in the body of a POST: ``event`` (one of :data:`EVENTS`),
``text``, ``run`` (the run directory), ``time`` (UTC) and ``dropped``, the number of alerts since the last one that were
not sent because they exceeded :data:`MOST` in :data:`SPAN` seconds. A separate thread sends them, so that a failure
does not affect the experiment. ``alerts.jsonl`` records each alert and whether it was sent.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from urllib.parse import urlsplit

import httpx

from ...utils.errors import UsageError
from ...utils.printable import to_printable

EVENTS = ("left_out", "diverged", "stalled", "failed")
"""A site is away or its upload was not used; training diverged; no round has ended for long; the experiment failed."""
FILE = "alerts.jsonl"
MOST, SPAN = 20, 3600.0
"""Maximum number of alerts within this span of seconds."""
SECONDS = 20.0
"""Time limit for the command, and for the answer to a POST."""
PARTING = 25.0
"""Seconds to wait for the last alerts at the end."""


def parse_target(target: str) -> str | list[str]:
    """Parse ``--alert`` into an address, or the words of a command; raise :class:`UsageError` if it is neither."""
    if target.startswith(("http://", "https://")):
        if not urlsplit(target).hostname:
            raise UsageError(f"--alert {target}: there is no host in it: write http://HOST:PORT/PATH")
        return target
    try:
        words = shlex.split(target)
    except ValueError as error:
        raise UsageError(f"--alert {target!r}: {error}: write a command, or an http(s) address") from error
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"--alert {target!r}: there is no such command: name a program, or an http(s) address")
    return words


class Alerts:
    """Context manager that sends alerts about the run in ``directory`` to ``target`` (None: nowhere).

    ``log``: the folder for their record.
    """

    def __init__(self, target: str | None, directory: Path, log: Path) -> None:
        self._target = None if target is None else parse_target(target)
        self._directory, self._log = directory, log
        self._waiting, self._failed = SimpleQueue[dict[str, str | int] | None](), SimpleQueue[str]()
        self._sent, self._dropped = deque[float](maxlen=MOST), 0
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Alerts:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._waiting.put(None)
        self._thread.join(PARTING)

    def send(self, event: str, text: str) -> None:
        """Queue an alert and return at once; it is dropped if there were too many recently."""
        if self._target is None:
            return
        now = time.monotonic()
        if len(self._sent) == MOST and now - self._sent[0] < SPAN:
            self._dropped += 1
            return
        self._sent.append(now)
        when = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        about: dict[str, str | int] = {"run": str(self._directory.resolve()), "time": when, "dropped": self._dropped}
        self._waiting.put({"event": event, "text": to_printable(text), **about})
        self._dropped = 0

    def take_failures(self) -> list[str]:
        """Return the messages about alerts that could not be sent since the last call."""
        failures = []
        while True:
            try:
                failures.append(self._failed.get_nowait())
            except Empty:
                return failures

    def _work(self) -> None:
        while (alert := self._waiting.get()) is not None:
            try:
                self._deliver(json.dumps(alert))
                failed = ""
            except Exception as error:  # no failure of a command or a server may stop the experiment
                failed = to_printable(f"{type(error).__name__}: {error}")
                self._failed.put(f"the alert {alert['event']!r} could not be sent ({failed})")
            try:
                with (self._log / FILE).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**alert, "failed": failed}) + "\n")
            except OSError as error:
                self._failed.put(f"{self._log / FILE} cannot be written: {error.strerror}")

    def _deliver(self, alert: str) -> None:
        if isinstance(self._target, str):
            headers = {"content-type": "application/json"}
            with httpx.Client(timeout=SECONDS, trust_env=False) as client:  # neither proxies nor .netrc
                client.post(self._target, content=alert, headers=headers).raise_for_status()
        elif self._target:
            subprocess.run(
                self._target, input=alert, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                timeout=SECONDS, check=True,
            )  # fmt: skip


class StallWatch:
    """Detects, once per stall, that no round has ended for ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until = seconds, float("inf")

    def note(self) -> None:
        """Note that a trial began or a round ended."""
        self._until = time.monotonic() + self._seconds

    def is_due(self) -> bool:
        """Return whether to report a stall now."""
        due = time.monotonic() > self._until
        self._until = float("inf") if due else self._until
        return due
