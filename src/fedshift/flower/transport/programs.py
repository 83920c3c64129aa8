"""Flower's own programs as children of ``fedshift serve`` and ``fedshift join``.

They report no usage (:data:`.QUIET`), install nothing, and write only below one private folder. They exit when their
parent does, however it ends: each watches its standard input, which the operating system closes. They give tasks only
to a SuperExec with the secret of :func:`isolate` (:mod:`.forwarding`), which runs only code that is installed on this
machine. Other machines can reach only the parts of the SuperLink that nodes need (:mod:`.firewall`).
"""

from __future__ import annotations

import importlib
import io
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import traceback
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import httpx

from ...utils.errors import FedshiftError, UsageError
from .. import QUIET
from .firewall import KEYS, install_firewall

APP = Path(__file__).with_name("app")
"""The app that a coordinator submits."""
PROGRAMS = {
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flwr": "flwr.cli.app:app",
    "flower-superexec": "fedshift.flower.transport.forwarding:execute_tasks",
}
COLOR, REASON = re.compile(r"\x1b\[[\d;]*m"), re.compile(r"Exit Code: \d+\n(.+(?:\n.+)*)")
HINT = re.compile(r"^For more information check: .*$", re.MULTILINE)
"""What httpx writes after an error of HTTP."""
CUT = re.compile(r"eof occurred|timed out")
"""OpenSSL's messages about a connection that ended or stalled, rather than about a certificate."""
VERSIONS = ("1.41", "1.42")
"""Minor versions of Flower that fedshift was run with."""
NEAR = "FEDSHIFT_NEAR"
"""Environment variable with NAME=ADDRESS, if a name is to resolve to an address of this machine."""
UNSET = ("FORWARDED_ALLOW_IPS", "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", KEYS)
"""Variables that programs do not inherit: trusted proxies, the size of an entry's parts, and where keys are."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
GRACE = 5.0
"""Seconds that a program gets to exit before it is killed."""
PATIENCE = 120.0
"""Time limit in seconds for a call of a Flower program on a machine that is not slow."""
HEARTBEAT = 10.0
"""Seconds between heartbeats, the minimum that a SuperLink accepts; a dead node is considered gone after twice this."""


class Program:
    """One of :data:`PROGRAMS` as a child process; its output is appended to the file ``log``.

    ``home``: a private folder for the files it writes. ``more``: additional environment variables. ``near``: a host
    that it reaches without a proxy, like this machine; NAME=ADDRESS: at this address, without asking name servers.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], *, home: Path, log: Path, more: Mapping[str, str] | None = None,
        near: str = "",
    ) -> None:  # fmt: skip
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        run = "from fedshift.flower.transport.programs import main; main()"
        with log.open("ab") as output:
            self._began = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", run, name, *arguments],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                env=make_environment(home, more or {}, near),
                start_new_session=True,  # only the parent receives Ctrl-C
            )  # fmt: skip

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait at most ``seconds``; return the exit code, or None if it still runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Stop the program and all processes that it started."""
        if self._process.stdin:
            self._process.stdin.close()
        if self.wait(GRACE) is None:
            self._process.kill()
            self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_message(self) -> str:
        """Return Flower's reason for the exit, or else the last line of output."""
        with self.log.open("rb") as log:
            log.seek(self._began)
            text = HINT.sub("", COLOR.sub("", log.read().decode(errors="replace"))).strip()
        reasons = REASON.findall(text)
        lines = reasons[-1].splitlines()[:2] if reasons else text.splitlines()[-1:]
        return " ".join(line.strip() for line in lines) or "it printed nothing"


def make_environment(home: Path, more: Mapping[str, str], near: str = "") -> dict[str, str]:
    """Return the environment of a program whose folder is ``home``, which is created.

    Flower's programs reach each other over this machine's loopback, and reach ``near``, without a proxy.
    """
    home.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    inherited = {name: value for name, value in os.environ.items() if name not in UNSET}
    name, _, address = near.partition("=")
    known = (inherited.get("no_proxy") or inherited.get("NO_PROXY") or "", *LOOPBACK, name)
    direct = ",".join(dict.fromkeys(filter(None, known)))
    resolved = {NEAR: near} if address else {}
    return {
        **inherited, **QUIET, "NO_PROXY": direct, "no_proxy": direct, "FLWR_HOME": str(home), "PATH": path,
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "PYTHONUNBUFFERED": "1", **resolved, **more,
    }  # fmt: skip


def is_own(app: bytes) -> bool:
    """Return whether ``app``, in Flower's package format, has the components of :data:`APP` and no code."""
    own = tomllib.loads((APP / "pyproject.toml").read_text(encoding="utf-8"))
    try:
        with zipfile.ZipFile(io.BytesIO(app)) as packed:
            found = tomllib.loads(packed.read("pyproject.toml").decode())
            files = {name for name in packed.namelist() if not name.startswith(".info/")}
        components = found["tool"]["flwr"]["app"]["components"]
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError):
        return False
    return files == {"pyproject.toml"} and components == own["tool"]["flwr"]["app"]["components"]


def find_proxy(host: str, *, secured: bool) -> str:
    """Return the proxy that programs here use to reach ``host``, without its password; empty if there is none."""
    known = urllib.request.getproxies_environment()
    if urllib.request.proxy_bypass(host):
        return ""
    found = known.get("https" if secured else "http") or known.get("all") or ""
    return found.rpartition("@")[2].rpartition("//")[2]


def isolate(home: Path) -> list[str]:
    """Return arguments with which only a SuperExec with the same ones can take tasks; save their secret in ``home``."""
    file = home / "secret"
    if not file.exists():
        home.mkdir(parents=True, exist_ok=True)
        with open(file, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as secret:
            secret.write(secrets.token_bytes(32))
    return ["--superexec-auth-secret-file", str(file)]


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connect(home: Path, address: str, root: Path | None) -> None:
    """Configure ``flwr`` in ``home`` for the SuperLink at ``address``.

    ``root``: the certificate authority's certificate; None: plain text.
    """
    trust = f'root-certificates = "{root.resolve()}"' if root else "insecure = true"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{address}"\n{trust}\n', encoding="utf-8"
    )


def submit(config: Path, *, home: Path, log: Path, near: str = "", seconds: float = PATIENCE) -> None:
    """Submit :data:`APP` with the run configuration in TOML file ``config``.

    Raises :class:`FedshiftError` if this fails or takes longer than ``seconds``.
    """
    arguments = ["run", str(APP), "here", "--run-config", str(config)]
    _finish(Program("flwr", arguments, home=home, log=log, near=near), "submit a run", seconds)


def register(key: Path, name: str, *, home: Path, log: Path, near: str = "", seconds: float = PATIENCE) -> None:
    """Register the public key in file ``key`` for node ``name``.

    Raises :class:`FedshiftError` if this fails or takes longer than ``seconds``.
    """
    arguments = ["supernode", "register", str(key), "here", "--name", name]
    program = Program("flwr", arguments, home=home, log=log, near=near)
    _finish(program, f"register the key of {name!r}", seconds)


def _finish(program: Program, what: str, seconds: float) -> None:
    code = program.wait(seconds)
    if code != 0:
        program.stop()
        late = f" within {seconds:.0f} seconds" if code is None else ""
        raise FedshiftError(f"Flower could not {what}{late} ({program.last_message()}): see {program.log}")


def main() -> None:
    """Run the program named in the arguments until it exits or its parent dies; called in the child process."""
    threading.Thread(target=exit_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    # When a SuperNode is refused, each of its threads interrupts the process, and Flower restores this handler at the
    # first interrupt. Python's own handler would abort Flower's exit at the second, and the process would hang forever.
    signal.signal(signal.SIGINT, lambda *_: None)
    del sys.argv[0]
    if near := os.environ.get(NEAR):
        _resolve(*near.split("="))
    if sys.argv[0] == "flower-superlink":
        install_firewall(Path(os.environ["FLWR_HOME"]))
    if sys.argv[0] == "flower-supernode":
        _beat_every(HEARTBEAT)
        retry_after_cuts()
        poll_quickly()
        if poll := os.environ.get("FEDSHIFT_POLL"):
            _poll_every(float(poll))
    module, _, name = PROGRAMS[sys.argv[0]].partition(":")
    code = 0
    try:
        getattr(importlib.import_module(module), name)()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    # A SuperNode whose connection breaks in a TLS handshake returns; its other threads would never end.
    os._exit(code)


def exit_with_parent(lifeline: int) -> None:
    """Wait until file descriptor ``lifeline`` is closed, then terminate this process."""
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE / 2)
    os._exit(1)


def check_flower() -> None:
    """Raise :class:`UsageError` unless the installed version of Flower is one that fedshift was run with."""
    found = version("flwr")
    if ".".join(found.split(".")[:2]) not in VERSIONS:
        raise UsageError(
            f"flwr {found} is installed, but fedshift, which replaces parts of it, was run with "
            f"only {' and '.join(VERSIONS)}: pip install 'fedshift[flower]'"
        )


def replace_part(module: str, name: str, by: object, *, used_by: str = "") -> None:
    """Replace a part of Flower that has no setting; ``used_by``: the function of the module that reads it.

    Exits if the part does not exist or is not read, so that nothing ever runs with Flower's own part.
    """
    found = importlib.import_module(module)
    reader = getattr(getattr(found, used_by, None), "__code__", None)
    if not hasattr(found, name) or (used_by and not (reader and _reads(reader, name))):
        sys.exit(
            f"{module} of flwr {version('flwr')} does not use {name}, which fedshift replaces: nothing was started"
        )
    setattr(found, name, by)


def _reads(code: CodeType, name: str) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return name in code.co_names or any(_reads(each, name) for each in inner)


def poll_quickly() -> None:
    """Retry after 0.05 seconds for parts of a message that are still in transit, then at increasing intervals.

    Flower begins with one second for any size and has no setting for this.
    """
    utils = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
        defaults = getattr(getattr(utils, name, None), "__kwdefaults__", None) or {}
        if "initial_backoff" not in defaults:
            sys.exit(
                f"{name} of flwr {version('flwr')} has no initial_backoff, which fedshift sets: nothing was started"
            )
        defaults["initial_backoff"] = 0.05


def _resolve(name: str, address: str) -> None:
    """Let ``name`` resolve to ``address`` in this process; programs verify the certificate by the name."""
    resolve = socket.getaddrinfo

    def resolve_near(host: Any, *rest: Any, **named: Any) -> Any:
        return resolve(address if host == name else host, *rest, **named)

    socket.getaddrinfo = resolve_near


def retry_after_cuts() -> None:
    """Make a SuperNode try again after a connection that ended during the TLS handshake.

    Flower takes every error that names TLS for a wrong certificate, gives up, and loses the upload.
    """
    module = importlib.import_module("flwr.supernode.fleet_http_connection")
    make: Any = getattr(module, "make_simple_http_retry_invoker", None)

    def make_patient() -> Any:
        invoker = make()
        gives_up = invoker.should_giveup
        invoker.should_giveup = lambda error: not _is_cut(error) and gives_up(error)
        return invoker

    replace_part(module.__name__, "make_simple_http_retry_invoker", make_patient)


def _is_cut(error: Exception) -> bool:
    said = str(error).lower()
    return isinstance(error, httpx.TransportError) and "certificate" not in said and bool(CUT.search(said))


def _beat_every(seconds: float) -> None:
    """Make a SuperNode send heartbeats every ``seconds`` instead of 30; Flower has no setting for it."""
    for module in ("flwr.supercore.heartbeat", "flwr.supernode.fleet_http_connection"):
        replace_part(module, "HEARTBEAT_DEFAULT_INTERVAL", seconds)


def _poll_every(seconds: float) -> None:
    """Make a SuperNode ask for messages every ``seconds`` instead of three; Flower has no setting for it."""
    quicker = SimpleNamespace(**{**vars(time), "sleep": lambda wanted: time.sleep(min(wanted, seconds))})
    replace_part("flwr.supernode.start_client_internal", "time", quicker, used_by="start_client_internal")
