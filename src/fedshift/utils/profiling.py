"""Profiling of a round: seconds by section, measured only while they are recorded.

>>> with record_seconds() as seconds:
...     with timed_section("update"):
...         pass
>>> list(seconds)
['update']
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

Seconds = dict[str, float]
OPERATIONS = "operations"
"""Key of the floating-point operations of training among the seconds."""

_now: ContextVar[Seconds | None] = ContextVar("profile", default=None)


@contextmanager
def record_seconds() -> Iterator[Seconds]:
    """Record the seconds of each section, by name, inside the block."""
    seconds: Seconds = {}
    token = _now.set(seconds)
    try:
        yield seconds
    finally:
        _now.reset(token)


def is_recording() -> bool:
    """Return whether seconds are being recorded."""
    return _now.get() is not None


def add_seconds(seconds: Mapping[str, float]) -> None:
    """Add ``seconds`` that were spent elsewhere, such as in a worker."""
    counted = _now.get()
    if counted is not None:
        for name, value in seconds.items():
            counted[name] = counted.get(name, 0.0) + value


def timed_section(name: str) -> AbstractContextManager[None]:
    """Count the seconds of the block under ``name`` if they are being recorded."""
    return _timed(name) if is_recording() else _UNTIMED


_UNTIMED = nullcontext()


@contextmanager
def _timed(name: str) -> Iterator[None]:
    began = _read_clock()
    try:
        yield
    finally:
        add_seconds({name: _read_clock() - began})


def wait_for_device() -> None:
    """Wait until CUDA devices have finished what was launched on them."""
    import torch  # processes that do not train need not load it

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for number in range(torch.cuda.device_count()):
            if torch.cuda.memory_allocated(number):
                torch.cuda.synchronize(number)


def _read_clock() -> float:
    wait_for_device()
    return time.perf_counter()
