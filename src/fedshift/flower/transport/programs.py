"""Flower's own programs as children of ``fedshift serve`` and ``fedshift join``.

They phone nobody (:mod:`fedshift.flower.transport.no_telemetry`), install nothing, keep what they write below one private folder, and
end with the program that started them, however that ends: each watches its standard input, which the operating system
closes. What Flower itself starts for each run and message is looked up by name, and here found as
:mod:`fedshift.flower.transport.forwarding`, which runs what is installed on this machine and nothing that was sent.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from ...utils.errors import FedshiftError, UsageError
from .no_telemetry import QUIET

APP = Path(__file__).with_name("app")
"""The app that a coordinator submits."""
PROGRAMS = {
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flwr": "flwr.cli.app:app",
    "flwr-clientapp": "fedshift.flower.transport.forwarding:serve_requests",
}
REFUSED = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-simulation")
COLOR, REASON = re.compile(r"\x1b\[[\d;]*m"), re.compile(r"Exit Code: \d+\n(.+(?:\n.+)*)")
GRACE = 5.0
"""Seconds in which a program may end by itself."""
HEARTBEAT = 10.0
"""Seconds, the fewest that a SuperLink takes: a node that died is gone, and may come back, after twice as many."""


class Program:
    """One of :data:`PROGRAMS` as a child; what it says goes to the file ``log``.

    ``home``: a private folder for what it writes. ``more``: further variables of its environment.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], *, home: Path, log: Path, more: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as said:
            self._began = said.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from fedshift.flower.transport.programs import main; main()", name, *arguments],
                stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT, env=make_environment(home, more or {}),
                start_new_session=True,  # Ctrl-C is for whoever started it
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """How it ended, after at most ``seconds``; None where it still runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End it, and what it started."""
        if self._process.stdin:
            self._process.stdin.close()
        if self.wait(GRACE) is None:
            self._process.kill()
            self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def last_message(self) -> str:
        """Why it ended, where Flower says so, else the last line that it wrote."""
        with self.log.open("rb") as log:
            log.seek(self._began)
            text = COLOR.sub("", log.read().decode(errors="replace")).strip()
        reasons = REASON.findall(text)
        lines = reasons[-1].splitlines()[:2] if reasons else text.splitlines()[-1:]
        return " ".join(line.strip() for line in lines) or "it said nothing"


def make_environment(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program whose folder is ``home``; makes the folder and the programs that Flower starts.

    Raises :class:`UsageError` where these could not run, as Flower's own would then be started in their place.
    """
    found = home / "bin"
    found.mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    serverapp = shlex.quote("from fedshift.flower.transport.forwarding import serverapp; serverapp()")
    started = {
        "flwr-clientapp": 'exec printf \'%s\\n\' "$*" > "$FEDSHIFT_PIPE"',
        "flwr-serverapp": f'exec {shlex.quote(sys.executable)} -P -c {serverapp} "$@"',
    }
    for name in (*started, *REFUSED):
        run = started.get(name, f"echo {name} is not for this machine; exit 1")
        beside = found / f"{name}.{os.getpid()}"
        beside.write_text(f"#!/bin/sh\n{run}\n", encoding="utf-8")
        beside.chmod(0o700)
        beside.replace(found / name)
        if not os.access(found / name, os.X_OK):  # the search would go on, and find Flower's own
            raise UsageError(f"{home} does not let programs run (noexec): set TMPDIR to a folder that does")
    path = os.pathsep.join((str(found), str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {
        **os.environ, **QUIET, "FLWR_HOME": str(home), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "PATH": path,
        "PYTHONUNBUFFERED": "1", **more,
    }  # fmt: skip


def is_own(app: bytes) -> bool:
    """Whether ``app``, as Flower packs apps, is :data:`APP`: its names, and no code beside them."""
    own = tomllib.loads((APP / "pyproject.toml").read_text(encoding="utf-8"))
    try:
        with zipfile.ZipFile(io.BytesIO(app)) as packed:
            found = tomllib.loads(packed.read("pyproject.toml").decode())
            files = {name for name in packed.namelist() if not name.startswith(".info/")}
        components = found["tool"]["flwr"]["app"]["components"]
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError):
        return False
    return files == {"pyproject.toml"} and components == own["tool"]["flwr"]["app"]["components"]


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connect(home: Path, address: str, root: Path | None) -> None:
    """Tell ``flwr`` in ``home`` where the SuperLink is.

    ``root``: the certificate that it is checked against; None: plain text.
    """
    trust = f'root-certificates = "{root.resolve()}"' if root else "insecure = true"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{address}"\n{trust}\n', encoding="utf-8"
    )


def submit(config: Path, *, home: Path, log: Path) -> None:
    """Submit :data:`APP` with the run configuration in TOML file ``config``; raises :class:`FedshiftError`."""
    _finish(Program("flwr", ["run", str(APP), "here", "--run-config", str(config)], home=home, log=log), "submit a run")


def register(key: Path, name: str, *, home: Path, log: Path) -> None:
    """Make the public key in file ``key`` known as that of ``name``; raises :class:`FedshiftError`."""
    program = Program("flwr", ["supernode", "register", str(key), "here", "--name", name], home=home, log=log)
    _finish(program, f"register the key of {name!r}")


def _finish(program: Program, what: str) -> None:
    code = program.wait(120.0)
    if code != 0:
        program.stop()
        raise FedshiftError(f"Flower could not {what} ({program.last_message()}): see {program.log}")


def main() -> None:
    """What the child runs: the program that its arguments name, until it ends or nobody is left who wants it."""
    threading.Thread(target=exit_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    del sys.argv[0]
    if sys.argv[0] == "flower-superlink":
        importlib.import_module("fedshift.flower.transport.firewall").guard_port()
    if sys.argv[0] == "flower-supernode":
        _beat_every(HEARTBEAT)
        poll_quickly()
        if poll := os.environ.get("FEDSHIFT_POLL"):
            _poll_every(float(poll))
    module, _, name = PROGRAMS[sys.argv[0]].partition(":")
    getattr(importlib.import_module(module), name)()


def exit_with_parent(lifeline: int) -> None:
    """Wait for the end of file ``lifeline``, then end this process."""
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE / 2)
    os._exit(1)


def poll_quickly() -> None:
    """Let this process look after 0.05 seconds for what of a message is still on its way, then ever less often.

    Flower begins with one second, whatever the size; it has no setting.
    """
    utils = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    for function in (utils.pull_objects, utils.pull_and_inflate_object_from_tree):
        function.__kwdefaults__["initial_backoff"] = 0.05


def _beat_every(seconds: float) -> None:
    """Let a SuperNode say every ``seconds`` that it is there, in place of 30; Flower has no setting."""
    for module in ("flwr.supercore.heartbeat", "flwr.supernode.fleet_http_connection"):
        importlib.import_module(module).HEARTBEAT_DEFAULT_INTERVAL = seconds  # type: ignore[attr-defined]


def _poll_every(seconds: float) -> None:
    """Let a SuperNode, which asks for messages every three seconds, ask every ``seconds``; Flower has no setting."""
    node = importlib.import_module("flwr.supernode.start_client_internal")
    node.time = SimpleNamespace(**{**vars(time), "sleep": lambda wanted: time.sleep(min(wanted, seconds))})  # type: ignore[attr-defined]
