"""Cost model: operations per sample, bytes of activations, and how fast this machine is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
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
from ..nn.recognition import placed_hooks
from ..utils.profiling import wait_for_device
from ..utils.state import clone
from ..utils.threads import limit_threads
from .engine import Data


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
    with flop_counter._FlopCounterMode(counter):
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
    left, right = torch.randn(2, 1024, 1024)
    images, kernels = (
        torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in ((32, 64, 28, 28), (64, 64, 3, 3))
    )
    works = {"product": lambda: left @ right, "convolution": lambda: F.conv2d(images, kernels, padding=1)}
    with limit_threads(threads), torch.no_grad():
        seconds = time_in_turns(works, 5, 0.0)
    operations = {"product": 2 * 1024**3, "convolution": 2 * 32 * 28**2 * 64**2 * 9}
    return {kind: operations[kind] / value for kind, value in seconds.items()}
