"""Local work: the batches of a client between two exchanges, and the order of its samples.

The order of samples is a function of the client's step count alone: pass ``p`` over the data is permuted by the stream
``(seed, "order", client, p)``, and step ``s`` is batch ``s mod T`` of pass ``s div T``, T batches a pass; where T is 1,
the samples stay in the order in which they are stored. A resumed run therefore needs no cursor. A group of C batches a
round follows FedMMB's Algorithm 1 (Nasirigerdeh et al., arXiv:2011.07006): batches are taken in turn through a pass and
the last group of a pass may be smaller. A round of n steps takes n, over as many passes as that needs, and the next
round continues where it ended: local work in FLamby (du Terrail et al. 2022, arXiv:2210.04620, section 4).
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

from ..utils.errors import UsageError
from ..utils.random_streams import stream

Bounds = tuple[tuple[int, int], ...]


AMOUNTS = ("epochs", "batches", "steps")
"""Units of the amount of local work."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Local work of one round: passes over the client's data, batches within a pass, or steps; exactly one of them.

    Args:
        batch_size: Samples in a batch; None: all of the client's.
        epochs: Passes over the client's data.
        batches: Batches, at most as many as are left of the pass: a round ends with the pass (FedMMB's Algorithm 1).
        steps: Local steps, over as many passes as they need; the next round continues where this one ended.

    """

    batch_size: int | None = 32
    epochs: int | None = None
    batches: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in AMOUNTS if getattr(self, name) is not None}
        if len(given) != 1:
            found = " and ".join(f"{name}={value}" for name, value in given.items()) or "none of them"
            raise UsageError(f"{found}: give exactly one of {', '.join(AMOUNTS)}").about("epochs", "batches", "steps")
        for name, value in {"batch_size": self.batch_size, **given}.items():
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: must be at least 1")

    def change(self, changes: Mapping[str, Any]) -> Self:
        """Return the work with fields replaced by ``changes``, in which an amount takes the place of another."""
        given = any(changes.get(name) is not None for name in AMOUNTS)
        return replace(self, **{**(dict.fromkeys(AMOUNTS) if given else {}), **changes})

    def batch_bounds(self, samples: int, smallest: int = 1) -> Bounds:
        """Return the first and last bound of each batch of one pass in the permuted samples.

        The last batch is kept although smaller; where it would hold fewer than ``smallest`` samples (one sample under
        batch normalization, which has no variance), its samples join the batch before it.
        """
        return _bounds(samples, min(self.batch_size or samples, samples), smallest)

    def steps_of_round(self, done: int, per_pass: int) -> range:
        """Return the steps of the next round of a client that has done ``done`` steps, ``per_pass`` batches a pass."""
        if self.epochs is not None:
            return range(done, done + self.epochs * per_pass)
        if self.steps is not None:
            return range(done, done + self.steps)
        assert self.batches is not None
        return range(done, min(done + self.batches, (done // per_pass + 1) * per_pass))

    def is_one_step(self, sizes: Iterable[int], smallest: int = 1) -> bool:
        """Return whether each round of clients with ``sizes`` samples is one step.

        ``smallest``: as of :meth:`batch_bounds`.
        """
        return self.always_one_step or (
            self.epochs == 1 and all(len(self.batch_bounds(size, smallest)) == 1 for size in sizes)
        )

    @property
    def always_one_step(self) -> bool:
        """Return whether a round is one step, whatever the number of samples."""
        return 1 in (self.batches, self.steps)

    def rounds(self, done: int, per_pass: int) -> int:
        """Return the number of rounds after which a client has done ``done`` steps, ``per_pass`` batches a pass."""
        if self.epochs is not None:
            return done // (self.epochs * per_pass)
        if self.steps is not None:
            return done // self.steps
        assert self.batches is not None
        passes, rest = divmod(done, per_pass)
        return passes * -(-per_pass // self.batches) + -(-rest // self.batches)

    def passes(self, rounds: int, per_pass: int) -> int:
        """Return the number of passes that a client begins in its first ``rounds`` rounds, ``per_pass`` batches each.

        Each sample is in one batch of a pass, so that it is in at most as many steps.
        """
        if self.epochs is not None:
            return rounds * self.epochs
        if self.steps is not None:
            return ceil(rounds * self.steps / per_pass)
        assert self.batches is not None
        return ceil(rounds / ceil(per_pass / self.batches))

    def average_round(self, samples: int, smallest: int = 1) -> tuple[float, float]:
        """Return the steps of a round of a client with ``samples``, and the samples in these, averaged over rounds.

        ``smallest``: as of :meth:`batch_bounds`.
        """
        per_pass = len(self.batch_bounds(samples, smallest))
        if self.epochs is not None:
            return self.epochs * per_pass, self.epochs * samples
        if self.steps is not None:
            return self.steps, self.steps * samples / per_pass
        assert self.batches is not None
        rounds = ceil(per_pass / self.batches)
        return per_pass / rounds, samples / rounds


@lru_cache(maxsize=1024)
def _bounds(samples: int, size: int, smallest: int) -> Bounds:
    edges = [*range(0, samples, size), samples]
    if len(edges) > 2 and edges[-1] - edges[-2] < smallest:
        del edges[-2]
    return tuple(pairwise(edges))


def iterate_batches(seed: int, client: str, samples: int, bounds: Bounds, steps: range) -> Iterator[tuple[int, Tensor]]:
    """Yield each step of ``steps`` with the indices (int64) of its samples among ``samples``."""
    if len(bounds) == 1:
        yield from ((step, torch.arange(samples)) for step in steps)
        return
    taken_again = len(steps) < len(bounds) and samples <= KEPT_SAMPLES
    draw = _kept_order if taken_again else _draw_order
    order, current = None, -1
    for step in steps:
        number, position = divmod(step, len(bounds))
        if order is None or number != current:
            order, current = draw(seed, client, number, samples), number
        start, stop = bounds[position]
        yield step, order[start:stop]


def square_uses(
    seed: int, client: str, numbers: NDArray[np.int64], bounds: Bounds, passes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the different numbers, and how often a step of the first ``passes`` uses each, squared, summed over steps.

    ``numbers``: those of the client's samples, int64 ``[N]``; copies of a sample have the same one.
    """
    different, place_N = np.unique(numbers, return_inverse=True)
    if len(different) == len(numbers):
        return different, np.full(len(different), passes)
    total, step_N = np.zeros(len(different), np.int64), np.repeat(np.arange(len(bounds)), [b - a for a, b in bounds])
    for steps in range(0, passes * len(bounds), len(bounds)):
        batches = iterate_batches(seed, client, len(numbers), bounds, range(steps, steps + len(bounds)))
        order = torch.cat([index for _, index in batches]).numpy()
        used, times = np.unique(place_N[order] * len(bounds) + step_N, return_counts=True)
        np.add.at(total, used // len(bounds), times**2)
    return different, total


KEPT_SAMPLES = 10_000
"""Samples of a client up to which the order of a pass is kept for the next round."""


def _draw_order(seed: int, client: str, number: int, samples: int) -> Tensor:
    return torch.from_numpy(stream(seed, "order", client, number).permutation(samples))


_kept_order = lru_cache(maxsize=1024)(_draw_order)
