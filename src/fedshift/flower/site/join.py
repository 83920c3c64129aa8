"""``fedshift join``: one site of an experiment across machines.

This process holds the data, asks the coordinator for messages, and answers them one by one (:mod:`.site`).
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from ...console.printing import Console
from ...console.terminal import catch_interrupts, print_line
from ...results.run_directory import acquire_lock
from ...utils.errors import UsageError
from ...utils.files import owner_only
from ...utils.processors import available_processors
from ..keys import LOOPBACK, EndNotice, load_private_key
from ..messages import Exchange, RefusedMessage
from .node import answer_all, check_connection, connect
from .reasons import explain
from .site import Site

POLL_SECONDS = 3.0
"""Seconds between two requests for messages."""
LONGEST_PAUSE = 30.0
"""Most seconds between two attempts to connect."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorLink:
    """A site's connection to its coordinator.

    ``address``: HOST:PORT. ``tls``: folder with ``ca.crt``; None: plain text. ``key``: file of the site's private key.
    ``poll``: seconds between two requests for messages; None: three.
    """

    address: str
    tls: Path | None
    key: Path | None
    poll: float | None

    def check(self) -> None:
        """Raise :class:`UsageError` if the address is malformed, or files are missing or no keys."""
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(
                f"{self.address!r} is not an address: write HOST:PORT, for example coordinator.example.org:9091"
            )
        if self.tls is None:
            if self.key:
                raise UsageError(f"--key {self.key} needs --tls: a key proves nothing over plain text")
            return
        if not (self.tls / "ca.crt").is_file():
            raise UsageError(f"--tls {self.tls}: no ca.crt there: bring it from the coordinator's directory of keys")
        self.load_key()

    @property
    def root(self) -> str | None:
        """File of the authority's certificate; None: plain text."""
        return str(self.tls / "ca.crt") if self.tls else None

    def load_key(self) -> ec.EllipticCurvePrivateKey:
        """Read and return the site's private key; over plain text make a new one, which proves nothing."""
        if self.tls is None:
            return ec.generate_private_key(ec.SECP384R1())
        if self.key is None:
            raise UsageError("--tls needs --key, this site's private key: ssh-keygen -t ecdsa -b 384 -N '' -f NAME")
        return load_private_key(self.key)


def join(link: CoordinatorLink, site: Site, folder: Path, threads: int | None) -> int:
    """Take part until the coordinator ends the experiment (returns 0) or Ctrl-C is pressed (returns 130).

    All files are made accessible only to their owner.

    Raises :class:`FedshiftError` naming another process that uses ``folder``, the site's own folder, or an error after
    which nothing can be answered, such as a full disk.
    """
    import torch

    link.check()
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    os.environ["no_proxy"] = ",".join(filter(None, (known, *LOOPBACK)))  # a coordinator on this machine
    torch.set_num_threads(threads or min(torch.get_num_threads(), available_processors()))
    console = Console()
    with owner_only():
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):  # of a folder that another account made, which keeps what it gave it
            folder.chmod(0o700)
        lock = acquire_lock(folder)
        _ = site.gate  # opens the record
        site.say = lambda text: print_line(console, f"{time.strftime('%H:%M:%S')} {text}")
        with catch_interrupts(console, "Leaving") as stop:
            work = _Work(link, site)
            site.say(f"looking for the coordinator at {link.address}")
            work.start()
            try:
                while not stop.is_set() and work.is_alive():
                    work.join(0.2)
            finally:
                work.stop.set()
                site.export_latest()
                lock.release()
    if work.failure is not None:
        raise work.failure
    return 0 if work.over else 130


def check_link(link: CoordinatorLink) -> int:
    """Connect once, and print whether key, certificate and clock are right; return an exit code."""
    console = Console()
    try:
        lines, code = check_connection(link.address, link.root, link.load_key()), 0
    except (httpx.HTTPError, OSError) as error:
        lines, code = [explain(error)], 1
    for line in lines:
        print_line(console, line)
    return code


class _Work(threading.Thread):
    """Answers questions until the experiment is ``over``; ``failure``: the error that ended it, if one did."""

    def __init__(self, link: CoordinatorLink, site: Site) -> None:
        super().__init__(daemon=True)
        self.link, self.site, self.stop, self.over = link, site, threading.Event(), False
        self.failure: BaseException | None = None
        self._ends = EndNotice(link.tls, site.say)

    def run(self) -> None:
        """Connect, again and again, until the experiment is over; keep any error that nobody foresaw."""
        pause = 1.0
        try:
            while not self.stop.is_set():
                began = time.monotonic()
                self._connect()
                pause = 1.0 if time.monotonic() - began > LONGEST_PAUSE else min(2 * pause, LONGEST_PAUSE)
                self.stop.wait(pause)
        except BaseException as error:  # also SystemExit of a user's function
            self.failure = error

    def _connect(self) -> None:
        """Answer over one connection, until it ends or the experiment is over; say why it ended."""
        link = self.link
        try:
            self._ends.check()
            key = link.load_key()  # it may have been replaced
            with connect(link.address, link.root, key, self.stop, register=link.tls is None) as connection:
                answer_all(connection, self._answer, self.stop, link.poll or POLL_SECONDS)
        except (httpx.HTTPError, OSError, UsageError) as error:
            if not self.stop.is_set():
                self.site.say(f"{explain(error)}; connecting again")

    def _answer(self, message: Message) -> Message:
        try:
            question = Exchange.of(message.content)
        except RefusedMessage as error:
            return Message(self.site.gate.refuse(str(error)).content(), reply_to=message)
        answer = self.site.answer(question)
        if answer.kind == "told" and question.facts.get("over"):
            self.over = True
            self.stop.set()  # once the answer is sent
        return Message(answer.content(), reply_to=message)
