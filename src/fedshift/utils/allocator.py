"""Memory that is freed is kept for the next step, where glibc would give it back to the kernel and fault it in again.

By default glibc takes large blocks from the kernel and returns them when they are freed; a training step frees and
takes the same gradients and activations every time, and zeroing their pages costs a good part of it. Keeping them
changes no bit of any result. Elsewhere than under glibc nothing is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
GROWN = 2**25
"""Bytes to which glibc by itself raises the first threshold at most; the second is then twice that."""
_holders = 0


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Inside the block, this process keeps the memory that it frees; after the outermost it is given back.

    glibc's thresholds are then set to what they grow to in a program that frees large blocks; they cannot be made to
    adapt by themselves again.
    """
    global _holders
    _holders += 1
    if _holders == 1:
        _set(2**30, 2**31 - 1)
    try:
        yield
    finally:
        _holders -= 1
        if _holders == 0:
            _set(GROWN, 2 * GROWN)
            _call("malloc_trim", 0)


def _set(mmap_threshold: int, trim_threshold: int) -> None:
    _call("mallopt", MMAP_THRESHOLD, mmap_threshold)
    _call("mallopt", TRIM_THRESHOLD, trim_threshold)


def _call(function: str, *arguments: int) -> None:
    try:
        getattr(ctypes.CDLL(None), function)(*arguments)
    except (OSError, AttributeError, TypeError):  # another C library
        return
