"""Outliers: uploads that are much farther from the broadcast model than the other sites' uploads.

One such upload, even if finite, makes the mean useless and every later round diverge. The bound excludes faulty uploads
and crude attacks under any aggregation; robust aggregations (``krum``, ``median``) address subtle attacks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median_high
from typing import Any

from torch import Tensor

from ...core.kernel import broadcast
from ...core.states import ServerState, Update

BOUND = 10.0
"""Maximum ratio of an update's length to the others'."""


@dataclass(frozen=True, kw_only=True)
class UpdateSize:
    """Euclidean lengths of a client's change in a round (``shared``) and of its rules' uploads (``memory``)."""

    shared: float
    memory: float
    steps: int

    @staticmethod
    def of(server: ServerState, update: Update) -> UpdateSize:
        """Return the size of ``update`` relative to the broadcast of ``server``."""
        changes = (
            tensor.double() - server.shared[name].double()
            for name, tensor in update.shared.items()
            if tensor.is_floating_point()
        )
        memory = (tensor.double() for part in update.memory for tensor in part.values())
        return UpdateSize(shared=_length(changes), memory=_length(memory), steps=update.steps)

    def join(self, other: UpdateSize) -> UpdateSize:
        """Return the larger lengths of both, with the smaller number of steps."""
        return UpdateSize(
            shared=max(self.shared, other.shared),
            memory=max(self.memory, other.memory),
            steps=min(self.steps, other.steps),
        )

    def compare(self, others: Collection[UpdateSize]) -> float:
        """Return the ratio of the length to the median of ``others``, per round or per step, whichever is smaller.

        Clients of different sizes take different numbers of steps. More steps go farther, but not in proportion.
        The median of two others is the longer one, so that one tiny update does not make an honest one an outlier.
        """
        ratios = [0.0]
        for name in ("shared", "memory"):
            length, lengths = getattr(self, name), [(getattr(other, name), other.steps) for other in others]
            usual = median_high([other for other, _ in lengths])
            by_step = median_high([other / steps for other, steps in lengths])
            if usual > 0 and by_step > 0:
                ratios.append(min(length / usual, length / self.steps / by_step))
        return max(ratios)


class UpdateSizes:
    """The longest updates used so far, by client; ``bound``: maximum ratio to the others' length, 0: no limit.

    ``ratios`` holds the ratios of the last round's updates to the others'.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.longest: dict[str, UpdateSize] = {}
        self.ratios: dict[str, float] = {}

    def find_outliers(self, server: ServerState, updates: Mapping[str, Update], enough: int = 0) -> dict[str, float]:
        """Return the clients whose updates of this round are too long, with their ratios to the others'.

        Each update is compared with the others of this round or, if there are none, with the longest used before. If
        fewer than ``enough`` would remain, outliers are used as well, the shortest first, if they are within the bound
        of the other clients' longest earlier updates: updates may become longer again, and two updates in a round do
        not show which of them is wrong.
        """
        sizes = {name: UpdateSize.of(broadcast(server, name), update) for name, update in updates.items()}
        ratios = {}
        for name, size in sizes.items():
            others = [other for key, other in sizes.items() if key != name] or list(self.longest.values())
            ratios[name] = size.compare(others) if others else 0.0
        outliers = {name: ratio for name, ratio in ratios.items() if self.bound and not ratio <= self.bound}
        for name in sorted(outliers, key=outliers.__getitem__):
            before = [longest for key, longest in self.longest.items() if key != name]
            if len(sizes) - len(outliers) < enough and before and sizes[name].compare(before) <= self.bound:
                del outliers[name]
        used = sorted(sizes.keys() - outliers.keys())
        self.longest |= {name: sizes[name].join(self.longest.get(name, sizes[name])) for name in used}
        self.ratios = {name: ratios[name] for name in used}
        return outliers

    def facts(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`, as JSON values."""
        return {"longest": {name: asdict(size) for name, size in self.longest.items()}, "ratios": self.ratios}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Restore the state from :meth:`facts`."""
        self.longest = {name: UpdateSize(**size) for name, size in facts.get("longest", {}).items()}
        self.ratios = dict(facts.get("ratios", {}))


def _length(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))
