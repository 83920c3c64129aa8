"""Engines against the plain loop on a GPU, and their equality with the CPU, in at most ten minutes.

    python benchmarks/gpu_check.py                        # on a machine with CUDA
    python benchmarks/gpu_check.py --count                # on any machine: what a device would be asked to do

Prints, for each work of ``benchmarks/engines.py`` and each engine, the median milliseconds of a round, how many times
faster it is than the plain loop on the same device, kernels of a round, peak memory, and the largest relative
difference of the server's entries from the CPU's after a round in float64; the lines fit into docs/performance.md.

With ``--count``, nothing is timed: a round runs on a device that counts (``tests/engines/fake_gpu.py``), and the
columns are kernels, copies between host and device, waits of the processor, and the milliseconds that launching the
kernels takes at five microseconds each, which bounds a round of small networks from below.
"""

from __future__ import annotations

# ruff: noqa: E402 - the other benchmarks and the tests are found first
import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import engines
from engines import WORKS, Measured
from plain import PlainLoop

from fedshift.config.expressions import list_catalog
from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.utils.errors import UsageError

NAMES = ("W3a", "W3b", "W3c", "W4", "W2", "W5r", "W1", "W6")
LAUNCH = 5e-6
"""Seconds that the processor needs to launch a kernel, about, through torch's dispatcher."""
MOST = 30
"""Maximum number of timed rounds."""


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_trial(work: Measured, engine: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Trial:
    """Return the trial that ``engine`` runs on ``device``, with a network of ``dtype``."""
    make = list_catalog("models")[work.model]

    def model(shape: tuple[int, ...], classes: int) -> nn.Module:
        return make(shape, classes).to(dtype)

    settings = Settings(
        rounds=10**6, work=Work(**work.work), optimizer=SGD(lr=engines.LR), engine=engine, device=str(device),
        evaluate_every=10**6,
    )  # fmt: skip
    return Trial(METHODS.parse(work.method), model, engines.data_of(work), settings, 0)


def make_plain(work: Measured, device: torch.device) -> PlainLoop:
    """Return the plain loop with models and batches on ``device``."""
    plain = engines.plain_of(work)
    for model in (plain.server, *plain.clients):
        model.to(device)
    plain.batches = [[(x.to(device), y.to(device)) for x, y in own] for own in plain.batches]
    return plain


def time_rounds(take: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median seconds of a round, after two that do not count."""
    take()
    take()
    wait(device)
    times, end = list[float](), time.perf_counter() + seconds
    while len(times) < 3 or (len(times) < MOST and time.perf_counter() < end):
        began = time.perf_counter()
        take()
        wait(device)
        times.append(time.perf_counter() - began)
    return median(times)


def count_kernels(take: Callable[[], object], device: torch.device) -> str:
    """Return how many kernels a round runs on a CUDA device; empty elsewhere."""
    if device.type != "cuda":
        return ""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        take()
        wait(device)
    return str(sum(event.device_type == DeviceType.CUDA for event in profiled.events() or ()))


def compare_with_cpu(work: Measured, engine: str, device: torch.device) -> float:
    """Return the largest relative difference of the server's entries after a small round in float64."""
    batch = work.work.get("batch_size", work.samples)
    few = replace(
        work,
        clients=min(work.clients, 3),
        samples=min(work.samples, 2 * batch),
        work={"batch_size": batch, "batches": 2},
    )
    here, there = (make_trial(few, engine, where, torch.float64) for where in (torch.device("cpu"), device))
    here.advance()
    there.advance()
    pairs = ((value.double(), there.server.shared[name].cpu().double()) for name, value in here.server.shared.items())
    return max(float((one - two).abs().max() / one.abs().max().clamp(min=1e-12)) for one, two in pairs)


def list_engines(work: Measured) -> list[str]:
    return ["sequential", "stacked", *(["identity"] if "identity" in work.engines else [])]


def check(names: list[str], device: torch.device, seconds: float) -> None:
    """Time each work on ``device`` and print the table."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}\n")
    print("| work | engine | ms a round | times faster | kernels | peak MiB | difference from the CPU in float64 |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in names:
        work = WORKS[name]
        base = time_rounds(make_plain(work, device).round, device, seconds)
        print(f"| {name} | plain loop | {base * 1e3:.2f} | | | | |", flush=True)
        for engine in list_engines(work):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            try:
                trial = make_trial(work, engine, device)
            except UsageError as refusal:
                print(f"| {name} | {engine} | {refusal} | | | | |", flush=True)
                continue
            took = time_rounds(trial.advance, device, seconds)
            peak = f"{torch.cuda.max_memory_allocated(device) / 2**20:.0f}" if device.type == "cuda" else ""
            kernels, gap = count_kernels(trial.advance, device), compare_with_cpu(work, engine, device)
            cells = f"{took * 1e3:.2f} | {base / took:.1f} | {kernels} | {peak} | {gap:.0e}"
            print(f"| {name} | {engine} | {cells} |", flush=True)


def count(names: list[str]) -> None:
    """Count what a round of each work asks of a device and print the table."""
    from tests.engines import fake_gpu

    fake_gpu.register()
    device = fake_gpu.DEVICE
    print("| work | engine | kernels | copies | waits | ms to launch | fewer launches than the plain loop |")
    print("|---|---|---:|---:|---:|---:|---:|")

    def measure(take: Callable[[], object], who: str, base: int | None) -> int:
        take()
        fake_gpu.COUNTS.clear()
        take()
        counts = fake_gpu.COUNTS
        kernels = counts["kernels"] + counts["float64 kernels"]
        copies = counts["to device"] + counts["to host"]
        times = f"{base / kernels:.1f}" if base else ""
        cells = f"{kernels} | {copies} | {counts['waits']} | {kernels * LAUNCH * 1e3:.1f} | {times}"
        print(f"| {name} | {who} | {cells} |", flush=True)
        return kernels

    for name in names:
        work = WORKS[name]
        base = measure(make_plain(work, device).round, "plain loop", None)
        for engine in list_engines(work):
            try:
                trial = make_trial(work, engine, device)
            except UsageError:
                continue
            measure(trial.advance, engine, base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--works", type=lambda text: text.split(","), default=[*NAMES], help="names with commas")
    parser.add_argument("--seconds", type=float, default=12.0, help="for each work and engine, at most about")
    parser.add_argument("--count", action="store_true", help="count on any machine instead of timing")
    given = parser.parse_args()
    if unknown := set(given.works) - set(WORKS):
        parser.error(f"no work {min(unknown)!r}; there are: {', '.join(WORKS)}")
    if given.count:
        count(given.works)
    elif given.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: give --device cpu for a trial run, or --count")
    else:
        check(given.works, given.device, given.seconds)


if __name__ == "__main__":
    main()
