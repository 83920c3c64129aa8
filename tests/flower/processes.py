"""``fedshift serve`` and ``join`` as processes of their own, in a network that has nothing but loopback.

Where the system lets nobody make such a network the processes run in the machine's own; what they connect to is
written down in either.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedshift.config.settings_file import to_toml
from fedshift.flower import QUIET
from fedshift.flower.keys import make_certificate
from fedshift.utils.files import write_atomically
from tests.flower.gated import GATE

ROOT = Path(__file__).parents[2]
PATIENCE = 3600
"""Seconds after which a test gives up; none takes near as long."""
WATCH = "FEDSHIFT_TEST_WATCH"
WATCHER = f"""
import json, os, sys
def heard(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    with open(os.environ["{WATCH}"], "a") as said:
        said.write(json.dumps([str(host), sys.argv[0]]) + "\\n")
sys.addaudithook(heard)
"""
"""What each Python process runs first: it writes down to whom it connects, and of whom it asks the address."""

AHEAD = "FEDSHIFT_TEST_AHEAD"
CLOCK = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long ahead(void) {{ const char *seconds = getenv("{AHEAD}"); return seconds ? atol(seconds) : 0; }}
int clock_gettime(clockid_t kind, struct timespec *now) {{
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(kind, now);
    if (!failed && kind == CLOCK_REALTIME) now->tv_sec += ahead();
    return failed;
}}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {{
    (void)zone;
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}}
time_t time(time_t *now) {{
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    return now ? (*now = exact.tv_sec) : exact.tv_sec;
}}
"""
"""A library whose time of day is some seconds ahead of the system's, for programs that load it before the system's."""

SERVE = """
from fedshift.report import page, publication
publication.save_figures = page.make_panels = lambda *_: []
from fedshift.cli.app import main
main()
"""
"""``fedshift`` for the coordinator: its report is without figures, which take half of the process's time."""


class Process:
    """A command whose output goes to the file ``log``."""

    def __init__(self, command, log, environment, folder, stdin=subprocess.DEVNULL):
        self.log = log
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                command, stdin=stdin, stdout=said, stderr=subprocess.STDOUT, env=environment, cwd=folder
            )
        self.pid = self._process.pid

    @property
    def code(self):
        return self._process.poll()

    @property
    def said(self):
        return self.log.read_text()

    def says(self, text, times=1):
        """Return once it has said ``text`` so often."""
        until(lambda: self.said.count(text) >= times or self.code is not None, f"{text!r} in", self)
        assert self.said.count(text) >= times, self.said

    def ends(self):
        """Its exit code, once it has ended."""
        until(lambda: self.code is not None, "the end of", self)
        return self.code

    def kill(self):
        """Kill it, and return once it is gone."""
        self.signal(signal.SIGKILL)
        self.ends()

    def signal(self, number):
        """Send a signal, unless it has ended."""
        if self.code is None:
            os.kill(self.pid, number)

    @property
    def children(self):
        """The processes that it started, which are none."""
        return Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()


class Machines:
    """A coordinator and sites in ``folder``, started and killed at will; ``tls``: with keys, else in plain text.

    ``stdin``: where programs that are started next read from.
    """

    stdin = subprocess.DEVNULL

    def __init__(self, folder, spec, before, *, tls=True):
        self.folder, self.spec, self.tls = folder, spec, tls
        self._before, self.port = before, free_port()
        self.isolated, self.host = bool(before), "localhost"
        self._links, self._clocks = {}, {}
        self.served = folder / "served"
        self.watched = folder / "watched.jsonl"
        self.names = spec.domains.split(",")
        (folder / "watch").mkdir()
        (folder / "watch" / "sitecustomize.py").write_text(WATCHER)
        (folder / "config.toml").write_text(to_toml(asdict(spec)))
        (folder / "site.toml").write_text("[limits]\nleast_samples = 1\nleast_steps = 1\n")
        if tls:
            make_keys(folder, self.names)

    def serve(self, *arguments, resume=False, seconds=120):
        """Start the coordinator; ``seconds``: how long a round may take."""
        what = ("--resume", self.served) if resume else (self.folder / "config.toml", "--out", self.served)
        secured = ("--tls", self.folder / "tls") if self.tls else ("--insecure",)
        return self.start(
            "serve", "serve", *what, *secured, "--port", self.port, "--round-timeout", seconds, "--code",
            "tests.flower.gated:network", *arguments,
        )  # fmt: skip

    def join(self, name, *arguments, policy="site.toml"):
        data = self.spec.data
        data = Path(data) / f"{name}.npz" if Path(data).is_dir() else data
        secured = self.secured(name) if self.tls else ("--insecure",)
        return self.start(
            name, "join", self.address(name), "--data", data, "--name", name, *secured, "--state", self.folder / name,
            "--poll", 0.1, "--threads", 1, "--code", "tests.flower.gated:network",
            *(["--policy", self.folder / policy] if policy else []), *arguments,
        )  # fmt: skip

    def secured(self, name):
        """The words that name a site's files."""
        return "--tls", self.folder / "tls", "--key", self.folder / "keys" / f"{name}.key"

    def address(self, name):
        return f"{self.host}:{self._links.get(name, self.port)}"

    def set_clock(self, name, ahead):
        """Let the clock of what is started later as ``name`` be so many seconds ahead, in all of its processes."""
        library = self.folder / "clock.so"
        if not library.exists():
            command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"]
            subprocess.run(command, input=CLOCK, text=True, check=True)
        self._clocks[name] = {"LD_PRELOAD": str(library), AHEAD: str(ahead)}

    def link(self, name, *, delay=0.0, state="up"):
        """Put a :mod:`.link` between ``name``, if it joins later, and the coordinator, or change that link."""
        file = self.folder / f"{name}.link.json"
        write_atomically(file, json.dumps({"delay": delay, "state": state}).encode())
        if name not in self._links:
            self._links[name] = free_port()
            words = ["-m", "tests.flower.link", file, self._links[name], self.port]
            self.execute(f"{name}.link", *words).says("listening")

    def start(self, called, *arguments):
        """Start ``fedshift`` with ``arguments``; what it says goes to the file ``called``."""
        program = ["-P", "-c", SERVE] if called == "serve" else ["-m", "fedshift"]
        return self.execute(called, *program, *arguments)

    def execute(self, called, *arguments):
        """Start Python with ``arguments``; what it says goes to the file ``called``."""
        environment = {
            **{name: value for name, value in os.environ.items() if not (self.isolated and name in QUIET)},
            "PYTHONPATH": os.pathsep.join([str(self.folder / "watch"), *filter(None, sys.path), str(ROOT)]),
            WATCH: str(self.watched), GATE: str(self._gate(called)), "OMP_NUM_THREADS": "1",
            **self._clocks.get(called, {}),
        }  # fmt: skip
        command = [*self._before, sys.executable, *map(str, arguments)]
        return Process(command, self.folder / f"{called}.log", environment, self.folder, self.stdin)

    def go_on(self, called, code, *arguments):
        """Start Python ``code`` in the network of all; what it says goes to the file ``called``."""
        command = [*self._before, sys.executable, "-c", code, *map(str, arguments)]
        return Process(command, self.folder / f"{called}.log", dict(os.environ), self.folder)

    def run(self, code, *arguments):
        """What Python ``code`` says in the network of all."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)])}
        command = [*self._before, sys.executable, "-W", "ignore", "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()

    def hold(self, name, round):
        """Let training at ``name`` stop in its process's round number ``round``, until :meth:`release`."""
        self._gate(name).write_text(str(round))

    def held(self, name, process):
        """Return once ``name``, which is ``process``, is in the middle of its round."""
        until(self._gate(name).with_suffix(".held").exists, "mid-round at", process)

    def release(self, name):
        self._gate(name).unlink()
        self._gate(name).with_suffix(".held").unlink()

    @property
    def rounds(self):
        """Who took part in each round that is done."""
        return [json.loads(line)["participants"] for line in self._recorded]

    @property
    def rounds_done(self):
        """How many rounds are recorded."""
        return len(self._recorded)

    @property
    def _recorded(self):
        return [line for file in self.served.glob("trials/*/rounds.jsonl") for line in file.read_text().splitlines()]

    def _gate(self, name):
        return self.folder / f"{name}.gate"


@contextmanager
def machines(folder, spec, **options):
    """:class:`Machines`, of whose processes none outlives the block."""
    with ExitStack() as stack:
        made, began = Machines(folder, spec, stack.enter_context(_alone()), **options), []

        def kept(start):
            def begin(*arguments):
                began.append(start(*arguments))
                return began[-1]

            return begin

        made.execute, made.go_on = kept(made.execute), kept(made.go_on)
        try:
            yield made
        finally:
            for process in began:
                if process.code is None:
                    process.kill()


@contextmanager
def _alone():
    """What stands before a command that is to run in a network of its own; nothing where there can be none."""
    try:
        holder = subprocess.Popen(
            ["unshare", "--net", "--map-root-user", "sh", "-c", "ip link set lo up && echo up && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
    except FileNotFoundError:
        yield []
        return
    with holder:
        up = holder.stdout.readline() == "up\n"
        enter = ["nsenter", "--target", str(holder.pid), "--user", "--net", "--preserve-credentials", "--"]
        yield enter if up else []
        holder.stdin.close()


def until(condition, what, process):
    """Return once ``condition`` holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what} {process.log.name}, which said: {process.said}"
        time.sleep(0.05)


def free_port():
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_keys(folder, names, hosts=("localhost",)):
    """Make the coordinator's directory ``folder/tls``, and each site's key in ``folder/keys``, as ssh-keygen does."""
    make_certificate(folder / "tls", hosts)
    (folder / "keys").mkdir(exist_ok=True)
    for name in names:
        make_key(folder, name)


def make_key(folder, name):
    """Make a key for ``name``, or replace it."""
    key, form = ec.generate_private_key(ec.SECP384R1()), serialization.PrivateFormat.OpenSSH
    file = folder / "keys" / f"{name}.key"
    file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    file.chmod(0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_atomically(folder / "tls" / "nodes" / f"{name}.pub", public)
    return key
