"""Time of a sampled client and peak memory, against how many clients there are; ``fedshift run`` on 10,000 of them.

Each point is a separate process: 10 to 100,000 clients of 20 distinct gray images of 28 x 28 pixels each, all in one
array, of which min(clients, 100) take part in a round; every client has taken part once before, so that a method that
keeps entries on clients has those of all. A round is ``Trial.advance`` without evaluation and ``Trial.save``: local
work, aggregation, checkpoint. Points that differ in the number of clients alone take turns, 100 sampled clients a turn,
so that what else the machine does hits all; their medians are compared.

Peak memory is VmHWM of /proc: the most resident memory that a process ever had, and for the pool engine the sum over
process and workers, in which pages that they share count for each. So this runs on Linux.

The last table is the real command, with evaluation, checkpoints and report, on a directory of 200,000 training images:
the embedded digits in gray, drawn at random and moved by up to 3 pixels, with label skew (Dirichlet, 0.3).

Run ``python benchmarks/scale.py``: about twenty minutes, 8 GB of memory, 1 GB of temporary disk. Prints Markdown and
draws docs/images/scale.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parents[1]
CLIENTS, SAMPLED, SAMPLES = (10, 100, 1_000, 10_000, 100_000), 100, 20
IDLE = (10, 100, 1_000, 10_000, 100_000)
MEGABYTE = 1e6


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one process does; ``client_memory``: bytes of clients' states in memory, None for what fedshift takes."""

    method: str
    engine: str
    clients: int
    model: str = "small-cnn"
    client_memory: int | None = None

    @property
    def sampled(self) -> int:
        """Clients of a round."""
        return min(SAMPLED, self.clients)


def peak() -> int:
    """Peak resident memory of this process and of those it started and that are still there, added up, in bytes."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    status = (Path("/proc", each, "status").read_text() for each in ("self", *children))
    return sum(1024 * int(text.split("VmHWM:")[1].split()[0]) for text in status)


def be(point: Point, folder: Path) -> None:
    """In a process of its own: a turn for every line read, its seconds a sampled client in the line written."""
    import numpy as np
    import torch

    from fedshift.config.expressions import list_catalog
    from fedshift.core.work import Work
    from fedshift.data.federation import ClientData, Federation
    from fedshift.data.samples import Samples
    from fedshift.experiments.client_store import MEMORY
    from fedshift.experiments.settings import Settings
    from fedshift.experiments.trial import Trial
    from fedshift.utils.allocator import keep_freed_memory
    from fedshift.utils.state import clone

    imports = peak()
    count = SAMPLES * point.clients
    pixels = np.random.default_rng(0).integers(0, 256, (count, 1, 28, 28), np.uint8)
    store = Samples(x=torch.from_numpy(pixels), y=torch.arange(count) % 10)
    members = tuple(
        ClientData(
            name=f"{number:05}",
            train=store.take(torch.arange(SAMPLES * number, SAMPLES * (number + 1))),
            test=store,
        )
        for number in range(point.clients)
    )
    data = Federation(name="random", clients=members, classes=10)
    settings = Settings(
        rounds=10**6, work=Work(batch_size=10, epochs=1), participation=point.sampled, engine=point.engine,
        evaluate_every=10**6,
    )  # fmt: skip
    memory = point.client_memory or MEMORY
    method, model = list_catalog("methods")[point.method](), list_catalog("models")[point.model]
    with keep_freed_memory():  # as an experiment does
        trial = Trial(method, model, data, settings, 0, client_memory=memory)

        def round_() -> None:
            trial.advance()
            trial.save(folder, "checkpoint.safetensors")

        names = trial.clients.names
        for start in range(0, point.clients, SAMPLED):  # the rounds in which every client took part once
            there = {name: trial.clients[name] for name in names[start : start + SAMPLED]}
            trial.clients.put(
                {name: replace(each, personal=clone(each.personal), steps=2) for name, each in there.items()}
            )
            trial.server = replace(trial.server, round=trial.server.round + 1)
            trial.clients.save(folder, trial.server.round)
        round_()
        print(json.dumps({"imports": imports, "data": pixels.nbytes}), flush=True)
        turns = SAMPLED // point.sampled
        for _ in sys.stdin:
            began = time.perf_counter()
            for _ in range(turns):
                round_()
            print((time.perf_counter() - began) / SAMPLED, flush=True)
        print(peak(), flush=True)


def measure(points: Sequence[Point], turns: int) -> list[dict[str, Any]]:
    """What each point took: ``seconds`` a sampled client, by turn, and bytes: ``peak``, ``imports`` and ``data``."""
    with tempfile.TemporaryDirectory() as place:
        started, found = [], []
        for number, point in enumerate(points):
            (folder := Path(place, str(number))).mkdir()
            command = [sys.executable, __file__, "--point", json.dumps(asdict(point)), str(folder)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            started.append(process)
            found.append({"point": point, "seconds": [], **json.loads(process.stdout.readline())})
        for _ in range(turns):
            for process, each in zip(started, found, strict=True):
                process.stdin.write("go\n")
                process.stdin.flush()
                each["seconds"].append(float(process.stdout.readline()))
        for process, each in zip(started, found, strict=True):
            process.stdin.close()
            each["peak"] = int(process.stdout.readline())
            process.wait()
    return found


def grown(turns: int, only: Sequence[str]) -> list[dict[str, Any]]:
    """Points of both methods and engines against the number of clients, printed as a table."""
    print("| method | engine | clients | sampled | ms a sampled client | against 10 clients | peak | of it images |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    found = []
    for method in ("fedavg", "fedbn"):
        for engine in only:
            line = measure([Point(method=method, engine=engine, clients=number) for number in CLIENTS], turns)
            for each in line:
                point, seconds = each["point"], each["seconds"]
                paired = median(a / b for a, b in zip(seconds, line[0]["seconds"], strict=True))
                sizes = " | ".join(f"{each[what] / MEGABYTE:.0f} MB" for what in ("peak", "data"))
                print(
                    f"| {method} | {engine} | {point.clients:,} | {point.sampled} | {1000 * median(seconds):.2f} | "
                    f"{paired:.2f}x | {sizes} |",
                    flush=True,
                )
            found += line
    print(f"\nImports alone take {found[0]['imports'] / MEGABYTE:.0f} MB.\n", flush=True)
    return found


def kept(turns: int) -> None:
    """Clients that keep 45 KB each of a network of 57 MB, with all states in memory and with few, as a table."""
    print("| FedBN, digit-cnn-bn, 10,000 clients | ms a sampled client | peak |")
    print("|---|---:|---:|")
    for memory, name in ((None, "512 MiB (default)"), (2**20, "1 MiB")):
        chosen = {"model": "digit-cnn-bn", "client_memory": memory}
        (each,) = measure([Point(method="fedbn", engine="sequential", clients=10_000, **chosen)], turns)
        seconds = 1000 * median(each["seconds"])
        print(f"| `client_memory` {name} | {seconds:.0f} | {each['peak'] / MEGABYTE:.0f} MB |", flush=True)
    print()


def idle(turns: int) -> None:
    """Print what clients cost that sit a round out: rounds of ten among 10 to 100,000, in turn, as a table."""
    import torch

    from fedshift.config.expressions import list_catalog
    from fedshift.core.work import Work
    from fedshift.data.federation import ClientData, Federation
    from fedshift.data.samples import Samples
    from fedshift.experiments.settings import Settings
    from fedshift.experiments.trial import Trial

    settings = Settings(
        rounds=10**6, work=Work(batch_size=4, epochs=1), participation=10, engine="sequential", evaluate_every=10**6
    )
    with tempfile.TemporaryDirectory() as place:
        trials = {}
        for count in IDLE:
            store = Samples(x=torch.randn(4 * count, 4), y=torch.arange(4 * count) % 10)
            clients = tuple(
                ClientData(name=f"{k:06}", train=store.take(torch.arange(4 * k, 4 * k + 4)), test=store)
                for k in range(count)
            )
            data = Federation(name="random", clients=clients, classes=10)
            method, model = list_catalog("methods")["fedbn"](), list_catalog("models")["abide-mlp"]
            trials[count] = Trial(method, model, data, settings, 0)
            (Path(place) / str(count)).mkdir()
        seconds = {(count, part): [] for count in trials for part in ("round", "checkpoint")}
        for _ in range(turns + 1):  # the first makes what later ones keep
            for count, trial in trials.items():
                for part in ("round", "checkpoint"):
                    began = time.perf_counter()
                    trial.advance() if part == "round" else trial.save(
                        Path(place, str(count)), "checkpoint.safetensors"
                    )
                    seconds[count, part].append(time.perf_counter() - began)
    print("| FedBN, ten clients a round | ms a round | more than with 10 | ms a checkpoint | more than with 10 |")
    print("|---|---:|---:|---:|---:|")
    for count in IDLE:
        cells = []
        for part in ("round", "checkpoint"):
            few, many = seconds[IDLE[0], part][1:], seconds[count, part][1:]
            more = median(b - a for a, b in zip(few, many, strict=True))
            cells += [f"{1000 * median(many):.1f}", f"{1000 * more:.1f}"]
        print(f"| {count:,} clients | {' | '.join(cells)} |")
    print()


def write_digits(folder: Path) -> None:
    """220,000 gray digits of one client, 20,000 of them for testing."""
    import numpy as np

    import fedshift

    rng, clients = np.random.default_rng(0), fedshift.digits().clients
    ink = np.pad(np.concatenate([client.train.x[:, 0].numpy() for client in clients]), ((0, 0), (3, 3), (3, 3)))
    windows = np.lib.stride_tricks.sliding_window_view(ink, (28, 28), axis=(1, 2))
    parts = {}
    for split, count in (("train", 200_000), ("test", 20_000)):
        which, top, left = (rng.integers(0, size, count) for size in windows.shape[:3])
        parts[f"x_{split}"] = windows[which, top, left]
        parts[f"y_{split}"] = np.concatenate([client.train.y.numpy() for client in clients])[which]
    folder.mkdir()
    np.savez(folder / "digits.npz", **parts)


def commanded(rounds: int) -> None:
    """``fedshift run`` on 10,000 clients, as a table."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "digits")
        write_digits(folder)
        split = "dirichlet(clients=10000, alpha=0.3, minimum=2, test='same')"
        print(f'`fedshift run --data ... --split "{split}" --participation 100 --rounds {rounds}`:\n')
        print("| method | engine that auto chose | wall time | peak |")
        print("|---|---|---:|---:|")
        for method in ("fedavg", "fedbn"):
            words = [
                "run", "--data", str(folder), "--split", split, "--allow-single-class", "--method", method,
                "--model", "small-cnn", "--participation", str(SAMPLED), "--rounds", str(rounds), "--lr", "0.03",
                "--out", str(Path(place, method)),
            ]  # fmt: skip
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, __file__, "--command", *words],
                check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "FEDSHIFT_CACHE": place},
            )  # fmt: skip
            took, most = time.perf_counter() - began, int(done.stdout.strip().splitlines()[-1])
            engine = done.stdout.split("runs on the ")[1].split()[0]
            print(f"| {method} | {engine} | {took:.0f} s | {most / MEGABYTE:.0f} MB |", flush=True)


def command(words: Sequence[str]) -> None:
    """In a process of its own: be ``fedshift`` with these words, and print the peak memory at the end."""
    from fedshift.cli.app import main

    try:
        main(words)
    except SystemExit as end:
        if end.code:
            raise
    print(peak())


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Two panels, time and memory, a line for each method and engine."""
    from matplotlib.figure import Figure

    from fedshift.report.figures import to_svg
    from fedshift.report.style import add_legend, figure_settings, make_legend_entry, make_styles

    lines: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        lines.setdefault(f"{each['point'].method}, {each['point'].engine}", []).append(each)
    with figure_settings():
        figure = Figure(figsize=(8, 2.8), layout="constrained")
        time_, memory = figure.subplots(1, 2)
        handles = {}
        for name, look in make_styles(lines).items():
            numbers = [each["point"].clients for each in lines[name]]
            time_.plot(numbers, [1000 * median(each["seconds"]) for each in lines[name]], **look.line)
            memory.plot(numbers, [each["peak"] / MEGABYTE for each in lines[name]], **look.line)
            handles[name] = make_legend_entry(look)
        images = {each["point"].clients: each["data"] / MEGABYTE for each in found}
        memory.fill_between([*images], [*images.values()], alpha=0.15, color="gray", linewidth=0)
        memory.annotate(
            "the images,\nonce", (CLIENTS[-1], 12), (-2, 2), textcoords="offset points", ha="right", va="bottom"
        )
        for axes, title, label in (
            (time_, "Time of a sampled client", "milliseconds, with checkpoints"),
            (memory, "Peak memory", "MB, of all processes"),
        ):
            axes.set(title=title, xlabel="clients", ylabel=label, xscale="log")
            axes.set_xticks(CLIENTS, [f"{number:,}" for number in CLIENTS])
            axes.minorticks_off()
        time_.set_ylim(bottom=0)
        memory.set_yscale("log")
        memory.set_yticks((10, 100, 1_000, 10_000), ("10", "100", "1,000", "10,000"))
        memory.set_ylim(bottom=10)
        memory.minorticks_off()
        add_legend(figure, handles, "")
    path.write_text(to_svg(figure, background="white"), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="turns of 100 sampled clients of each point")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of `fedshift run`")
    parser.add_argument("--engines", nargs="+", default=("sequential", "pool"), help="engines that are measured")
    parts = ("grown", "idle", "kept", "command")
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        be(Point(**json.loads(options.point[0])), Path(options.point[1]))
    elif options.command:
        command(options.command)
    else:
        if "grown" in options.parts:
            draw(grown(options.turns, options.engines), ROOT / "docs" / "images" / "scale.svg")
        if "idle" in options.parts:
            idle(options.turns)
        if "kept" in options.parts:
            kept(max(1, options.turns // 3))
        if "command" in options.parts:
            commanded(options.rounds)


if __name__ == "__main__":
    main()
