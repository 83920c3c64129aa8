"""How long runs will take on this machine, from a timed step of each network on each kind of sample.

A run is local steps, visits of clients (loading, uploading, folding), checkpoints and forward passes of evaluation; how
many there will be follows from its settings and the sizes of its clients, and one of each is timed. Sizes and timings
are remembered. Engines that run clients side by side are faster: the estimate is good to a factor of two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config.spec import DataSpec, RunSpec
from ..core.aggregation import average_uploads
from ..core.method import Method
from ..core.plan import Plan
from ..core.selection import Scope
from ..core.work import Work
from ..data.federation import Federation, count_labels
from ..data.files.read_options import Progress
from ..data.sources import data_root, load_source, prepare_clients
from ..experiments.factory import make_methods, make_settings, resolve_model
from ..experiments.planning import make_plan
from ..experiments.settings import Settings
from ..utils.disk_cache import cached_measurement
from ..utils.errors import UsageError
from . import step_costs
from .step_costs import StepCosts, VisitCosts

LOOKING, TIMING = "looking at the data of runs", "timing a step of the networks of tables"
"""What takes the time that an estimate takes."""
DEALING = frozenset(("split", "samples", "validation", "allow_single_class", "normalize"))
"""Settings that say who has which samples, of which none need be read again."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What of a federation the length of a run depends on: samples of each client, and what one of them is.

    ``tests``: sizes of parts that are measured; ``distinct``: samples in these, where clients share some; ``labels``:
    how many there are of each class.
    """

    train: dict[str, int]
    tests: list[int]
    distinct: int
    shape: list[int]
    pixels: bool
    labels: list[int]


class TimeEstimates:
    """Estimates of runs; what was found for one serves the others. ``steps`` and ``moves`` time a plan's parts."""

    def __init__(
        self,
        steps: Callable[..., StepCosts] = step_costs.time_steps,
        moves: Callable[[Plan], VisitCosts] = step_costs.time_visits,
    ) -> None:
        self._time_steps, self._time_moves = steps, moves
        self._source = lru_cache(maxsize=1)(_load_source)
        self._sizes: dict[str, _Sizes] = {}
        self._steps: dict[str, StepCosts] = {}
        self._moves: dict[str, VisitCosts] = {}

    def gather_sizes(self, specs: Iterable[RunSpec], progress: Progress | None = None) -> None:
        """Find the sizes of clients of ``specs``, in an order in which no data are read twice.

        ``progress`` is called with what is read, how many data sets are done, and of how many.
        """
        ordered = sorted(specs, key=lambda spec: repr(_read_settings(spec)))
        for done, spec in enumerate(ordered):
            if progress:
                progress(LOOKING, done, len(ordered))
            with suppress(UsageError):  # which :meth:`estimate` raises
                self._sizes_of(spec)

    def estimate(self, specs: Iterable[RunSpec]) -> float:
        """Seconds that runs of ``specs``, one after another, will take. Raises as making their experiments does."""
        return sum(self._one(spec) for spec in sorted(specs, key=lambda spec: repr(_read_settings(spec))))

    def _one(self, spec: RunSpec) -> float:
        (method,) = make_methods(spec)
        sizes = self._sizes_of(spec)
        settings = make_settings(spec, tuple(sizes.train))
        members = {name: size for name, size in sizes.train.items() if name not in settings.newcomers}
        if method.pooled:
            members = {"pooled": sum(members.values())}
        work = _resolve_work(method, settings.work, len(sizes.train) - len(settings.newcomers))
        passed = [_count_steps(work, size) for size in members.values()]
        count, samples = (sum(found) / len(members) for found in zip(*passed, strict=True))
        taking_part = len(settings.draw_participants(spec.first_seed, 1, tuple(members)))
        plain = not method.rules and method.aggregate is average_uploads and method.scope == Scope()
        steps, moves = self._costs_of(spec, method, settings, sizes)
        together = plain and steps.apart and count == 1  # the engine identity does all clients' steps as one
        training = (1 if together else taking_part * count) * steps.step + taking_part * samples * steps.sample
        whole = settings.rounds * (training + taking_part * moves.visit + moves.save)
        looks = sum(map(settings.is_evaluated, range(1, settings.rounds + 1)))
        personal = method.scope.load != Scope().load or any(rule.personalizes for rule in method.rules)
        looked_at = personal * sum(sizes.tests) + (method.scope.send == Scope().send) * sizes.distinct
        return float(spec.seeds * (whole + looks * looked_at * steps.look))

    def _sizes_of(self, spec: RunSpec) -> _Sizes:
        asked = repr({name: getattr(spec, name) for name in ("data", *(field.name for field in fields(DataSpec)))})
        if asked not in self._sizes:
            facts = __version__, asked, _list_files(data_root(spec))
            found = cached_measurement(
                "sizes.json", facts, lambda: _measure_sizes(prepare_clients(self._source(_read_settings(spec)), spec))
            )
            self._sizes[asked] = _Sizes(**found)
        return self._sizes[asked]

    def _costs_of(
        self, spec: RunSpec, method: Method, settings: Settings, sizes: _Sizes
    ) -> tuple[StepCosts, VisitCosts]:
        """What the parts cost. Methods that change the network alike share it."""
        shape, classes = tuple(sizes.shape), len(sizes.labels)
        network = spec.model, shape, classes, __version__, torch.__version__, torch.get_num_threads()
        form = str(method.surgery), sizes.pixels, spec.loss, spec.augment, spec.optimizer, spec.precision

        @cache
        def plan() -> Plan:
            return make_plan(
                Method(name="plain", surgery=method.surgery), resolve_model(spec.model, shape), settings, spec.first_seed,
                sample=torch.zeros(1, *shape), classes=classes, labels=torch.tensor(sizes.labels), clients=1,
            )  # fmt: skip

        def timed() -> dict[str, Any]:
            return asdict(
                self._time_steps(plan(), shape, pixels=sizes.pixels, classes=classes, augment=settings.augment)
            )

        if (one := repr((network, form))) not in self._steps:
            self._steps[one] = StepCosts(**cached_measurement("steps.json", one, timed))
        if (all_of := repr(network)) not in self._moves:
            self._moves[all_of] = VisitCosts(
                **cached_measurement("moves.json", all_of, lambda: asdict(self._time_moves(plan())))
            )
        return self._steps[one], self._moves[all_of]


def _read_settings(spec: RunSpec) -> tuple[tuple[str, Any], ...]:
    """The settings that say what is read."""
    names = sorted({"data", *(field.name for field in fields(DataSpec))} - DEALING)
    return tuple((name, getattr(spec, name)) for name in names)


def _load_source(reading: tuple[tuple[str, Any], ...]) -> Federation:
    spec = RunSpec(**dict(reading))
    return load_source(spec.data, spec).fit_images(spec.image_size)


def _list_files(root: Path) -> list[tuple[str, int, int]]:
    """What lies in the directory of the data, so that other data are looked at anew."""
    try:
        found = [(entry.name, entry.stat()) for entry in os.scandir(root)]
    except OSError:
        return []
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _measure_sizes(data: Federation) -> dict[str, Any]:
    """The :class:`_Sizes` of ``data``."""
    store = data.clients[0].train.store
    tests = [part for client in data.clients for name, part in client.splits.items() if name != "train"]
    return asdict(
        _Sizes(
            train={client.name: len(client.train) for client in data.clients},
            tests=[len(part) for part in tests],
            distinct=sum(len(part) for part in {id(part): part for part in tests}.values()),
            shape=list(store.shape[1:]),
            pixels=store.dtype == torch.uint8,
            labels=count_labels(data).tolist(),
        )
    )


def _resolve_work(method: Method, work: Work, clients: int) -> Work:
    """The local work of ``method``, of which it may change fields."""
    work = replace(work, **method.work)
    scaled = method.pooled == "scaled" and work.batch_size is not None
    return replace(work, batch_size=(work.batch_size or 0) * clients) if scaled else work


def _count_steps(work: Work, samples: int) -> tuple[float, float]:
    """Local steps of a round, on average over a pass, of a client with so many ``samples``; and samples in these."""
    per_pass = len(work.batch_bounds(samples))
    if work.epochs is not None:
        return work.epochs * per_pass, work.epochs * samples
    rounds = ceil(per_pass / (work.batches or 1))
    return per_pass / rounds, samples / rounds
