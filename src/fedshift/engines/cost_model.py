"""What work costs: operations of a sample, and how many a second this machine can do at best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..core.plan import Plan, forward
from ..nn.linear import use_fast_linear, use_torch_linear
from .engine import Data


def count_operations(plan: Plan, data: Data) -> int:
    """Floating-point operations of training on one sample: three times those of the forward pass.

    Products of matrices and convolutions are counted, a multiplication and an addition each; the backward pass does
    twice as many as the forward pass, once for the inputs' gradients and once for the weights'.
    """
    split = next(iter(data.values()))
    x = split.inputs(slice(0, 1), plan.dtype)
    with FlopCounterMode(display=False) as counter, use_torch_linear():
        forward(plan, plan.initial, x)
    return 3 * int(counter.get_total_flops())


def measure_activations(plan: Plan, data: Data) -> int:
    """Bytes that the layers' outputs for one sample take, which training keeps until the backward pass."""
    counted = 0

    def count(_layer: nn.Module, _inputs: object, made: object) -> None:
        nonlocal counted
        counted += made.nbytes if isinstance(made, Tensor) else 0

    hooks = [layer.register_forward_hook(count) for layer in plan.layers if not any(layer.children())]
    try:
        forward(plan, plan.initial, next(iter(data.values())).inputs(slice(0, 1), plan.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return counted


@contextmanager
def limit_threads(threads: int | None) -> Iterator[None]:
    """Inside the block torch uses this many threads (None: as many as before); a small step is faster on one."""
    before = torch.get_num_threads()
    if threads in (None, before):
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def time_median(work: Callable[[], object], times: int) -> float:
    """The median seconds of ``work``, done ``times`` times after once to warm up."""
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return median(found[1:])


@cache
def measure_peak(threads: int) -> dict[str, float]:
    """Measured float32 operations a second, of a large product of matrices and of a 3 x 3 convolution.

    On the CPU, with as many ``threads``; each is the best that the libraries do here, not the processor's data sheet.
    """
    layer, x_BI = use_fast_linear(nn.Linear(1024, 1024)), torch.randn(1024, 1024)
    images, kernels = (
        torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in ((32, 64, 28, 28), (64, 64, 3, 3))
    )
    with limit_threads(threads), torch.no_grad():
        product = time_median(lambda: layer(x_BI), 5)
        convolution = time_median(lambda: F.conv2d(images, kernels, padding=1), 5)
    return {"product": 2 * 1024**3 / product, "convolution": 2 * 32 * 28**2 * 64**2 * 9 / convolution}
