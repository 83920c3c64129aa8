"""So many hours for all tables: each runs the share of its rounds that fits; what is left over goes to later ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Event, Timer
from types import TracebackType
from typing import Self

from ..config.spec import RunSpec
from ..data.files.read_options import Progress
from ..utils.errors import UsageError
from .planning import make_plans
from .published_tables import Table
from .recipes import ReproductionOptions
from .results import pending_runs
from .time_estimates import TIMING, TimeEstimates

LEAST = 2**-12
"""The smallest share of rounds that is tried; a run does at least one."""


class TimeBudget:
    """Time for a number of tables: ``hours`` from when it is entered, after which it sets ``stop``; None: no end.

    Shares of the rounds are powers of one half, so that tables are likely to share their runs.
    """

    def __init__(self, hours: float | None, stop: Event) -> None:
        self._seconds, self._stop = None if hours is None else 3600 * hours, stop
        self._timer: Timer | None = None
        self.over = False
        """Whether the time is up."""

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._seconds is not None:
            self._timer = Timer(self._seconds, self._end)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._timer:
            self._timer.cancel()

    def order_by_time(
        self, tables: Sequence[Table], way: ReproductionOptions, place: Path, progress: Progress | None = None
    ) -> list[Table]:
        """``tables`` by the time that what is left of them takes; ``progress`` is called as that is found out."""
        if not self._stop.is_set():
            self._estimates.gather_sizes(
                (spec for table in tables for spec in _pending_runs(table, way, place)), progress
            )
        costs: dict[str, float] = {}
        for done, table in enumerate(tables):
            if progress:
                progress(TIMING, done, len(tables))
            costs[table.key] = self._cost(table, way, place)
        return sorted(tables, key=lambda table: costs[table.key])

    def fit_scale(self, table: Table, way: ReproductionOptions, place: Path, of: int) -> ReproductionOptions:
        """``way`` with the scale at which ``table`` takes one of ``of`` parts of the time that is left."""
        if self._seconds is None:
            return way
        share = max(0.0, self._began + self._seconds - time.monotonic()) / of
        scale = 1.0
        while scale > LEAST and self._cost(table, replace(way, scale=scale), place) > share:
            scale /= 2
        return replace(way, scale=scale)

    def _end(self) -> None:
        self.over = True
        self._stop.set()

    @cached_property
    def _estimates(self) -> TimeEstimates:
        return TimeEstimates()

    def _cost(self, table: Table, way: ReproductionOptions, place: Path) -> float:
        if self._stop.is_set():  # nothing will be run
            return 0.0
        try:
            return self._estimates.estimate(_pending_runs(table, way, place))
        except UsageError:  # which running the table says
            return 0.0


def _pending_runs(table: Table, way: ReproductionOptions, place: Path) -> list[RunSpec]:
    return pending_runs([spec for _, plan in make_plans(table, way) for spec in plan.specs], place)
