"""Memory settings of training: keep freed memory for the next step, and leave older objects out of collections.

By default glibc takes large blocks from the kernel and returns them when they are freed. A training step frees and
allocates the same gradients and activations every time, and zeroing their pages takes a good part of it. Without glibc
nothing is done about it. Python's collector of cycles visits all objects again whenever many new ones last, such as the
states of a round's clients. Most of them are modules that stay. Neither changes a bit of any result.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
GROWN = 2**25
"""Maximum in bytes of the first threshold, which glibc raises; the second is then twice that."""
_holders, _freezes = 0, False


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep freed memory in this process inside the block; release it after the outermost block.

    Afterwards glibc's thresholds have the values they reach in a program that frees large blocks; its automatic
    adaptation cannot be restored. Inside, objects from before are not collected if they are garbage in cycles.
    """
    global _holders, _freezes
    _holders += 1
    if _holders == 1:
        _set(2**30, 2**31 - 1)
        _freezes = not gc.get_freeze_count()  # else the program did so itself
        if _freezes:
            gc.freeze()
    try:
        yield
    finally:
        _holders -= 1
        if _holders == 0:
            _set(GROWN, 2 * GROWN)
            if _freezes:
                gc.unfreeze()
            _call("malloc_trim", 0)


def _set(mmap_threshold: int, trim_threshold: int) -> None:
    _call("mallopt", MMAP_THRESHOLD, mmap_threshold)
    _call("mallopt", TRIM_THRESHOLD, trim_threshold)


def _call(function: str, *arguments: int) -> None:
    try:
        getattr(ctypes.CDLL(None), function)(*arguments)
    except (OSError, AttributeError, TypeError):  # another C library
        return
