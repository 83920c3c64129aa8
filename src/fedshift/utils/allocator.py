"""Memory allocator settings: keep freed memory for the next step instead of returning it to the kernel.

By default glibc takes large blocks from the kernel and returns them when they are freed. A training step frees and
allocates the same gradients and activations every time, and zeroing their pages takes a good part of it. Keeping them
changes no bit of any result. Without glibc nothing is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
GROWN = 2**25
"""Maximum in bytes of the first threshold, which glibc raises; the second is then twice that."""
_holders = 0


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep freed memory in this process inside the block; release it after the outermost block.

    Afterwards glibc's thresholds have the values they reach in a program that frees large blocks; its automatic
    adaptation cannot be restored.
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
