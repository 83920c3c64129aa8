"""What going across machines costs: seconds of a round beyond the work, bytes on the wire, memory of the coordinator.

The real programs, in plain text on loopback: ``fedshift serve``, and ``fedshift join`` for each site, which reach the
coordinator through a proxy that counts bytes; in a network namespace of its own where the system allows that. Works on
the embedded digits, two steps of FedAvg a round on 32 samples. Each second round ends with an evaluation; the first two
rounds are left out; medians of the others.

Time is compared with the same experiment in one process (``fedshift run``, sequential engine, one thread), for one
site, so that what is beyond is what Flower, its programs and the copying take. A round lasts from one line of
``rounds.jsonl`` to the next. Such runs and those across machines take turns.

Memory is VmHWM of /proc: the most resident memory that a process ever had. Many real sites do not fit one machine, so a
crowd of nodes that one process plays (``flower_crowd.py``) joins in their place: each introduces itself, fetches every
broadcast and sends as many bytes as a site would, of its own values. Uploads come in the order of the sites' names, in
which they are folded, or in the opposite one, in which all wait for the last: the worst case.

    python benchmarks/flower.py [--parts time memory] [--works tiny digits alexnet] [--rounds 8]

Prints Markdown. Runs on Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

ALONE = "FEDSHIFT_BENCHMARK_ALONE"
FEDSHIFT = str(Path(sys.executable).with_name("fedshift"))
SITES = ("pen", "photo", "print")
CROWDS = {"tiny": (), "digits": (3, 50), "alexnet": (3, 12)}
ORDERS = {"forward": "in order", "backward": "the first last"}
SAMPLES, MEGABYTE = 32, 1e6
LOOK, PATIENCE = 0.02, 600.0
"""Seconds between two looks at a run, and without a new round after which it has failed."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A network, and the image size that it is given."""

    title: str
    model: str
    size: int

    def settings(self, rounds: int, evaluate_every: int, domains: Sequence[str]) -> str:
        """As a TOML file."""
        lines = {
            "method": "fedavg", "model": self.model, "data": "digits", "image_size": self.size, "samples": SAMPLES,
            "batch_size": SAMPLES // 2, "epochs": 1, "lr": 0.01, "rounds": rounds, "evaluate_every": evaluate_every,
        } | ({"domains": ",".join(domains)} if domains else {})  # fmt: skip
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items())


WORKS = {
    "tiny": Work(title="`small-cnn`", model="small-cnn", size=28),
    "digits": Work(title="`digit-cnn-bn`", model="digit-cnn-bn", size=28),
    "alexnet": Work(title="`alexnet-bn`", model="alexnet-bn", size=64),
}


@dataclass
class SamplesBeforeWork:
    """What a run did, by round: ``ends`` (seconds), ``down`` and ``up`` as it says, ``wire`` (bytes both ways, so far);
    and ``peaks``, bytes by program."""

    ends: list[float] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    up: list[int] = field(default_factory=list)
    wire: list[tuple[int, int]] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)

    def seconds(self, *, evaluated: bool) -> float:
        """Median of the rounds from the third on that end with an evaluation, or of the others."""
        return median(self.ends[r] - self.ends[r - 1] for r in self._rounds(evaluated))

    def wired(self, way: int, *, evaluated: bool) -> float:
        """As :meth:`seconds`, of the bytes to the sites (0) or from them (1)."""
        return median(self.wire[r][way] - self.wire[r - 1][way] for r in self._rounds(evaluated))

    def _rounds(self, evaluated: bool) -> range:
        return range(2 + evaluated, len(self.ends), 2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Proxy:
    """Passes on what comes to ``port`` to the port ``to``, and counts: bytes to the sites and from them."""

    def __init__(self, to: int) -> None:
        self.to, self.bytes = to, [0, 0]
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True).start()
        ready.wait()

    async def _serve(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.to)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass(reader, back, 1), self._pass(there, writer, 0))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int) -> None:
        try:
            while block := await reader.read(2**20):
                self.bytes[way] += len(block)
                writer.write(block)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


def memory_of(pid: int) -> dict[str, int]:
    """The most memory that a process ever had (VmHWM) and what it has for itself now (Pss), in bytes."""
    found = {}
    for name, file in (("VmHWM:", "status"), ("Pss:", "smaps_rollup")):
        with suppress(OSError, IndexError):
            found[name] = 1024 * int(Path(f"/proc/{pid}/{file}").read_text().split(name)[1].split()[0])
    return found


def watch(
    process: subprocess.Popen[bytes], folder: Path, rounds: int, proxy: Proxy | None, log: Path
) -> SamplesBeforeWork:
    """Follow a run in ``folder`` until its last round is written; raises where it ends before, or a round does not."""
    seen, until = SamplesBeforeWork(), time.monotonic() + PATIENCE
    while len(seen.ends) < rounds:
        ended = process.poll() is not None or time.monotonic() > until
        for path in folder.glob("trials/*/rounds.jsonl"):
            for line in path.read_text().splitlines()[len(seen.ends) :]:
                done = json.loads(line)
                seen.ends.append(time.perf_counter())
                until = time.monotonic() + PATIENCE
                seen.down.append(done["down"])
                seen.up.append(done["up"])
                seen.wire.append(tuple(proxy.bytes) if proxy else (0, 0))
        if ended and len(seen.ends) < rounds:
            raise SystemExit(f"a run ended after {len(seen.ends)} of {rounds} rounds:\n{log.read_text()}")
        seen.peaks |= memory_of(process.pid) if proxy else {}
        time.sleep(LOOK if proxy else LOOK / 10)
    return seen


@contextmanager
def started(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program for as long as the block lasts; what it says goes to ``log``."""
    with log.open("wb") as said:
        process = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def alone(work: Work, rounds: int) -> SamplesBeforeWork:
    """The experiment of one site in one process."""
    with tempfile.TemporaryDirectory() as place:
        folder, settings = Path(place, "run"), Path(place, "settings.toml")
        settings.write_text(work.settings(rounds, 2, SITES[:1]))
        words = ["run", "--config", str(settings), "--engine", "sequential", "--threads", "1", "--out", str(folder)]
        with started([FEDSHIFT, *words], log := Path(place, "log")) as process:
            return watch(process, folder, rounds, None, log)


def across(
    work: Work, sites: int, rounds: int, *, poll: float | None = None, order: str | None = None
) -> SamplesBeforeWork:
    """The same behind Flower, with real sites, or (``order``) a crowd that sends uploads forward or backward."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder, settings, port = Path(place, "run"), Path(place, "settings.toml"), free_port()
        settings.write_text(work.settings(rounds, rounds if order else 2, () if order else SITES[:sites]))
        proxy = Proxy(port)
        words = ["serve", str(settings), "--min-clients", str(sites), "--insecure", "--port", str(port)]
        log = Path(place, "log")
        process = stack.enter_context(started([FEDSHIFT, *words, "--out", str(folder)], log))
        if order:
            words = [f"127.0.0.1:{proxy.port}", str(sites), order, str(work.size), str(SAMPLES)]
            crowd = [sys.executable, str(Path(__file__).with_name("flower_crowd.py")), *words]
            stack.enter_context(started(crowd, Path(place, "crowd")))
        else:
            often = [] if poll is None else ["--poll", str(poll)]
            for name in SITES[:sites]:
                words = ["join", f"127.0.0.1:{proxy.port}", "--data", "digits", "--name", name, "--insecure", *often]
                kept = ["--threads", "1", "--state", str(Path(place, name))]
                stack.enter_context(started([FEDSHIFT, *words, *kept], Path(place, f"{name}.log")))
        return watch(process, folder, rounds, proxy, log)


def timed(names: Sequence[str], rounds: int) -> None:
    """Seconds and bytes of a round for one site, as two tables."""
    print(
        "| | `--poll` | a round in one process | across | beyond | with evaluation, in one process | across | beyond |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    moved = []
    for work in map(WORKS.__getitem__, names):
        for poll in (None, 0.1):
            inside, outside = alone(work, rounds), across(work, 1, rounds, poll=poll)
            cells = [work.title, "default" if poll is None else f"{poll}"]
            for evaluated in (False, True):
                pair = [seen.seconds(evaluated=evaluated) for seen in (inside, outside)]
                cells += [f"{seconds:.2f} s" for seconds in (*pair, pair[1] - pair[0])]
            print(f"| {' | '.join(cells)} |", flush=True)
        moved.append((work, outside))
    print("\n| | `inspect`, down | on the wire | with evaluation | `inspect`, up | on the wire |")
    print("|---|---:|---:|---:|---:|---:|")
    for work, seen in moved:
        down, up = seen.down[-1], seen.up[-1]
        ways = ((0, False, down), (0, True, down), (1, False, up))
        first, second, third = (f"{seen.wired(way, evaluated=each) / told:.4f}x" for way, each, told in ways)
        print(f"| {work.title} | {down:,} | {first} | {second} | {up:,} | {third} |")
    print(flush=True)


def remembered(names: Sequence[str]) -> None:
    """Memory of the coordinator, as a table."""
    print("| | sites | uploads come | most resident memory | Pss after the last round |")
    print("|---|---|---|---:|---:|", flush=True)
    for name in names:
        crowds = [(sites, *order) for sites in CROWDS[name] for order in ORDERS.items()]
        for sites, order, how in ((3, None, "as they are ready"), *crowds):
            seen = across(WORKS[name], sites, 2 if order else 4, poll=0.1, order=order)
            sizes = [f"{seen.peaks[what] / MEGABYTE:.0f} MB" for what in ("VmHWM:", "Pss:")]
            cells = (WORKS[name].title, f"crowd of {sites}" if order else f"{sites}", how, *sizes)
            print(f"| {' | '.join(cells)} |", flush=True)


def in_namespace() -> None:
    """Go on where there is no network but loopback, and where nothing outlives this, if the system allows it."""
    if ALONE in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which the first process of a namespace else ignores
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    tools = shutil.which("unshare") and shutil.which("ip")
    apart = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if tools and subprocess.run([*apart, "true"], capture_output=True).returncode == 0:
        os.environ[ALONE] = "1"
        os.execvp(apart[0], [*apart, sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=("time", "memory"), choices=("time", "memory"))
    parser.add_argument("--works", nargs="+", default=tuple(WORKS), choices=tuple(WORKS))
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each run that is timed")
    options = parser.parse_args()
    in_namespace()
    import fedshift.flower  # noqa: F401

    print(f"{platform.machine()}, {os.cpu_count()} cores, flwr {version('flwr')}, torch {version('torch')}\n")
    if "time" in options.parts:
        timed(options.works, options.rounds)
    if "memory" in options.parts:
        remembered(options.works)


if __name__ == "__main__":
    main()
