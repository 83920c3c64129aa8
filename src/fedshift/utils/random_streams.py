"""Keyed random streams: every random draw depends only on ``(seed, purpose, ...)``.

Because no stream is shared, the order in which clients run, a resumed run and another engine cannot change a draw.
Keys are hashed to 128 bits (BLAKE2b), so that streams of different keys do not collide.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

Key = int | str


def _digest(seed: int, purpose: str, *key: Key) -> bytes:
    return blake2b(repr((seed, purpose, *key)).encode(), digest_size=16).digest()


def key_bits(seed: int, purpose: str, *key: Key) -> int:
    """Return the 128-bit integer that identifies the stream ``(seed, purpose, *key)``."""
    return int.from_bytes(_digest(seed, purpose, *key), "little")


class _GivenKey(ISeedSequence):
    """The key of a generator, uint64 ``[2]``; without a seed, NumPy would first ask the system for entropy."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words = words

    @override
    def generate_state(self, n_words: int, dtype: object = np.uint32) -> NDArray[np.uint64]:
        return self._words


def stream(seed: int, purpose: str, *key: Key) -> np.random.Generator:
    """Return a separate NumPy generator (Philox, counter based) for this key, :func:`key_bits`."""
    words = np.frombuffer(_digest(seed, purpose, *key), "<u8")
    return np.random.Generator(np.random.Philox(_GivenKey(words)))  # type: ignore[arg-type]  # its stub lacks ISeedSequence


def draw_secret_normal(count: int) -> Tensor:
    """Return ``count`` standard normal draws, float64, from the operating system's entropy; they cannot be redrawn."""
    bits = np.frombuffer(os.urandom(8 * count), np.uint64) >> 12  # 52: k + 1/2 is exact
    drawn: Tensor = torch.special.ndtri(torch.from_numpy((bits + 0.5) / 2**52))
    return drawn


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the global generators of torch (the CPU's), Python and NumPy after the block."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - networks draw from it
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002


def peek_generators() -> tuple[object, ...]:
    """Return a value that every draw from the global generators of torch (the CPU's), Python and NumPy changes."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002


def seed_generators(seed: int, purpose: str, *key: Key) -> None:
    """Set the global generators of torch, Python and NumPy from this key.

    ``torch.manual_seed`` does this too, but formats the stack each time, which takes longer than a small step.
    """
    bits = key_bits(seed, purpose, *key) % 2**63
    torch.default_generator.manual_seed(bits)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(bits)
    random.seed(bits % 2**32)
    np.random.seed(bits % 2**32)  # noqa: NPY002


@contextmanager
def torch_stream(seed: int, purpose: str, *key: Key) -> Iterator[None]:
    """Set the global generators from this key inside the block (:func:`seed_generators`); restore them after it."""
    with kept_generators():
        seed_generators(seed, purpose, *key)
        yield
