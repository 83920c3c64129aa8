"""Cost model: operations per sample, bytes of activations, and this machine's peak and faster matrix library."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from math import ceil
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import flop_counter

from ..core.network import forward
from ..core.plan import Plan
from ..nn.linear import FastLinear, make_products, set_products, use_fast_linear, use_torch_linear
from ..nn.recognition import placed_hooks
from ..utils.allocator import keep_freed_memory
from ..utils.files import cached_measurement
from ..utils.profiling import wait_for_device
from ..utils.state import clone
from ..utils.threads import limit_threads
from .engine import Data

FASTER = 1.1
"""Minimum speedup for choosing another library over torch's default; smaller ones are within noise."""
LARGEST, HEAVIEST = 2**23, 2**18
"""Maximum number of multiplications and of weights in a timed layer; larger layers are scaled down."""
PAIRS, SPAN, LONGEST = 5, 0.03, 0.5
"""Minimum number of timed pairs of each product, and minimum and maximum duration of timing in seconds."""
AGAIN = 1.05
"""Maximum ratio of the second shortest time of a product to the shortest, for the shortest to count as undisturbed."""
FULL = 64
"""Batch size for which libraries are chosen if a batch is the client's whole data."""


def count_operations(plan: Plan, data: Data) -> int:
    """Return the floating-point operations of training on one sample: three times the forward pass.

    Matrix products and convolutions count two operations per multiply-add; the backward pass costs two forward passes,
    one for the gradients of inputs and one for the gradients of weights.
    """
    split = next(iter(data.values()))
    x = split.inputs(slice(0, 1), plan.dtype)
    dispatch: Any = flop_counter._FlopCounterMode.__torch_dispatch__
    with suppress(AttributeError):  # keeps the compiler out, whose import takes a second; not in all versions of torch
        vars(dispatch.__wrapped__).setdefault("__dynamo_disable", dispatch.__wrapped__)
    counter = flop_counter.FlopCounterMode(display=False)  # its tracker of layers fails where these differentiate
    with flop_counter._FlopCounterMode(counter), use_torch_linear():
        forward(plan, clone(plan.initial), x)
    return 3 * int(counter.get_total_flops())


def measure_activations(plan: Plan, data: Data) -> int:
    """Return the bytes of the layers' outputs for one sample, which training keeps until the backward pass."""
    counted: list[int] = []

    def count(_layer: nn.Module, _inputs: object, output: object) -> None:
        counted.append(output.nbytes if isinstance(output, Tensor) else 0)

    hooks = [layer.register_forward_hook(count) for layer in plan.layers if not any(layer.children())]
    with placed_hooks(hooks):
        forward(plan, clone(plan.initial), next(iter(data.values())).inputs(slice(0, 1), plan.dtype))
    return sum(counted)


def time_in_turns(works: Mapping[str, Callable[[], object]], turns: int, seconds: float) -> dict[str, float]:
    """Return the median seconds of a run of each work, over ``turns`` turns of at least ``seconds``.

    Turns of different works alternate and have similar durations, so that other load on the machine slows all works
    equally; the median of short runs would exclude interrupted ones.
    """
    runs: dict[str, int] = {}
    timings: dict[str, list[float]] = {name: [] for name in works}
    for name, work in works.items():
        work()
        runs[name] = max(1, ceil(seconds / _time(work)))  # from the second run
    for _ in range(turns):
        for name, work in works.items():
            timings[name].append(_time(work, runs[name]))
    return {name: median(each) for name, each in timings.items()}


@contextmanager
def count_rows(module: nn.Module) -> Iterator[dict[str, int]]:
    """Count the rows that each large linear layer multiplies per call inside the block, by layer name."""
    rows: dict[str, int] = {}

    def count(name: str) -> Callable[[nn.Linear, object, Tensor], None]:
        return lambda layer, _, out: rows.update({name: max(rows.get(name, 0), out.numel() // layer.out_features)})

    layers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, FastLinear))
    with placed_hooks(layer.register_forward_hook(count(name)) for name, layer in layers):
        yield rows


def choose_products(plan: Plan, rows: Mapping[str, int]) -> None:
    """Make each large linear layer compute each product with the faster library, for the plan's batch size.

    ``rows``: rows of each layer per sample, from :func:`count_rows`. The choice depends only on shapes and the machine,
    not on the number of threads: a worker process has one thread and must produce the bits of its parent.
    """
    if plan.autocast:
        return
    batch = plan.work.batch_size or FULL
    layers = ((name, plan.module.get_submodule(name)) for name in rows)
    on_cpu = {name: layer for name, layer in layers if isinstance(layer, FastLinear) and layer.weight.is_cpu}
    set_products(plan.module, {name: _choose(layer, batch * rows[name]) for name, layer in on_cpu.items()})


def _choose(layer: nn.Linear, rows: int) -> list[str]:
    """Return the products that ``layer`` should compute with oneDNN."""
    gains = time_products(_reduce_shape(rows, layer.in_features, layer.out_features))
    return [kind for kind, gain in gains.items() if gain >= FASTER]


def _reduce_shape(rows: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Halve the largest dimension until timing takes milliseconds; large products have similar speedups."""
    while rows * inputs * outputs > LARGEST or inputs * outputs > HEAVIEST:
        if rows > max(inputs, outputs):
            rows //= 2
        elif inputs > outputs:
            inputs //= 2
        else:
            outputs //= 2
    return rows, inputs, outputs


@cache
def time_products(shape: tuple[int, int, int]) -> Mapping[str, float]:
    """Return the speedup of oneDNN over torch's default library for each product of a layer (cached).

    ``shape``: rows, inputs and outputs. Timed on one thread, because timings on several depend on other load, by the
    processor's time and the shortest of alternating runs, which other programs disturb least. Timing goes on until the
    shortest time of each product has come twice. Every result is cached, since worker processes must choose the same.
    """

    def measure() -> dict[str, float]:
        with limit_threads(1), torch.no_grad(), keep_freed_memory():
            works = make_products(*shape)
            took: dict[str, tuple[list[float], ...]] = {kind: ([], []) for kind in works}
            began = time.perf_counter()
            while not _is_settled([times for pair in took.values() for times in pair], time.perf_counter() - began):
                for kind, pair in works.items():
                    for work, times in zip(pair, took[kind], strict=True):
                        times.append(_time_processor(work))
        return {kind: min(usual) / min(other) for kind, (usual, other) in took.items()}

    facts = torch.__version__, torch.backends.cpu.get_cpu_capability(), shape
    return cached_measurement("products.json", facts, measure)


def _is_settled(timings: Sequence[Sequence[float]], seconds: float) -> bool:
    """Return whether ``timings`` of each work are enough after these ``seconds`` of timing."""
    if len(timings[0]) <= PAIRS or seconds < SPAN:
        return False
    shortest = (sorted(times)[:2] for times in timings)
    return seconds >= LONGEST or all(second <= AGAIN * first for first, second in shortest)


def _time_processor(work: Callable[[], object]) -> float:
    """Return the seconds of processor time of this thread for ``work``; of a clock where that is too coarse."""
    clock = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-5 else time.perf_counter
    began = clock()
    work()
    return clock() - began


def _time(work: Callable[[], object], runs: int = 1) -> float:
    """Return the mean seconds of ``runs`` runs of ``work``."""
    began = time.perf_counter()
    for _ in range(runs):
        work()
    wait_for_device()
    return (time.perf_counter() - began) / runs


@cache
def measure_peak(threads: int) -> dict[str, float]:
    """Measure float32 operations per second of a large matrix product and of a 3 x 3 convolution.

    On the CPU, with ``threads`` threads: the rates that the libraries reach, not the processor's nominal peak.
    """
    layer, x_BI = use_fast_linear(nn.Linear(1024, 1024)), torch.randn(1024, 1024)
    if isinstance(layer, FastLinear):
        set_products(layer, {"": _choose(layer, len(x_BI))})
    images, kernels = (
        torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in ((32, 64, 28, 28), (64, 64, 3, 3))
    )
    with limit_threads(threads), torch.no_grad():
        works = (lambda: layer(x_BI)), (lambda: F.conv2d(images, kernels, padding=1))
        product, convolution = (median([_time(work) for _ in range(6)][1:]) for work in works)  # the first warms up
    return {"product": 2 * 1024**3 / product, "convolution": 2 * 32 * 28**2 * 64**2 * 9 / convolution}
