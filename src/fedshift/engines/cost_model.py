"""Cost of work: operations per sample, bytes of activations, and this machine's measured peak."""

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
    """Return the floating-point operations of training on one sample: three times those of the forward pass.

    Matrix products and convolutions are counted, two operations for each multiplication and addition; the backward pass
    takes twice as many as the forward pass, once for the inputs' gradients and once for the weights'.
    """
    split = next(iter(data.values()))
    x = split.inputs(slice(0, 1), plan.dtype)
    with FlopCounterMode(display=False) as counter, use_torch_linear():
        forward(plan, plan.initial, x)
    return 3 * int(counter.get_total_flops())


def measure_activations(plan: Plan, data: Data) -> int:
    """Return the bytes of the layers' outputs for one sample, which training keeps until the backward pass."""
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
    """Limit torch to this many threads inside the block (None: no change); a small step is faster on one."""
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
    """Return the median seconds of ``times`` runs of ``work``, after one to warm up."""
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
    """Measure float32 operations per second of a large matrix product and of a 3 x 3 convolution.

    On the CPU, with this many ``threads``; the best that the libraries reach here, not the processor's data sheet.
    """
    layer, x_BI = use_fast_linear(nn.Linear(1024, 1024)), torch.randn(1024, 1024)
    images, kernels = (
        torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in ((32, 64, 28, 28), (64, 64, 3, 3))
    )
    with limit_threads(threads), torch.no_grad():
        product = time_median(lambda: layer(x_BI), 5)
        convolution = time_median(lambda: F.conv2d(images, kernels, padding=1), 5)
    return {"product": 2 * 1024**3 / product, "convolution": 2 * 32 * 28**2 * 64**2 * 9 / convolution}
