"""``fedshift join``: one site of an experiment across machines.

This process holds the data and does the work (:mod:`.site`). It starts Flower's SuperNode and restarts it when it
exits. The SuperNode fetches messages; a second program takes them one by one and forwards each over a local socket
(:mod:`fedshift.flower.transport.forwarding`). Data are therefore read only once, and no code from the network is ever
run.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...console.printing import Console
from ...console.terminal import catch_interrupts
from ...results.run_directory import acquire_lock
from ...utils.errors import UsageError
from ...utils.files import ScratchDirectory, owner_only
from ...utils.printable import to_printable
from ...utils.processors import available_processors
from ..transport.certificates import EndNotice
from ..transport.exchange import Exchange, accept_locally, listen_locally
from ..transport.forwarding import SITE
from ..transport.programs import Program, check_flower, find_proxy, free_port, isolate
from ..transport.signatures import load_private_key
from .reasons import explain_end
from .site import Site

LONGEST = 30.0
"""Maximum delay in seconds before a SuperNode that exited is restarted."""
PARTING = 5.0
"""Seconds to wait for the last answer to be sent."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorLink:
    """A site's connection to its coordinator.

    ``address``: HOST:PORT. ``tls``: folder with ``ca.crt``; None: plain text. ``key``: the node's private key.
    ``poll``: seconds between two requests for messages; None: Flower's default, three.
    """

    address: str
    tls: Path | None
    key: Path | None
    poll: float | None

    def check(self) -> None:
        """Raise :class:`UsageError` if the address is malformed or files are missing."""
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
            raise UsageError(f"--tls {self.tls}: no ca.crt there: bring it from where `fedshift pki init` was run")
        if self.key is None or not self.key.is_file():
            raise UsageError(
                f"--key {self.key}: no such file: copy this node's key from the machine where `fedshift pki init` was "
                "run"
            )

    @property
    def host(self) -> str:
        """The coordinator's name or IP address."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def route(self) -> str:
        """A remark on the proxy between site and coordinator; empty if there is none."""
        proxy = find_proxy(self.host, secured=self.tls is not None)
        says = f"set in the environment (NO_PROXY={self.host} connects directly)"
        return f" by the proxy {proxy}, {says}" if proxy else ""

    def to_arguments(self, port: int) -> list[str]:
        """Return the command-line arguments of a SuperNode that serves tasks on loopback ``port``."""
        if self.tls is None:
            secured = ["--insecure"]
        else:
            secured = ["--root-certificates", f"{self.tls}/ca.crt", "--auth-supernode-private-key", str(self.key)]
        return ["--superlink", self.address, "--host", "127.0.0.1", "--port", str(port), *secured]


def join(link: CoordinatorLink, site: Site, folder: Path, threads: int | None) -> int:
    """Take part until the coordinator ends the experiment (returns 0) or Ctrl-C is pressed (returns 130).

    All files are made accessible only to their owner.

    Raises :class:`FedshiftError` naming another process that uses ``folder``, the site's own folder.
    """
    import torch

    check_flower()
    link.check()
    torch.set_num_threads(threads or min(torch.get_num_threads(), available_processors()))
    with owner_only():
        return _join(link, site, folder)


def _join(link: CoordinatorLink, site: Site, folder: Path) -> int:
    console = Console()
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # of a folder that another account made, which keeps what it gave it
        folder.chmod(0o700)
    lock = acquire_lock(folder)
    site.gate.account.check()  # and the ledger, which the gate opens
    site.say = lambda text: console.print(
        f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True
    )
    with ScratchDirectory() as scratch, catch_interrupts(console, "Leaving") as stop:
        door = _MessageSocket(site, scratch.path / "talk")
        ends = EndNotice(link.tls, site.say)
        ends.check()
        site.say(f"looking for the coordinator at {link.address}{link.route}")
        try:
            return _watch(link, door, scratch.path, folder / "supernode.log", stop, ends)
        finally:
            door.close()
            site.export_latest()
            lock.release()


def _watch(
    link: CoordinatorLink, door: _MessageSocket, home: Path, log: Path, stop: threading.Event, ends: EndNotice
) -> int:
    """Keep a SuperNode and the process that handles its messages running; return the exit code."""
    pause = 1.0
    more, secret = {SITE: str(door.path)}, isolate(home)
    if link.poll is not None:
        more["FEDSHIFT_POLL"] = str(link.poll)
    while True:
        began, port = time.monotonic(), free_port()
        if link.key:  # which may have been replaced
            try:
                door.site.sign_with(load_private_key(link.key))
            except (OSError, UsageError) as error:
                door.site.say(str(error))
        tasks = ["--runtime-api-address", f"127.0.0.1:{port}", "--insecure", *secret]
        forward = Program("flower-superexec", tasks, home=home, log=log.with_name("superexec.log"), more=more)
        arguments = [*link.to_arguments(port), "--isolation", "process", *secret]
        node = Program("flower-supernode", arguments, home=home, log=log, more=more)
        try:
            while node.wait(0.2) is forward.code is None and not (stop.is_set() or door.broken.is_set() or door.over):
                ends.check()
            if door.over:
                node.wait(PARTING)
                door.site.say(door.over)
                return 0
            ended = forward if forward.code is not None and node.code is None else node
        finally:
            node.stop()
            forward.stop()
        if stop.is_set():
            return 130
        door.broken.clear()
        pause = 1.0 if time.monotonic() - began > LONGEST else min(2 * pause, LONGEST)
        said = ended.last_message()
        why = explain_end(said, link.address, secured=link.tls is not None) if ended is node else ""
        what = "SuperNode ended" if ended is node else "work on a message ended"
        door.site.say(why or f"Flower's {what} ({said}){link.route}; it is started again (see {ended.log})")
        stop.wait(pause)


class _MessageSocket:
    """A socket at ``path`` that receives messages and answers them one by one.

    ``broken`` is set if the program that delivered a message exited before it received the answer. ``over``: the
    coordinator's closing message; "" until it arrives.
    """

    def __init__(self, site: Site, path: Path) -> None:
        self.site, self.path = site, path
        self.broken, self.over = threading.Event(), ""
        self._listener = listen_locally(path)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Accept no more messages."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                talk = accept_locally(self._listener)
            except OSError:
                return
            with talk:
                try:
                    asked = Exchange.receive(talk)
                    answer = self.site.answer(asked)
                    if answer.kind == "ended":
                        self.over = to_printable(str(answer.facts["say"])) or "the experiment is finished"
                    answer.send(talk)
                except (EOFError, OSError, ValueError):
                    self.broken.set()
