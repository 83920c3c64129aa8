"""Where the time of a round goes: seconds by part, kept by whoever asks for it and by nobody else.

>>> with recording() as seconds:
...     with part("update"):
...         pass
>>> list(seconds)
['update']
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

Seconds = dict[str, float]
OPERATIONS = "operations"
"""The name under which floating-point operations of training are counted beside the seconds."""

_now: ContextVar[Seconds | None] = ContextVar("profile", default=None)


@contextmanager
def record_seconds() -> Iterator[Seconds]:
    """Inside the block, the seconds of each part, by name."""
    seconds: Seconds = {}
    token = _now.set(seconds)
    try:
        yield seconds
    finally:
        _now.reset(token)


def is_recording() -> bool:
    """Whether somebody asked for the seconds."""
    return _now.get() is not None


def add_seconds(seconds: Mapping[str, float]) -> None:
    """Count ``seconds`` that were spent elsewhere, as in a worker."""
    counted = _now.get()
    if counted is not None:
        for name, value in seconds.items():
            counted[name] = counted.get(name, 0.0) + value


class timed_section:  # noqa: N801 - used as a keyword is
    """The seconds of the block count as those of ``name``; nothing is measured unless somebody records."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.began = time.perf_counter() if is_recording() else 0.0

    def __exit__(self, *_: object) -> None:
        if is_recording():
            add_seconds({self.name: time.perf_counter() - self.began})
