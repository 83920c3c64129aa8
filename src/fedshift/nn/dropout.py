"""Dropout with masks determined by a key, so that every engine, and a resumed run, draws the same masks.

The mask of element ``i`` in the ``c``-th draw of a forward pass is a hash of ``(key, c, i)``: a counter-based generator
(Salmon et al. 2011, doi:10.1145/2063384.2063405) with the 32-bit finalizer of MurmurHash3, in integer tensor
arithmetic, which has the same results on every device and under ``torch.vmap``. Layers draw under the step's key and
count their draws in a pass (:func:`take_draws`); each rule draws under a key that is derived for it
(:func:`derive_key`), so that no two draws are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count, islice
from math import pi, prod
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..utils.errors import UsageError
from ..utils.random_streams import key_bits
from .recognition import list_hooks, runs_as_torch
from .surgery import replace_modules

_MASK = 0xFFFFFFFF


class _Draws(NamedTuple):
    """The key of a step, the numbers of its layers' draws, and the first numbers of each layer's."""

    key: Tensor
    numbers: Iterator[int]
    drawn: WeakKeyDictionary[nn.Module, set[int]]


_current: ContextVar[_Draws | None] = ContextVar("dropout_draws", default=None)
_latest: list[_Draws] = []
"""The last step's draws: checkpointing (``torch.utils.checkpoint``) runs layers again, in its backward pass."""


@contextmanager
def dropout_key(key: Tensor) -> Iterator[None]:
    """Key the draws of layers inside the block, and in a backward pass after it, by ``key`` (int64 scalar)."""
    again = bool(_latest) and _latest[0].key is key
    draws = _Draws(key, count(), _latest[0].drawn if again else WeakKeyDictionary())
    if torch._C._functorch.peek_interpreter_stack() is None:  # lanes are not checkpointed
        _latest[:] = [draws]
    token = _current.set(draws)
    try:
        yield
    finally:
        _current.reset(token)


def derive_key(key: Tensor, purpose: str) -> Tensor:
    """Return the key of draws for ``purpose``, such as a rule's name, in the step of ``key`` (int64 scalar)."""
    return key ^ (key_bits(0, purpose) >> 65)


def take_draws(layer: nn.Module, numbers: int = 1) -> tuple[Tensor, int]:
    """Return the step's key and the first of ``numbers`` draws of ``layer``, which no other call in the pass makes.

    If a backward pass runs the layer again, they are those that it took. Raise RuntimeError outside of a step.
    """
    again = bool(_latest) and torch._C._current_graph_task_id() != -1
    draws = _latest[0] if again else _current.get()
    if draws is None:
        raise RuntimeError(
            "a layer with random draws ran in training mode outside dropout_key(...): call .eval(), or give a key"
        )
    drawn = draws.drawn.setdefault(layer, set())
    if not again:
        first, *_ = islice(draws.numbers, numbers)
        drawn.add(first)
        return draws.key, first
    if len(drawn) != 1:
        raise UsageError(
            f"a dropout layer drew {len(drawn)} masks in a step that checkpointing runs again: call it once in a "
            "forward pass, or leave it out of torch.utils.checkpoint"
        )
    return draws.key, next(iter(drawn))


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def draw_bits(key: Tensor, call: int, count: int) -> Tensor:
    """Return ``count`` uniform integers in 0..2^32-1 (int64), for draw number ``call`` under ``key``."""
    low, high = key & _MASK, (key >> 32) & _MASK
    salt = _mix(low ^ _mix((high + 0x9E3779B9 * (call + 1)) & _MASK))
    return _mix(_mix(torch.arange(count, device=key.device) ^ salt) ^ high)


def draw_uniform(key: Tensor, call: int, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ``count`` uniform numbers in (0, 1), for draw number ``call`` under ``key``."""
    drawn = (draw_bits(key, call, count).to(dtype) + 0.5) / 2**32
    return drawn.clamp(max=1 - torch.finfo(dtype).eps / 2)  # float32 would round the largest to 1


def draw_normal(key: Tensor, call: int, shape: Sequence[int]) -> Tensor:
    """Return standard normal numbers, float64 ``shape``, for draws ``call`` and ``call + 1`` under ``key``.

    Box and Muller 1958, doi:10.1214/aoms/1177706645.
    """
    first, second = (draw_uniform(key, call + number, prod(shape)) for number in (0, 1))
    return ((-2 * first.log()).sqrt() * (2 * pi * second).cos()).reshape(shape)


class Keyed(nn.Module):
    """Base class of layers whose random draws in training are keyed by the step (:func:`take_draws`)."""


class KeyedDropout(Keyed):
    """Drops elements, or whole channels, with probability ``p`` in training and scales the rest by 1 / (1 - p)."""

    def __init__(self, p: float, channels: bool = False) -> None:
        super().__init__()
        self.p, self.channels = p, channels

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to ``x`` of any shape (``[N, C, ...]`` to drop whole channels)."""
        if not self.training or self.p == 0.0:
            return x
        shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if self.channels else x.shape
        keep = draw_bits(*take_draws(self), prod(shape)) >= int(self.p * 2**32)
        return x * keep.reshape(shape).to(x.dtype) / (1.0 - self.p) if self.p < 1.0 else torch.zeros_like(x)


def key_dropouts(module: nn.Module) -> nn.Module:
    """Key every Dropout layer (element- or channel-wise) of ``module`` by the step, in place; return ``module``.

    Other layers (AlphaDropout, subclasses with another ``forward``, layers with hooks) draw from torch's generator,
    which engines seed for each client and round.
    """

    def make(_name: str, layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, _DropoutNd) or isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout):
            return None
        plain = runs_as_torch(layer) and not layer._modules and not list_hooks(layer)
        return KeyedDropout(layer.p, channels=not isinstance(layer, nn.Dropout)) if plain else None

    return replace_modules(module, make)
