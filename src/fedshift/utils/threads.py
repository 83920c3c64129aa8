"""Threads of one processor each, for work that is a few large tensor operations after another.

Two threads inside one operation wait for each other at its end: if they sleep, they wake slowly; if they spin, they
take time from other work. Two operations at a time, each on one thread, avoid both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

import torch

from .profiling import add_seconds, is_recording, record_seconds

Item = TypeVar("Item")
Result = TypeVar("Result")


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


def map_in_threads(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[Result]:
    """Yield ``work`` of each item, in order, on ``threads`` threads, each at most one item ahead.

    Until the last result, torch also has one thread in the caller.
    """
    if threads == 1 or len(items) == 1:
        yield from map(work, items)
        return
    recording = is_recording()

    def run(item: Item) -> tuple[Result, dict[str, float]]:
        if not recording:
            return work(item), {}
        with record_seconds() as seconds:
            return work(item), seconds

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the caller's own operations, between two results, run in parallel with the others
    with ThreadPoolExecutor(threads, "lanes", torch.set_num_threads, (1,)) as executor:
        ahead: deque[Future[tuple[Result, dict[str, float]]]] = deque()
        try:
            for item in items:
                ahead.append(executor.submit(copy_context().run, run, item))
                if len(ahead) > threads:
                    yield _collect(ahead.popleft(), threads)
            while ahead:
                yield _collect(ahead.popleft(), threads)
        finally:
            executor.shutdown(cancel_futures=True)
            torch.set_num_threads(before)


def _collect(future: Future[tuple[Result, dict[str, float]]], threads: int) -> Result:
    result, seconds = future.result()
    add_seconds({name: value / threads for name, value in seconds.items()})
    return result
