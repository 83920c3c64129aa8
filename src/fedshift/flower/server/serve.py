"""``fedshift serve``: the coordinator of an experiment across machines.

It starts Flower's SuperLink, registers the nodes' keys, submits one fixed app (:mod:`.coordinator`) and shows its
progress. A program that exits is restarted and continues from the last saved round. If this process exits, all programs
do, and ``--resume`` continues the run.
"""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

from ...config.settings_file import FILE
from ...config.spec import CompareSpec, RunOptions, RunSpec
from ...console.printing import Console
from ...console.terminal import catch_interrupts, report_stop, show_progress
from ...experiments.callbacks import Callback, Callbacks
from ...experiments.trial import RoundResult
from ...results.run_directory import MACHINES, acquire_lock
from ...results.summary import require_series
from ...utils.errors import FedshiftError, UsageError
from ...utils.files import ScratchDirectory, owner_only
from ..transport.certificates import (
    EndNotice,
    check_server,
    example_host,
    is_for,
    list_hosts,
    read_certificates,
    read_end,
)
from ..transport.exchange import FACTS, accept_locally, listen_locally
from ..transport.firewall import GUARDED, KEYS
from ..transport.programs import LOOPBACK, PATIENCE, Program, check_flower, connect, isolate, register, submit
from .alerts import Alerts, StallWatch, parse_target
from .claims import MAX_SHARE
from .coordinator import COORDINATOR
from .history import go_back
from .outliers import BOUND
from .prometheus import serve_metrics

SLOWER = 20.0
"""Patience with other Flower programs, as a multiple of the time that the SuperLink took to start."""
TRIES = 3
"""Number of consecutive restarts without a completed round before giving up."""


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """A coordinator's address and its conditions for a round.

    ``tls``: directory made by `fedshift pki`; None: plain text, which leaves this machine only if ``forced``.
    ``clients``: minimum number of participants. ``seconds``: maximum duration of a round. ``wait``: seconds to wait for
    the first clients to connect. ``update_bound``: maximum ratio of a client's update length to the others'; 0: no
    limit. ``max_share``: maximum weight of one client among three or more. ``metrics``: loopback port for metrics;
    None: no metrics. ``alert``: command or address for alerts; None: no alerts.
    """

    host: str
    port: int
    tls: Path | None
    clients: int
    seconds: float = 3600.0
    wait: float = 86400.0
    update_bound: float = BOUND
    max_share: float = MAX_SHARE
    forced: bool = False
    metrics: int | None = None
    alert: str | None = None

    @property
    def here(self) -> str:
        """The host for connections from this machine."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def name(self) -> str:
        """The host that Flower's programs on this machine connect to; the certificate covers it."""
        certificate = read_certificates(self.tls / "server.crt")[0] if self.tls else None
        if certificate is None or is_for(certificate, self.here):
            return self.here
        return example_host(list_hosts(certificate)[0])

    @property
    def local_address(self) -> str:
        """The address for connections from this machine."""
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"

    @property
    def flags(self) -> str:
        """The equivalent command-line flags."""
        secured = f"--tls {shlex.quote(str(self.tls))}" if self.tls else "--insecure"
        values = {
            "round-timeout": (self.seconds, ListenOptions.seconds),
            "wait": (self.wait, ListenOptions.wait),
            "update-bound": (self.update_bound, ListenOptions.update_bound),
            "max-share": (self.max_share, ListenOptions.max_share),
            "metrics": (self.metrics, ListenOptions.metrics),
        }
        more = [f" --{name} {value:g}" for name, (value, default) in values.items() if value != default]
        if self.forced:
            more.append(" --force-insecure")
        if self.alert:
            more.append(f" --alert {shlex.quote(self.alert)}")
        return f"--min-clients {self.clients} {secured} --host {self.host} --port {self.port}{''.join(more)}"

    def check(self) -> None:
        """Raise :class:`UsageError` if files are missing, plain text would leave the machine, or the port is in use."""
        if self.tls:
            for name in ("ca.crt", "server.crt", "server.key"):
                if not (self.tls / name).is_file():
                    raise UsageError(f"--tls {self.tls}: contains no {name}: create it with `fedshift pki init`")
            if not any((self.tls / "nodes").glob("*.pub")):
                raise UsageError(f"--tls {self.tls}: contains no node's key: create one with `fedshift pki add`")
            check_server(self.tls)
        elif self.host not in LOOPBACK and not self.forced:
            raise UsageError(
                f"--insecure on --host {self.host} would send models in plain text to other machines: give --tls, or "
                "listen on 127.0.0.1 behind a tunnel, or force it (--force-insecure)"
            )
        if self.clients < 1:
            raise UsageError(f"min_clients={self.clients}: must be at least 1")
        if not (self.update_bound == 0 or self.update_bound > 1):
            raise UsageError(
                f"update_bound={self.update_bound:g}: must be greater than 1 (maximum ratio to the length of the "
                "others' updates), or 0 for no limit"
            )
        if not 0 < self.max_share <= 1:
            raise UsageError(
                f"max_share={self.max_share:g}: must be greater than 0 and at most 1 (no limit): the maximum weight of "
                "one site among three or more"
            )
        if self.alert is not None:
            parse_target(self.alert)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise UsageError(
                    f"cannot listen on {self.host}:{self.port}: {error.strerror}; choose another (--port)"
                ) from error


def serve(
    spec: RunSpec | CompareSpec,
    reach: ListenOptions,
    place: RunOptions,
    directory: Path,
    from_round: int | None = None,
) -> int:
    """Run ``spec`` in ``directory`` with the sites that connect; return an exit code, as ``fedshift run`` does.

    All files are accessible only to their owner. ``from_round``: the trial in progress first goes back to this round;
    None: it continues where it stopped.
    """
    with owner_only():
        return _serve(spec, reach, place, directory, from_round)


def _serve(
    spec: RunSpec | CompareSpec, reach: ListenOptions, place: RunOptions, directory: Path, from_round: int | None
) -> int:
    check_flower()
    console = Console()
    if place.resume is None and (directory / "config.toml").exists():
        raise UsageError(
            f"{directory} already holds a run: continue it (--resume {directory}), or choose another --out"
        )
    if place.resume:
        require_series(directory)
    console.print(f"{directory}: listening on {reach.host}:{reach.port}", markup=False, highlight=False, soft_wrap=True)
    failure: FedshiftError | OSError | None = None
    finished = False
    with (
        acquire_lock(directory / MACHINES),
        catch_interrupts(console) as stop,
        show_progress(Console(quiet=place.quiet)) as shown,
        serve_metrics(reach.metrics, read_end(reach.tls) if reach.tls else None) as counted,
        Alerts(reach.alert, directory, directory / MACHINES) as alerts,
        _Coordination(spec, reach, directory, place, alerts) as work,
    ):
        if from_round is not None:
            go_back(directory, from_round)
        try:
            finished = work.run(Callbacks(shown, counted), stop)
        except UsageError as error:
            alerts.send("failed", str(error))
            raise
        except FedshiftError as error:
            alerts.send("failed", str(error))
            failure = error
        except KeyboardInterrupt:
            pass
    from ...report.publication import publish_safely

    unpublished = publish_safely(directory, console)
    failure = failure or unpublished
    if failure:
        raise failure
    return 0 if finished else report_stop(console, f"serve {reach.flags}", directory)


class _Coordination:
    """Context manager that keeps the SuperLink and its app running. ``rounds``: number of completed rounds."""

    rounds = 0
    _patience = PATIENCE

    def __init__(
        self,
        spec: RunSpec | CompareSpec,
        reach: ListenOptions,
        directory: Path,
        place: RunOptions,
        alerts: Alerts,
    ) -> None:
        self.alerts, self._stalls = alerts, StallWatch(reach.seconds / 2)
        self.place, self.reach, self.directory, self.logs = place, reach, directory, directory / MACHINES
        self._scratch = ScratchDirectory()
        self.home = self._scratch.path
        self.config = self.home / "run.toml"
        self.settings = json.dumps(asdict(spec))
        self.config.write_text(f"{FACTS} = {json.dumps(self.settings)}\n", encoding="utf-8")
        self.socket = listen_locally(self.home / "talk")
        self.socket.settimeout(0.2)

    @property
    def near(self) -> str:
        """The host, and its address, where programs on this machine reach the SuperLink without a proxy."""
        return self.reach.here if self.reach.name == self.reach.here else f"{self.reach.name}={self.reach.here}"

    def __enter__(self) -> _Coordination:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._scratch.close()

    def run(self, callback: Callback, stop: Event) -> bool:
        """Run until the experiment finishes or ``stop`` is set; return whether it finished."""
        tries, rounds = 0, 0
        while True:
            with self._superlink() as link, self._superexec(link, stop) as executor:
                finished = self._follow(link, executor, callback, stop)
                running = link.code is None
            if finished is not None:
                return finished
            if stop.is_set():
                return False
            lost = executor if executor.code is not None and running else link
            tries, rounds = (0, self.rounds) if self.rounds > rounds else (tries + 1, rounds)
            if tries == TRIES:
                raise FedshiftError(
                    f"Flower's programs exited {tries} times without completing a round ({lost.last_message()}): see "
                    f"{self.logs}"
                )
            callback.on_notice(f"Flower's programs exited ({lost.last_message()}) and are restarted")

    @contextmanager
    def _superlink(self) -> Iterator[Program]:
        tls = self.reach.tls
        secured = [
            "--ssl-ca-certfile", f"{tls}/ca.crt", "--ssl-certfile", f"{tls}/server.crt", "--ssl-keyfile",
            f"{tls}/server.key", "--enable-supernode-auth",
        ] if tls else ["--insecure"]  # fmt: skip
        listen = ["--host", self.reach.host, "--port", str(self.reach.port)]
        (self.home / GUARDED).unlink(missing_ok=True)
        link = Program(
            "flower-superlink", [*listen, "--disable-runtime-dependency-installation", *secured, "--isolation",
            "process", *isolate(self.home)],
            home=self.home, log=self.logs / "superlink.log", near=self.near,
            more={KEYS: str(tls.resolve())} if tls else {},
        )  # fmt: skip
        try:
            yield link
        finally:
            link.stop()

    @contextmanager
    def _superexec(self, link: Program, stop: Event) -> Iterator[Program]:
        """Run the app in a process that takes it from the SuperLink, once the SuperLink listens."""
        self._wait_for(link, stop)
        secured = ["--root-certificates", f"{self.reach.tls}/ca.crt"] if self.reach.tls else ["--insecure"]
        executor = Program(
            "flower-superexec", ["--runtime-api-address", self.reach.local_address, *secured, *isolate(self.home)],
            home=self.home, log=self.logs / "superexec.log", more={COORDINATOR: str(self.home / "talk")},
            near=self.near,
        )  # fmt: skip
        try:
            self._submit()
            yield executor
        finally:
            executor.stop()

    def _wait_for(self, link: Program, stop: Event) -> None:
        """Wait until the SuperLink listens; raise :class:`FedshiftError` if it exits first."""
        guarded = self.home / GUARDED
        port = self.reach.port
        began = time.monotonic()
        while True:
            with suppress(OSError), socket.create_connection((self.reach.here, port)):
                self._patience = max(PATIENCE, SLOWER * (time.monotonic() - began))
                break
            if stop.is_set():
                raise KeyboardInterrupt
            if link.wait(0.1) is not None:
                raise FedshiftError(f"Flower's SuperLink did not start ({link.last_message()}): see {link.log}")
        if not guarded.exists():
            link.stop()
            raise FedshiftError(
                "Flower's SuperLink was stopped: it opened its port without fedshift's guard and would have let other "
                "machines submit and stop runs. Install a version of Flower that fedshift supports"
            )

    def _submit(self) -> None:
        """Register the nodes' keys, and submit the app."""
        log = self.logs / "flwr.log"
        connect(self.home, self.reach.local_address, self.reach.tls / "ca.crt" if self.reach.tls else None)
        self._registered: set[bytes] = set()
        self._register()
        submit(self.config, home=self.home, log=log, near=self.near, seconds=self._patience)

    def _register(self) -> None:
        """Register new node keys, which may be added or replaced while the experiment runs.

        Flower cannot unregister keys; the app ignores nodes whose keys have been removed (:mod:`.nodes`).
        """
        if self.reach.tls:
            for path in sorted((self.reach.tls / "nodes").glob("*.pub")):
                try:
                    key = path.read_bytes()
                except FileNotFoundError:  # removed since the listing
                    continue
                if key not in self._registered:
                    self._registered.add(key)
                    log = self.logs / "flwr.log"
                    register(path, path.stem, home=self.home, log=log, near=self.near, seconds=self._patience)

    def _follow(self, link: Program, executor: Program, callback: Callback, stop: Event) -> bool | None:
        """Forward the app's messages; return whether the experiment finished, or None if the connection was lost."""
        connection = self._accept((link, executor), stop)
        if connection is None:
            return None
        stopping, ends = False, EndNotice(self.reach.tls, callback.on_notice)
        with connection:
            keys = str(self.reach.tls.resolve()) if self.reach.tls else None
            order = {
                "directory": str(self.directory.resolve()), "clients": self.reach.clients,
                "seconds": self.reach.seconds, "wait": self.reach.wait, "keys": keys, "settings": self.settings,
                "update_bound": self.reach.update_bound, "max_share": self.reach.max_share, "code": self.place.code,
                "file": str(self.place.config or self.directory / FILE), "home": str(self.home),
            }  # fmt: skip
            connection.send_bytes(json.dumps(order).encode())
            try:
                while True:
                    if connection.poll(0.2):
                        event, *values = json.loads(connection.recv_bytes())
                        if event == "ended":
                            return bool(values[0])
                        if event == "failed":
                            raise (UsageError if values[1] else FedshiftError)(values[0])
                        self._show(callback, event, *values)
                    elif link.code is not None or executor.code is not None:
                        return None
                    ends.check()
                    self._watch(callback)
                    try:
                        self._register()
                    except FedshiftError as error:
                        callback.on_notice(str(error))
                    if stop.is_set() and not stopping:
                        connection.send_bytes(b"stop")
                        stopping = True
            except (EOFError, OSError):
                return None

    def _watch(self, callback: Callback) -> None:
        """Send an alert if the round stalls, and report alerts that failed."""
        if self._stalls.is_due():
            self.alerts.send("stalled", f"no round has ended for {self.reach.seconds / 2:g} seconds")
        for text in self.alerts.take_failures():
            callback.on_notice(text)

    def _show(self, callback: Callback, event: str, *values: Any) -> None:
        if event == "alert":
            self.alerts.send(*values)
            return
        if event in ("on_trial_begin", "on_round_end"):
            self._stalls.note()
        if event != "on_round_end":
            getattr(callback, event)(*values)
            return
        self.rounds += 1
        done = RoundResult(**{**values[0], "participants": tuple(values[0]["participants"])})
        callback.on_round_end(done)
        moved = f"{_format_bytes(done.down)} down, {_format_bytes(done.up)} up, {done.seconds:.1f} s"
        callback.on_notice(f"round {done.round}: {', '.join(done.participants)} took part; {moved}")

    def _accept(self, programs: Sequence[Program], stop: Event) -> Connection | None:
        while all(program.code is None for program in programs) and not stop.is_set():
            with suppress(TimeoutError):
                return accept_locally(self.socket)
        return None


def _format_bytes(number: int) -> str:
    return f"{number / 1e6:.2f} MB" if number >= 1e5 else f"{number / 1e3:.2f} kB"
