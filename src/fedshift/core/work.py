"""Local work: the batches of a client between two exchanges, and the order of its samples.

In: settings, and the steps that a client has done. Out: the steps of its next round, with the indices of their samples.
The order of samples depends only on the client's step count: epoch ``p`` is permuted by the stream
``(seed, "order", client, p)``, and step ``s`` is batch ``s mod T`` of epoch ``s div T``, with T batches per epoch. If T
is 1, the samples are not permuted. A resumed run therefore needs no cursor. Rounds of C batches follow FedMMB's
Algorithm 1 (Nasirigerdeh et al., arXiv:2011.07006): they iterate through an epoch, whose last group may be smaller.
Rounds of n steps continue where the previous round ended, across epochs: local work in FLamby (du Terrail et al. 2022,
arXiv:2210.04620, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..utils.errors import UsageError, require
from ..utils.random_streams import stream

Bounds = tuple[tuple[int, int], ...]
AMOUNTS = ("epochs", "batches", "steps")
"""Units of the amount of local work."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Local work of one round, as exactly one of epochs, batches within an epoch, or steps.

    Args:
        batch_size: Number of samples in a batch; None: all samples of the client.
        epochs: Number of epochs (passes over the client's data).
        batches: Number of batches, limited to the rest of the epoch: a round ends with the epoch (FedMMB's Algorithm
            1).
        steps: Number of local steps, across epochs; the next round continues where this one ended.

    """

    batch_size: int | None = 32
    epochs: int | None = None
    batches: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        amounts = {name: getattr(self, name) for name in AMOUNTS if getattr(self, name) is not None}
        if len(amounts) != 1:
            text = " and ".join(f"{name}={value}" for name, value in amounts.items()) or "none of them"
            raise UsageError(f"{text}: give exactly one of {', '.join(AMOUNTS)}").about("epochs", "batches", "steps")
        for name, value in {"batch_size": self.batch_size, **amounts}.items():
            require(value is None or value >= 1, f"{name}={value}: must be at least 1")

    def change(self, changes: Mapping[str, Any]) -> Self:
        """Return the work with the fields in ``changes`` replaced; a new amount unsets the others."""
        changes_amount = any(changes.get(name) is not None for name in AMOUNTS)
        return replace(self, **{**(dict.fromkeys(AMOUNTS) if changes_amount else {}), **changes})

    def batch_bounds(self, samples: int, smallest: int = 1) -> Bounds:
        """Return the start and stop of each batch of one epoch in the permuted samples.

        The last batch may be smaller; if it has fewer than ``smallest`` samples (BatchNorm cannot train on one), it is
        merged with the previous batch.
        """
        return _bounds(samples, min(self.batch_size or samples, samples), smallest)

    def steps_of_round(self, done: int, per_pass: int) -> range:
        """Return the steps of the next round of a client after ``done`` steps, with ``per_pass`` batches per epoch."""
        if self.batches is not None:
            return range(done, min(done + self.batches, (done // per_pass + 1) * per_pass))
        return range(done, done + self._steps(per_pass))

    def is_one_step(self, sizes: Iterable[int], smallest: int = 1) -> bool:
        """Return whether each round of clients with ``sizes`` samples is one step.

        ``smallest``: see :meth:`batch_bounds`.
        """
        once = self.epochs == 1 and all(len(self.batch_bounds(size, smallest)) == 1 for size in sizes)
        return once or 1 in (self.batches, self.steps)

    def rounds(self, done: int, per_pass: int) -> int:
        """Return the number of rounds that amount to ``done`` steps, with ``per_pass`` batches per epoch."""
        if self.batches is None:
            return done // self._steps(per_pass)
        passes, rest = divmod(done, per_pass)
        return passes * ceil(per_pass / self.batches) + ceil(rest / self.batches)

    def passes(self, rounds: int, per_pass: int) -> int:
        """Return the number of epochs that a client starts in ``rounds`` rounds, with ``per_pass`` batches per epoch.

        Each sample is in one batch per epoch, so that this bounds the number of steps that use it.
        """
        if self.batches is None:
            return ceil(rounds * self._steps(per_pass) / per_pass)
        return ceil(rounds / ceil(per_pass / self.batches))

    def _steps(self, per_pass: int) -> int:
        return self.steps or (self.epochs or 0) * per_pass


@lru_cache(maxsize=1024)
def _bounds(samples: int, size: int, smallest: int) -> Bounds:
    edges = [*range(0, samples, size), samples]
    if len(edges) > 2 and edges[-1] - edges[-2] < smallest:
        del edges[-2]
    return tuple(pairwise(edges))


def iterate_batches(seed: int, client: str, samples: int, bounds: Bounds, steps: range) -> Iterator[tuple[int, Tensor]]:
    """Yield each of consecutive ``steps`` with the indices (int64) of its samples among ``samples``."""
    count = len(bounds)
    if count == 1:
        yield from ((step, torch.arange(samples)) for step in steps)
        return
    draw = _kept_order if len(steps) < count and samples <= KEPT_SAMPLES else _draw_order
    step = steps.start
    while step < steps.stop:
        epoch, first = divmod(step, count)
        batches = bounds[first : first + steps.stop - step]
        order = draw(seed, client, epoch, samples)[batches[0][0] : batches[-1][1]]
        many = len(batches) > 1  # one call in place of one for each batch
        yield from enumerate(order.split_with_sizes([b - a for a, b in batches]) if many else (order,), step)
        step += len(batches)


def square_uses(
    seed: int, client: str, numbers: NDArray[np.int64], bounds: Bounds, passes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct numbers, and for each the squared uses per step, summed over the steps of ``passes`` epochs.

    ``numbers``: identifiers of the client's samples, int64 ``[N]``, equal for copies of a sample.
    """
    distinct, place_N = np.unique(numbers, return_inverse=True)
    if len(distinct) == len(numbers):
        return distinct, np.full(len(distinct), passes)
    total, step_N = np.zeros(len(distinct), np.int64), np.repeat(np.arange(len(bounds)), [b - a for a, b in bounds])
    for steps in range(0, passes * len(bounds), len(bounds)):
        batches = iterate_batches(seed, client, len(numbers), bounds, range(steps, steps + len(bounds)))
        order = torch.cat([index for _, index in batches]).numpy()
        used, times = np.unique(place_N[order] * len(bounds) + step_N, return_counts=True)
        np.add.at(total, used // len(bounds), times**2)
    return distinct, total


KEPT_SAMPLES = 10_000
"""Maximum number of a client's samples for which the order of an epoch is cached."""


def _draw_order(seed: int, client: str, number: int, samples: int) -> Tensor:
    return torch.from_numpy(stream(seed, "order", client, number).permutation(samples))


_kept_order = lru_cache(maxsize=1024)(_draw_order)
