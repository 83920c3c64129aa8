"""How fast each engine does a round, against the plain loop of public research code (``plain.py``).

    python benchmarks/engines.py [--works W1,W3a] [--rounds 5] [--threads 2] [--precision bfloat16]

Every contender is a separate process with its data ready. They take turns, so that all see the same machine, and
medians are compared. Since rounds follow each other in a real run, a turn of short rounds is several of them, after one
that fills the processor's caches again and does not count. The plain loop runs on one thread and on all, and the faster
is the baseline, since more threads slow a small network down. Time for setting up and for choosing an engine is left
out. The plain loop and the engines do the same work on random data: local steps of all clients of a round, and
aggregation. Prints a table in Markdown, and for each work how near the fastest engine came to the machine's peak.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from plain import PlainLoop, batch_norm_entries

from fedshift.config.expressions import list_catalog
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import apply_surgery
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.federation import ClientData, Federation
from fedshift.data.samples import Samples
from fedshift.engines.auto import count_operations, measure_peak
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.utils.allocator import keep_freed_memory

LR = 0.01
PLAIN, SINGLE = "plain", "plain on one thread"
TURN = 0.5
"""Seconds that a turn of short rounds takes at least, about."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A work to be measured: ``clients`` of ``samples`` each, a model, a method, local work; ``goal``: times faster."""

    title: str
    clients: int
    samples: int
    model: str
    work: dict[str, int]
    goal: str
    engines: tuple[str, ...]
    shape: tuple[int, ...] = (3, 28, 28)
    method: str = "fedbn"
    classes: int = 10
    evaluates: bool = False
    rounds: int = 5


LARGE, SMALL = ("sequential", "pool", "auto"), ("sequential", "stacked", "pool", "auto")
FNN2 = {"model": "fnn2", "shape": (784,), "method": "fedavg", "engines": SMALL}
WORKS = {
    "W1": Measured(
        title="Digits-Five: 5 clients x 743, digit CNN with BN, B = 32", goal="2.4 (bfloat16 3.4)", rounds=3,
        clients=5, samples=743, model="digit-cnn-bn", work={"batch_size": 32, "epochs": 1}, engines=LARGE,
    ),
    "W1e": Measured(
        title="evaluation of 10,000 images, digit CNN with BN", goal="2.0 (4.2)", evaluates=True, method="fedavg",
        clients=1, samples=10_000, model="digit-cnn-bn", work={"epochs": 1}, engines=("sequential",),
    ),
    "W2": Measured(
        title="FedWon, cross-device: 10 clients x 372, digit CNN, B = 4", goal="5", rounds=2, method="fedwon(agc=None)",
        clients=10, samples=372, model="digit-cnn-bn", work={"batch_size": 4, "epochs": 1}, engines=SMALL,
    ),
    "W3a": Measured(
        title="FedSMB, 2FNN: 100 clients, B = 5, C = 1", goal="12 (identity), 3.5 (stacked)", rounds=9,
        clients=100, samples=600, work={"batch_size": 5, "batches": 1}, **{**FNN2, "engines": ("identity", *SMALL)},
    ),
    "W3b": Measured(
        title="FedMMB, 2FNN: 10 clients, B = 50, C = 20", goal="1.9", rounds=9,
        clients=10, samples=6000, work={"batch_size": 50, "batches": 20}, **FNN2,
    ),
    "W3c": Measured(
        title="FedMMB, 2FNN: 1,000 clients, B = 5, C = 20", goal="5", rounds=3,
        clients=1000, samples=100, work={"batch_size": 5, "batches": 20}, **FNN2,
    ),
    "W4": Measured(
        title="ABIDE MLP 5995-16-16-2 with BN: 4 clients, B = 100", goal="2", rounds=15, shape=(5995,), classes=2,
        clients=4, samples=100, model="abide-mlp", work={"batch_size": 100, "epochs": 1}, engines=SMALL,
    ),
    "W5r": Measured(
        title="ResNet-20, 32 x 32: 10 clients x 128, B = 64", goal="1.6 (2.7)", shape=(3, 32, 32),
        clients=10, samples=128, model="resnet20", work={"batch_size": 64, "epochs": 1}, engines=LARGE,
    ),
    "W5m": Measured(
        title="MobileNetV2, 32 x 32: 10 clients x 128, B = 64", goal="4.5", shape=(3, 32, 32),
        clients=10, samples=128, model="mobilenet-v2", work={"batch_size": 64, "epochs": 1}, engines=LARGE,
    ),
    "W6": Measured(
        title="AlexNet with BN, 256 x 256: 4 clients, B = 32", goal="1.7 (2.9)", rounds=3, shape=(3, 256, 256),
        clients=4, samples=32, model="alexnet-bn", work={"batch_size": 32, "epochs": 1}, engines=LARGE,
    ),
}  # fmt: skip


def data_of(work: Measured) -> Federation:
    """Random clients: bytes for images, as they come from files, and numbers for vectors."""
    random = np.random.default_rng(0)
    images = len(work.shape) == 3
    made = {}
    for number in range(work.clients):
        size = (work.samples, *work.shape)
        x = random.integers(0, 256, size, dtype=np.uint8) if images else random.normal(size=size).astype(np.float32)
        y = np.arange(work.samples) % work.classes
        made[f"{number:04}"] = (x, y, x[:2], y[:2])
    found = federation(made, classes=work.classes)
    if work.evaluates:
        only = found.clients[0]
        test: Samples = only.train
        found = Federation(
            name="test", clients=(ClientData(name="0", train=only.train, test=test),), classes=work.classes
        )
    return found


def trial_of(work: Measured, engine: str, precision: str) -> Trial:
    """The trial that an engine runs."""
    method = METHODS.parse(work.method)
    settings = Settings(
        rounds=10**6, work=Work(**work.work), optimizer=SGD(lr=LR), engine=engine, precision=precision,
        evaluate_every=10**6,
    )  # fmt: skip
    return Trial(method, list_catalog("models")[work.model], data_of(work), settings, 0)


def plain_of(work: Measured) -> PlainLoop:
    """The plain loop on the same number of batches of the same sizes, as tensors already."""
    method = METHODS.parse(work.method)
    network = apply_surgery(method, list_catalog("models")[work.model](work.shape, work.classes))
    size = work.work.get("batch_size", 32)
    clients = []
    for client in data_of(work).clients:
        x = client.train.inputs(slice(None))
        pairs = list(zip(x.split(size), client.train.y.split(size), strict=True))
        clients.append(pairs[: work.work.get("batches")])
    personal = batch_norm_entries(network) if work.method == "fedbn" else ()
    return PlainLoop(network, clients, lr=LR, personal=personal)


def contend(name: str, who: str, threads: int, precision: str) -> None:
    """Be one contender: a round for every line read, its seconds in the line written."""
    torch.set_num_threads(1 if who == SINGLE else threads)
    work = WORKS[name]
    if who in (PLAIN, SINGLE):
        plain = plain_of(work)
        test = data_of(work).clients[0].test
        x, y = test.inputs(slice(None)), test.y
        compete((lambda: plain.evaluate(x, y, 100)) if work.evaluates else plain.round, {})
        return
    trial = trial_of(work, who, precision)
    samples = sum(len(client.train) for client in trial.data.clients)
    if "batches" in work.work:
        samples = work.clients * work.work["batches"] * work.work["batch_size"]
    done = count_operations(trial.plan, trial.train) * samples / (3 if work.evaluates else 1)
    with keep_freed_memory():  # as an experiment does
        facts = {"engine": trial.engine_choice.engine, "operations": done}
        compete(trial.evaluate if work.evaluates else trial.advance, facts)


def compete(one: Callable[[], object], facts: dict[str, object]) -> None:
    """Warm up, write ``facts``, and take a turn for every line that comes: write its seconds for a round."""
    began = time.perf_counter()
    one()
    one()
    rounds = math.ceil(TURN / (time.perf_counter() - began))
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        if rounds > 1:
            one()
        began = time.perf_counter()
        for _ in range(rounds):
            one()
        print((time.perf_counter() - began) / rounds, flush=True)


def measure(name: str, threads: int, precision: str, rounds: int | None) -> dict[str, object]:
    """Return the medians of all contenders, which take turns."""
    work = WORKS[name]
    started = {}
    for who in (PLAIN, *((SINGLE,) if threads > 1 else ()), *work.engines):
        command = [
            sys.executable,
            __file__,
            "--contend",
            name,
            who,
            "--threads",
            str(threads),
            "--precision",
            precision,
        ]
        environment = {
            **os.environ,
            **({} if who in (PLAIN, SINGLE) else {"OMP_WAIT_POLICY": "passive"}),
        }  # as the program does
        started[who] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        started[who].facts = json.loads(started[who].stdout.readline())
    times: dict[str, list[float]] = {who: [] for who in started}
    for _ in range(rounds or work.rounds):
        for who, process in started.items():
            process.stdin.write("go\n")
            process.stdin.flush()
            times[who].append(float(process.stdout.readline()))
    for process in started.values():
        process.stdin.close()
        process.wait()
    best = min((who for who in (PLAIN, SINGLE) if who in times), key=lambda who: median(times[who]))
    paired = {who: median(p / t for p, t in zip(times[best], times[who], strict=True)) for who in times}
    return {
        "plain": best,
        "seconds": {who: median(each) for who, each in times.items()},
        "ratios": paired,
        "auto": started["auto"].facts["engine"] if "auto" in started else "",
        "operations": started[work.engines[0]].facts["operations"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--contend", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contend:
        contend(*given.contend, given.threads, given.precision)
        return
    best = measure_peak(given.threads)
    print(
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {given.threads} threads, load "
        f"{os.getloadavg()[0]:.1f}, torch {torch.__version__}, engines in {given.precision}; peak "
        f"{best['product'] / 1e9:.0f} GFLOP/s (products of matrices), {best['convolution'] / 1e9:.0f} (convolutions)\n"
    )
    print("| work | plain loop | sequential | stacked | pool | identity | auto | goal | time / peak's |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.works.split(","):
        work, found = WORKS[name], measure(name, given.threads, given.precision, given.rounds)
        seconds, ratios = found["seconds"], found["ratios"]
        cells = [
            f"{ratios[who]:.2f}x" if who in ratios else "" for who in ("sequential", "stacked", "pool", "identity")
        ]
        auto = f"{ratios['auto']:.2f}x ({found['auto']})" if "auto" in ratios else ""
        fastest = min(seconds[who] for who in work.engines)
        ideal = found["operations"] / max(best.values())
        row = (f"{name}: {work.title}", f"{1000 * seconds[found['plain']]:.1f} ms", *cells, auto, work.goal)
        print(f"| {' | '.join(row)} | {fastest / ideal:.1f} |", flush=True)


if __name__ == "__main__":
    main()
